"""Refilled slots: sequences do not depend on each other, and each prompt is admitted once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import CARELESS, NEARLY_GREEDY, ragged_prompts, shallow_model, tiny_model

import emsjax
from emsjax.decode import refill as feeding
from emsjax.decode.prefill import prefill
from emsjax.decode.row_counts import prompt_row_counts
from emsjax.decode.run import Run
from emsjax.decode.step import decode_loop
from emsjax.engine import slots
from emsjax.engine.adapt import make_run
from emsjax.engine.preparation import check

PROMPT_SIXTEENTHS = (6, 16)  # of the row counts of steps that feed prompts
LENGTHS = [5, 9, 20, 3, 14, 1, 2, 33, 7, 11, 4]
NEW = [7, 20, 3, 12, 9, 1, 25, 2, 16, 8, 5]
SAMPLED = emsjax.Sampling(0.9, top_k=20, top_p=[0.9, 1.0] * 5 + [0.8])


def same(out, whole, *, steps=True):
    np.testing.assert_array_equal(out.tokens, whole.tokens)
    np.testing.assert_array_equal(out.lengths, whole.lengths)
    np.testing.assert_allclose(out.logprobs, whole.logprobs, atol=2e-5)
    assert out.finish_reasons == whole.finish_reasons
    if steps:
        for name in ("num_steps", "num_drafted", "num_accepted", "accepted_histogram"):
            np.testing.assert_array_equal(getattr(out.stats, name), getattr(whole.stats, name))


def draft_model():
    """A model whose drafts are partly right."""
    return shallow_model(ffn_dim=32)


def drafters():
    prompts = ragged_prompts(LENGTHS)
    return {
        "plain": None,
        "prompt lookup": emsjax.PromptLookup(match_length=1),
        "references": emsjax.PromptLookup(match_length=1, references=[p[::-1] for p in prompts]),
        "draft model": emsjax.DraftModel(draft_model(), 3),
        "not a pytree": CARELESS,
    }


@pytest.mark.parametrize(
    ("name", "sampling"),
    [("prompt lookup", None), ("draft model", None), *((name, SAMPLED) for name in drafters())],
    ids=lambda of: of if isinstance(of, str) else "greedy" if of is None else "sampled",
)
def test_refilled_sequences_equal_those_of_one_batch(name, sampling):
    model, prompts, drafter = shallow_model(), ragged_prompts(LENGTHS), drafters()[name]
    options = {"max_new_tokens": NEW, "sampling": sampling, "key": jax.random.key(5)}
    whole = emsjax.generate(model, prompts, drafter, **options)
    batch_size = 1 if (name, sampling) == ("prompt lookup", None) else 4
    out = emsjax.generate(model, prompts, drafter, batch_size=batch_size, **options)
    same(out, whole, steps=drafter is not CARELESS)  # its drafts depend on the step


@pytest.mark.parametrize("name", ["plain", "references", "draft model"])
def test_sequences_of_a_prompt_copy_the_cache_of_its_first_sequence(name):
    model, prompts, drafter = shallow_model(), ragged_prompts(LENGTHS), drafters()[name]
    options = {"max_new_tokens": NEW, "num_sequences": 3, "key": jax.random.key(5)}
    options["sampling"] = emsjax.Sampling(0.9)
    whole = emsjax.generate(model, prompts, drafter, **options)
    batch_size = 2 if drafter is None else 7
    same(emsjax.generate(model, prompts, drafter, batch_size=batch_size, **options), whole)


def test_long_prompts_of_several_sequences_are_fed_in_chunks(monkeypatch):
    model, prompts = shallow_model(), ragged_prompts(LENGTHS)
    options = {"max_new_tokens": 6, "num_sequences": 2, "key": jax.random.key(5)}
    options["sampling"] = emsjax.Sampling(0.9)
    drafter = drafters()["references"]
    whole = emsjax.generate(model, prompts, drafter, **options)
    monkeypatch.setattr(emsjax.decode.row_counts, "MAX_CHUNK_ROWS", 16)
    same(emsjax.generate(model, prompts, drafter, batch_size=5, **options), whole)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class FirstSteps:
    """A policy without `admit` that drafts only in a sequence's first two steps."""

    def init(self, batch, max_draft_tokens):
        return jnp.zeros(batch, jnp.int32)

    def lengths(self, state, view):
        return jnp.where(state < 2, 3, 0)

    def update(self, state, view, num_drafted, num_accepted):
        return state + view.active.astype(jnp.int32)


