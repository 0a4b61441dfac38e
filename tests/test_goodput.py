"""Goodput is compared with all combinations of lengths, by hand and in the device loop."""

import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from toy import (
    VOCAB,
    Asking,
    ScriptedDrafter,
    compiled_step,
    ragged_prompts,
    script_of,
    shallow_model,
)

import emsjax
from emsjax.decode.base import StepView
from emsjax.decode.row_counts import row_buckets
from emsjax.policies import goodput
from emsjax.policies.survival import AcceptanceCounts

PRIOR = (goodput.PRIOR_RATE, goodput.PRIOR_WEIGHT)
# Buckets by batch size and k. They are finer than the real ones for so few rows, and some are too
# small for the batch.
SHAPES = {
    (1, 3): (1, 3, 4),
    (2, 3): (2, 4, 5, 8),
    (3, 2): (1, 2, 4, 6, 9),
    (3, 3): (3, 5, 8, 12),
    (3, 20): row_buckets(3, 21),
}
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")


@st.composite
def situations(draw) -> SimpleNamespace:
    """Acceptance counts, costs and views for up to 3 samples and 20 positions."""
    some = lambda values, n: st.lists(values, min_size=n, max_size=n)
    return SimpleNamespace(
        trials=np.reshape(draw(some(st.integers(0, 30), 60)), (3, 20)),
        rates=np.reshape(draw(some(st.sampled_from([0, 0.3, 0.8, 1]), 3)), (3, 1)),
        row_ms=draw(some(st.sampled_from([1, 1.1, 1.5, 2, 3, 5]), 5)),  # in any order
        token_ms=draw(st.sampled_from([0, 0.1, 1])),
        draft_ms=draw(st.sampled_from([0, 0.01, 0.1, 0.5, 3])),
        active=draw(some(st.booleans(), 3)),
        available=draw(some(st.integers(0, 20), 3)),
        wanted=draw(some(st.integers(-1, 22), 3)),
        drafted=draw(st.booleans()),
        least_gain=draw(st.sampled_from([0, 0.05, 0.5])),
    )


def counted(trials, hits) -> AcceptanceCounts:
    return AcceptanceCounts.init(*trials.shape)._replace(trials=trials, hits=hits)


survival_of = jax.jit(AcceptanceCounts.survival)


@functools.partial(jax.jit, static_argnames="drafted")
def lengths_of(policy, state, view, drafted):
    return policy.lengths(state, view._replace(drafted=drafted))


@functools.partial(jax.jit, static_argnames="drafted")
def updated(policy, state, view, drafted, counts, accepted):
    return policy.update(state, view._replace(drafted=drafted), counts, accepted)


class Problem:
    """A situation and a shape, with a policy's view of them and the value of any lengths."""

    def __init__(self, shape, situation, monkeypatch, reread=0.0):
        (batch, k), self.buckets = shape, np.array(SHAPES[shape])
        monkeypatch.setattr(goodput, "row_buckets", lambda *asked: SHAPES[(asked[0], asked[1] - 1)])
        trials = situation.trials[:batch, :k].astype(np.float32)
        hits = (trials * situation.rates[:batch]).astype(np.float32)
        self.counts = counted(jnp.asarray(trials), jnp.asarray(hits))
        survival = survival_of(self.counts, *PRIOR)
        self.survival = np.asarray(survival, np.float64)
        self.expected = np.pad(np.cumsum(self.survival, axis=1), ((0, 0), (1, 0)))  # [b, k1]
        row_ms = dict(zip(SHAPES[shape], situation.row_ms, strict=False))
        more = situation.token_ms, situation.draft_ms, reread
        self.costs = emsjax.StepCosts.of(row_ms, *more)
        active = np.array(situation.active[:batch])
        self.available = np.where(active, np.minimum(situation.available[:batch], k), 0)
        self.num_active, self.draft_ms = active.sum(), situation.draft_ms
        self.least_gain = situation.least_gain
        self.wanted = np.array(situation.wanted[:batch])
        cached = np.array([0, 8, 100])[:batch] * active
        self.bucket_ms = np.array(list(row_ms.values())) + situation.token_ms * cached.sum()
        self.reread_ms = reread * situation.token_ms * cached
        as_int32 = lambda values: jnp.array(values, jnp.int32)
        self.view = StepView(
            jnp.asarray(active),
            as_int32([1, 9, 101][:batch]),
            as_int32(self.available),
            situation.drafted,
        )

    def worth(self, lengths) -> np.ndarray:
        """Tokens per ms with lengths [..., b], reduced by `least_gain` for longer steps."""
        lengths = np.asarray(lengths)
        gained = self.expected[np.arange(lengths.shape[-1]), lengths].sum(axis=-1)
        rows = self.num_active + lengths.sum(axis=-1)
        ms = self.bucket_ms[np.searchsorted(self.buckets, rows)]
        ms = ms + (self.reread_ms * (lengths >= 16)).sum(axis=-1)
        if not self.view.drafted:
            ms = ms + self.draft_ms * lengths.max(axis=-1)
        longer = ms > self.bucket_ms[np.searchsorted(self.buckets, self.num_active)]
        return (self.num_active + gained) / ms / (1 + self.least_gain * longer)

    def lengths(self, policy, state) -> np.ndarray:
        lengths = np.asarray(lengths_of(policy, state, self.view, drafted=self.view.drafted))
        assert (lengths >= 0).all()
        assert (lengths <= self.available).all()
        return lengths


