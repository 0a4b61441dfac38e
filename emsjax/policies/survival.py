"""Estimates of the probability that draft tokens are accepted, from counts while decoding."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from emsjax.checks import check_number, is_traced
from emsjax.decode.base import StepView
from emsjax.trees import Tree
from pallas_kernels.common.indexing import take, take_in_rows

CANDIDATES = 8  # after the first one, whose acceptance is counted; later ones count as the last
PRIOR_CANDIDATE_RATE = 0.2  # of candidates after the first, before any has been verified
PRIOR_EVIDENCE = 100.0  # verified tokens that the prior weight is worth
GROUP_WEIGHTS = (4.0, 400.0)  # the smallest and the largest


class AcceptanceCounts(NamedTuple):
    """Decaying counts of verified and accepted tokens at each draft position.

    Attributes:
        trials: drafts of which all tokens before position i were accepted, and i was verified. In
            a tree the first candidate at each depth is counted.
        hits: those of them of which position i was accepted too.
        waited: steps since any sample drafted.
        candidate_trials: in trees, tokens whose candidates before the i-th one, counted from 1,
            were rejected while it was verified; of all samples.
        candidate_hits: those of them whose i-th candidate was accepted.
    """

    trials: Float[Array, "b k"]
    hits: Float[Array, "b k"]
    waited: Float[Array, ""]
    candidate_trials: Float[Array, "m"]
    candidate_hits: Float[Array, "m"]

    @classmethod
    def init(cls, batch: int, max_draft_tokens: int) -> "AcceptanceCounts":
        zeros = lambda *shape: jnp.zeros(shape, jnp.float32)
        of_samples = (batch, max_draft_tokens)
        others = (zeros(CANDIDATES), zeros(CANDIDATES))
        return cls(zeros(*of_samples), zeros(*of_samples), zeros(), *others)

    def update(
        self,
        num_drafted: Int32[Array, "b"],
        num_accepted: Int32[Array, "b"],
        memory,
        view: StepView,
    ) -> "AcceptanceCounts":
        """Counts after a step; earlier counts are multiplied by `memory`.

        Another try costs a drafter that is not free (`view.drafted`): a draft model has to catch
        up on all tokens that were emitted while it waited. So its counts decay more slowly the
        longer it waits, as a power of the wait instead of exponentially.
        """
        position, others = jnp.arange(self.trials.shape[1]), (0, 0)
        hit = position < num_accepted[:, None]
        tried = (position <= num_accepted[:, None]) & (position < num_drafted[:, None])
        if view.tree is not None:
            tried, hit, *others = tree_trials(view.tree, num_drafted, view.on_path)
        forgotten = 1 - memory
        if not view.drafted:
            forgotten = forgotten / (1 + forgotten * self.waited)
        count = lambda old, new: (1 - forgotten) * old + jnp.asarray(new, jnp.float32)
        waited = jnp.where(jnp.any(num_drafted > 0), 0, self.waited + 1)
        return AcceptanceCounts(
            count(self.trials, tried),
            count(self.hits, hit),
            waited,
            *map(count, (self.candidate_trials, self.candidate_hits), others),
        )

    def admit(self, fresh: Bool[Array, "b"]) -> "AcceptanceCounts":
        """Counts without those of `fresh` slots, which begin new sequences."""
        forget = lambda counts: jnp.where(fresh[:, None], 0, counts)
        return self._replace(trials=forget(self.trials), hits=forget(self.hits))

    def survival(self, prior_rate, prior_weight, tree: Tree | None = None) -> Float[Array, "b k"]:
        """Estimated probability that a draft is accepted up to and including each position, or
        that each token of a tree is on the accepted path.

        The odds of acceptance at a position are the sample's odds times the position's odds over
        all samples, divided by the overall odds. At each level the counts are smoothed with
        pseudo-counts at the rate of the level above, and at the top at `prior_rate`. Their
        number is `prior_weight`; for samples and for positions it is smaller the more their
        rates differ, and larger the more they agree. The sample's rate at a position also counts
        the tokens before it as accepted, because the probability is conditional on that. So a
        sample with few counts may still turn out to be one whose long drafts are accepted.

        In a tree this is the rate of a token's first candidate. The others share what it leaves:
        each is accepted at a rate of its own, over all samples, if those before it are not.
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
        if tree is None:
            up_to = jnp.tri(rates.shape[1], dtype=bool)
            return jnp.prod(jnp.where(up_to, rates[:, None, :], 1), axis=2)
        others = filled(
            self.candidate_hits, self.candidate_trials, PRIOR_CANDIDATE_RATE, prior_weight
        )
        left = jnp.cumprod(1 - others) / (1 - others)  # if those before are rejected too
        rate = take_in_rows(rates, tree.depths[:, 1:] - 1)
        other = jnp.clip(tree.places - 1, 0, CANDIDATES - 1)
        share = (1 - rate) * take(left * others, other)
        return tree.product(jnp.where(tree.places == 0, rate, share))


