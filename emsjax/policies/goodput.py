"""Draft lengths from what is accepted and from what a step costs."""

import dataclasses
import numbers
from collections.abc import Mapping
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from emsjax.checks import check_at_least
from emsjax.decode.base import check_state
from emsjax.decode.row_counts import row_buckets, smallest_bucket
from emsjax.policies.costs import LEAST_GAIN, TILE_ROWS, StepCosts
from emsjax.policies.lengths import (
    DraftLength,
    StepView,
    admitted_by_policy,
    available_lengths,
    check_is_policy,
)
from emsjax.policies.survival import Verdicts, check_estimates
from pallas_kernels.common.indexing import take

LIMIT = TILE_ROWS - 1  # with the last emitted token before it a draft fills a tile
PRIOR_RATE, PRIOR_WEIGHT, MEMORY = 0.7, 16.0, 0.98


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Goodput:
    """The lengths, one per sample, with which the step emits the most tokens per second.

    A draft token is worth the probability that it and all before it stand, estimated from
    the sample's own recent verdicts and those of the others. For every row bucket the
    worthiest tokens that fill it are taken; the bucket with the most expected tokens per
    millisecond wins, together with the longest draft where drafting takes time. All
    lengths may be 0; as verdicts are forgotten, drafts are tried again, those of a draft model
    less often.

    Args:
        costs: of a step on this device.
        prior_rate: acceptance rate before any verdict.
        prior_weight: strength of the prior: after this many verdicts a sample's own acceptance
            weighs as much as the batch's. Adapted to how much the samples are seen to differ.
        memory: what a verdict weighs after each further step, relative to before.
        limit: the largest length; also `DraftModel`'s limit where its user set none. Above
            the default a sample's cache is read more than once, which is not priced here.
        least_gain: share by which drafts that make the step longer must raise the expected
            tokens per second: see `emsjax.policies.costs.LEAST_GAIN`.

    Raises:
        ValueError: a `limit` that is no integer or below 1, or a profile as `costs`; where
            decoding begins, a `prior_rate` not between 0 and 1, a `prior_weight` that is not
            above 0, a `memory` outside 0..1, or a `least_gain` below 0.
    """

    costs: StepCosts
    prior_rate: float = PRIOR_RATE
    prior_weight: float = PRIOR_WEIGHT
    memory: float = MEMORY
    limit: int = dataclasses.field(default=LIMIT, metadata={"static": True})
    least_gain: float = LEAST_GAIN

    def __post_init__(self):
        check_at_least("limit", self.limit, 1)
        check_no_profile(self.costs, "Goodput.from_profile(profile)")

    @classmethod
    def from_profile(cls, profile: str | PathLike | Mapping[str, Any], **settings) -> "Goodput":
        """With the costs that `emsjax profile` measured.

        Args:
            profile: its file, or what that holds.
            settings: other arguments of `Goodput`.

        Raises:
            ValueError: not such a profile.
        """
        return cls(StepCosts.from_profile(profile), **settings)

    @property
    def max_draft_tokens(self) -> int:
        return self.limit

    def check_settings(self) -> None:
        # Not where it is made: a pytree is made of anything.
        check_costs(self.costs)
        check_estimates(self.prior_rate, self.prior_weight, self.memory)
        check_gain(self.least_gain)

    def init(self, batch: int, max_draft_tokens: int) -> Verdicts:
        return Verdicts.init(batch, max_draft_tokens)

    def lengths(self, state: Verdicts, view: StepView) -> Int32[Array, "b"]:
        batch, k = state.trials.shape
        # Where drafts are there already a long one takes no longer.
        most = min(self.limit, k)
        longest = jnp.array([most]) if view.drafted else jnp.arange(most + 1)  # [n]
        available = jnp.minimum(view.available, longest[:, None])  # [n, b]
        usable = jnp.arange(k) < available[:, :, None]
        survival = state.survival(self.prior_rate, self.prior_weight)
        gains = jnp.where(usable, survival, 0).reshape(-1, batch * k)
        place = lax.broadcasted_iota(jnp.int32, gains.shape, 1)
        # Stable: of a sample's equally worthy tokens the first come first.
        losses, places = lax.sort((-gains, place), num_keys=1, is_stable=True)

        sizes = row_buckets(batch, k + 1)
        buckets = jnp.array(sizes, jnp.float32)  # [m]
        num_active = jnp.sum(view.active, dtype=jnp.float32)
        room = buckets - num_active
        fits = jnp.arange(batch * k, dtype=jnp.float32) < room[:, None]
        # A sum and no product of matrices: those round to fewer bits on a GPU.
        gained = -jnp.sum(jnp.where(fits, losses[:, None], 0), axis=-1)  # [n, m]
        # With too few tokens for a bucket a step takes a smaller one; with too many samples, a
        # larger one.
        most_rows = num_active + jnp.sum(available, axis=1, keepdims=True).astype(jnp.float32)
        used = smallest_bucket(sizes, jnp.clip(buckets, num_active, most_rows))
        bucket_ms = self.costs.step_ms(buckets, jnp.sum(cached_tokens(view)))
        ms = take(bucket_ms, used)
        if not view.drafted:
            ms = ms + self.costs.draft_step_ms(batch) * longest[:, None].astype(jnp.float32)
        without_ms = take(bucket_ms, smallest_bucket(sizes, num_active))
        value = worth(num_active + gained, ms, without_ms, self.least_gain)
        n, m = jnp.unravel_index(jnp.argmax(value), value.shape)
        taken = jnp.zeros(batch * k, bool)
        taken = taken.at[take(places, n)].set(take(fits, m), unique_indices=True)
        taken &= take(gains, n) > 0
        return jnp.sum(taken.reshape(batch, k), axis=1, dtype=jnp.int32)

    def update(self, state: Verdicts, view, num_drafted, num_accepted) -> Verdicts:
        return state.update(num_drafted, num_accepted, self.memory, free=view.drafted)

    def admit(self, state: Verdicts, fresh: Bool[Array, "b"]) -> Verdicts:
        return state.admit(fresh)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CostCapped:
    """Caps another policy's lengths at the length with the highest expected tokens per second.

    The cap is the same for all samples and may be 0: drafting is off while it does not pay. It
    comes from the same estimates as `Goodput`'s lengths, `least_gain` included. The other policy
    learns only from steps in which its lengths were not cut.

    Args:
        policy: the other one.
        costs: of a step on this device.
        prior_rate, prior_weight, memory, least_gain: as for `Goodput`.

    Raises:
        ValueError: as `Goodput` does.
    """

    policy: DraftLength
    costs: StepCosts
    prior_rate: float = PRIOR_RATE
    prior_weight: float = PRIOR_WEIGHT
    memory: float = MEMORY
    least_gain: float = LEAST_GAIN

    def __post_init__(self):
        check_no_profile(self.costs, "CostCapped(policy, StepCosts.from_profile(profile))")

    @property
    def max_draft_tokens(self) -> int | None:
        return getattr(self.policy, "max_draft_tokens", None)

    def check_settings(self) -> None:
        check_is_policy(self.policy)
        check_costs(self.costs)
        check_estimates(self.prior_rate, self.prior_weight, self.memory)
        check_gain(self.least_gain)

    def init(self, batch: int, max_draft_tokens: int) -> tuple[Any, Verdicts]:
        return self.policy.init(batch, max_draft_tokens), Verdicts.init(batch, max_draft_tokens)

    def lengths(self, state: tuple[Any, Verdicts], view: StepView) -> Int32[Array, "b"]:
        inner, verdicts = state
        batch, k = verdicts.trials.shape
        wanted = self._wanted(inner, view)
        capped = jnp.minimum(wanted, jnp.arange(k + 1)[:, None])  # [n, b]
        survival = verdicts.survival(self.prior_rate, self.prior_weight)
        verified = jnp.arange(k) < capped[:, :, None]
        gained = jnp.sum(jnp.where(verified, survival, 0), axis=(1, 2))
        num_active = jnp.sum(view.active, dtype=jnp.float32)
        rows = num_active + jnp.sum(capped, axis=1, dtype=jnp.float32)
        sizes = row_buckets(batch, k + 1)
        rows = jnp.array(sizes, jnp.float32)[smallest_bucket(sizes, rows)]
        read = self.costs.tokens_read(cached_tokens(view), capped + 1)
        ms = self.costs.step_ms(rows, jnp.sum(read, axis=1))
        if not view.drafted:
            longest = jnp.max(capped, axis=1).astype(jnp.float32)
            ms = ms + self.costs.draft_step_ms(batch) * longest
        return capped[jnp.argmax(worth(num_active + gained, ms, ms[0], self.least_gain))]

    def update(self, state: tuple[Any, Verdicts], view: StepView, num_drafted, num_accepted):
        inner, verdicts = state
        # Cut drafts say nothing about the other policy's own lengths.
        own = jnp.all(num_drafted == self._wanted(inner, view))
        updated = self.policy.update(inner, view, num_drafted, num_accepted)
        check_state("the policy's", "update", inner, updated)
        inner = jax.tree.map(lambda new, old: jnp.where(own, new, old), updated, inner)
        verdicts = verdicts.update(num_drafted, num_accepted, self.memory, free=view.drafted)
        return inner, verdicts

    def admit(self, state: tuple[Any, Verdicts], fresh: Bool[Array, "b"]):
        inner, verdicts = state
        inner = admitted_by_policy(self.policy, inner, fresh, verdicts.trials.shape[1])
        return inner, verdicts.admit(fresh)

    def _wanted(self, inner: Any, view: StepView) -> Int32[Array, "b"]:
        return available_lengths(self.policy, inner, view)


