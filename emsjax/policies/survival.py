"""How likely drafts stand, estimated from verdicts while decoding."""

import math
import numbers
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

PRIOR_EVIDENCE = 100.0  # verdicts that the prior weight counts for
GROUP_WEIGHTS = (4.0, 400.0)  # the least and the largest


class Verdicts(NamedTuple):
    """Weighted counts of verdicts on each draft position, recent ones counting more.

    Attributes:
        trials: verdicts on position i of a draft whose earlier tokens all stood.
        hits: those of them by which it stood too.
        waited: steps since a sample drafted.
    """

    trials: Float[Array, "b k"]
    hits: Float[Array, "b k"]
    waited: Float[Array, ""]

    @classmethod
    def init(cls, batch: int, max_draft_tokens: int) -> "Verdicts":
        zeros = lambda *shape: jnp.zeros(shape, jnp.float32)
        return cls(zeros(batch, max_draft_tokens), zeros(batch, max_draft_tokens), zeros())

    def update(
        self,
        num_drafted: Int32[Array, "b"],
        num_accepted: Int32[Array, "b"],
        memory,
        *,
        free: bool,
    ) -> "Verdicts":
        """After a step; what was counted before weighs `memory` of what it did.

        A drafter that is not `free` pays for another try: a draft model has to see all that was
        emitted while it waited. The longer it waits, the more slowly its verdicts are forgotten:
        not exponentially, but like a power of the wait.
        """
        position = jnp.arange(self.trials.shape[1])
        hit = position < num_accepted[:, None]
        tried = (position <= num_accepted[:, None]) & (position < num_drafted[:, None])
        forgotten = 1 - memory
        if not free:
            forgotten = forgotten / (1 + forgotten * self.waited)
        count = lambda old, new: (1 - forgotten) * old + new.astype(jnp.float32)
        waited = jnp.where(jnp.any(num_drafted > 0), 0, self.waited + 1)
        return Verdicts(count(self.trials, tried), count(self.hits, hit), waited)

    def admit(self, fresh: Bool[Array, "b"]) -> "Verdicts":
        """Nothing is known of new sequences."""
        forget = lambda counts: jnp.where(fresh[:, None], 0, counts)
        return Verdicts(forget(self.trials), forget(self.hits), self.waited)

    def survival(self, prior_rate, prior_weight) -> Float[Array, "b k"]:
        """Estimated probability that a sample's draft stands up to each position, included.

        The odds of a position are those of its sample times those of the position over all
        samples, over the overall odds; at each level verdicts of the level above, at the top
        of `prior_rate`, fill up one's own. There are `prior_weight` of them, but for samples
        and for positions as many fewer or more as their rates are seen to differ or to agree.
        To a token it speaks for its sample that the tokens before it stand: these are verdicts
        too. Where little is known of a sample, it may be one whose long drafts stand.
        """
        total = lambda axis: (jnp.sum(x, axis, keepdims=True) for x in (self.hits, self.trials))

        def filled(hits, trials, rate, weight):
            return (hits + weight * rate) / (trials + weight)

        def of_groups(axis, seen=0.0):
            hits, trials = total(axis)
            weight = group_weight(hits, trials, overall, prior_weight)
            return filled(hits + seen, trials + seen, overall, weight)

        odds = lambda rate: rate / (1 - rate)
        overall = filled(*total((0, 1)), prior_rate, prior_weight)
        before = jnp.arange(self.trials.shape[1], dtype=jnp.float32)
        expected = odds(of_groups(1, seen=before)) * odds(of_groups(0)) / odds(overall)
        rates = filled(self.hits, self.trials, expected / (1 + expected), prior_weight)
        up_to = jnp.tri(rates.shape[1], dtype=bool)
        return jnp.prod(jnp.where(up_to, rates[:, None, :], 1), axis=2)


def check_estimates(prior_rate: Any, prior_weight: Any, memory: Any) -> None:
    """Whether survival can be estimated so; traced values are taken as they are.

    Raises:
        ValueError: a prior rate outside 0..1 or at its ends, a prior weight that is not above 0,
            or a memory outside 0..1.
    """
    known = lambda value: isinstance(value, numbers.Real)
    if known(prior_rate) and not 0 < prior_rate < 1:
        raise ValueError(f"prior_rate must be between 0 and 1, not {prior_rate}")
    if known(prior_weight) and not 0 < prior_weight < math.inf:
        raise ValueError(f"prior_weight must be above 0, not {prior_weight}")
    if known(memory) and not 0 <= memory <= 1:
        raise ValueError(f"memory must be in 0..1, not {memory}")


def group_weight(
    hits: Float[Array, "..."], trials: Float[Array, "..."], rate: Float[Array, "..."], prior_weight
) -> Float[Array, ""]:
    """How many verdicts at the common `rate` to add to each group's own.

    That is the sum of a beta distribution's parameters, if it has this mean and each group's own
    rate is drawn from it. In expectation then sum (hits - trials rate)^2 / trials =
    rate (1 - rate) sum (1 + (trials - 1) r), where r = 1 / (weight + 1) is the correlation of
    two verdicts of a group.
    """
    surprise = jnp.where(trials > 0, (hits - trials * rate) ** 2 / jnp.maximum(trials, 1e-6), 0)
    excess = jnp.sum(surprise / (rate * (1 - rate)) - jnp.minimum(trials, 1))
    evidence = jnp.sum(jnp.maximum(trials - 1, 0))
    prior = PRIOR_EVIDENCE / (prior_weight + 1)
    correlation = (jnp.maximum(excess, 0) + prior) / (evidence + PRIOR_EVIDENCE)
    return jnp.clip(1 / correlation - 1, *GROUP_WEIGHTS)
