"""Draft lengths that maximise expected tokens per second, from acceptance and step costs."""

import dataclasses
import math
from collections.abc import Mapping
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from emsjax.checks import MOST, check_at_least
from emsjax.decode.base import DraftLength, StepView
from emsjax.decode.row_counts import row_buckets, smallest_bucket
from emsjax.decode.state import admitted_policy_state
from emsjax.engine.adapt import as_policy, check_policy
from emsjax.policies.costs import LEAST_GAIN, TILE_ROWS, StepCosts
from emsjax.policies.survival import AcceptanceCounts, check_estimates, check_setting
from emsjax.returned import available_lengths, check_state
from emsjax.values import pytree
from pallas_kernels.common.indexing import take

LIMIT = TILE_ROWS - 1  # a draft and the last emitted token before it fill a tile
PRIOR_RATE, PRIOR_WEIGHT, MEMORY = 0.7, 16.0, 0.98


@pytree
class Goodput(DraftLength):
    """One length per sample, chosen so that the step emits the most expected tokens per second.

    The gain of a draft token is the probability that it and all tokens before it are accepted,
    estimated from recent acceptance of the sample itself and of the others; in a tree also by its
    place among the candidates for the same token. Every row bucket is filled with the most likely
    tokens of all samples, and the bucket with the most expected tokens per
    millisecond is chosen; if drafting takes time, the longest draft is chosen with it. All lengths
    may be 0. Old counts decay, so that drafting is tried again, less often with a draft model.

    Args:
        costs: of a step on this device.
        prior_rate: acceptance rate before any draft has been verified.
        prior_weight: strength of the prior: after this many verified tokens a sample's own
            acceptance weighs as much as the batch's. It adapts to how much samples differ.
        memory: factor by which counts decay in each step.
        limit: the largest length; also the limit of a `DraftModel` created without one. Above
            the default a sample's cache is read more than once, which the costs here ignore.
        least_gain: fraction by which drafts that make a step longer must raise the expected
            tokens per second; see `emsjax.policies.costs.LEAST_GAIN`.

    Raises:
        ValueError: `limit` is not an integer of at least 1, or `costs` is a profile. When decoding
            begins: `prior_rate` is not between 0 and 1, `prior_weight` not above 0, `memory`
            outside 0..1, or `least_gain` below 0.
    """

    costs: StepCosts
    prior_rate: float = PRIOR_RATE
    prior_weight: float = PRIOR_WEIGHT
    memory: float = MEMORY
    limit: int = dataclasses.field(default=LIMIT, metadata={"static": True})
    least_gain: float = LEAST_GAIN

    def __post_init__(self):
        object.__setattr__(self, "limit", check_at_least("limit", self.limit, 1, MOST))
        check_no_profile(self.costs, "Goodput.from_profile(profile)")

    @classmethod
    def from_profile(cls, profile: str | PathLike | Mapping[str, Any], **settings) -> "Goodput":
        """A policy with the costs that `emsjax profile` measured.

        Args:
            profile: its file, or the contents.
            settings: other arguments of `Goodput`.

        Raises:
            ValueError: not such a profile.
        """
        return cls(StepCosts.from_profile(profile), **settings)

    @property
    def max_draft_tokens(self) -> int:
        return self.limit

    def check_settings(self) -> None:
        # Not in __post_init__: JAX also builds pytrees of other objects.
        check_costs(self.costs)
        check_estimates(self.prior_rate, self.prior_weight, self.memory)
        check_gain(self.least_gain)

    def init(self, batch: int, max_draft_tokens: int) -> AcceptanceCounts:
        return AcceptanceCounts.init(batch, max_draft_tokens)

    def lengths(self, state: AcceptanceCounts, view: StepView) -> Int32[Array, "b"]:
        return jnp.sum(self.nodes(state, view), axis=1, dtype=jnp.int32)

    def nodes(self, state: AcceptanceCounts, view: StepView) -> Bool[Array, "b k"]:
        """The tokens of chains or trees to verify."""
        batch, k = state.trials.shape
        # If drafts exist already, a long one takes no more time.
        most = min(self.limit, k)
        longest = jnp.array([most]) if view.drafted else jnp.arange(most + 1)  # [n]
        available = jnp.minimum(view.available, longest[:, None])  # [n, b]
        usable = jnp.arange(k) < available[:, :, None]
        survival = state.survival(self.prior_rate, self.prior_weight, view.tree)
        gains = jnp.where(usable, survival, 0).reshape(-1, batch * k)
        place = lax.broadcasted_iota(jnp.int32, gains.shape, 1)
        # A stable sort keeps a sample's equally likely tokens in order, parents first.
        losses, places = lax.sort((-gains, place), num_keys=1, is_stable=True)

        sizes = row_buckets(batch, k + 1)
        buckets = jnp.array(sizes, jnp.float32)  # [m]
        num_active = jnp.sum(view.active, dtype=jnp.float32)
        room = buckets - num_active
        fits = jnp.arange(batch * k, dtype=jnp.float32) < room[:, None]
        # A sum, because a GPU computes matrix products with fewer bits.
        gained = -jnp.sum(jnp.where(fits, losses[:, None], 0), axis=-1)  # [n, m]
        # A step uses a smaller bucket if there are too few tokens to fill it, and a larger one if
        # there are too many samples.
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
        return taken.reshape(batch, k)

    def update(self, state: AcceptanceCounts, view, num_drafted, num_accepted) -> AcceptanceCounts:
        return state.update(num_drafted, num_accepted, self.memory, view)

    def admit(self, state: AcceptanceCounts, fresh: Bool[Array, "b"]) -> AcceptanceCounts:
        return state.admit(fresh)


