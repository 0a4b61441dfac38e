"""What drafters that read the target's hidden states share.

Axis legend: see `emsjax.decode.pack`; w = draft vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Key

from emsjax.checks import MOST, check_at_least
from emsjax.decode.base import Draft, Drafter, ModelConfig
from emsjax.decode.cache import KVCache
from emsjax.decode.kernels import Kernels, resolve_kernels
from emsjax.decode.pack import AcceptedPath, PackedRows
from emsjax.device import tree_bytes
from emsjax.drafters.candidates import Candidates
from emsjax.drafters.feature_network import FeatureNetwork
from emsjax.sampling import Purpose, Sampling, draw, position_keys, softmax, warp
from emsjax.sampling.processors import Processing
from emsjax.values import pytree
from pallas_kernels.common.indexing import take


class Shared(NamedTuple):
    """Arrays of the target that a network without its own uses.

    Attributes:
        embeddings: the table of embeddings.
        head: the table of the head.
    """

    embeddings: Float[Array, "v e"] | None = None
    head: Float[Array, "v e"] | None = None


class Randomness(NamedTuple):
    """How `Drafter.propose` is to draw tokens; see there."""

    keys: Key[Array, "b"]
    sampling: Sampling | None


@pytree
class GrowingDraft:
    """A draft that grows by a token of every sample at a time.

    Attributes:
        tokens, counts, probs: as in a `Draft`; `counts` is what each sample wants. For a tree,
            these are the likeliest tokens, and instead of `probs` the candidates for each.
    """

    tokens: Int32[Array, "b k"]
    counts: Int32[Array, "b"]
    probs: Float[Array, "b k v"] | Candidates | None

    def finished(self, most: int) -> Draft:
        """The draft, of up to `most` tokens."""
        if isinstance(self.probs, Candidates):
            return self.probs.tree(self.counts, most)
        return Draft(self.tokens, self.counts, self.probs)


class FeatureDrafter(Drafter):
    """A network, the tokens that it can draft, and what it shares with the target; a pytree.

    Attributes:
        network: the network.
        draft_ids: the target's id of each token that the network can draft; None: all, in order.
        shared: arrays of the target.
        branches: candidates for each token; 1: drafts are chains.
    """

    branches: int = 1

    def __init__(
        self,
        network: FeatureNetwork,
        draft_ids: Any = None,
        shared: Shared | None = None,
        *,
        max_draft_tokens: int,
        has_own_limit: bool,
        attention_implementation: str | Callable | None,
    ):
        self.network, self.draft_ids = network, draft_ids
        self.shared = Shared() if shared is None else shared
        self.has_own_limit = has_own_limit
        self.max_draft_tokens = check_at_least("max_draft_tokens", max_draft_tokens, 1, MOST)
        resolve_kernels(attention_implementation)
        self.attention_implementation = attention_implementation
        self.process: Processing | None = None
        self._check_parts()

    def _check_parts(self) -> None:
        """Raises ValueError unless the arrays fit the network's config."""
        config = self.network.config
        width, vocab_size = config.architecture.width, config.architecture.vocab_size
        ids = None if self.draft_ids is None else self.draft_ids.shape
        if ids is None and config.draft_vocab_size != vocab_size:
            raise ValueError(
                f"draft_ids must be given, as {config.draft_vocab_size} of the target's "
                f"{vocab_size} tokens can be drafted"
            )
        if ids not in (None, (config.draft_vocab_size,)):
            raise ValueError(f"draft_ids must be [{config.draft_vocab_size}], not {list(ids)}")
        owned = {"embeddings": config.owns_embeddings, "head": config.owns_head}
        for name, is_owned in owned.items():
            table = getattr(self.shared, name)
            if not is_owned and table is None:
                raise ValueError(
                    f"the drafter has no {name} of its own: give target, whose it uses"
                )
            if not is_owned and (table.shape[1], table.dtype) != (width, self.network.dtype):
                raise ValueError(
                    f"the drafter uses the target's {name}, and has {width} numbers per token in "
                    f"{self.network.dtype.name}, but the target {table.shape[1]} in "
                    f"{table.dtype.name}"
                )

    def tree_flatten(self):
        children = (self.network, self.draft_ids, self.shared)
        settings = {k: v for k, v in vars(self).items() if k not in _CHILDREN}
        return children, tuple(sorted(settings.items()))

    @classmethod
    def tree_unflatten(cls, settings, children):
        self = object.__new__(cls)
        vars(self).update(zip(_CHILDREN, children, strict=True))
        vars(self).update(settings)
        return self

    def _with(self, **settings) -> "FeatureDrafter":
        children, own = self.tree_flatten()
        return self.tree_unflatten(tuple(sorted((dict(own) | settings).items())), children)

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's layers whose hidden states the network reads."""
        return self.network.config.taps

    @property
    def kernels(self) -> Kernels:
        """Attention and cache update."""
        return resolve_kernels(self.attention_implementation)

    @property
    def embeddings(self) -> Float[Array, "v e"]:
        """The table of embeddings."""
        own = self.network.embed_tokens
        return self.shared.embeddings if own is None else own.embedding[...]

    @property
    def head(self) -> Float[Array, "w e"]:
        """The table of the head."""
        own = self.network.lm_head
        return self.shared.head if own is None else own.embedding[...]

    @property
    def max_depth(self) -> int:
        """The most tokens on a path of the draft."""
        return max(1, self.max_draft_tokens // self.branches)

    def with_limit(self, max_draft_tokens: int) -> "FeatureDrafter":
        """Returns the drafter with this limit, unless it was created with its own."""
        return self if self.has_own_limit else self._with(max_draft_tokens=max_draft_tokens)

    def with_processing(self, process: Processing) -> "FeatureDrafter":
        """Returns the drafter for one step, whose logits pass through `process` first."""
        return self._with(process=process)

    def check_target(self, config: ModelConfig, positions: int) -> None:
        """Raises ValueError if the target has another vocabulary or width, or too few layers."""
        mine = self.network.config
        mine_vocab = mine.architecture.vocab_size
        if mine_vocab != config.vocab_size:
            raise ValueError(
                f"the drafter is for a vocabulary of {mine_vocab} ids, and the target has "
                f"{config.vocab_size}"
            )
        theirs = getattr(config, "architecture", None)
        if theirs is None:  # a user's own model
            return
        if theirs.width != mine.target_width:
            raise ValueError(
                f"the drafter reads hidden states of {mine.target_width} numbers, and the target's "
                f"have {theirs.width}"
            )
        if max(self.taps) > len(theirs.layers):
            raise ValueError(
                f"the drafter reads the hidden states after layers {self.taps}, and the target has "
                f"{len(theirs.layers)} layers"
            )

    def state_bytes(self, max_len: int) -> int:
        """Bytes per sample for the state and the distributions of one step's drafts."""
        prompts, lengths = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
        leaves = lambda: jax.tree.leaves(self.init(prompts, lengths, max_len))
        probs = 2 * self.max_draft_tokens * self._vocab_size * 4 if self.branches == 1 else 0
        return tree_bytes(jax.eval_shape(leaves)) + probs

    @property
    def _vocab_size(self) -> int:
        return self.network.config.architecture.vocab_size

    def _begin(self, counts: Int32[Array, "b"], sampling: Sampling | None) -> GrowingDraft:
        """A draft without tokens, of which sample s wants counts[s]."""
        block = (counts.shape[0], self.max_depth)
        probs = None if sampling is None else jnp.zeros((*block, self._vocab_size), jnp.float32)
        if self.branches > 1:
            probs = Candidates.none(*block, self.branches)
        return GrowingDraft(jnp.zeros(block, jnp.int32), counts, probs)

    def _extend(
        self,
        draft: GrowingDraft,
        step: int | Int32[Array, ""],
        logits: Float[Array, "b w"],
        lengths: Int32[Array, "b"],
        randomness: Randomness,
    ) -> GrowingDraft:
        """The draft with a token of these logits at place `step` of every sample.

        A draft ends where no token is allowed.
        """
        logits = self._on_vocabulary(logits)
        tokens, counts, probs = draft.tokens, draft.counts, draft.probs
        if self.process is not None:
            samples = jnp.arange(tokens.shape[0], dtype=jnp.int32)
            logits = self.process(logits, tokens, samples, jnp.full_like(samples, step))
            stuck = jnp.all(logits == -jnp.inf, axis=-1)
            counts = jnp.where(stuck, jnp.minimum(counts, step), counts)
        keys, sampling = randomness
        if sampling is not None:
            logits = warp(logits, sampling)
        if self.branches > 1:
            probs = probs.with_logits(logits, step)
            token = probs.tokens[:, step, 0]
        elif sampling is None:
            token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        else:
            token = draw(
                logits, sampling.temperature, position_keys(keys, lengths + step, Purpose.DRAFT)
            )
            probs = probs.at[:, step].set(softmax(logits))
        return GrowingDraft(tokens.at[:, step].set(token), counts, probs)

    def _on_vocabulary(self, logits: Float[Array, "b w"]) -> Float[Array, "b v"]:
        """The logits of all of the target's tokens, -inf for those that cannot be drafted."""
        if self.draft_ids is None:
            return logits
        none = jnp.full((logits.shape[0], self._vocab_size), -jnp.inf, logits.dtype)
        return none.at[:, self.draft_ids].set(logits, unique_indices=True)


_CHILDREN = ("network", "draft_ids", "shared")


def append(
    cache: KVCache,
    fresh: tuple[Float[Array, "r h d"], ...],
    segment_ids: Int32[Array, "r"],
    places: Int32[Array, "r"],
    update: Callable,
) -> KVCache:
    """The cache with rows of a call of the target, each sample's behind its committed ones.

    Args:
        fresh: queries, keys and values of the rows in every layer.
        segment_ids: sample of each row; the number of samples for rows that are ignored.
        places: place of each row in its sample.
        update: see `KVCache.commit`.
    """
    samples = jnp.arange(cache.lengths.shape[0], dtype=jnp.int32)
    counts = jnp.sum(segment_ids == samples[:, None], axis=1, dtype=jnp.int32)
    rows = PackedRows(segment_ids, places, jnp.zeros_like(counts), counts)
    ranks = places - take(cache.lengths, rows.samples)
    path = AcceptedPath(jnp.where(segment_ids < len(samples), ranks, -1), counts)
    return cache.commit(fresh, rows, path, update)