def worth(
    tokens: Float[Array, "*n"],
    ms: Float[Array, "*n"],
    without_ms: Float[Array, ""],
    least_gain: float,
) -> Float[Array, "*n"]:
    """Tokens per millisecond; a step that takes longer than one without drafts has to earn it."""
    return tokens / jnp.where(ms > without_ms, (1 + least_gain) * ms, ms)


def check_no_profile(costs: Any, instead: str) -> None:
    """All else is taken as it is: a pytree is made of anything.

    Raises:
        ValueError: a profile, or its file.
    """
    if isinstance(costs, str | PathLike | Mapping):
        kind = type(costs).__name__
        raise ValueError(f"costs must be StepCosts, not {kind}: of a profile, {instead}")


def check_costs(costs: Any) -> None:
    """Raises a ValueError where they are no `StepCosts`."""
    if not isinstance(costs, StepCosts):
        raise ValueError(f"costs must be StepCosts, not {type(costs).__name__}")


def check_gain(least_gain: Any) -> None:
    """Traced values are taken as they are.

    Raises:
        ValueError: below 0.
    """
    if isinstance(least_gain, numbers.Real) and not least_gain >= 0:
        raise ValueError(f"least_gain must be at least 0, not {least_gain}")


def cached_tokens(view: StepView) -> Float[Array, "b"]:
    """What a step reads from the cache for each sample, in tokens."""
    return jnp.where(view.active, view.lengths - 1, 0).astype(jnp.float32)