@pytree
class CostCapped(DraftLength):
    """Caps another policy's lengths at the length with the most expected tokens per second.

    The cap is the same for all samples and may be 0, which switches drafting off while it does
    not pay. It uses the same estimates as `Goodput`, including `least_gain`. The other policy is
    updated only after steps in which its lengths were not cut.

    Args:
        policy: the other policy.
        costs: of a step on this device.
        prior_rate, prior_weight, memory, least_gain: as in `Goodput`.

    Raises:
        ValueError: as in `Goodput`.
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
    def _policy(self) -> DraftLength:
        return as_policy(self.policy)

    @property
    def max_draft_tokens(self) -> int | None:
        return self._policy.max_draft_tokens

    def check_settings(self) -> None:
        check_policy(self.policy)
        check_costs(self.costs)
        check_estimates(self.prior_rate, self.prior_weight, self.memory)
        check_gain(self.least_gain)

    def init(self, batch: int, max_draft_tokens: int) -> tuple[Any, AcceptanceCounts]:
        return self._policy.init(batch, max_draft_tokens), AcceptanceCounts.init(
            batch, max_draft_tokens
        )

    def lengths(self, state: tuple[Any, AcceptanceCounts], view: StepView) -> Int32[Array, "b"]:
        inner, counts = state
        batch, k = counts.trials.shape
        wanted = self._wanted(inner, view)
        capped = jnp.minimum(wanted, jnp.arange(k + 1)[:, None])  # [n, b]
        survival = counts.survival(self.prior_rate, self.prior_weight)
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

    def update(
        self, state: tuple[Any, AcceptanceCounts], view: StepView, num_drafted, num_accepted
    ):
        inner, counts = state
        # Acceptance of cut drafts does not apply to the other policy's own lengths.
        own = jnp.all(self.lengths(state, view) == self._wanted(inner, view))
        updated = self._policy.update(inner, view, num_drafted, num_accepted)
        check_state("the policy's", "update", inner, updated)
        inner = jax.tree.map(lambda new, old: jnp.where(own, new, old), updated, inner)
        counts = counts.update(num_drafted, num_accepted, self.memory, view)
        return inner, counts

    def admit(self, state: tuple[Any, AcceptanceCounts], fresh: Bool[Array, "b"]):
        inner, counts = state
        inner = admitted_policy_state(self._policy, inner, fresh, counts.trials.shape[1])
        return inner, counts.admit(fresh)

    def _wanted(self, inner: Any, view: StepView) -> Int32[Array, "b"]:
        return available_lengths(self._policy, inner, view)


def worth(
    tokens: Float[Array, "*n"],
    ms: Float[Array, "*n"],
    without_ms: Float[Array, ""],
    least_gain: float,
) -> Float[Array, "*n"]:
    """Tokens per millisecond, reduced by `least_gain` if drafts make the step longer."""
    return tokens / jnp.where(ms > without_ms, (1 + least_gain) * ms, ms)


def check_no_profile(costs: Any, instead: str) -> None:
    """Raises a ValueError if `costs` is a profile or its file.

    Other objects are accepted, because JAX also builds pytrees of other objects.
    """
    if isinstance(costs, str | PathLike | Mapping):
        kind = type(costs).__name__
        raise ValueError(f"costs must be StepCosts, not {kind}: for a profile, use {instead}")


def check_costs(costs: Any) -> None:
    """Raises a ValueError unless `costs` is a `StepCosts`."""
    if not isinstance(costs, StepCosts):
        raise ValueError(f"costs must be StepCosts, not {type(costs).__name__}")


def check_gain(least_gain: Any) -> None:
    """Raises a ValueError if the gain is below 0; traced values are not checked."""
    check_setting("least_gain", least_gain, "at least 0", lambda x: 0 <= x < math.inf)


def cached_tokens(view: StepView) -> Float[Array, "b"]:
    """Cached tokens of each sample that a step reads."""
    return jnp.where(view.active, view.lengths - 1, 0).astype(jnp.float32)
