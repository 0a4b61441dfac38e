"""Lossless decoding: for any drafter, greedy output is identical to plain decoding."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import (
    CARELESS,
    NEARLY_GREEDY,
    ScriptedDrafter,
    ragged_prompts,
    script_of,
    shallow_model,
    tiny_model,
)
from transformers import BatchEncoding

import emsjax
import pallas_kernels
from emsjax import generation
from emsjax.decode.step import decode_loop
from emsjax.engine import slots

PROMPT_SIXTEENTHS = (6, 16)  # of the row counts of steps that feed prompts
NEW = 20
ragged_lengths = st.lists(st.integers(1, 40), min_size=4, max_size=4)


def drafters(prompts, plain):
    script = script_of(prompts, plain)
    yield ScriptedDrafter(script)
    yield ScriptedDrafter(script, offset=1)
    yield CARELESS
    yield emsjax.PromptLookup(match_length=1, max_draft_tokens=4, search_generated=True)


@settings(max_examples=8)
@given(lengths=ragged_lengths, seed=st.integers(0, 99))
def test_greedy_tokens_equal_plain_decoding_for_every_drafter(lengths, seed):
    model, prompts = shallow_model(), ragged_prompts(lengths, seed)
    plain = emsjax.generate(model, prompts, max_new_tokens=NEW)
    for drafter in drafters(prompts, plain):
        out = emsjax.generate(model, prompts, drafter, max_new_tokens=NEW)
        np.testing.assert_array_equal(out.tokens, plain.tokens, err_msg=repr(drafter))
        np.testing.assert_allclose(out.logprobs, plain.logprobs, atol=1e-4)


def test_correct_drafts_are_always_accepted_and_wrong_ones_never():
    model, prompts = shallow_model(), ragged_prompts([5, 1, 30])
    plain = emsjax.generate(model, prompts, max_new_tokens=NEW)
    script = script_of(prompts, plain)
    right = emsjax.generate(model, prompts, ScriptedDrafter(script), max_new_tokens=NEW).stats
    wrong = emsjax.generate(model, prompts, ScriptedDrafter(script, offset=1), max_new_tokens=NEW)
    assert right.acceptance_rate == 1
    assert right.num_steps.tolist() == [NEW // 4] * 3
    assert right.model_calls == NEW // 4
    assert wrong.stats.acceptance_rate == 0
    assert wrong.stats.mean_acceptance_length == 1
    # Drafts are cut to remaining - 1 tokens: 3 per step until only 3, 2, 1 tokens remain.
    assert wrong.stats.num_drafted.tolist() == [3 * (NEW - 3) + 2 + 1] * 3


@settings(max_examples=4)
@given(lengths=ragged_lengths)
def test_a_sample_does_not_depend_on_the_rest_of_the_batch(lengths):
    model, prompts = shallow_model(), ragged_prompts(lengths)
    drafter = emsjax.PromptLookup(match_length=1, search_generated=True)
    together = emsjax.generate(model, prompts, drafter, max_new_tokens=NEW)
    for i, prompt in enumerate(prompts):
        alone = emsjax.generate(model, [prompt], drafter, max_new_tokens=NEW)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[i])
        assert alone.stats.num_steps[0] == together.stats.num_steps[i]
        assert alone.stats.num_drafted[0] == together.stats.num_drafted[i]


@pytest.mark.usefixtures("every_row_count")
def test_the_last_sequences_of_a_large_batch_use_a_smaller_bucket():
    """The last steps have fewer rows than the batch has sequences."""
    model, prompts = shallow_model(), ragged_prompts([1 + i % 9 for i in range(24)])
    drafter = emsjax.PromptLookup(match_length=1, max_draft_tokens=2, search_generated=True)
    limits = np.array([2] * 22 + [NEW, NEW - 3])
    plain = emsjax.generate(model, prompts, max_new_tokens=limits)
    out = emsjax.generate(model, prompts, drafter, max_new_tokens=limits)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    stats = out.stats
    assert np.all(stats.num_steps <= stats.num_emitted)  # no sequence waits for a row
    real = (stats.num_steps + stats.num_drafted).sum()
    assert stats.model_calls > 10
    assert real * (1 + stats.padding_ratio.inputs) <= 2 * 72 + 16 * (stats.model_calls - 2)


def stepped(model, drafter, state, steps, poison=False, **options):
    advance = jax.jit(
        lambda model, drafter, state: emsjax.step(model, drafter, state, **options)[0]
    )
    for _ in range(steps):
        if poison:
            beyond = jnp.arange(state.cache.max_len) >= state.cache.lengths[:, None]
            spoil = lambda x, beyond=beyond: jnp.where(beyond[..., None, None], jnp.nan, x)
            layers = jax.tree.map(spoil, state.cache.layers)
            cache = dataclasses.replace(state.cache, layers=layers)
            state = dataclasses.replace(state, cache=cache)
        state = advance(model, drafter, state)
    return state


def test_the_cache_after_ragged_acceptance_equals_a_fresh_prefill():
    model, prompts = tiny_model(), ragged_prompts([9, 2, 31, 17])
    drafter = emsjax.PromptLookup(match_length=1, search_generated=True)
    state = emsjax.init_state(model, drafter, prompts, max_new_tokens=24)
    state = stepped(model, drafter, state, 12)
    assert len(set(np.asarray(state.lengths - state.prompt_lengths).tolist())) > 1  # ragged
    np.testing.assert_array_equal(state.cache.lengths, state.lengths - 1)
    grown = [
        row[:length]
        for row, length in zip(np.asarray(state.tokens), np.asarray(state.lengths), strict=True)
    ]
    fresh = emsjax.init_state(model, None, grown, max_new_tokens=1)
    for old, new in zip(
        jax.tree.leaves(state.cache.layers), jax.tree.leaves(fresh.cache.layers), strict=True
    ):
        for i, length in enumerate(np.asarray(state.lengths)):
            np.testing.assert_allclose(old[i, : length - 1], new[i, : length - 1], atol=2e-5)


def test_nan_beyond_the_committed_lengths_changes_nothing():
    model, prompts = shallow_model(), ragged_prompts([9, 2, 31])
    drafter = emsjax.PromptLookup(match_length=1, search_generated=True)
    start = functools.partial(emsjax.init_state, model, drafter, prompts, max_new_tokens=16)
    clean = stepped(model, drafter, start(), 6)
    poisoned = stepped(model, drafter, start(), 6, poison=True)
    np.testing.assert_array_equal(clean.lengths, poisoned.lengths)
    for i, length in enumerate(np.asarray(clean.lengths)):
        np.testing.assert_array_equal(clean.tokens[i, :length], poisoned.tokens[i, :length])


def test_ten_ragged_batches_compile_the_loop_at_most_twice(monkeypatch):
    model, rng = shallow_model(), np.random.default_rng(0)
    counted = chex.assert_max_traces(decode_loop.__wrapped__, n=2)
    monkeypatch.setattr(slots, "decode_loop", jax.jit(counted))
    for batch in range(10):
        prompts = ragged_prompts(rng.integers(1, 50, rng.integers(1, 5)), seed=batch)
        drafter = emsjax.PromptLookup(references=[prompt[::-1] for prompt in prompts])
        new = rng.integers(1, 14, len(prompts)).tolist()
        emsjax.generate(model, prompts, drafter, max_new_tokens=new, batch_size=4)


def test_the_loop_is_one_compiled_call_without_callbacks(monkeypatch):
    model, calls = shallow_model(), []

    def spy(*args):
        calls.append(str(jax.make_jaxpr(decode_loop)(*args)))
        return decode_loop(*args)

    monkeypatch.setattr(slots, "decode_loop", spy)
    drafter = emsjax.PromptLookup()
    out = emsjax.generate(model, ragged_prompts([4, 9]), drafter, max_new_tokens=NEW)
    assert out.stats.model_calls > 5
    assert len(calls) == 1
    assert "while[" in calls[0]
    assert "callback" not in calls[0]


def test_every_sample_stops_at_its_own_end_token_or_limit():
    model, prompts = shallow_model(), ragged_prompts([5, 9, 20, 3])
    plain = emsjax.generate(model, prompts, max_new_tokens=NEW)
    end = int(plain.tokens[0, 6])
    limits = [NEW, 3, 11, 1]
    for drafter in (None, *drafters(prompts, plain)):
        out = emsjax.generate(
            model, prompts, drafter, max_new_tokens=limits, eos_token_ids=[end, 59]
        )
        for i, limit in enumerate(limits):
            row = plain.tokens[i, :limit].tolist()
            ends = [j for j, token in enumerate(row) if token in (end, 59)]
            expected = row[: ends[0] + 1] if ends else row
            assert out.tokens[i, : out.lengths[i]].tolist() == expected
            assert (out.tokens[i, out.lengths[i] :] == model.config.pad_token_id).all()
            assert (out.logprobs[i, out.lengths[i] :] == 0).all()
            assert out.finish_reasons[i] == ("eos" if ends else "length")
        assert out.finish_reasons[0] == "eos"


def test_the_configs_end_token_is_the_default():
    model = shallow_model(eos_token_id=(11, 12))
    out = emsjax.generate(model, ragged_prompts([5, 9, 20, 3]), max_new_tokens=40)
    free = emsjax.generate(
        model, ragged_prompts([5, 9, 20, 3]), max_new_tokens=40, eos_token_ids=()
    )
    for i, row in enumerate(free.tokens):
        ends = np.flatnonzero(np.isin(row, [11, 12]))
        assert out.lengths[i] == (ends[0] + 1 if ends.size else 40)


def test_refilled_slots_and_several_sequences_give_the_same_tokens():
    model, prompts = shallow_model(), ragged_prompts([5, 9, 20, 3, 14])
    references = [prompt[::-1] for prompt in prompts]
    drafter = emsjax.PromptLookup(match_length=1, references=references)
    limits = [7, 20, 3, 12, 9]
    plain = emsjax.generate(model, prompts, max_new_tokens=limits)
    whole = emsjax.generate(model, prompts, drafter, max_new_tokens=limits)
    for batch_size in (1, 4):
        out = emsjax.generate(model, prompts, drafter, max_new_tokens=limits, batch_size=batch_size)
        np.testing.assert_array_equal(out.tokens, plain.tokens)
        np.testing.assert_array_equal(out.stats.num_drafted, whole.stats.num_drafted)
    for batch_size in (None, 4):
        options = {"max_new_tokens": limits, "num_sequences": 3, **NEARLY_GREEDY}
        out = emsjax.generate(model, prompts, drafter, batch_size=batch_size, **options)
        np.testing.assert_array_equal(out.tokens, plain.tokens.repeat(3, axis=0))
        np.testing.assert_array_equal(out.stats.num_drafted, whole.stats.num_drafted.repeat(3))


def test_the_last_position_is_used_and_none_is_exceeded():
    model = shallow_model()
    prompts = ragged_prompts([64, 60])
    out = emsjax.generate(model, prompts, emsjax.PromptLookup(), max_new_tokens=[1, 5])
    assert out.lengths.tolist() == [1, 5]
    with pytest.raises(ValueError, match=r"prompts\[1\].*max_position_embeddings is 64"):
        emsjax.generate(model, prompts, max_new_tokens=[1, 6])


def test_statistics_add_up():
    model, prompts = shallow_model(), ragged_prompts([9, 2, 31, 17])
    drafter = emsjax.PromptLookup(match_length=1, max_draft_tokens=4, search_generated=True)
    stats = emsjax.generate(model, prompts, drafter, max_new_tokens=[20, 5, 9, 30]).stats
    assert stats.num_emitted.tolist() == [20, 5, 9, 30]
    np.testing.assert_array_equal(stats.num_accepted + stats.num_steps, stats.num_emitted)
    np.testing.assert_array_equal(stats.accepted_histogram.sum(1), stats.num_steps)
    np.testing.assert_array_equal(stats.accepted_histogram @ np.arange(5), stats.num_accepted)
    assert stats.accepted_histogram.shape == (4, 5)
    assert stats.model_calls == stats.num_steps.max()
    assert stats.num_accepted.sum() > 0
    assert stats.padding_ratio.kv == 0
    assert stats.padding_ratio.inputs > 0


def test_latencies_are_measured_to_the_first_and_last_finished_sequence(monkeypatch):
    clock = iter([10.0, 16.0])  # 30 steps in 6 s
    monkeypatch.setattr(slots, "perf_counter", lambda: next(clock))
    prompts, new = ragged_prompts([9, 2, 31]), [20, 30, 4]
    stats = emsjax.generate(shallow_model(), prompts, max_new_tokens=new).stats
    np.testing.assert_allclose(stats.finish_seconds, [4, 6, 0.8], rtol=1e-6)
    assert stats.latency_per_token == pytest.approx((0.2, 0.2, 0.2))
    none = dataclasses.replace(stats, num_emitted=np.zeros(3, np.int32))
    assert none.latency_per_token == (0, 0, 0)


def test_a_policy_limits_drafts_without_changing_tokens():
    model, prompts = shallow_model(), ragged_prompts([9, 2])
    plain = emsjax.generate(model, prompts, max_new_tokens=NEW)
    drafter = ScriptedDrafter(script_of(prompts, plain))
    for k, steps in ((0, 20), (1, 10), (9, 5)):
        out = emsjax.generate(model, prompts, drafter, emsjax.FixedLength(k), max_new_tokens=NEW)
        np.testing.assert_array_equal(out.tokens, plain.tokens)
        assert out.stats.num_steps.tolist() == [steps, steps]


def test_a_fixed_length_may_be_larger_than_int32():
    model, prompts = shallow_model(), ragged_prompts([5, 9])
    drafter = emsjax.PromptLookup(match_length=1)
    steps = [
        emsjax.generate(
            model, prompts, drafter, policy, max_new_tokens=NEW
        ).stats.num_steps.tolist()
        for policy in (None, emsjax.FixedLength(2**40))
    ]
    assert steps[0] == steps[1]


def test_an_exhausted_time_budget_returns_the_tokens_decoded_so_far(monkeypatch):
    model, prompts = shallow_model(), ragged_prompts([9, 2])
    plain = emsjax.generate(model, prompts, max_new_tokens=40)
    clock = iter([0.0, 1.0, 9.0])
    read = lambda: next(clock)
    for module in (generation, slots):
        monkeypatch.setattr(module, "monotonic", read)
    out = emsjax.generate(model, prompts, max_new_tokens=40, time_budget_s=5)
    steps = slots.BUDGET_CHECK_STEPS
    assert out.lengths.tolist() == [steps, steps]
    assert out.finish_reasons == ["time"] * 2
    np.testing.assert_array_equal(out.tokens[:, :steps], plain.tokens[:, :steps])


@pytest.mark.parametrize("batch_size", [None, 1])
def test_a_time_budget_may_be_exhausted_before_the_first_step(batch_size):
    prompts = ragged_prompts([3, 2])
    out = emsjax.generate(
        shallow_model(), prompts, max_new_tokens=NEW, time_budget_s=1e-9, batch_size=batch_size
    )
    assert out.finish_reasons == ["time", "time"]
    assert (out.lengths.tolist(), out.stats.model_calls) == ([0, 0], 0)


@pytest.mark.usefixtures("unchecked_annotations")
def test_a_step_without_a_model_is_rejected():
    model, drafter, prompts = shallow_model(), emsjax.PromptLookup(), ragged_prompts([9, 2])
    state = emsjax.init_state(model, drafter, prompts, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"model must be a model, .* not PromptLookup"):
        emsjax.step(drafter, model, state)


@pytest.mark.parametrize(
    ("spoil", "got"),
    [
        (lambda out: out.reshape(len(out), -1), r"float32\[\d+, 32\]"),
        (lambda out: out.astype(jnp.bfloat16), r"bfloat16\[\d+, 4, 8\]"),
        (lambda out: out[:1], r"float32\[1, 4, 8\]"),
        (lambda out: None, "NoneType"),
        (lambda out: (out, out), "tuple"),
    ],
    ids=["heads joined", "narrow", "too few rows", "nothing", "two"],
)
def test_the_result_of_a_custom_attention_function_is_checked(spoil, got):
    attention = pallas_kernels.reference.ragged_attention
    own = lambda *arrays, **options: spoil(attention(*arrays, **options))
    prompts, options = ragged_prompts([9, 2]), {"max_new_tokens": 2}
    message = rf"^attention_implementation must return .* float32\[\d+, 4, 8\], not {got}"
    with pytest.raises(ValueError, match=message):
        emsjax.generate(shallow_model(), prompts, attention_implementation=own, **options)


def test_a_custom_attention_function_runs_in_the_loop():
    model, prompts = shallow_model(), ragged_prompts([9, 2])
    plain = emsjax.generate(model, prompts, max_new_tokens=NEW)
    own = functools.partial(pallas_kernels.reference.ragged_attention)
    blind = lambda query, *args, **kwargs: jnp.zeros_like(query)
    triton = functools.partial(
        pallas_kernels.ragged_attention, implementation="triton", interpret=True
    )
    cases = [("reference", True), ("xla", True), (own, True), (triton, True), (blind, False)]
    for attention, same in cases:
        out = emsjax.generate(
            model, prompts, max_new_tokens=NEW, attention_implementation=attention
        )
        assert (out.tokens == plain.tokens).all() == same


legacy = np.array([0, 1], np.uint32)
too_many_keys = lambda: jax.random.split(jax.random.key(0), 3)
BAD = {
    "no prompts": ({"prompts": []}, "prompts is empty"),
    "prompts is text": ({"prompts": "abc"}, "prompts must be a sequence of .* not str"),
    "texts": ({"prompts": ["a", "b"]}, r"prompts\[0\] is a str: .*tokenizer\(texts\)\.input_ids"),
    "a text among ids": ({"prompts": [[5], "b"]}, r"prompts\[1\] is a str: pass token ids"),
    "a mapping without ids": (
        {"prompts": BatchEncoding({"labels": [[5], [6]]})},
        r"prompts is a BatchEncoding without input_ids: .*\.input_ids",
    ),
    "empty prompt": ({"prompts": [[5], []]}, r"prompts\[1\] is empty"),
    "2-D prompt": ({"prompts": [[[5]]]}, r"prompts\[0\] must be a 1-D"),
    "id too large": ({"prompts": [[5, 61]]}, r"prompts\[0\] .* 61, outside 0\.\.60"),
    "negative id": ({"prompts": [[-1]]}, r"-1, outside 0\.\.60"),
    "float ids": ({"prompts": [[1.0]]}, "integer token ids"),
    "no new tokens": ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    "float new tokens": ({"max_new_tokens": 2.0}, "max_new_tokens must be an integer"),
    "wrong number of limits": ({"max_new_tokens": [1, 2, 3]}, "got 3 for 2 prompts"),
    "no sequences": ({"num_sequences": 0}, "num_sequences must be at least 1"),
    "batch size 0": ({"batch_size": 0}, "batch_size must be at least 1"),
    "end token outside": ({"eos_token_ids": [61]}, "eos_token_ids"),
    "legacy key": ({"key": legacy}, "legacy uint32"),
    "wrong number of keys": ({"key": too_many_keys}, "for 2 sequences"),
    "no key": ({"sampling": emsjax.Sampling(temperature=1.0)}, "key is needed"),
    "temperature": ({"sampling": emsjax.Sampling(temperature=-1.0)}, "sampling.temperature"),
    "top_k": ({"sampling": emsjax.Sampling(top_k=-1)}, "sampling.top_k"),
    "top_p": ({"sampling": emsjax.Sampling(top_p=0.0)}, "sampling.top_p"),
    "a number as sampling": ({"sampling": 0.8}, r"must be emsjax\.Sampling\(\.\.\.\), not float"),
    "a dict as sampling": ({"sampling": {"top_p": 0.9}}, "sampling must be .*, not dict"),
    "sampling values": ({"sampling": emsjax.Sampling(top_k=[1])}, "got 1 for 2 prompts"),
    "budget": ({"time_budget_s": 0}, "time_budget_s must be seconds above 0, not 0"),
    "budget as text": ({"time_budget_s": "1"}, "time_budget_s must be seconds above 0, not '1'"),
    "ragged prompt": ({"prompts": [[[5, 6], [7]]]}, r"prompts\[0\] cannot be read as token ids"),
    "key of another kind": (
        {"key": jax.random.key(0, impl="rbg")},
        "key must be of jax.random.key.seed, impl='threefry2x32'., not of rbg",
    ),
    "unknown attention": ({"attention_implementation": "flash"}, "attention_implementation"),
    "attention of another device": (
        {"attention_implementation": "triton"},
        "attention_implementation 'triton' needs .*: use 'xla'$",
    ),
    "references": ({"drafter": emsjax.PromptLookup(references=[[1]])}, "got 1 for 2 prompts"),
}


@pytest.mark.parametrize("arguments", BAD.values(), ids=BAD)
def test_invalid_input_is_named_before_any_work(arguments, monkeypatch):
    def no_work(*args, **kwargs):
        raise AssertionError("work began")

    monkeypatch.setattr(slots, "begin_group", no_work)
    monkeypatch.setattr("pallas_kernels.common.implementations._compute_capability", lambda: None)
    changes, message = arguments
    call = {"prompts": [[5], [6, 7]], "max_new_tokens": 4} | changes
    if call.get("key") is too_many_keys:
        call["key"] = too_many_keys()
    with pytest.raises(ValueError, match=message):
        emsjax.generate(shallow_model(), **call)


def test_an_object_that_is_not_a_model_is_named_by_its_argument():
    model, prompts = shallow_model(), [[5], [6, 7]]
    with pytest.raises(ValueError, match=r"^model must be a model, .*, not list$"):
        emsjax.generate(prompts, model)
    for unread in (prompts, iter(prompts)):
        with pytest.raises(ValueError, match=r"^model must be a model, .*, not str$"):
            emsjax.stream("facebook/opt-125m", unread, batch_size=1)


@pytest.mark.parametrize("name", ["match_length", "max_draft_tokens"])
def test_prompt_lookup_names_an_invalid_length(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        emsjax.PromptLookup(**{name: 0})


def test_per_prompt_values_may_be_arrays_of_any_kind():
    model, prompts = shallow_model(), ragged_prompts([5, 9])
    for limits in ([3, 7], (3, 7), np.array([3, 7]), jnp.array([3, 7])):
        assert emsjax.generate(model, prompts, max_new_tokens=limits).lengths.tolist() == [3, 7]
    assert emsjax.generate(model, prompts, max_new_tokens=jnp.array(3)).lengths.tolist() == [3, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": [[3], [4]]}, "max_new_tokens must be one value or one per prompt, not"),
        ({"max_new_tokens": [[3], [4, 5]]}, "max_new_tokens must be one value or one per prompt"),
        ({"max_new_tokens": [True, 3]}, "max_new_tokens.* not True"),
        ({"sampling": emsjax.Sampling([[1.0], [1.0]])}, r"sampling\.temperature must be one value"),
        ({"sampling": emsjax.Sampling(1e39)}, r"sampling\.temperature must be finite and >= 0"),
        ({"attention_implementation": []}, "attention_implementation must be"),
    ],
)
def test_values_of_the_wrong_type_or_shape_are_named(options, message):
    options = {"max_new_tokens": 2, "key": jax.random.key(0)} | options
    with pytest.raises(ValueError, match=message):
        emsjax.generate(shallow_model(), ragged_prompts([5, 9]), **options)
