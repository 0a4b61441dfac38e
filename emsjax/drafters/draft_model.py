"""Drafts of a small model: speculative sampling, arXiv 2302.01318 and 2211.17192."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from emsjax.checks import check_at_least
from emsjax.decode.base import Draft
from emsjax.decode.cache import KVCache
from emsjax.decode.kernels import resolve_kernels
from emsjax.decode.pack import pack
from emsjax.decode.prefill import prefill
from emsjax.models.config import OPTConfig
from emsjax.models.opt import OPT, check_is_model
from emsjax.sampling import Purpose, draw, position_keys, warp
from pallas_kernels.common.indexing import take

DEFAULT_DRAFT_TOKENS = 4
CATCH_UP_ROWS = 2  # a sample whose drafts were all accepted is one token behind


@jax.tree_util.register_pytree_node_class
class DraftModel:
    """A smaller model with the target's tokenizer proposes, one token after the other.

    It has a KV cache of its own in the device loop and sees, of every sample that
    drafts, just the tokens it has not seen yet; a sample that has not drafted for a
    while is caught up in packed chunks when it drafts again. Temperature, top-k and
    top-p apply to its distribution as to the target's.

    Args:
        draft_model: of any dtype.
        max_draft_tokens: per sample and step; None: what the draft-length policy asks
            for, 4 if it leaves that open.
        vocab_size: the tokenizer's, where the models' vocabularies are padded to
            different sizes: ids from here on are never drafted. None: the sizes must
            be equal.
        attention_implementation: as for `generate`.

    Raises:
        ValueError: a `draft_model` that is none, `max_draft_tokens` or `vocab_size` below 1, or
            `vocab_size` above the draft model's vocabulary.
    """

    def __init__(
        self,
        draft_model: OPT,
        max_draft_tokens: int | None = None,
        vocab_size: int | None = None,
        attention_implementation: str | Callable | None = None,
    ):
        check_is_model("draft_model", draft_model)
        self.draft_model = draft_model
        self.has_own_limit = max_draft_tokens is not None
        if max_draft_tokens is None:
            max_draft_tokens = DEFAULT_DRAFT_TOKENS
        self.max_draft_tokens = check_at_least("max_draft_tokens", max_draft_tokens, 1)
        self.vocab_size = vocab_size
        self.attention_implementation = attention_implementation
        if vocab_size is not None:
            check_at_least("vocab_size", vocab_size, 1)
            if vocab_size > draft_model.config.vocab_size:
                raise ValueError(
                    f"vocab_size must be at most the draft model's {draft_model.config.vocab_size},"
                    f" not {vocab_size}"
                )

    def tree_flatten(self):
        settings = {name: value for name, value in vars(self).items() if name != "draft_model"}
        return (self.draft_model,), tuple(sorted(settings.items()))

    @classmethod
    def tree_unflatten(cls, settings, children) -> "DraftModel":
        self = object.__new__(cls)
        (self.draft_model,) = children
        vars(self).update(settings)
        return self

    def with_limit(self, max_draft_tokens: int) -> "DraftModel":
        """With this limit, unless it was made with one."""
        if self.has_own_limit:
            return self
        return DraftModel(
            self.draft_model, max_draft_tokens, self.vocab_size, self.attention_implementation
        )

    def check_target(self, config: OPTConfig, positions: int) -> None:
        """Whether it can draft for this target, at up to `positions` positions.

        Raises:
            ValueError: vocabularies that do not match, or too short a context.
        """
        mine = self.draft_model.config
        if self.vocab_size is None and mine.vocab_size != config.vocab_size:
            raise ValueError(
                f"the draft model's vocabulary has {mine.vocab_size} ids and the target's "
                f"{config.vocab_size}: if they share a tokenizer and differ in padding alone, "
                "give its size as vocab_size"
            )
        if self.vocab_size is not None and self.vocab_size > config.vocab_size:
            raise ValueError(
                f"vocab_size must be at most the target's {config.vocab_size}, "
                f"not {self.vocab_size}"
            )
        if mine.max_position_embeddings < positions:
            raise ValueError(
                f"the draft model has {mine.max_position_embeddings} positions, "
                f"but {positions} are needed"
            )

    def init(self, prompts, prompt_lengths, max_len) -> KVCache:
        cache = self.draft_model.init_cache(prompts.shape[0], max_len)
        return self._prefill(cache, prompts, prompt_lengths - 1)

    def fork(self, state: KVCache, samples: Int32[Array, "n"]) -> KVCache:
        return state.fork(samples)

    def admit(self, state: KVCache, tokens, lengths, fresh: Bool[Array, "b"]) -> KVCache:
        """Nothing of a new sequence has been fed: it is caught up when it first drafts."""
        return dataclasses.replace(state, lengths=jnp.where(fresh, 0, state.lengths))

    def propose(
        self,
        state: KVCache,
        tokens: Int32[Array, "b t"],
        lengths: Int32[Array, "b"],
        draft_lengths: Int32[Array, "b"],
        keys,
        sampling,
    ) -> tuple[Draft, KVCache]:
        batch, k = tokens.shape[0], self.max_draft_tokens
        draft_lengths = jnp.minimum(draft_lengths, k)
        vocab_size = self.vocab_size or self.draft_model.config.vocab_size
        probs = None if sampling is None else jnp.zeros((batch, k, vocab_size), jnp.float32)
        start = (jnp.zeros((), jnp.int32), tokens, jnp.zeros((batch, k), jnp.int32), probs, state)

        def unfinished(carry):
            return carry[0] < jnp.max(draft_lengths)

        def advance(carry):
            step, tokens, drafts, probs, cache = carry
            active = step < draft_lengths
            counts = jnp.where(active, lengths + step - cache.lengths, 0)
            logits, cache = self._forward(cache, tokens, counts)
            if sampling is None:
                token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            else:
                logits = warp(logits, sampling)
                step_keys = position_keys(keys, lengths + step, Purpose.DRAFT)
                token = draw(logits, sampling.temperature, step_keys)
                probs = probs.at[:, step].set(jax.nn.softmax(logits))
            at = jnp.where(active, lengths + step, tokens.shape[1])
            tokens = tokens.at[jnp.arange(batch), at].set(
                token, mode="drop", wrap_negative_indices=False
            )
            return step + 1, tokens, drafts.at[:, step].set(token), probs, cache

        def draft(carry):
            step, tokens, drafts, probs, cache = carry
            # Whoever is far behind comes up in chunks; the rest is a draft step's own rows.
            wanted = jnp.where(draft_lengths > 0, lengths - CATCH_UP_ROWS, 0)
            cache = self._prefill(cache, tokens, jnp.maximum(cache.lengths, wanted))
            return lax.while_loop(unfinished, advance, (step, tokens, drafts, probs, cache))

        # Once, or not at all: each loop's condition is waited for, and where nobody drafts one is
        # enough. As a branch of `lax.cond` the cache would be copied.
        _, _, drafts, probs, cache = lax.while_loop(unfinished, draft, start)
        return Draft(drafts, draft_lengths, probs), cache

    def commit(self, state: KVCache, lengths: Int32[Array, "b"]) -> KVCache:
        """Forgets what was not accepted; the last token has never been fed."""
        return dataclasses.replace(state, lengths=jnp.minimum(state.lengths, lengths - 1))

    def state_bytes(self, max_len: int) -> int:
        """Bytes per sample: the cache, and the distributions of one step's drafts."""
        config, item = self.draft_model.config, self.draft_model.dtype.itemsize
        cache = 2 * max_len * config.num_hidden_layers * config.hidden_size * item
        return cache + 2 * self.max_draft_tokens * config.vocab_size * 4

    def _forward(self, cache: KVCache, tokens, counts) -> tuple[Array, KVCache]:
        """Feed each sample's next `counts` tokens; float32 logits [b, v] after the last of them."""
        kernels = resolve_kernels(self.attention_implementation)
        batch = tokens.shape[0]
        rows = pack(cache.lengths, counts, CATCH_UP_ROWS * batch)
        hidden, fresh = self.draft_model(
            take(tokens, rows.samples, rows.positions),
            rows,
            cache,
            attention=kernels.attention,
            max_rows_per_sample=CATCH_UP_ROWS,
        )
        last_rows = jnp.clip(rows.offsets + rows.counts - 1, 0, hidden.shape[0] - 1)
        logits = self.draft_model.logits(take(hidden, last_rows))
        return logits[:, : self.vocab_size], cache.commit(fresh, rows, rows.counts, kernels.update)

    def _prefill(self, cache: KVCache, tokens, lengths) -> KVCache:
        kernels = resolve_kernels(self.attention_implementation)
        return prefill(self.draft_model, cache, tokens, lengths, kernels=kernels)
