"""Policies that limit how many tokens are drafted, per sample and step."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from emsjax.checks import check_at_least


@runtime_checkable
class DraftLength(Protocol):
    """A draft-length policy: pure functions, run inside the device loop.

    The effective limit is the smaller of the policy's and the drafter's. A policy that may
    ask for more than drafters allow by themselves has an attribute `max_draft_tokens`: a
    drafter whose limit nobody has set takes it over.
    """

    def init(self, batch: int) -> Any:
        """State for `batch` samples."""
        ...

    def lengths(self, state: Any, active: Bool[Array, "b"]) -> Int32[Array, "b"]:
        """How many tokens each sample may draft in this step; 0 drafts nothing."""
        ...

    def update(
        self, state: Any, num_drafted: Int32[Array, "b"], num_accepted: Int32[Array, "b"]
    ) -> Any:
        """State after a step that fed `num_drafted` draft tokens and kept `num_accepted`."""
        ...


@jax.tree_util.register_pytree_node_class
class FixedLength:
    """Up to `k` draft tokens for every sample in every step; 0 switches drafting off.

    The length is traced data: another k needs no new compilation.

    Raises:
        ValueError: k is no integer, or negative.
    """

    def __init__(self, k: int):
        self.k = check_at_least("k", k, 0)

    def tree_flatten(self):
        return (self.k,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        self = object.__new__(cls)
        (self.k,) = children
        return self

    def init(self, batch: int) -> tuple[()]:
        return ()

    def lengths(self, state, active):
        return jnp.full(active.shape, self.k, jnp.int32)

    def update(self, state, num_drafted, num_accepted):
        return state


class BassState(NamedTuple):
    """What Algorithm 1 of BASS carries from step to step."""

    length: Int32[Array, ""]
    shrinking: Int32[Array, ""]  # 1 if the last step shortened it


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class BassHeuristic:
    """One length for all samples: longer after a whole draft stood, otherwise shorter.

    After a step in which some sample accepted as many tokens as the length it grows by
    `increment`, up to `limit`. Otherwise it shrinks by a `divisor`-th, rounded up, and by one
    more if the step before shortened it too, but not below the most that a sample accepted, nor
    below 1. A step in which nobody drafted changes nothing.

    Args:
        initial: the first step's length.
        limit: the largest length; also `DraftModel`'s limit where its user set none.

    Raises:
        ValueError: a value that is no integer or below 1, or `initial` above `limit`.

    Reference: BASS, arXiv 2404.15778, Algorithm 1 and its constants.
    """

    initial: int = 7
    increment: int = 2
    divisor: int = 10
    limit: int = 32

    def __post_init__(self):
        for field in dataclasses.fields(self):
            check_at_least(field.name, getattr(self, field.name), 1)
        if self.initial > self.limit:
            raise ValueError(f"initial must be at most limit={self.limit}, not {self.initial}")

    @property
    def max_draft_tokens(self) -> int:
        return self.limit

    def init(self, batch: int) -> BassState:
        return BassState(jnp.int32(self.initial), jnp.int32(0))

    def lengths(self, state: BassState, active):
        return jnp.full(active.shape, state.length, jnp.int32)

    def update(self, state: BassState, num_drafted, num_accepted) -> BassState:
        length, most = state.length, jnp.max(num_accepted)
        longer = jnp.minimum(length + self.increment, self.limit)
        shorter = length - (length + self.divisor - 1) // self.divisor - state.shrinking
        shorter = jnp.maximum(jnp.maximum(shorter, most), 1)
        whole = most == length
        after = BassState(jnp.where(whole, longer, shorter), jnp.where(whole, 0, 1))
        drafted = jnp.any(num_drafted > 0)
        return jax.tree.map(lambda new, old: jnp.where(drafted, new, old), after, state)


@jax.tree_util.register_pytree_node_class
class BatchSizeTable:
    """A length for every batch size, looked up by the samples that are still active.

    Args:
        table: draft tokens by batch size, as in {1: 7, 8: 4, 32: 0}: the entry with the
            largest size that is not above the number of active samples counts, or the first.

    Raises:
        ValueError: an empty table, a size below 1, or a length below 0.

    Reference: The Synergy of Speculative Decoding and Batching, arXiv 2310.18813.
    """

    def __init__(self, table: Mapping[int, int]):
        if not table:
            raise ValueError("table is empty: at least one batch size is needed")
        self.sizes = jnp.array(
            [check_at_least("a batch size of table", size, 1) for size in sorted(table)], jnp.int32
        )
        lengths = [check_at_least(f"table[{size}]", table[size], 0) for size in sorted(table)]
        self.draft_lengths = jnp.array(lengths, jnp.int32)

    def tree_flatten(self):
        return (self.sizes, self.draft_lengths), None

    @classmethod
    def tree_unflatten(cls, _, children):
        self = object.__new__(cls)
        self.sizes, self.draft_lengths = children
        return self

    def init(self, batch: int) -> tuple[()]:
        return ()

    def lengths(self, state, active):
        entry = jnp.searchsorted(self.sizes, jnp.sum(active), side="right") - 1
        length = self.draft_lengths[jnp.maximum(entry, 0)]
        return jnp.full(active.shape, length, jnp.int32)

    def update(self, state, num_drafted, num_accepted):
        return state