def test_policy_state_is_reset_when_a_slot_is_refilled():
    model, prompts = shallow_model(), ragged_prompts(LENGTHS)
    drafter = emsjax.DraftModel(draft_model(), 3)
    whole = emsjax.generate(model, prompts, drafter, FirstSteps(), max_new_tokens=NEW)
    out = emsjax.generate(model, prompts, drafter, FirstSteps(), max_new_tokens=NEW, batch_size=4)
    assert out.stats.num_drafted.sum() > 6 * 4
    same(out, whole)


def test_state_of_a_capped_policy_is_reset_when_a_slot_is_refilled():
    """The policy has no `admit`. Drafting costs almost nothing, so no draft is capped."""
    model, prompts = shallow_model(), ragged_prompts(LENGTHS)
    drafter = emsjax.DraftModel(draft_model(), 3)
    costs = emsjax.StepCosts.of({16: 1.0, 1024: 1.001}, draft_ms=1e-6)
    policy = emsjax.CostCapped(FirstSteps(), costs, least_gain=0.0)
    out = emsjax.generate(model, prompts, drafter, policy, max_new_tokens=NEW, batch_size=4)
    assert (out.stats.num_drafted[out.stats.num_steps > 1] > 0).all()


@pytest.mark.parametrize("policy", [emsjax.BassHeuristic(3, limit=4), "goodput", "capped"])
def test_policies_that_depend_on_the_batch_do_not_change_greedy_tokens(policy):
    costs = emsjax.StepCosts.of({16: 1.0, 64: 1.5}, draft_ms=0.1)
    policy = {
        "goodput": emsjax.Goodput(costs),
        "capped": emsjax.CostCapped(emsjax.BassHeuristic(3, limit=4), costs),
    }.get(policy, policy)
    model, prompts = shallow_model(), ragged_prompts(LENGTHS)
    drafter = emsjax.DraftModel(draft_model())
    if isinstance(policy, emsjax.BassHeuristic):
        drafter = emsjax.PromptLookup(match_length=1)
    whole = emsjax.generate(model, prompts, max_new_tokens=NEW)
    out = emsjax.generate(model, prompts, drafter, policy, max_new_tokens=NEW, batch_size=4)
    same(out, whole, steps=False)


def slots_for(model, prompts, *, count, drafter=None, **asked):
    run, requests = check(make_run(model, drafter), prompts, **asked)
    served = slots.Slots(run, requests, count)
    return served, slots.sequences_of(requests), requests


def test_a_prompt_is_fed_once_for_any_number_of_sequences():
    model, prompts = shallow_model(), ragged_prompts([9, 20, 14])
    asked = {"max_new_tokens": 6, "num_sequences": 8, "eos_token_ids": (), **NEARLY_GREEDY}
    served, sequences, _ = slots_for(model, prompts, count=4, **asked)
    rows = list(served.serve(sequences))
    assert len(rows) == 24
    emitted = 24 * 6  # each from one row
    assert served.counts()["real_rows"] == emitted + sum(len(p) - 1 for p in prompts)


def test_previous_contents_of_a_slot_have_no_influence(monkeypatch):
    """Undefined cache entries are NaN at first and later hold what earlier sequences left."""
    model, prompts = shallow_model(), ragged_prompts(LENGTHS)
    drafter = emsjax.DraftModel(draft_model(), 3)
    whole = emsjax.generate(model, prompts, drafter, max_new_tokens=NEW)
    init_cache = emsjax.OPT.init_cache

    def poisoned(self, *size):
        cache = init_cache(self, *size)
        layers = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache.layers)
        return dataclasses.replace(cache, layers=layers)

    monkeypatch.setattr(emsjax.OPT, "init_cache", poisoned)
    same(emsjax.generate(model, prompts, drafter, max_new_tokens=NEW, batch_size=3), whole)