def tree_trials(
    tree: Tree, num_drafted: Int32[Array, "b"], on_path: Bool[Array, "b k1"]
) -> tuple[Array, Array, Array, Array]:
    """The trials and hits of a step's trees: those of first candidates by depth [b, k], and those
    of later ones by their place among the candidates, over all samples [m]."""
    k = tree.parents.shape[1]
    verified = jnp.arange(k) < num_drafted[:, None]
    tried = verified & take_in_rows(on_path, tree.parents)
    hit = tried & on_path[:, 1:]
    first = tree.places == 0
    at_depth = tree.depths[:, 1:, None] - 1 == jnp.arange(k)  # [b, node, depth]
    by_depth = lambda nodes: jnp.any((nodes & first)[..., None] & at_depth, axis=1)
    # A candidate is tried if none before it is accepted.
    same = tree.parents[:, :, None] == tree.parents[:, None]
    earlier = same & (tree.places[:, None] < tree.places[:, :, None]) & hit[:, None]
    later = tried & ~first & ~jnp.any(earlier, axis=2)
    place = jnp.clip(tree.places - 1, 0, CANDIDATES - 1)[..., None] == jnp.arange(CANDIDATES)
    by_place = lambda nodes: jnp.sum(nodes[..., None] & place, axis=(0, 1))
    return by_depth(tried), by_depth(hit), by_place(later), by_place(later & hit)


def check_estimates(prior_rate: Any, prior_weight: Any, memory: Any) -> None:
    """Raises a ValueError unless the settings of `survival` and `update` are valid.

    The prior rate must be strictly between 0 and 1, the prior weight above 0, and the memory in
    0..1. Traced values are not checked.
    """
    check_setting("prior_rate", prior_rate, "between 0 and 1", lambda x: 0 < x < 1)
    check_setting("prior_weight", prior_weight, "above 0", lambda x: 0 < x < math.inf)
    check_setting("memory", memory, "in 0..1", lambda x: 0 <= x <= 1)


def check_setting(name: str, value: Any, rule: str, fits: Callable[[float], bool]) -> None:
    """Checks a number of a policy: see `check_number`. Traced values are not checked."""
    if not is_traced(value):
        check_number(name, value, rule, fits)


def group_weight(
    hits: Float[Array, "..."], trials: Float[Array, "..."], rate: Float[Array, "..."], prior_weight
) -> Float[Array, ""]:
    """Number of pseudo-counts at the common `rate` to add to each group's own counts.

    It is the sum of the parameters of a beta distribution with this mean, from which each group's
    rate is drawn. Then the expectation of sum (hits - trials rate)^2 / trials is
    rate (1 - rate) sum (1 + (trials - 1) r), where r = 1 / (weight + 1) is the correlation of
    two outcomes of a group.
    """
    surprise = jnp.where(trials > 0, (hits - trials * rate) ** 2 / jnp.maximum(trials, 1e-6), 0)
    excess = jnp.sum(surprise / (rate * (1 - rate)) - jnp.minimum(trials, 1))
    evidence = jnp.sum(jnp.maximum(trials - 1, 0))
    prior = PRIOR_EVIDENCE / (prior_weight + 1)
    correlation = (jnp.maximum(excess, 0) + prior) / (evidence + PRIOR_EVIDENCE)
    return jnp.clip(1 / correlation - 1, *GROUP_WEIGHTS)
