"""Drafting with a small model: speculative sampling, arXiv 2302.01318 and 2211.17192."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from emsjax.checks import MOST, check_at_least
from emsjax.decode.base import Draft, Model, ModelConfig
from emsjax.decode.cache import KVCache
from emsjax.decode.kernels import resolve_kernels
from emsjax.decode.pack import AcceptedPath, pack
from emsjax.decode.prefill import prefill
from emsjax.drafters.growing import GrowingDrafter, Randomness
from emsjax.engine.adapt import check_is_model
from emsjax.engine.memory import sizes_of
from pallas_kernels.common.indexing import take

DEFAULT_DRAFT_TOKENS = 4
CATCH_UP_ROWS = 2  # a sample whose drafts were all accepted is one token behind


@jax.tree_util.register_pytree_node_class
class DraftModel(GrowingDrafter):
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

    children = ("draft_model",)
    first_rows = CATCH_UP_ROWS  # the most rows of a sample in the first draft step; later ones: 1

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
        return self._prefill(self.init_unread(len(prompts), max_len), prompts, prompt_lengths - 1)

    def init_unread(self, batch: int, max_len: int) -> KVCache:
        """As `init`, but prompts are read when they are first drafted for."""
        return self.draft_model.init_cache(batch, max_len)

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
        batch, randomness = tokens.shape[0], Randomness(keys, sampling)
        draft_lengths = jnp.minimum(draft_lengths, self.max_depth)
        begun = self.begin(draft_lengths, sampling)
        start = (jnp.zeros((), jnp.int32), begun, tokens, state)

        def unfinished(carry):
            step, draft, *_ = carry
            return step < jnp.max(draft.counts)

        def advance(carry, rows_per_sample=1):
            step, draft, tokens, cache = carry
            active = step < draft.counts
            counts = jnp.where(active, lengths + step - cache.lengths, 0)
            logits, cache = self._forward(cache, tokens, counts, rows_per_sample)
            draft, token = draft.extended(step, logits, lengths, randomness, self.process)
            at = jnp.where(active, lengths + step, tokens.shape[1])
            tokens = tokens.at[jnp.arange(batch), at].set(
                token, mode="drop", wrap_negative_indices=False
            )
            return step + 1, draft, tokens, cache

        def catch_up_and_draft(carry):
            step, draft, tokens, cache = carry
            # Samples that are further behind are prefilled in chunks; the others catch up in the
            # first draft step.
            wanted = jnp.where(draft_lengths > 0, lengths - self.first_rows, 0)
            cache = self._prefill(cache, tokens, jnp.maximum(cache.lengths, wanted))
            carry = step, draft, tokens, cache
            if self.first_rows > 1:
                carry = advance(carry, self.first_rows)
            return lax.while_loop(unfinished, advance, carry)

        # The outer loop runs at most once: the device waits for each loop's condition, so a step
        # in which no sample drafts waits for one only. `lax.cond` would copy the cache.
        _, draft, _, cache = lax.while_loop(unfinished, catch_up_and_draft, start)
        return draft.finished(self.max_draft_tokens), cache

    def commit(self, state: KVCache, lengths: Int32[Array, "b"]) -> KVCache:
        """Drops rejected tokens from the cache; the last token has not been fed yet.

        In a tree the token before it may not have been fed either, if it is accepted.
        """
        fed = lengths - 1 if self.branches == 1 else jnp.maximum(lengths - 2, 0)
        return dataclasses.replace(state, lengths=jnp.minimum(state.lengths, fed))

    def state_bytes(self, max_len: int) -> int:
        """Bytes per sample for the cache and the distributions of one step's drafts."""
        return max_len * sizes_of(self.draft_model).token_bytes + self.probs_bytes

    @property
    def probs_width(self) -> int:
        """The ids that may be drafted."""
        return self.vocab_size or self.draft_model.config.vocab_size

    def _forward(
        self, cache: KVCache, tokens, counts, rows_per_sample: int
    ) -> tuple[Array, KVCache]:
        """Feeds each sample's next `counts` tokens, which are `rows_per_sample` at most.

        Returns:
            Float32 logits [b, v] after the last of them, and the cache with all of them.
        """
        kernels = resolve_kernels(self.attention_implementation)
        batch = tokens.shape[0]
        rows = pack(cache.lengths, counts, rows_per_sample * batch)
        out = self.draft_model(
            take(tokens, rows.samples, rows.positions),
            rows,
            cache,
            attention=kernels.attention,
            max_rows_per_sample=rows_per_sample,
        )
        last_rows = jnp.clip(rows.offsets + rows.counts - 1, 0, out.hidden.shape[0] - 1)
        logits = self.draft_model.logits(take(out.hidden, last_rows))
        # On CPUs XLA copies a cache unless it must be read before it is written.
        logits, fresh = lax.optimization_barrier((logits, out.fresh))
        path = AcceptedPath.prefix(rows, rows.counts)
        return logits[:, : self.vocab_size], cache.commit(fresh, rows, path, kernels.update)

    def _prefill(self, cache: KVCache, tokens, lengths) -> KVCache:
        kernels = resolve_kernels(self.attention_implementation)
        return prefill(self.draft_model, cache, tokens, lengths, kernels=kernels)