@pytest.mark.usefixtures("every_row_count")
def test_caches_equal_those_of_a_prefill_while_slots_are_refilled():
    model, prompts = tiny_model(), ragged_prompts(LENGTHS)
    drafter = emsjax.PromptLookup(match_length=1)
    served, sequences, requests = slots_for(
        model, prompts, count=4, drafter=drafter, max_new_tokens=NEW
    )
    kernels = emsjax.decode.kernels.resolve_kernels(None)
    fill = jax.jit(functools.partial(prefill, model, kernels=kernels))
    looks = 0
    entries = list(sequences)
    while entries or served.staged or served.busy:
        while entries and len(served.staged) < served.room:
            served.staged.append(entries.pop(0))
        served.decode(served.count, 1)
        served.take_finished()
        state = served.state
        active, lengths = np.asarray(state.active), np.asarray(state.cache.lengths)
        cached = np.where(active, lengths, 0)
        assert (lengths < np.asarray(state.lengths))[active].all()
        empty = model.init_cache(4, requests.max_len)
        fresh = fill(empty, state.tokens, jnp.array(cached))
        there = np.arange(requests.max_len) < cached[:, None]
        for mine, theirs in zip(
            jax.tree.leaves(state.cache.layers), jax.tree.leaves(fresh.layers), strict=True
        ):
            np.testing.assert_allclose(
                np.asarray(mine)[there], np.asarray(theirs)[there], atol=1e-5
            )
        looks += 1
    assert looks > 20


def test_slots_are_not_idle_while_sequences_wait():
    model, prompts = shallow_model(), ragged_prompts([6] * 30)
    served, sequences, _ = slots_for(
        model, prompts, count=4, max_new_tokens=[3, 9, 5] * 10, eos_token_ids=()
    )
    rows = list(served.serve(sequences))
    # Each sequence takes one step for its prompt, which others may share, and one per token.
    busy = sum(int(row["num_steps"]) + 1 for row in rows)
    assert served.counts()["model_calls"] <= busy / 4 + 12  # the last do not end together


def test_prompts_of_several_sequences_are_admitted_together():
    model, prompts = shallow_model(), ragged_prompts([6] * 8)
    asked = {"max_new_tokens": 6, "num_sequences": 2, "eos_token_ids": (), **NEARLY_GREEDY}
    served, sequences, _ = slots_for(model, prompts, count=8, **asked)
    assert len(list(served.serve(sequences))) == 16
    # Two rounds of one step for all prompts and one per token. Sequences that copy a prompt's
    # cache start one step later.
    assert served.counts()["model_calls"] <= 2 * (1 + 6)


def test_a_drafter_that_would_be_recompiled_for_every_prompt_is_rejected():
    class Plain(emsjax.PromptLookup):
        """A subclass that is not registered as a pytree."""

    model, prompts = shallow_model(), ragged_prompts([4, 5, 6])
    drafter = Plain(references=prompts)
    with pytest.raises(ValueError, match=r"Plain holds data for each prompt.* a pytree"):
        emsjax.generate(model, prompts, drafter, max_new_tokens=3, batch_size=2)


def test_each_prompt_is_admitted_once_and_in_order():
    model, prompts = shallow_model(), ragged_prompts([4] * 20)
    served, sequences, _ = slots_for(model, prompts, count=3, max_new_tokens=[9, 2, 4, 1] * 5)
    entered = []

    def look(queue, look=served.read_back):
        look(queue)
        entered.extend(sorted(set(served.state.sequence_ids.tolist()) - {-1, *entered}))

    served.read_back = look
    seen = [int(row["sequence_ids"]) for row in served.serve(sequences)]
    assert sorted(seen) == list(range(20))
    assert entered == sorted(entered)