@each_shape
@settings(max_examples=60)
@given(situation=situations())
def test_no_lengths_have_a_higher_value_than_goodputs(shape, situation, monkeypatch):
    problem = Problem(shape, situation, monkeypatch)
    policy = emsjax.Goodput(problem.costs, least_gain=situation.least_gain, limit=20)
    lengths = problem.lengths(policy, problem.counts)
    every = np.array(list(itertools.product(*(range(n + 1) for n in problem.available))))
    best = problem.worth(every).max()
    assert problem.worth(lengths) == pytest.approx(best, rel=1e-5)


@each_shape
@settings(max_examples=20)
@given(situation=situations())
def test_buckets_are_filled(shape, situation, monkeypatch):
    problem = Problem(shape, situation, monkeypatch)
    assume((problem.survival > 0).all())  # in float32
    policy = emsjax.Goodput(problem.costs, least_gain=situation.least_gain, limit=20)
    lengths = problem.lengths(policy, problem.counts)
    # Otherwise all found tokens are taken, or all that fit into that many draft steps.
    longest = problem.available.max() if situation.drafted else lengths.max()
    everything = np.minimum(problem.available, longest)
    assert problem.num_active + lengths.sum() in SHAPES[shape] or (lengths == everything).all()


@each_shape
@settings(max_examples=20)
@given(situation=situations())
def test_a_policy_is_capped_at_the_length_with_the_highest_value(shape, situation, monkeypatch):
    problem = Problem(shape, situation, monkeypatch, reread=0.4)
    gain = {"least_gain": situation.least_gain}
    policy = emsjax.CostCapped(Asking(jnp.array(problem.wanted, jnp.int32)), problem.costs, **gain)
    lengths = problem.lengths(policy, ((), problem.counts))
    wanted = np.clip(problem.wanted, 0, problem.available)
    cuts = np.minimum(wanted, np.arange(shape[1] + 1)[:, None])
    assert lengths.tolist() in cuts.tolist()
    best = problem.worth(cuts).max()
    assert problem.worth(lengths) == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize(("reread", "length"), [(0.0, 20), (1.0, 15)])
def test_a_policy_is_capped_before_caches_are_read_again_if_that_costs_more(reread, length):
    costs = emsjax.StepCosts.of({1: 1.0}, token_ms=0.01, reread=reread)
    trials = jnp.full((1, 20), 1e6)
    counts = counted(trials, 0.95 * trials)
    view = StepView(jnp.ones(1, bool), jnp.array([101]), jnp.array([20]), drafted=True)
    # 15 draft tokens give 11.2 tokens in 2 ms; 20 give 13.2 in 2 ms, or in 3 ms.
    policy = emsjax.CostCapped(emsjax.FixedLength(20), costs)
    assert lengths_of(policy, ((), counts), view, True).tolist() == [length]


@pytest.mark.parametrize("limit", [7, 32])
def test_a_policy_is_not_updated_after_its_lengths_were_capped(limit):
    """To BASS, accepted drafts that were capped are not full ones, so it would shrink."""
    costs = emsjax.StepCosts.of({16: 1.0, 32: 1.5})
    policy = emsjax.CostCapped(emsjax.BassHeuristic(limit=limit), costs)
    state, lengths = policy.init(4, 7), []
    view = StepView(
        jnp.ones(4, bool), jnp.full(4, 9, jnp.int32), jnp.full(4, 7, jnp.int32), drafted=True
    )
    for _ in range(9):
        lengths.append(lengths_of(policy, state, view, True))
        state = updated(policy, state, view, True, lengths[-1], lengths[-1])  # all are accepted
    drafted = [counts.tolist() for counts in lengths]
    assert drafted[0] == [3] * 4  # nothing is known yet
    assert drafted[-1] == [7] * 4


