"""Estimates of the probability that draft tokens are accepted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from emsjax.decode.base import StepView
from emsjax.policies.survival import PRIOR_CANDIDATE_RATE, AcceptanceCounts, group_weight
from emsjax.trees import Tree


def seen(free: bool, tree=None, on_path=None) -> StepView:
    """A view of a step, of which only what `update` reads is there."""
    return StepView(None, None, None, free, tree, on_path)


@functools.partial(jax.jit, static_argnames="free")
def updated(counts, drafted, accepted, memory, free=True, tree=None, on_path=None):
    return counts.update(drafted, accepted, memory, seen(free, tree, on_path))


survival_of = jax.jit(AcceptanceCounts.survival)


def counts_after(*steps, batch=1, k=3, memory=1.0, free=True) -> AcceptanceCounts:
    """Counts after steps with these numbers of (drafted, accepted) tokens per sample."""
    counts = AcceptanceCounts.init(batch, k)
    for drafted, accepted in steps:
        tokens = (jnp.array(tokens, jnp.int32) for tokens in (drafted, accepted))
        counts = updated(counts, *tokens, memory, free)
    return counts


@pytest.mark.parametrize(
    ("steps", "memory", "trials", "hits"),
    [
        ([], 1, [0, 0, 0], [0, 0, 0]),
        ([([3], [0])], 1, [1, 0, 0], [0, 0, 0]),
        ([([3], [2])], 1, [1, 1, 1], [1, 1, 0]),
        ([([2], [2])], 1, [1, 1, 0], [1, 1, 0]),
        ([([0], [0])], 1, [0, 0, 0], [0, 0, 0]),
        ([([3], [3]), ([3], [1]), ([0], [0])], 0.5, [0.75, 0.75, 0.25], [0.75, 0.25, 0.25]),
    ],
    ids=["none", "all rejected", "the last rejected", "short", "no draft", "decayed"],
)
def test_accepted_tokens_and_the_first_rejected_one_are_counted(steps, memory, trials, hits):
    counts = counts_after(*steps, memory=memory)
    assert counts.trials.tolist() == [trials]
    assert counts.hits.tolist() == [hits]


def test_counts_of_a_draft_model_decay_more_slowly_the_longer_it_waits():
    nothing = ([0, 0], [0, 0])
    steps = [([3, 1], [3, 0]), nothing, nothing, nothing]
    counts = counts_after(*steps, batch=2, memory=0.5, free=False)
    # The first step's counts decay to 1/2, then to 2/3 and 3/4 of that.
    np.testing.assert_allclose(counts.trials, np.array([[1, 1, 1], [1, 0, 0]]) / 4, rtol=1e-6)
    assert float(counts.waited) == 3
    drafted = updated(counts, *jnp.array([[0, 1], [0, 1]]), 0.5, free=False)
    assert float(drafted.waited) == 0  # it is enough that one sample drafts
    assert drafted.trials[0].tolist() == pytest.approx([0.2] * 3)
    free = counts_after(*steps, batch=2, memory=0.5)
    np.testing.assert_allclose(free.trials, np.array([[1, 1, 1], [1, 0, 0]]) / 8)


def test_before_any_count_samples_may_have_any_rate_around_the_prior():
    survival = survival_of(AcceptanceCounts.init(2, 3), 0.7, 16.0)
    np.testing.assert_allclose(survival, np.cumprod([[0.7, 12.2 / 17, 13.2 / 18]] * 2, 1), 1e-6)
    # This is the fraction of drafts accepted up to each token if each sample has its own rate.
    rates = np.random.default_rng(0).beta(0.7 * 16, 0.3 * 16, 10**6)
    shares = [np.mean(rates**n) for n in (1, 2, 3)]
    np.testing.assert_allclose(survival[0], shares, rtol=2e-3)


def test_survival_after_one_count_by_hand():
    # Weight 4, rate 1/2. Overall (1 + 4/2) / 5 = 3/5, odds 3/2; the sample and the position have
    # (1 + 4 * 3/5) / 5 = 17/25, odds 17/8; expected odds 289/96; (1 + 4 * 289/385) / 5.
    survival = lambda accepted: survival_of(counts_after(([1], [accepted]), k=1), 0.5, 4.0)[0, 0]
    assert survival(1) == pytest.approx(1541 / 1925)
    assert survival(0) == pytest.approx(384 / 1925)


def test_survival_of_two_samples_by_hand():
    # Weight 4, rate 1/2; sample 0 has a hit, sample 1 a miss: overall 1/2, as is the position.
    # Samples (1 + 4/2) / 5 = 3/5 and 2/5; with their own counts (1 + 4 * 3/5) / 5 and 8/25.
    survival = survival_of(counts_after(([1, 1], [1, 0]), batch=2, k=1), 0.5, 4.0)
    np.testing.assert_allclose(survival, [[17 / 25], [8 / 25]], rtol=1e-6)


def test_acceptance_of_a_sample_raises_its_own_survival_most():
    # Sample 0's drafts are accepted, sample 1's are rejected, and sample 2 has not drafted yet.
    steps = [([3, 3, 0], [3, 0, 0])] * 8
    hits, misses, none = np.asarray(survival_of(counts_after(*steps, batch=3), 0.7, 16.0))[:, 0]
    assert hits > none + 0.1
    assert none > misses + 0.1
    alone = [([3, 0], [3, 0])] * 8
    better, also = np.asarray(survival_of(counts_after(*alone, batch=2), 0.7, 16.0))[:, 0]
    assert better > also > 0.7 + 0.01


def test_acceptance_at_a_position_affects_that_position_of_all_samples_most():
    # The second token is always rejected, the first never.
    steps = [([2, 0], [1, 0])] * 20
    survival = np.asarray(survival_of(counts_after(*steps, batch=2), 0.7, 16.0))
    rates = survival / np.pad(survival, ((0, 0), (1, 0)), constant_values=1)[:, :-1]
    for rate in rates:
        assert rate[0] > rate[2] + 0.05 > rate[1] + 0.1


def test_survival_returns_to_the_prior_as_counts_decay():
    bad = [([3], [0])] * 9
    rate = lambda *steps: survival_of(counts_after(*steps, memory=0.8), 0.7, 4.0)[0, 0]
    rates = [rate(*bad, *[([0], [0])] * n) for n in (0, 4, 16, 99)]
    assert rates == sorted(rates)
    assert rates[0] < 0.2
    assert rates[-1] == pytest.approx(0.7, abs=1e-3)


def weight_of(hits, trials, rate, prior_weight=48.0) -> float:
    arrays = (jnp.asarray(x, jnp.float32) for x in (hits, trials, rate))
    return float(group_weight(*arrays, prior_weight))


def test_before_any_count_and_after_one_each_the_prior_weight_applies():
    assert weight_of(np.zeros(5), np.zeros(5), 0.7) == pytest.approx(48)
    # Single counts cannot show that groups differ.
    assert weight_of([1, 0], np.ones(2), 0.5) == pytest.approx(48)


def test_a_weight_by_hand():
    # Each group adds (30 - 25)^2 / 50 over the variance 1/4, which is 2. The sum of 4 is reduced by
    # the two that chance alone would give; 98 counts could show more.
    correlation = (2 + 100 / 5) / (98 + 100)
    assert weight_of([30, 20], [50, 50], 0.5, 4.0) == pytest.approx(1 / correlation - 1)


@pytest.mark.parametrize("weight", [6.0, 25.0, 100.0])
@pytest.mark.parametrize("rate", [0.3, 0.8])
def test_weights_equal_those_of_the_distribution_of_the_rates(weight, rate):
    rng = np.random.default_rng(0)
    trials = rng.integers(1, 60, 20_000)
    hits = rng.binomial(trials, rng.beta(weight * rate, weight * (1 - rate), len(trials)))
    assert weight_of(hits, trials, rate) == pytest.approx(weight, rel=0.05)


def test_weights_are_bounded():
    trials = np.full(1000, 40)
    none_or_all = trials * np.arange(1000) % 80
    assert weight_of(none_or_all, trials, 0.5) == pytest.approx(4)
    assert weight_of(trials // 2, trials, 0.5) == pytest.approx(400)


def test_samples_that_differ_are_distinguished_sooner_than_samples_that_agree():
    good, bad = ([3, 3, 3, 3], [3, 3, 3, 3]), ([3, 3, 3, 3], [1, 1, 1, 1])
    own = lambda *steps: survival_of(counts_after(*steps, batch=4), 0.7, 48.0)[:, 0]
    agree = own(*[good, bad] * 8)
    differ = own(*[([3, 3, 3, 3], [3, 0, 3, 0])] * 16)
    assert np.ptp(np.asarray(agree)) < 1e-6
    assert differ[0] > differ[1] + 0.5


# Root, 0 and 1 after it, 2 and 3 after 0, 4 after 1, 5 after 0.
PARENTS = jnp.array([[-1, -1, 0, 0, 1, 0]])


@pytest.mark.parametrize(
    ("accepted", "count", "trials", "hits", "later_trials", "later_hits"),
    [
        ([], 6, [1, 0, 0], [0, 0, 0], [1, 0], [0, 0]),
        ([0], 6, [1, 1, 0], [1, 0, 0], [1, 1], [0, 0]),
        ([0, 3], 6, [1, 1, 0], [1, 0, 0], [1, 0], [1, 0]),
        ([0, 5], 6, [1, 1, 0], [1, 0, 0], [1, 1], [0, 1]),
        ([1], 6, [1, 1, 0], [0, 0, 0], [1, 0], [1, 0]),
        ([1, 4], 6, [1, 1, 0], [0, 1, 0], [1, 0], [1, 0]),
        ([0], 3, [1, 1, 0], [1, 0, 0], [0, 0], [0, 0]),
    ],
    ids=str,
)
def test_candidates_of_a_tree_are_counted(accepted, count, trials, hits, later_trials, later_hits):
    on_path = jnp.zeros((1, 7), bool).at[0, jnp.array([0, *(i + 1 for i in accepted)])].set(True)
    numbers = jnp.array([count]), jnp.array([len(accepted)])
    tree = Tree.of(PARENTS)
    counts = updated(AcceptanceCounts.init(1, 6), *numbers, 1.0, tree=tree, on_path=on_path)
    assert counts.trials[0, :3].tolist() == trials
    assert counts.hits[0, :3].tolist() == hits
    assert counts.candidate_trials[:2].tolist() == later_trials
    assert counts.candidate_hits[:2].tolist() == later_hits


def test_survival_in_a_tree_by_hand():
    counts = counts_after(([2], [1]), k=6)
    counts = counts._replace(
        candidate_trials=jnp.zeros(8).at[1].set(8), candidate_hits=jnp.zeros(8).at[1].set(4)
    )
    rates = np.array(survival_of(counts, 0.5, 4.0))[0]
    rates[1:] /= rates[:-1]
    later = [PRIOR_CANDIDATE_RATE, (4 + 4 * PRIOR_CANDIDATE_RATE) / 12]
    survival = survival_of(counts, 0.5, 4.0, Tree.of(PARENTS))[0]
    first, second = rates[0], (1 - rates[0]) * later[0]
    expected = [first, second, first * rates[1], first * (1 - rates[1]) * later[0]]
    expected += [second * rates[1], first * (1 - rates[1]) * (1 - later[0]) * later[1]]
    np.testing.assert_allclose(survival, expected, rtol=1e-5)
    chain = Tree.of(jnp.arange(-1, 5)[None])
    np.testing.assert_allclose(
        survival_of(counts, 0.5, 4.0, chain), survival_of(counts, 0.5, 4.0), rtol=1e-6
    )