def test_one_compilation_serves_all_prompts():
    model = shallow_model()
    before = decode_loop._cache_size()
    for lengths in ([5, 9, 2, 3], [30, 1, 1, 7, 12, 3, 2]):
        emsjax.generate(
            model,
            ragged_prompts(lengths),
            max_new_tokens=11,
            batch_size=2,
            attention_implementation="xla",
        )
    assert decode_loop._cache_size() == before + 1


def test_an_exhausted_time_budget_is_the_finish_reason_of_unfinished_sequences(monkeypatch):
    model, prompts = shallow_model(), ragged_prompts([9, 2, 7, 5])
    whole = emsjax.generate(model, prompts, max_new_tokens=[40, 3, 40, 40], eos_token_ids=())
    clock = iter([1.0, 9.0])
    monkeypatch.setattr(slots, "monotonic", lambda: next(clock))
    monkeypatch.setattr(emsjax.generation, "monotonic", lambda: 0.0)
    out = emsjax.generate(
        model,
        prompts,
        max_new_tokens=[40, 3, 40, 40],
        time_budget_s=5,
        batch_size=2,
        eos_token_ids=(),
    )
    assert out.finish_reasons == ["time", "length", "time", "time"]
    assert 0 < out.lengths[0] < slots.BUDGET_CHECK_STEPS + 1
    assert out.lengths[3] == 0
    for row, length in enumerate(out.lengths):
        np.testing.assert_array_equal(out.tokens[row, :length], whole.tokens[row, :length])


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=4, max_size=4),
    st.permutations(range(4)),
    st.integers(0, 70),
    st.integers(1, 4),
)
def test_prompts_that_have_waited_longest_are_fed_first(slots_there, order, room, num_sequences):
    unread, active = map(np.array, zip(*slots_there, strict=True))
    state = _State(
        jnp.array(active),
        jnp.array(unread + 1, jnp.int32),
        jnp.array(order, jnp.int32),
        _Lengths(jnp.zeros(4, jnp.int32)),
    )
    waits = feeding.unread_prompts(Run(None, None, None), state, jnp.int32(num_sequences))
    shares = feeding.prompt_shares(waits, state.sequence_ids, jnp.int32(room))
    left, begun = room, set()
    for slot in np.argsort(order):
        prompt = order[slot] // num_sequences
        wanted = unread[slot] if active[slot] and prompt not in begun else 0
        if wanted:
            begun.add(prompt)
        assert shares[slot] == min(left, wanted)
        left -= min(left, wanted)


@dataclasses.dataclass
class _Lengths:
    lengths: jax.Array


@dataclasses.dataclass
class _State:
    active: jax.Array
    lengths: jax.Array
    sequence_ids: jax.Array
    cache: _Lengths


@pytest.mark.usefixtures("every_row_count")
@pytest.mark.parametrize(("batch", "k1", "width"), [(1, 1, 64), (24, 8, 2048), (64, 17, 1024)])
def test_the_largest_step_has_room_for_prompts_besides_all_drafts(batch, k1, width):
    counts = prompt_row_counts(batch, k1, width)
    assert list(counts) == sorted(set(counts))
    assert counts[-1] >= batch * k1 + min(1024, batch * width) // 2
    assert all(count % 16 == 0 for count in counts)


prompt_bucket = jax.jit(feeding.prompt_bucket, static_argnums=0)


@pytest.mark.usefixtures("every_row_count")
@settings(max_examples=200)
@given(st.integers(0, 512), st.integers(1, 3000))
def test_steps_that_feed_prompts_are_full_or_feed_all_waiting_rows(verified, unread):
    sizes = tuple(prompt_row_counts(24, 8, 2048))
    rows = sizes[int(prompt_bucket(sizes, jnp.int32(verified), jnp.int32(unread)))]
    fed = min(rows - verified, unread)
    assert fed >= min(unread, sizes[-1] - verified) / 4
    if rows > verified + unread:  # padded, as any smaller step would feed too little
        smaller = [size for size in sizes if size < rows]
        assert all(size - verified < unread / 4 for size in smaller)
    else:
        assert rows in (sizes[-1], max(size for size in sizes if size <= verified + unread))
