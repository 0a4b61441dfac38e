"""Policies that limit how many tokens are drafted, per sample and step."""

import dataclasses
import numbers
from collections.abc import Mapping
from os import PathLike
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from emsjax.checks import check_at_least
from emsjax.decode.base import of_fresh_slots
from emsjax.policies.costs import StepCosts, accepted_at_rate, read_profile, synergy_lengths
from pallas_kernels.common.indexing import take

MOST = 1 << 30  # of a length: steps of the device loop may add to it


class StepView(NamedTuple):
    """What a policy sees of a step before it.

    Attributes:
        active: samples that still decode.
        lengths: tokens of each sample so far, prompt included.
        available: draft tokens that each could use at most; where they are drafted
            already, those that there are.
        drafted: whether they are, so that fewer of them save no drafting. Static.
    """

    active: Bool[Array, "b"]
    lengths: Int32[Array, "b"]
    available: Int32[Array, "b"]
    drafted: bool


METHODS = ("init", "lengths", "update")  # of every policy


@runtime_checkable
class DraftLength(Protocol):
    """A draft-length policy: a pytree with pure functions, run inside the device loop.

    The effective limit is the smaller of the policy's and the drafter's. A policy that may
    ask for more than drafters allow by themselves has an attribute `max_draft_tokens`: a
    drafter whose limit nobody has set takes it over.

    Where its settings can be wrong, `check_settings()` raises a ValueError; it is called before any
    work. Where slots are refilled, `admit(state, fresh)` returns the state in which slots with
    `fresh` [b] begin new sequences; without it they take what `init` makes, from arrays whose
    first axis is theirs.
    """

    def init(self, batch: int, max_draft_tokens: int) -> Any:
        """State for `batch` samples, each with up to `max_draft_tokens` in a step."""
        ...

    def lengths(self, state: Any, view: StepView) -> Int32[Array, "b"]:
        """How many draft tokens of each sample to verify in this step; 0: none."""
        ...

    def update(
        self,
        state: Any,
        view: StepView,
        num_drafted: Int32[Array, "b"],
        num_accepted: Int32[Array, "b"],
    ) -> Any:
        """State after a step that was seen so, fed `num_drafted` tokens, kept `num_accepted`."""
        ...


def check_is_policy(draft_length: Any) -> None:
    """Whether it can be asked in the device loop.

    Raises:
        ValueError: it is no policy, one that is not registered as a pytree, or has wrong settings.
    """
    kind = type(draft_length)
    is_class = isinstance(draft_length, type)
    missing = [name for name in METHODS if not callable(getattr(draft_length, name, None))]
    if is_class or missing:
        what = f"the class {draft_length.__name__}" if is_class else kind.__name__
        if not is_class and len(missing) < len(METHODS):
            what += f", which has no {' and no '.join(missing)}"
        raise ValueError(f"draft_length must be a policy such as emsjax.FixedLength(3), not {what}")
    if jax.tree_util.all_leaves([draft_length]):
        raise ValueError(
            f"draft_length must be a pytree, and {kind.__name__} is none: register the class with "
            "jax.tree_util.register_static, or with register_dataclass if it holds arrays"
        )
    if hasattr(draft_length, "check_settings"):
        draft_length.check_settings()


def admitted_by_policy(
    policy: DraftLength, state: Any, fresh: Bool[Array, "b"], max_draft_tokens: int
) -> Any:
    """A policy's state where `fresh` slots begin new sequences."""
    if hasattr(policy, "admit"):
        return policy.admit(state, fresh)
    return of_fresh_slots(policy.init(fresh.shape[0], max_draft_tokens), state, fresh)


def available_lengths(policy: DraftLength, state: Any, view: StepView) -> Int32[Array, "b"]:
    """The policy's lengths, as far as each sample could use them.

    Raises:
        ValueError: they are no integers, or not one for each sample.
    """
    lengths = policy.lengths(state, view)
    shape, dtype = jnp.shape(lengths), jnp.result_type(lengths)
    if not jnp.issubdtype(dtype, jnp.integer) or shape not in ((), view.available.shape):
        raise ValueError(
            f"{type(policy).__name__}.lengths must return integers [b] = {view.available.shape}, "
            f"not {dtype}{list(shape)}"
        )
    return jnp.clip(jnp.asarray(lengths).astype(jnp.int32), 0, view.available)


