"""Draft-length policies: how many draft tokens of each sample a step verifies."""

import dataclasses
from collections.abc import Mapping
from os import PathLike
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from emsjax.checks import (
    INT32_MAX,
    MOST,
    check_at_least,
    check_flag,
    check_number,
    check_table,
)
from emsjax.decode.base import DraftLength, StepView
from emsjax.engine.memory import MOST_SLOTS
from emsjax.policies.costs import (
    StepCosts,
    accepted_at_rate,
    errors_of,
    from_json,
    read_profile,
    section,
    synergy_lengths,
)
from pallas_kernels.common.indexing import take

PROBABILITY = ("in 0..1", lambda x: 0 <= x <= 1)
MOST_PROFILED = 1024  # draft tokens of a profile: costs are compared for all lengths up to it


@jax.tree_util.register_pytree_node_class
class FixedLength(DraftLength):
    """Up to `k` draft tokens for every sample in every step; 0 switches drafting off.

    The length is traced data, so another k needs no new compilation.

    Raises:
        ValueError: k is not an integer, or negative.
    """

    def __init__(self, k: int):
        self.k = min(check_at_least("k", k, 0), INT32_MAX)

    def tree_flatten(self):
        return (self.k,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        self = object.__new__(cls)
        (self.k,) = children
        return self

    def lengths(self, state, view: StepView):
        return jnp.full(view.active.shape, self.k, jnp.int32)


class BassState(NamedTuple):
    """State of Algorithm 1 of BASS."""

    length: Int32[Array, ""]
    shrinking: Int32[Array, ""]  # 1 if the last step reduced the length


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class BassHeuristic(DraftLength):
    """One length for all samples, which grows after fully accepted drafts and shrinks otherwise.

    If some sample accepted as many tokens as the length, it grows by `increment`, up to `limit`.
    Otherwise it shrinks by length / `divisor`, rounded up, and by one more if it also shrank in
    the step before, but not below the most tokens that a sample accepted, nor below 1. A step
    without any draft tokens leaves it unchanged.

    Args:
        initial: length of the first step.
        limit: the largest length; also the limit of a `DraftModel` created without one.

    Raises:
        ValueError: a value is not an integer, below 1 or far too large, or `initial` is above
            `limit`.

    Reference: BASS, arXiv 2404.15778, Algorithm 1 and its constants.
    """

    initial: int = 7
    increment: int = 2
    divisor: int = 10
    limit: int = 32

    def __post_init__(self):
        for field in dataclasses.fields(self):
            number = check_at_least(field.name, getattr(self, field.name), 1, MOST)
            object.__setattr__(self, field.name, number)
        if self.initial > self.limit:
            raise ValueError(f"initial must be at most limit={self.limit}, not {self.initial}")

    @property
    def max_draft_tokens(self) -> int:
        return self.limit

    def init(self, batch, max_draft_tokens) -> BassState:
        return BassState(jnp.int32(self.initial), jnp.int32(0))

    def lengths(self, state: BassState, view: StepView):
        return jnp.full(view.active.shape, state.length, jnp.int32)

    def update(self, state: BassState, view, num_drafted, num_accepted) -> BassState:
        length, most = state.length, jnp.max(num_accepted)
        longer = jnp.minimum(length + self.increment, self.limit)
        shorter = length - (length + self.divisor - 1) // self.divisor - state.shrinking
        shorter = jnp.maximum(jnp.maximum(shorter, most), 1)
        whole = most == length
        after = BassState(jnp.where(whole, longer, shorter), jnp.where(whole, 0, 1))
        drafted = jnp.any(num_drafted > 0)
        return jax.tree.map(lambda new, old: jnp.where(drafted, new, old), after, state)


@jax.tree_util.register_pytree_node_class
class BatchSizeTable(DraftLength):
    """A length for every batch size, looked up by the number of active samples.

    Args:
        table: draft tokens by batch size, as in {1: 7, 8: 4, 32: 0}. The entry with the
            largest size up to the number of active samples applies, or else the first.

    Raises:
        ValueError: the table is not a mapping or empty, a size is below 1, or a length is
            below 0.

    >>> BatchSizeTable({1: 7, 8: 4, 32: 0}).draft_lengths.tolist()
    [7, 4, 0]

    Reference: The Synergy of Speculative Decoding and Batching, arXiv 2310.18813.
    """

    def __init__(self, table: Mapping[int, int]):
        lengths = check_table("table", table, lambda name, value: check_at_least(name, value, 0))
        at_most = lambda values: jnp.array([min(value, MOST) for value in values], jnp.int32)
        self.sizes, self.draft_lengths = at_most(lengths), at_most(lengths.values())

    @classmethod
    def from_profile(
        cls,
        profile: str | PathLike | Mapping[str, Any],
        acceptance: Any = None,
        *,
        free: bool = False,
    ) -> "BatchSizeTable":
        """The table of a profile that `emsjax profile` wrote.

        Args:
            profile: its file, or the contents.
            acceptance: the probability that a draft token is accepted, or the `stats` of a run
                that drafted as many tokens as it could; None for the rate that the profile
                assumed.
            free: whether proposing takes no time, as with prompt lookup; the costs of the
                profile's draft model are then left out.

        Raises:
            ValueError: not such a profile, or a probability outside 0..1.
        """
        free = check_flag("free", free)
        contents = read_profile(profile)
        with errors_of(profile):
            table, settings = (section(contents, name) for name in ("table", "settings"))
            at_least_0 = lambda name, value: check_at_least(name, value, 0)
            lengths = check_table(
                "table.lengths", from_json(table.get("lengths")), at_least_0, MOST_SLOTS
            )
            if acceptance is None and not free:
                return cls(lengths)
            k = settings.get("max_draft_tokens")
            k = check_at_least("settings.max_draft_tokens", k, 1, MOST_PROFILED)
            context = check_number(
                "settings.context", settings.get("context"), "at least 0", lambda x: 0 <= x < MOST
            )
            if acceptance is None:
                acceptance = table.get("acceptance_rate")
                check_number("table.acceptance_rate", acceptance, *PROBABILITY)
        if hasattr(acceptance, "accepted_histogram"):
            accepted, drafted = acceptance_curves(acceptance)
        else:
            rate = check_number("acceptance", acceptance, *PROBABILITY)
            accepted, drafted = accepted_at_rate(rate, k), np.arange(k + 1.0)
        costs = StepCosts.from_profile(profile)
        if free:
            costs = costs.without_drafting()
        return cls(synergy_lengths(costs, lengths, context, accepted, drafted))

    def tree_flatten(self):
        return (self.sizes, self.draft_lengths), None

    @classmethod
    def tree_unflatten(cls, _, children):
        self = object.__new__(cls)
        self.sizes, self.draft_lengths = children
        return self

    def lengths(self, state, view: StepView):
        entry = jnp.sum(self.sizes <= jnp.sum(view.active)) - 1
        length = take(self.draft_lengths, jnp.maximum(entry, 0))
        return jnp.full(view.active.shape, length, jnp.int32)


def acceptance_curves(stats: Any) -> tuple[Float[np.ndarray, "k1"], Float[np.ndarray, "k1"]]:
    """Mean accepted and drafted tokens of a sample's step, by draft length 0..k.

    Args:
        stats: `GenerateOutput.stats` of a run that drafted as many tokens as it could. A
            shorter draft would have accepted as many, up to its length.
    """
    histogram = stats.accepted_histogram.sum(axis=0)
    length, steps = np.arange(len(histogram)), max(histogram.sum(), 1)
    accepted = np.minimum(length, length[:, None]) @ histogram / steps
    # A sample with fewer draft tokens than allowed is modelled as drafting all or none of them,
    # as prompt lookup does.
    return accepted, length * stats.num_drafted.sum() / steps / max(length[-1], 1)
