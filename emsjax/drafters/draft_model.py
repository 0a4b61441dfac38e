"""Drafting with a small model: speculative sampling, arXiv 2302.01318 and 2211.17192."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from emsjax.checks import MOST, check_at_least
from emsjax.decode.base import Draft, Drafter, Model, ModelConfig
from emsjax.decode.cache import KVCache
from emsjax.decode.kernels import resolve_kernels
from emsjax.decode.pack import AcceptedPath, pack
from emsjax.decode.prefill import prefill
from emsjax.device import tree_bytes
from emsjax.drafters.candidates import Candidates
from emsjax.engine.adapt import check_is_model
from emsjax.sampling import Purpose, draw, position_keys, softmax, warp
from emsjax.sampling.processors import Processing
from pallas_kernels.common.indexing import take

DEFAULT_DRAFT_TOKENS = 4
CATCH_UP_ROWS = 2  # a sample whose drafts were all accepted is one token behind


@jax.tree_util.register_pytree_node_class
class DraftModel(Drafter):
    """Drafts tokens autoregressively with a smaller model that shares the target's tokenizer.

    The draft model has its own KV cache in the device loop. For every sample that drafts, it
    is fed the tokens it has not seen yet; a sample that has not drafted for a while catches
    up in packed chunks when it drafts again. Temperature, top-k, top-p and logits processors
    apply to the draft model's distribution as to the target's.

    With several `branches` the draft is a tree: a chain of the likeliest tokens, and beside each of
    them the next likeliest ones, which cost no call of the draft model; the likeliest paths come
    first. The tokens are then not drawn, so that sampled output equals plain decoding under the
    same keys.

    Args:
        draft_model: the model, in any dtype.
        max_draft_tokens: limit per sample and step; None: the draft-length policy's limit, or
            4 if the policy has none.
        vocab_size: the tokenizer's vocabulary size, for models whose vocabularies are padded to
            different sizes: ids at or above it are never drafted. None: the sizes must be equal.
        attention_implementation: as for `generate`.
        branches: candidates for each token; 1: the draft is a chain. A tree is at most
            max_draft_tokens / branches tokens deep.

    Raises:
        ValueError: `draft_model` is not a model, `max_draft_tokens`, `vocab_size` or `branches` is
            below 1, `vocab_size` exceeds the draft model's vocabulary, there are more branches
            than tokens, or the attention is unknown.
    """

    def __init__(
        self,
        draft_model: Model,
        max_draft_tokens: int | None = None,
        vocab_size: int | None = None,
        attention_implementation: str | Callable | None = None,
        branches: int = 1,
    ):
        check_is_model("draft_model", draft_model)
        self.draft_model = draft_model
        self.has_own_limit = max_draft_tokens is not None
        if max_draft_tokens is None:
            max_draft_tokens = DEFAULT_DRAFT_TOKENS
        self.max_draft_tokens = check_at_least("max_draft_tokens", max_draft_tokens, 1, MOST)
        self.branches = check_at_least("branches", branches, 1, self.max_draft_tokens)
        resolve_kernels(attention_implementation)
        self.vocab_size, self.attention_implementation = vocab_size, attention_implementation
        self.process: Processing | None = None
        if self.branches > draft_model.config.vocab_size:
            most = draft_model.config.vocab_size
            raise ValueError(f"branches must be at most the {most} tokens of the draft model")
        if vocab_size is not None:
            self.vocab_size = check_at_least("vocab_size", vocab_size, 1)
            if self.vocab_size > draft_model.config.vocab_size:
                raise ValueError(
                    f"vocab_size must be at most the draft model's {draft_model.config.vocab_size},"
                    f" not {self.vocab_size}"
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

    @property
    def max_depth(self) -> int:
        """The most tokens on a path of the draft."""
        return max(1, self.max_draft_tokens // self.branches)

    def with_limit(self, max_draft_tokens: int) -> "DraftModel":
        """Returns the drafter with this limit, unless it was created with its own."""
        return self if self.has_own_limit else self._with(max_draft_tokens=max_draft_tokens)

    def with_processing(self, process: Processing) -> "DraftModel":
        """Returns the drafter for one step, whose logits pass through `process` first."""
        return self._with(process=process)

    def _with(self, **settings) -> "DraftModel":
        children, own = self.tree_flatten()
        return self.tree_unflatten(tuple(sorted((dict(own) | settings).items())), children)

    def check_target(self, config: ModelConfig, positions: int) -> None:
        """Raises ValueError if the vocabularies do not match or the draft model's context is too
        short.

        Args:
            config: the target's configuration.
            positions: the largest number of positions that a sample needs.
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
        """Clears fresh slots; the draft model catches up when a new sequence first drafts."""
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
        batch, k = tokens.shape[0], self.max_depth
        draft_lengths = jnp.minimum(draft_lengths, k)
        vocab_size = self.vocab_size or self.draft_model.config.vocab_size
        probs = None if sampling is None else jnp.zeros((batch, k, vocab_size), jnp.float32)
        if self.branches > 1:  # what is known of each step is kept in the place of probabilities
            probs = Candidates.none(batch, k, self.branches)
        drafts = jnp.zeros((batch, k), jnp.int32)
        start = (jnp.zeros((), jnp.int32), draft_lengths, tokens, drafts, probs, state)

        def unfinished(carry):
            step, counts, *_ = carry
            return step < jnp.max(counts)

        def advance(carry):
            step, draft_counts, tokens, drafts, probs, cache = carry
            active = step < draft_counts
            counts = jnp.where(active, lengths + step - cache.lengths, 0)
            logits, cache = self._forward(cache, tokens, counts)
            if self.process is not None:
                samples = jnp.arange(batch, dtype=jnp.int32)
                logits = self.process(logits, drafts, samples, jnp.full_like(samples, step))
                # A draft ends where none of this model's tokens is allowed.
                stuck = jnp.all(logits == -jnp.inf, axis=-1)
                draft_counts = jnp.where(stuck, jnp.minimum(draft_counts, step), draft_counts)
            if sampling is not None:
                logits = warp(logits, sampling)
            if self.branches > 1:
                probs = probs.with_logits(logits, step)
                token = probs.tokens[:, step, 0]
            elif sampling is None:
                token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
            else:
                step_keys = position_keys(keys, lengths + step, Purpose.DRAFT)
                token = draw(logits, sampling.temperature, step_keys)
                probs = probs.at[:, step].set(softmax(logits))
            at = jnp.where(active, lengths + step, tokens.shape[1])
            tokens = tokens.at[jnp.arange(batch), at].set(
                token, mode="drop", wrap_negative_indices=False
            )
            drafts = drafts.at[:, step].set(token)
            return step + 1, draft_counts, tokens, drafts, probs, cache

        def draft(carry):
            step, counts, tokens, drafts, probs, cache = carry
            # Samples more than CATCH_UP_ROWS behind are prefilled in chunks; the others catch up in
            # the draft step.
            wanted = jnp.where(draft_lengths > 0, lengths - CATCH_UP_ROWS, 0)
            cache = self._prefill(cache, tokens, jnp.maximum(cache.lengths, wanted))
            return lax.while_loop(unfinished, advance, (step, counts, tokens, drafts, probs, cache))

        # The outer loop runs at most once: the device waits for each loop's condition, so a step
        # in which no sample drafts waits for one only. `lax.cond` would copy the cache.
        _, draft_counts, _, drafts, probs, cache = lax.while_loop(unfinished, draft, start)
        if self.branches > 1:
            return probs.tree(draft_counts, self.max_draft_tokens), cache
        return Draft(drafts, draft_counts, probs), cache

    def commit(self, state: KVCache, lengths: Int32[Array, "b"]) -> KVCache:
        """Drops rejected tokens from the cache; the last token has not been fed yet.

        In a tree the token before it may not have been fed either, if it is accepted.
        """
        fed = lengths - 1 if self.branches == 1 else jnp.maximum(lengths - 2, 0)
        return dataclasses.replace(state, lengths=jnp.minimum(state.lengths, fed))

    def state_bytes(self, max_len: int) -> int:
        """Bytes per sample for the cache and the distributions of one step's drafts."""
        leaves = lambda: jax.tree.leaves(self.draft_model.init_cache(1, max_len).layers)
        parallel = getattr(self.draft_model, "parallel", None)
        devices = 1 if parallel is None else parallel.size  # that have different heads
        return tree_bytes(jax.eval_shape(leaves)) // devices + self.probs_bytes

    @property
    def probs_bytes(self) -> int:
        """Bytes per sample for the distributions of one step's drafts."""
        if self.branches > 1:
            return 0
        return 2 * self.max_draft_tokens * self.draft_model.config.vocab_size * 4

    def _forward(self, cache: KVCache, tokens, counts) -> tuple[Array, KVCache]:
        """Feeds each sample's next `counts` tokens; float32 logits [b, v] after the last one."""
        kernels = resolve_kernels(self.attention_implementation)
        batch = tokens.shape[0]
        rows = pack(cache.lengths, counts, CATCH_UP_ROWS * batch)
        out = self.draft_model(
            take(tokens, rows.samples, rows.positions),
            rows,
            cache,
            attention=kernels.attention,
            max_rows_per_sample=CATCH_UP_ROWS,
        )
        last_rows = jnp.clip(rows.offsets + rows.counts - 1, 0, out.hidden.shape[0] - 1)
        logits = self.draft_model.logits(take(out.hidden, last_rows))
        path = AcceptedPath.prefix(rows, rows.counts)
        return logits[:, : self.vocab_size], cache.commit(out.fresh, rows, path, kernels.update)

    def _prefill(self, cache: KVCache, tokens, lengths) -> KVCache:
        kernels = resolve_kernels(self.attention_implementation)
        return prefill(self.draft_model, cache, tokens, lengths, kernels=kernels)
