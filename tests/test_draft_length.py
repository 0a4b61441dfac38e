"""Draft-length policies: their arithmetic, their arguments, and no effect on tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import Asking, ScriptedDrafter, compiled_step, ragged_prompts, script_of, shallow_model

import emsjax
from emsjax.decode.base import StepView
from emsjax.decode.step import decode_loop

PROMPTS = ragged_prompts([9, 2, 17])


def view_of(active, available=32) -> StepView:
    active = jnp.asarray(active, bool)
    counts = jnp.where(active, available, 0).astype(jnp.int32)
    return StepView(active, jnp.full(active.shape, 9, jnp.int32), counts, drafted=False)


def trace(policy, accepted_by_step):
    """The length before each step and after the last, as samples accept the given counts."""
    state = policy.init(2, 32)
    view, lengths = view_of([True, True]), []
    for accepted in accepted_by_step:
        lengths.append(policy.lengths(state, view).tolist())
        state = policy.update(state, view, policy.lengths(state, view), jnp.array(accepted))
    lengths.append(policy.lengths(state, view).tolist())
    assert all(first == second for first, second in lengths)
    return [first for first, _ in lengths]


@pytest.mark.parametrize(
    ("policy", "accepted", "expected"),
    [
        # Grows by 2 after a fully accepted draft; shrinks by a tenth, rounded up, and by one
        # more if it shrank in the step before.
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
        # Not below the most tokens that a sample accepted.
        (emsjax.BassHeuristic(initial=9), [(8, 1), (7, 0), (6, 0)], [9, 8, 7, 6]),
        (emsjax.BassHeuristic(2, 3, 2, 5), [(2, 2), (1, 0), (0, 0)], [2, 5, 2, 1]),
    ],
    ids=["defaults", "at the limit", "a partly accepted draft", "other constants"],
)
def test_bass_heuristic_follows_algorithm_1(policy, accepted, expected):
    assert trace(policy, accepted) == expected


def test_a_step_without_drafts_does_not_change_the_bass_length():
    policy = emsjax.BassHeuristic()
    view, none = view_of([True, True]), jnp.array([0, 0])
    state = policy.update(policy.init(2, 32), view, none, none)
    assert policy.lengths(state, view).tolist() == [7, 7]


@pytest.mark.parametrize(
    ("num_active", "expected"), [(0, 5), (1, 5), (2, 5), (3, 4), (7, 4), (8, 0), (30, 0)]
)
def test_a_table_is_looked_up_by_active_samples(num_active, expected):
    table = emsjax.BatchSizeTable({8: 0, 2: 5, 3: 4})
    view = view_of(np.arange(30) < num_active)
    assert table.lengths(table.init(30, 7), view).tolist() == [expected] * 30


def test_a_table_adapts_as_samples_finish():
    model, new = shallow_model(), [3, 7, 20]
    plain = emsjax.generate(model, PROMPTS, max_new_tokens=new)
    drafter = ScriptedDrafter(script_of(PROMPTS, plain))  # every draft token is accepted
    table = {3: 0, 2: 1, 1: 3}
    out = emsjax.generate(model, PROMPTS, drafter, emsjax.BatchSizeTable(table), max_new_tokens=new)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    left, steps = np.array(new), np.zeros(3, int)
    while left.any():
        active = left > 0
        steps += active
        left = np.where(active, np.maximum(left - 1 - table[active.sum()], 0), 0)
    assert out.stats.num_steps.tolist() == steps.tolist()


@dataclasses.dataclass
class Watching:
    """Records its arguments and asks for all available tokens."""

    views: list[StepView] = dataclasses.field(default_factory=list)

    def init(self, batch, max_draft_tokens):
        self.max_draft_tokens_told = max_draft_tokens
        return ()

    def lengths(self, state, view):
        self.views.append(view)
        return view.available

    def update(self, state, view, num_drafted, num_accepted):
        return state


REPEATING = [[5, 6, 7, 8, 5, 6], [3, 4, 9], [7, 8, 9, 7, 8], [5, 6, 7, 8, 9, 5, 6], [5, 6, 5, 6]]
ROOM, ACTIVE = [9, 9, 3, 9, 9], [True, True, True, True, False]


@pytest.mark.parametrize(
    ("drafter", "available", "drafted"),
    [
        # Found tokens: a copy ends with the prompt, there is no match, 2 new tokens are left.
        (emsjax.PromptLookup(max_draft_tokens=4), [4, 0, 2, 4, 0], True),
        (emsjax.PromptLookup(max_draft_tokens=5), [4, 0, 2, 5, 0], True),
        (ScriptedDrafter(jnp.full((5, 65), 3, jnp.int32), 4), [4, 4, 2, 4, 0], False),
    ],
    ids=["prompt lookup", "longer copies", "not free"],
)
def test_a_policy_sees_the_numbers_of_found_or_allowed_tokens(drafter, available, drafted):
    @jax.jit
    def one_step(model, state):
        policy = Watching()
        info = emsjax.step(model, drafter, state, draft_length=policy)[1]
        (view,) = policy.views
        return view, info.num_drafted

    model = shallow_model()
    state = emsjax.init_state(model, drafter, REPEATING, max_new_tokens=ROOM)
    state = dataclasses.replace(state, active=jnp.array(ACTIVE))
    view, num_drafted = one_step(model, state)
    assert view.available.tolist() == num_drafted.tolist() == available
    assert view.drafted == drafted
    assert view.active.tolist() == ACTIVE
    assert view.lengths.tolist() == [len(prompt) for prompt in REPEATING]


class Drawing(ScriptedDrafter):
    """A drafter that claims to be free although it draws its tokens."""

    free = True

    def propose(self, *args):
        draft, state = super().propose(*args)
        probs = jnp.full((*draft.tokens.shape, 61), 1 / 61, jnp.float32)
        return dataclasses.replace(draft, probs=probs), state


def test_a_drafter_that_draws_its_tokens_cannot_be_free():
    drafter = Drawing(jnp.zeros((3, 65), jnp.int32))
    with pytest.raises(ValueError, match=r"draws its tokens \(Draft.probs\) cannot be `free`"):
        emsjax.generate(shallow_model(), PROMPTS, drafter, max_new_tokens=9)


@pytest.mark.parametrize("free", [False, True], ids=["model", "free"])
def test_lengths_beyond_the_available_tokens_have_no_effect(free):
    model = shallow_model()
    plain = emsjax.generate(model, PROMPTS, max_new_tokens=20)
    drafter = ScriptedDrafter(script_of(PROMPTS, plain))
    if free:
        references = [np.concatenate(pair) for pair in zip(PROMPTS, plain.tokens, strict=True)]
        drafter = emsjax.PromptLookup(max_draft_tokens=3, references=references)

    def counted(*wanted):
        policy = Asking(jnp.array(wanted, jnp.int32))
        out = emsjax.generate(model, PROMPTS, drafter, policy, max_new_tokens=20)
        np.testing.assert_array_equal(out.tokens, plain.tokens)
        return out.stats.num_drafted.tolist(), out.stats.num_steps.tolist()

    expected = counted(3, 0, 1)
    (long, none, short), steps = expected
    assert none == 0
    assert 0 < short <= steps[2]
    assert long > 2 * steps[0]
    assert counted(4, -1, 1) == counted(2**31 - 1, -(2**31), 1) == expected


COSTS = emsjax.StepCosts.of({1: 1.0, 16: 1.2, 24: 2.0})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AskingForWhatWasFound(Asking):
    def lengths(self, state, view):
        return self.wanted if view.drafted else jnp.zeros_like(self.wanted)


class Constant(emsjax.PromptLookup):
    """A drafter that is not a pytree."""


def test_a_free_drafter_that_is_not_a_pytree_also_proposes_before_the_policy():
    policy = AskingForWhatWasFound(jnp.ones(5, jnp.int32))
    for drafter in (Constant(), emsjax.PromptLookup()):
        out = emsjax.generate(shallow_model(), REPEATING, drafter, policy, 9)
        assert out.stats.num_drafted.sum() > 0


POLICIES = [
    emsjax.BassHeuristic(),
    emsjax.BatchSizeTable({1: 5, 2: 2}),
    emsjax.FixedLength(2),
    emsjax.Goodput(COSTS),
    emsjax.CostCapped(emsjax.BassHeuristic(), COSTS),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_no_policy_changes_tokens(policy):
    model = shallow_model()
    sampling = {"sampling": emsjax.Sampling(temperature=0.9), "key": jax.random.key(0)}
    for options in ({}, sampling):
        plain = emsjax.generate(model, PROMPTS, max_new_tokens=24, **options)
        drafter = emsjax.PromptLookup(match_length=1, search_generated=True)
        out = emsjax.generate(model, PROMPTS, drafter, policy, max_new_tokens=24, **options)
        np.testing.assert_array_equal(out.tokens, plain.tokens)
        assert out.stats.num_drafted.sum() > 0


def test_the_bass_heuristic_sets_the_limit_of_a_drafter_without_one():
    model = shallow_model()
    widths = {
        (None, None): 4,
        (None, emsjax.BassHeuristic()): 32,
        (None, emsjax.BassHeuristic(limit=9)): 9,
        (None, emsjax.FixedLength(9)): 4,
        (3, emsjax.BassHeuristic()): 3,
    }
    for (limit, policy), width in widths.items():
        state = emsjax.init_state(
            model, emsjax.DraftModel(model, limit), PROMPTS, draft_length=policy, max_new_tokens=40
        )
        assert state.counters.accepted_histogram.shape == (3, width + 1)
    # Its own draft model is always right, so the length grows from step to step: 8, 10 and 12
    # tokens, and the 10 that remain.
    own, policy = emsjax.DraftModel(model), emsjax.BassHeuristic()
    out = emsjax.generate(model, PROMPTS, own, policy, max_new_tokens=40, eos_token_ids=())
    lengths = out.stats.accepted_histogram
    assert lengths[:, [7, 9, 11]].tolist() == [[1, 2, 1]] * 3


def test_a_step_in_a_users_own_loop_sets_it_too():
    model, policy = shallow_model(), emsjax.BassHeuristic(initial=5, limit=6)
    drafter = emsjax.DraftModel(model)
    state = emsjax.init_state(model, drafter, PROMPTS, max_new_tokens=40, draft_length=policy)
    drafted = []
    for _ in range(2):
        state, info = compiled_step(model, drafter, state, policy)
        drafted.append(info.num_drafted.tolist())
    assert drafted == [[5] * 3, [6] * 3]


DRAFTING = {draft_ms: emsjax.StepCosts.of({1: 1.0}, draft_ms=draft_ms) for draft_ms in (0.01, 9)}
NEVER = {
    "fixed": emsjax.FixedLength(0),
    "goodput": emsjax.Goodput(DRAFTING[9], limit=2),
    "cost-capped": emsjax.CostCapped(emsjax.FixedLength(2), DRAFTING[9]),
}


@pytest.mark.parametrize("policy", NEVER.values(), ids=NEVER)
def test_a_draft_model_with_length_0_does_not_run(policy):
    model = shallow_model()
    drafter = emsjax.DraftModel(model, 2)
    state = emsjax.init_state(model, drafter, PROMPTS, draft_length=policy, max_new_tokens=9)
    for _ in range(3):
        state, info = compiled_step(model, drafter, state, policy)
        assert info.num_emitted.tolist() == [1, 1, 1]
    assert state.drafter_state.lengths.tolist() == [8, 1, 16]


def test_sampled_tokens_of_a_draft_model_with_goodput():
    model = shallow_model()
    options = {"sampling": emsjax.Sampling(temperature=0.9), "key": jax.random.key(0)}
    policy = emsjax.Goodput(DRAFTING[0.01], limit=3)
    drafter = emsjax.DraftModel(model)
    out = emsjax.generate(model, PROMPTS, drafter, policy, max_new_tokens=9, **options)
    assert out.lengths.tolist() == [9, 9, 9]
    assert out.stats.num_accepted.sum() == out.stats.num_drafted.sum() > 0  # drafted by itself


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (emsjax.FixedLength(2), emsjax.FixedLength(3)),
        (emsjax.BatchSizeTable({1: 2, 2: 1}), emsjax.BatchSizeTable({2: 0, 3: 4})),
        (emsjax.Goodput(DRAFTING[9], 0.3, 4.0, 0.9), emsjax.Goodput(DRAFTING[0.01])),
        (
            emsjax.CostCapped(emsjax.FixedLength(1), DRAFTING[9], 0.3, 4.0, 0.9),
            emsjax.CostCapped(emsjax.FixedLength(2), DRAFTING[0.01]),
        ),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_other_settings_need_no_new_compilation(first, second):
    model, drafter = shallow_model(), emsjax.PromptLookup(match_length=1)
    emsjax.generate(model, PROMPTS, drafter, first, max_new_tokens=9)
    before = decode_loop._cache_size()
    emsjax.generate(model, PROMPTS, drafter, second, max_new_tokens=9)
    assert decode_loop._cache_size() == before


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: emsjax.BassHeuristic(initial=0), "initial must be at least 1"),
        (lambda: emsjax.BassHeuristic(limit=2.5), "limit"),
        (lambda: emsjax.BassHeuristic(increment=0), "increment must be at least 1"),
        (lambda: emsjax.BassHeuristic(initial=9, limit=8), "initial must be at most limit=8"),
        (lambda: emsjax.BassHeuristic(increment=2**40), "increment must be at most 1073741824"),
        (lambda: emsjax.BatchSizeTable([1, 2]), "table must be a mapping, not list"),
        (lambda: emsjax.BatchSizeTable({1: 1, "a": 2}), "key of table must be an integer"),
        (lambda: emsjax.BatchSizeTable({}), "table is empty"),
        (lambda: emsjax.BatchSizeTable({0: 1}), "key of table must be at least 1"),
        (lambda: emsjax.BatchSizeTable({4: -1}), r"table\[4\] must be at least 0"),
    ],
)
def test_invalid_settings_of_a_policy_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()
