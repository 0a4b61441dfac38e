"""Draft-length policies: their arithmetic by hand, and no effect on tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import ScriptedDrafter, ragged_prompts, script_of, tiny_model

import emsjax

PROMPTS = ragged_prompts([9, 2, 17])


def trace(policy, accepted_by_step):
    """The length before each step and after the last, as samples accept the given counts."""
    state = policy.init(2)
    active, lengths = jnp.ones(2, bool), []
    for accepted in accepted_by_step:
        lengths.append(policy.lengths(state, active).tolist())
        state = policy.update(state, policy.lengths(state, active), jnp.array(accepted))
    lengths.append(policy.lengths(state, active).tolist())
    assert all(first == second for first, second in lengths)
    return [first for first, _ in lengths]


@pytest.mark.parametrize(
    ("policy", "accepted", "expected"),
    [
        # Grows by 2 when a whole draft stood; shrinks by a tenth, rounded up, and one more
        # if it shrank in the step before.
        (
            emsjax.BassHeuristic(),
            [(7, 3), (4, 1), (0, 2), (6, 6), (0, 0), (0, 0), (1, 0), (0, 0), (0, 0), (0, 1)],
            [7, 9, 8, 6, 8, 7, 5, 3, 1, 1, 3],
        ),
        # Never beyond the limit; a tenth of 32 is 4, of 28 and 24 is 3.
        (
            emsjax.BassHeuristic(initial=31),
            [(31, 0), (5, 32), (9, 2), (0, 0), (0, 0)],
            [31, 32, 32, 28, 24, 20],
        ),
        # Not below the most that a sample accepted.
        (emsjax.BassHeuristic(initial=9), [(8, 1), (7, 0), (6, 0)], [9, 8, 7, 6]),
        (emsjax.BassHeuristic(2, 3, 2, 5), [(2, 2), (1, 0), (0, 0)], [2, 5, 2, 1]),
    ],
)
def test_bass_heuristic_follows_algorithm_1(policy, accepted, expected):
    assert trace(policy, accepted) == expected


def test_a_step_without_drafts_does_not_change_the_bass_length():
    policy = emsjax.BassHeuristic()
    state = policy.update(policy.init(2), jnp.array([0, 0]), jnp.array([0, 0]))
    assert policy.lengths(state, jnp.ones(2, bool)).tolist() == [7, 7]


@pytest.mark.parametrize(
    ("num_active", "expected"), [(0, 5), (1, 5), (2, 5), (3, 4), (7, 4), (8, 0), (30, 0)]
)
def test_a_table_is_looked_up_by_active_samples(num_active, expected):
    table = emsjax.BatchSizeTable({8: 0, 2: 5, 3: 4})
    active = jnp.arange(30) < num_active
    assert table.lengths(table.init(30), active).tolist() == [expected] * 30


def test_a_table_adapts_as_samples_finish():
    model, new = tiny_model(), [3, 7, 20]
    plain = emsjax.generate(model, PROMPTS, max_new_tokens=new)
    drafter = ScriptedDrafter(script_of(PROMPTS, plain))  # every draft stands
    table = {3: 0, 2: 1, 1: 3}
    out = emsjax.generate(model, PROMPTS, drafter, emsjax.BatchSizeTable(table), max_new_tokens=new)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    left, steps = np.array(new), np.zeros(3, int)
    while left.any():
        active = left > 0
        steps += active
        left = np.where(active, np.maximum(left - 1 - table[active.sum()], 0), 0)
    assert out.stats.num_steps.tolist() == steps.tolist()


POLICIES = [emsjax.BassHeuristic(), emsjax.BatchSizeTable({1: 5, 2: 2}), emsjax.FixedLength(2)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_no_policy_changes_tokens(policy):
    model = tiny_model()
    sampling = {"sampling": emsjax.Sampling(temperature=0.9), "key": jax.random.key(0)}
    for options in ({}, sampling):
        plain = emsjax.generate(model, PROMPTS, max_new_tokens=24, **options)
        drafter = emsjax.PromptLookup(match_length=1, search_generated=True)
        out = emsjax.generate(model, PROMPTS, drafter, policy, max_new_tokens=24, **options)
        np.testing.assert_array_equal(out.tokens, plain.tokens)
        assert out.stats.num_drafted.sum() > 0


def test_the_bass_heuristic_raises_the_limit_that_nobody_set():
    model = tiny_model()
    draft = lambda drafter, policy: emsjax.generate(
        model, PROMPTS, drafter, policy, max_new_tokens=40, eos_token_ids=()
    )
    widths = {
        (None, None): 4,
        (None, emsjax.BassHeuristic()): 32,
        (None, emsjax.BassHeuristic(limit=9)): 9,
        (None, emsjax.FixedLength(9)): 4,
        (3, emsjax.BassHeuristic()): 3,
    }
    for (limit, policy), width in widths.items():
        stats = draft(emsjax.DraftModel(model, limit), policy).stats
        assert stats.accepted_histogram.shape == (3, width + 1)
    # Its own draft model is always right, so the length grows from step to step: 8, 10 and 12
    # tokens, and the 10 that remain.
    lengths = draft(emsjax.DraftModel(model), emsjax.BassHeuristic()).stats.accepted_histogram
    assert lengths[:, [7, 9, 11]].tolist() == [[1, 2, 1]] * 3


def test_a_step_of_ones_own_raises_it_too():
    model, policy = tiny_model(), emsjax.BassHeuristic(initial=5, limit=6)
    drafter = emsjax.DraftModel(model)
    options = {"draft_length": policy}
    state = emsjax.init_state(model, drafter, PROMPTS, max_new_tokens=40, **options)
    drafted = []
    for _ in range(2):
        state, info = emsjax.step(model, drafter, state, **options)
        drafted.append(info.num_drafted.tolist())
    assert drafted == [[5] * 3, [6] * 3]


def test_a_draft_model_without_length_is_fed_nothing():
    model = tiny_model()
    drafter = emsjax.DraftModel(model)
    policy = emsjax.FixedLength(0)
    state = emsjax.init_state(model, drafter, PROMPTS, draft_length=policy, max_new_tokens=9)
    for _ in range(3):
        state, info = emsjax.step(model, drafter, state, draft_length=policy)
        assert info.num_emitted.tolist() == [1, 1, 1]
    assert state.drafter_state.lengths.tolist() == [8, 1, 16]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: emsjax.BassHeuristic(initial=0), "initial must be at least 1"),
        (lambda: emsjax.BassHeuristic(limit=2.5), "limit"),
        (lambda: emsjax.BassHeuristic(increment=0), "increment must be at least 1"),
        (lambda: emsjax.BassHeuristic(initial=9, limit=8), "initial must be at most limit=8"),
        (lambda: emsjax.BatchSizeTable({}), "table is empty"),
        (lambda: emsjax.BatchSizeTable({0: 1}), "size of table must be at least 1"),
        (lambda: emsjax.BatchSizeTable({4: -1}), r"table\[4\] must be at least 0"),
    ],
)
def test_a_bad_policy_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