def test_a_policy_that_was_not_capped_learns_from_drafts_shorter_than_asked_for():
    """A drafter may find fewer tokens than it was asked for."""
    policy = emsjax.CostCapped(emsjax.BassHeuristic(initial=3), emsjax.StepCosts.of({1: 1.0}))
    state = policy.init(2, 7)
    limits = jnp.full(2, 7, jnp.int32)
    view = StepView(jnp.ones(2, bool), jnp.full(2, 9, jnp.int32), limits, drafted=False)
    lengths = lengths_of(policy, state, view, False)
    none = jnp.zeros_like(lengths)
    inner, _ = updated(policy, state, view, False, lengths - 1, none)
    alone = emsjax.BassHeuristic(initial=3)
    expected = updated(alone, state[0], view, False, lengths - 1, none)
    assert jax.tree.map(int, inner) == jax.tree.map(int, expected) != jax.tree.map(int, state[0])


@pytest.mark.parametrize("drafted", [False, True])
def test_drafting_that_did_not_pay_is_tried_again_and_kept_once_it_pays(drafted):
    costs = emsjax.StepCosts.of({16: 1.0, 32: 1.2, 144: 3.0}, draft_ms=0.1)
    policy = emsjax.Goodput(costs)
    whole = lambda n: jnp.full(16, n, jnp.int32)
    view = StepView(jnp.ones(16, bool), whole(9), whole(8), drafted=drafted)

    @jax.jit
    def step(state, share):
        lengths = policy.lengths(state, view)
        return lengths, policy.update(state, view, lengths, share * lengths)

    state, tries = policy.init(16, 8), []
    for i in range(700):
        lengths, state = step(state, 0)
        tries += [i] if lengths.any() else []
    between = np.diff(tries)
    # Tries are periodic once the first counts have decayed. A draft model waits longer.
    assert len(set(between[1:])) == 1
    assert 40 < between[1] < 80 if drafted else 120 < between[1] < 240
    for _ in range(between[1] + 20):
        lengths, state = step(state, 1)
    assert (lengths > 0).all()


def test_the_longest_draft_and_the_bucket_are_chosen_together(monkeypatch):
    monkeypatch.setattr(goodput, "row_buckets", lambda *asked: (2, 4, 5, 8))
    costs = emsjax.StepCosts.of({2: 1.0, 4: 1.2, 5: 1.3, 8: 5.0}, draft_ms=0.2)
    trials = jnp.full((2, 3), 1e6)
    counts = counted(trials, trials * jnp.array([[0.95], [0.6]]))
    many = jnp.array([3, 3], jnp.int32)
    view = StepView(jnp.ones(2, bool), many, many, drafted=False)
    # The choice gives 4.45 tokens in 1.7 ms. A third token of the first sample is worth more than
    # the second's first, but takes another draft step: 4.71 in 1.9 ms. One each: 3.55 in 1.4 ms.
    assert lengths_of(emsjax.Goodput(costs), counts, view, False).tolist() == [2, 1]


@pytest.mark.parametrize("drafted", [False, True])
def test_goodput_respects_its_limit(drafted):
    policy = emsjax.Goodput(emsjax.StepCosts.of({1: 1.0}), limit=2)
    many = jnp.array([1, 5], jnp.int32)
    view = StepView(jnp.ones(2, bool), many, many, drafted)
    assert lengths_of(policy, policy.init(2, 5), view, drafted).tolist() == [1, 2]


@settings(max_examples=60)
@given(situation=situations())
def test_survival_decreases_from_token_to_token_and_is_below_1(situation, monkeypatch):
    survival = Problem((3, 3), situation, monkeypatch).survival
    assert (np.diff(survival, axis=1, prepend=1) < 0).all()
    assert (survival > 0).all()


PROMPTS, BATCH, NEW_TOKENS = ragged_prompts([9, 2, 17, 5]), 4, 40
COSTS = emsjax.StepCosts.of({16: 1.0, 32: 1.05}, draft_ms=0.02)


@pytest.fixture(scope="module")
def script():
    return script_of(PROMPTS, emsjax.generate(small(), PROMPTS, max_new_tokens=NEW_TOKENS))


def small() -> emsjax.OPT:
    return shallow_model()