@jax.tree_util.register_pytree_node_class
class FixedLength:
    """Up to `k` draft tokens for every sample in every step; 0 switches drafting off.

    The length is traced data: another k needs no new compilation.

    Raises:
        ValueError: k is no integer, or negative.
    """

    def __init__(self, k: int):
        self.k = min(check_at_least("k", k, 0), np.iinfo(np.int32).max)

    def tree_flatten(self):
        return (self.k,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        self = object.__new__(cls)
        (self.k,) = children
        return self

    def init(self, batch, max_draft_tokens) -> tuple[()]:
        return ()

    def lengths(self, state, view: StepView):
        return jnp.full(view.active.shape, self.k, jnp.int32)

    def update(self, state, view, num_drafted, num_accepted):
        return state


class BassState(NamedTuple):
    """What Algorithm 1 of BASS carries from step to step."""

    length: Int32[Array, ""]
    shrinking: Int32[Array, ""]  # 1 if the last step shortened it


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class BassHeuristic:
    """One length for all samples: it grows when some sample accepted all of it, else shrinks.

    After a step in which some sample accepted as many tokens as the length it grows by
    `increment`, up to `limit`. Otherwise it shrinks by a `divisor`-th, rounded up, and by one
    more if the step before shortened it too, but not below the most that a sample accepted, nor
    below 1. A step in which nobody drafted changes nothing.

    Args:
        initial: the first step's length.
        limit: the largest length; also `DraftModel`'s limit where its user set none.

    Raises:
        ValueError: a value that is no integer, below 1 or far too large, or `initial` above
            `limit`.

    Reference: BASS, arXiv 2404.15778, Algorithm 1 and its constants.
    """

    initial: int = 7
    increment: int = 2
    divisor: int = 10
    limit: int = 32

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if check_at_least(field.name, value := getattr(self, field.name), 1) > MOST:
                raise ValueError(f"{field.name} must be at most {MOST}, not {value}")
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
class BatchSizeTable:
    """A length for every batch size, looked up by the samples that are still active.

    Args:
        table: draft tokens by batch size, as in {1: 7, 8: 4, 32: 0}: the entry with the
            largest size that is not above the number of active samples counts, or the first.

    Raises:
        ValueError: no mapping, or an empty one, a size below 1, or a length below 0.

    >>> BatchSizeTable({1: 7, 8: 4, 32: 0}).draft_lengths.tolist()
    [7, 4, 0]

    Reference: The Synergy of Speculative Decoding and Batching, arXiv 2310.18813.
    """

    def __init__(self, table: Mapping[int, int]):
        if not isinstance(table, Mapping):
            raise ValueError(f"table must be a mapping, not {type(table).__name__}")
        if not table:
            raise ValueError("table is empty: at least one batch size is needed")
        sizes = sorted(check_at_least("a batch size of table", size, 1) for size in table)
        lengths = [check_at_least(f"table[{size}]", table[size], 0) for size in sizes]
        at_most = lambda values: jnp.array([min(value, MOST) for value in values], jnp.int32)
        self.sizes, self.draft_lengths = at_most(sizes), at_most(lengths)

    @classmethod
    def from_profile(
        cls,
        profile: str | PathLike | Mapping[str, Any],
        acceptance: Any = None,
        *,
        free: bool = False,
    ) -> "BatchSizeTable":
        """The table that `emsjax profile` found.

        Args:
            profile: its file, or what that holds.
            acceptance: the probability that a draft token stands, or the `stats` of a run
                that drafted as much as it could; None: the rate that the profile assumed.
            free: proposing takes no time, as with prompt lookup: what the profile's draft model
                costs is left out.

        Raises:
            ValueError: not such a profile, or a probability outside 0..1.
        """
        profile = read_profile(profile)
        if "table" not in profile or "settings" not in profile:
            raise ValueError("the profile holds no table of lengths by batch size")
        if acceptance is None:
            if not free:
                return cls({int(size): k for size, k in profile["table"]["lengths"].items()})
            acceptance = profile["table"]["acceptance_rate"]
        if isinstance(acceptance, numbers.Real):
            if not 0 <= acceptance <= 1:
                raise ValueError(f"acceptance must be in 0..1, not {acceptance}")
            k = profile["settings"]["max_draft_tokens"]
            accepted, drafted = accepted_at_rate(acceptance, k), np.arange(k + 1.0)
        else:
            accepted, drafted = acceptance_curves(acceptance)
        context = profile["settings"]["context"]
        sizes = map(int, profile["table"]["lengths"])
        costs = StepCosts.from_profile(profile)
        if free:
            costs = costs.without_drafting()
        return cls(synergy_lengths(costs, sizes, context, accepted, drafted))

    def tree_flatten(self):
        return (self.sizes, self.draft_lengths), None

    @classmethod
    def tree_unflatten(cls, _, children):
        self = object.__new__(cls)
        self.sizes, self.draft_lengths = children
        return self

    def init(self, batch, max_draft_tokens) -> tuple[()]:
        return ()

    def lengths(self, state, view: StepView):
        entry = jnp.sum(self.sizes <= jnp.sum(view.active)) - 1
        length = take(self.draft_lengths, jnp.maximum(entry, 0))
        return jnp.full(view.active.shape, length, jnp.int32)

    def update(self, state, view, num_drafted, num_accepted):
        return state


def acceptance_curves(stats: Any) -> tuple[Float[np.ndarray, "k1"], Float[np.ndarray, "k1"]]:
    """Mean accepted and drafted tokens of a sample's step, by draft length 0..k.

    Args:
        stats: `GenerateOutput.stats` of a run that drafted as much as it could: of what stood
            there, a shorter draft would have had its part.
    """
    histogram = stats.accepted_histogram.sum(axis=0)
    length, steps = np.arange(len(histogram)), max(histogram.sum(), 1)
    accepted = np.minimum(length, length[:, None]) @ histogram / steps
    # Whoever drafts less than it may is taken to draft all or nothing, as a copy does.
    return accepted, length * stats.num_drafted.sum() / steps / max(length[-1], 1)
