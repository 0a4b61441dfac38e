"""What drafters that read the target's hidden states share.

Axis legend: see `emsjax.decode.pack`; w = draft vocabulary.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from emsjax.checks import MOST, check_at_least, check_instance
from emsjax.decode.base import ModelConfig
from emsjax.decode.cache import KVCache, with_rows
from emsjax.decode.kernels import Kernels, Visible, resolve_kernels
from emsjax.decode.pack import PackedRows
from emsjax.device import tree_bytes
from emsjax.drafters.feature_network import FeatureConfig, FeatureNetwork
from emsjax.drafters.growing import GrowingDraft, GrowingDrafter, Randomness
from emsjax.models.linears import NarrowLinear
from pallas_kernels.matmul.narrow import NarrowWeight


class Shared(NamedTuple):
    """Arrays of the target that a network without its own uses.

    Attributes:
        embeddings: the table of embeddings.
        head: the table of the head.
    """

    embeddings: Float[Array, "v e"] | None = None
    head: Float[Array, "v e"] | None = None


class FeatureDrafter(GrowingDrafter):
    """A network, the tokens that it can draft, and what it shares with the target; a pytree.

    Attributes:
        network: the network.
        draft_ids: the target's id of each token that the network can draft; None: all, in order.
        shared: arrays of the target.
    """

    children = ("network", "draft_ids", "shared")

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
        check_instance("shared", self.shared, Shared, "emsjax.drafters.feature_drafter.Shared(...)")
        self.has_own_limit = has_own_limit
        self.max_draft_tokens = check_at_least("max_draft_tokens", max_draft_tokens, 1, MOST)
        resolve_kernels(attention_implementation)
        self.attention_implementation = attention_implementation
        self._check_parts()

    def _check_parts(self) -> None:
        """Raises ValueError unless the arrays fit the network's config."""
        config = self.network.config
        width, vocab_size = config.architecture.width, config.architecture.vocab_size
        ids = None
        if self.draft_ids is not None:
            is_array = isinstance(self.draft_ids, np.ndarray | Array)
            if not (is_array and jnp.issubdtype(self.draft_ids.dtype, jnp.integer)):
                raise ValueError(
                    f"draft_ids must be an array of integers, not {type(self.draft_ids).__name__}"
                )
            ids = self.draft_ids.shape
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
    def head(self) -> Float[Array, "w e"] | NarrowWeight:
        """The head, as `head_logits` takes it."""
        own = self.network.lm_head
        if isinstance(own, NarrowLinear):
            return own.weight
        return self.shared.head if own is None else own.embedding[...]

    def check_target(self, config: ModelConfig, positions: int) -> None:
        """Raises ValueError if the target has another vocabulary or width, or too few layers."""
        check_fits(self.network.config, config)

    def state_bytes(self, max_len: int) -> int:
        """Bytes per sample for the state and the distributions of one step's drafts."""
        prompts, lengths = jnp.zeros((1, 1), jnp.int32), jnp.ones(1, jnp.int32)
        leaves = lambda: jax.tree.leaves(self.init(prompts, lengths, max_len))
        return tree_bytes(jax.eval_shape(leaves)) + self.probs_bytes

    @property
    def probs_width(self) -> int:
        """The size of the target's vocabulary."""
        return self.network.config.architecture.vocab_size

    def _extend(
        self,
        draft: GrowingDraft,
        step: int | Int32[Array, ""],
        logits: Float[Array, "b w"],
        lengths: Int32[Array, "b"],
        randomness: Randomness,
    ) -> tuple[GrowingDraft, Int32[Array, "b"]]:
        """The draft with a token of the network's logits at place `step` of every sample, and the
        tokens."""
        logits, ids = self._columns(logits, randomness)
        return draft.extended(step, logits, lengths, randomness, self.process, ids)

    def _columns(
        self, logits: Float[Array, "... w"], randomness: Randomness
    ) -> tuple[Float[Array, "... v"], Int32[Array, "v"] | None]:
        """The logits from which tokens are chosen, and the token of each column.

        Processors, draws and the distributions of drawn tokens are over all of the target's tokens,
        of which those that cannot be drafted have the logit -inf. The ids are then None. Otherwise
        the likeliest token is found among those that can be drafted.
        """
        few = self.branches > self.network.config.draft_vocab_size
        sees_all = self.process is not None or randomness.sampling is not None or few
        if self.draft_ids is None or not sees_all:
            return logits, self.draft_ids
        none = jnp.full((*logits.shape[:-1], self.probs_width), -jnp.inf, logits.dtype)
        return none.at[..., self.draft_ids].set(logits, unique_indices=True), None


def check_fits(mine: FeatureConfig, config: ModelConfig) -> None:
    """Raises ValueError unless a network of this config can draft for a target.

    Args:
        mine: the network's config.
        config: the target's.
    """
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
    if max(mine.taps) > len(theirs.layers):
        raise ValueError(
            f"the drafter reads the hidden states after layers {mine.taps}, and the target has "
            f"{len(theirs.layers)} layers"
        )


class BlockRows(NamedTuple):
    """Rows of a network's own call, as many of every sample, in the order of samples.

    Samples that draft nothing have rows too, which see each other alone: so nothing is packed.

    Attributes:
        rows: where the rows belong.
        visible: what they see of the cache.
    """

    rows: PackedRows
    visible: Visible

    @classmethod
    def behind(
        cls, lengths: Int32[Array, "b"], active: Bool[Array, "b"], count: int
    ) -> "BlockRows":
        """`count` rows behind the committed ones.

        Args:
            lengths: committed rows of each sample.
            active: the samples that draft.
        """
        batch = lengths.shape[0]
        seen = jnp.where(active, lengths, 0)
        samples = np.repeat(np.arange(batch, dtype=np.int32), count)
        places = (seen[:, None] + jnp.arange(count, dtype=jnp.int32)).reshape(-1)
        offsets = jnp.arange(batch, dtype=jnp.int32) * count
        counts = jnp.full(batch, count, jnp.int32)
        return cls(PackedRows(jnp.asarray(samples), places, offsets, counts), Visible(seen))


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
    layers = with_rows(cache, fresh, segment_ids, places, update)
    return dataclasses.replace(cache, layers=layers, lengths=cache.lengths + counts)