def drafted_by_step(drafted, script, policy, steps) -> np.ndarray:
    """Verified draft tokens [n, b] if `drafted` is proposed and `script` is the target's text."""
    drafter = ScriptedDrafter(drafted % VOCAB, 7)
    options = {"draft_length": policy, "max_new_tokens": NEW_TOKENS}
    state = emsjax.init_state(small(), drafter, PROMPTS, **options)
    counts = []
    for _ in range(steps):
        state, info = compiled_step(small(), drafter, state, policy)
        counts.append(info.num_drafted)
    for tokens, expected, length in zip(state.tokens, script, state.lengths, strict=True):
        np.testing.assert_array_equal(tokens[:length], expected[:length])
    return np.array(counts)


def test_samples_whose_drafts_are_accepted_get_longer_ones(script):
    drafts = script.at[::2].add(1)  # wrong for half of the samples
    dear = emsjax.StepCosts.of({16: 1.0, 32: 3.0})
    lengths = drafted_by_step(drafts, script, emsjax.Goodput(dear), 5)
    assert lengths[0].tolist() == [3] * BATCH  # 16 rows, before anything is known
    assert lengths[-1, [1, 3]].min() > lengths[-1, [0, 2]].max() + 2
    assert lengths[-1].sum() + BATCH == 16


POLICIES = {"bass": emsjax.BassHeuristic(3, 1), "fixed": emsjax.FixedLength(7)}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_policy_whose_drafts_are_accepted_is_not_capped(policy, script):
    alone = drafted_by_step(script, script, policy, 5)
    guarded = drafted_by_step(script, script, emsjax.CostCapped(policy, COSTS), 5)
    np.testing.assert_array_equal(guarded, alone)
    assert alone.max() == 7


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_policy_is_off_while_drafts_are_rejected_and_on_again_after_decay(policy, script):
    def drafted(memory):
        guarded = emsjax.CostCapped(policy, COSTS, prior_weight=4.0, memory=memory)
        return drafted_by_step(script + 1, script, guarded, 38).sum(axis=1)

    kept, forgotten = drafted(1.0), drafted(0.9)
    assert kept[0] == forgotten[0] >= 3 * BATCH
    off = int(np.argmin(kept))
    assert 1 <= off <= 10
    assert not kept[off:].any()
    off = int(np.argmin(forgotten))
    assert forgotten[off:].any()
    assert (forgotten[off:] == 0).mean() > 0.6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prior_rate": 0}, "prior_rate must be between 0 and 1, not 0"),
        ({"prior_rate": 1.0}, "prior_rate must be between 0 and 1, not 1.0"),
        ({"prior_weight": 0.0}, "prior_weight must be above 0, not 0.0"),
        ({"prior_weight": float("nan")}, "prior_weight must be above 0, not nan"),
        ({"memory": 1.5}, "memory must be in 0..1, not 1.5"),
        ({"memory": -0.1}, "memory must be in 0..1, not -0.1"),
        ({"least_gain": -0.1}, "least_gain must be at least 0, not -0.1"),
        ({"least_gain": float("nan")}, "least_gain must be at least 0, not nan"),
        ({"limit": 0}, "limit must be at least 1, not 0"),
        ({"limit": 2.0}, "limit must be an integer"),
    ],
)
def test_invalid_settings_are_rejected(settings, message):
    costs = emsjax.StepCosts.of({1: 1.0})
    decode = functools.partial(
        emsjax.generate, shallow_model(), [[3, 4]], emsjax.PromptLookup(), max_new_tokens=2
    )
    with pytest.raises(ValueError, match=message):
        decode(emsjax.Goodput(costs, **settings))
    if "limit" not in settings:
        with pytest.raises(ValueError, match=message):
            decode(emsjax.CostCapped(emsjax.FixedLength(1), costs, **settings))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (emsjax.CostCapped(3, emsjax.StepCosts.of({1: 1.0})), "must be a policy .* not int"),
        (
            emsjax.CostCapped(emsjax.FixedLength, emsjax.StepCosts.of({1: 1.0})),
            "not the class FixedLength",
        ),
        (emsjax.Goodput(None), "costs must be StepCosts, not NoneType"),
        (emsjax.CostCapped(emsjax.FixedLength(1), 2.0), "costs must be StepCosts, not float"),
    ],
)
def test_fields_of_a_policy_are_checked_before_any_work(policy, message):
    with pytest.raises(ValueError, match=message):
        emsjax.generate(shallow_model(), [[3, 4]], emsjax.PromptLookup(), policy, max_new_tokens=2)
