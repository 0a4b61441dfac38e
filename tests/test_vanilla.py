"""The padded baselines output the same tokens, and count padding as the paper does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from toy import CARELESS, POSITIONS, VOCAB, ragged_prompts, script_of, shallow_model

import emsjax
from emsjax import vanilla
from emsjax.decode.cache import KVCache
from emsjax.decode.layout import Layout
from emsjax.drafters.replay import Replay

NEW = 12
step = jax.jit(emsjax.step, static_argnames=("layout", "attention_implementation"))
METHODS = [
    {"unpad_kv_cache": kv, "unpad_inputs": inputs}
    for kv in (False, True)
    for inputs in (False, True)
]
every_method = pytest.mark.parametrize(
    "method", METHODS, ids=["vanilla", "unpad-inputs", "unpad-kv", "both"]
)
every_layout = pytest.mark.parametrize(
    "layout", [Layout(inputs, kv) for inputs in (False, True) for kv in (False, True)], ids=str
)


def replay(script, counts, right) -> Replay:
    """A drafter of the text in `script` [b, t], with draft lengths and numbers of correct tokens
    given for each (sample, position).
    """
    k = int(np.max(counts))
    table = lambda values: jnp.asarray(np.broadcast_to(values, script.shape), jnp.int32)
    return Replay(script, table(counts), table(right), VOCAB, k)


@every_method
def test_greedy_tokens_equal_plain_decoding_for_every_method(method):
    model, prompts = shallow_model(), ragged_prompts([17, 1, 40, 6])
    plain = emsjax.generate(model, prompts, max_new_tokens=NEW)
    script = script_of(prompts, plain)
    right = np.random.default_rng(0).integers(0, 4, script.shape)
    drafters = [CARELESS, replay(script, 3, right)]
    if method["unpad_kv_cache"] == method["unpad_inputs"]:
        drafters.append(emsjax.DraftModel(model, 2))
    if not any(method.values()):
        drafters.append(None)
    for drafter in drafters:
        out = vanilla.generate(model, prompts, drafter, max_new_tokens=NEW, **method)
        np.testing.assert_array_equal(out.tokens, plain.tokens, err_msg=repr(drafter))
        np.testing.assert_allclose(out.logprobs, plain.logprobs, atol=1e-4)


@every_method
def test_samples_end_where_plain_decoding_ends(method):
    model, prompts = shallow_model(), ragged_prompts([7, 3, 30, 12])
    free = emsjax.generate(model, prompts, max_new_tokens=NEW)
    ends, limits = (int(free.tokens[0, 4]),), [NEW, 1, 5, NEW]
    asked = {"max_new_tokens": limits, "eos_token_ids": ends}
    plain = emsjax.generate(model, prompts, **asked)
    drafter = emsjax.PromptLookup(match_length=1, max_draft_tokens=4, search_generated=True)
    out = vanilla.generate(model, prompts, drafter, batch_size=3, **asked, **method)
    assert out.finish_reasons == plain.finish_reasons
    assert "eos" in out.finish_reasons
    np.testing.assert_array_equal(out.tokens, plain.tokens)


@pytest.mark.usefixtures("every_row_count")
@every_method
def test_padding_may_reach_beyond_the_last_position(method):
    model, prompts = shallow_model(), ragged_prompts([POSITIONS - NEW + 1, 4])
    plain = emsjax.generate(model, prompts, max_new_tokens=NEW)
    script = script_of(prompts, plain)
    counts, right = np.zeros((2, *script.shape), int)
    # The long sample is near its end while the other one still drafts five tokens.
    counts[0, [53, 57]] = right[0, [53, 57]] = 3
    counts[1] = 5
    drafter = replay(script, counts, right)
    out = vanilla.generate(model, prompts, drafter, max_new_tokens=NEW, **method)
    np.testing.assert_array_equal(out.tokens, plain.tokens)


def decode(model, prompts, drafter, layout, steps):
    """Decode step by step. Returns the initial state and that after each step, and each step's
    `StepInfo`.
    """
    state = emsjax.init_state(model, drafter, prompts, max_new_tokens=NEW, layout=layout)
    states, infos = [state], []
    for _ in range(steps):
        state, info = step(model, drafter, state, layout=layout)
        states.append(state)
        infos.append(info)
    return states, infos


@pytest.mark.usefixtures("every_row_count")
def test_the_papers_example_of_padding():
    """Table 1 of EMS-SD gives predicted and accepted tokens, with the padding of each."""
    model, prompts = shallow_model(), ragged_prompts([9, 9])
    script = script_of(prompts, emsjax.generate(model, prompts, max_new_tokens=NEW))
    counts, right = np.zeros((2, *script.shape), int)
    # Sample 0 drafts 5 tokens, of which 3 are replayed as correct, then 2, of which 1 is.
    counts[0, [9, 13]], right[0, [9, 13]] = (5, 2), (3, 1)
    counts[1, [9, 10]], right[1, [9, 10]] = (2, 5), (0, 5)
    drafter = replay(script, counts, right)
    states, infos = decode(model, prompts, drafter, Layout(True, True), 2)
    predicted = [info.num_drafted.tolist() for info in infos]
    accepted = [info.num_emitted.tolist() for info in infos]
    input_padding = [[int(info.num_rows) // 2 - 1 - n for n in info.num_drafted] for info in infos]
    index = np.array([int(state.cache.index) for state in states])
    kv_padding = [
        [moved - n for n in info.num_emitted.tolist()]
        for info, moved in zip(infos, np.diff(index).tolist(), strict=True)
    ]
    assert predicted == [[5, 2], [2, 5]]
    assert input_padding == [[0, 3], [3, 0]]
    assert accepted == [[4, 1], [2, 6]]
    assert kv_padding == [[0, 3], [4, 0]]
    assert int(states[-1].cache.num_masked) == 7


@pytest.mark.usefixtures("every_row_count")
@every_method
def test_padding_ratios_equal_the_padding_of_the_run(method):
    model, prompts = shallow_model(), ragged_prompts([9, 5])
    script = script_of(prompts, emsjax.generate(model, prompts, max_new_tokens=7))
    # Sample 0 emits four tokens, then three; sample 1 emits one token in each of seven steps.
    drafter = replay(script, [[3], [0]], [[3], [0]])
    out = vanilla.generate(model, prompts, drafter, max_new_tokens=7, **method)
    np.testing.assert_array_equal(out.stats.num_steps, [2, 7])
    # Drafts of the second step are cut to two, as the bonus token is the last of the seven.
    padded, rows = 2 * (4 + 3 + 5), 7 + 7
    # Unpadded rows take the only bucket for so few rows.
    fed = 7 * 8 if method["unpad_inputs"] else padded
    assert out.stats.padding_ratio.inputs == pytest.approx(fed / rows - 1)
    slots = 14 if method["unpad_kv_cache"] else padded
    assert out.stats.padding_ratio.kv == pytest.approx(slots / 14 - 1)


@pytest.mark.usefixtures("every_row_count")
def test_with_both_ablations_the_baseline_equals_the_library():
    model, prompts = shallow_model(), ragged_prompts([20, 3, 9])
    lookup = emsjax.PromptLookup(match_length=1, max_draft_tokens=4)
    out = vanilla.generate(
        model, prompts, lookup, max_new_tokens=NEW, unpad_kv_cache=True, unpad_inputs=True
    )
    expected = emsjax.generate(model, prompts, lookup, max_new_tokens=NEW)
    for field in dataclasses.fields(out.stats):
        if field.name != "finish_seconds":
            np.testing.assert_array_equal(
                getattr(out.stats, field.name), getattr(expected.stats, field.name)
            )
    assert expected.stats.padding_ratio.kv == 0


@pytest.mark.usefixtures("every_row_count")
@settings(max_examples=6)
@given(seed=st.integers(0, 10**6))
@example(seed=-1)
def test_gaps_are_masked_and_there_is_room_for_them(seed):
    """In the worst case a different sample accepts its whole draft in each step."""
    model, prompts = shallow_model(), ragged_prompts([30, 4, 11])
    plain = emsjax.generate(model, prompts, max_new_tokens=NEW)
    script = script_of(prompts, plain)
    right = np.random.default_rng(abs(seed)).integers(0, 2, script.shape) * 3
    if seed < 0:
        right[:] = 0
        for sample, prompt in enumerate(prompts):
            right[sample, len(prompt) + sample :: 6] = 3
    layout, drafter = Layout(True, True), replay(script, 3, right)
    state = emsjax.init_state(model, drafter, prompts, max_new_tokens=NEW, layout=layout)
    while bool(state.active.any()):
        before, masked = int(state.cache.index), int(state.cache.num_masked)
        # Masked entries may hold any value.
        poisoned = jax.tree.map(
            lambda x, mask=state.cache.mask: jnp.where(mask[..., None, None], x, jnp.nan),
            state.cache.layers,
        )
        state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=poisoned))
        state, info = step(model, drafter, state, layout=layout)
        most, total = int(info.num_emitted.max()), int(info.num_emitted.sum())
        assert int(state.cache.index) == before + most <= state.cache.mask.shape[1]
        assert int(state.cache.num_masked) == masked + 3 * most - total
        np.testing.assert_array_equal(state.cache.mask.sum(axis=1), state.cache.lengths)
    for sample, prompt in enumerate(prompts):
        emitted = state.tokens[sample, len(prompt) : len(prompt) + NEW]
        np.testing.assert_array_equal(emitted, plain.tokens[sample])


@pytest.mark.parametrize(("slots", "k1"), [(1, 8), (3, 8), (24, 8), (24, 1)])
def test_the_cache_has_room_for_every_gap(slots, k1):
    layout, new = Layout(pad_kv_cache=True), 100
    assert Layout().cache_length(1000, new, slots, k1) == 1000
    # In the worst case each step emits the most tokens for a different sample, until all end.
    assert layout.cache_length(1000, new, slots, k1) >= 1000 + new * min(slots, k1)


@pytest.mark.usefixtures("every_row_count")
@every_layout
@settings(max_examples=20)
@given(counts=st.lists(st.integers(0, 5), min_size=3, max_size=3))
def test_packed_rows_are_gathered_and_scattered_by_sample_and_position(layout, counts):
    starts, counts = np.array([7, 0, 3]), np.array([*counts[:2], max(*counts, 1)])
    sizes = layout.row_counts(3, 6)
    size = sizes[int(layout.smallest(sizes, jnp.asarray(counts)))]
    assert size >= (3 * counts.max() if layout.pad_inputs else counts.sum())
    smaller = [n for n in sizes if n < size]
    assert all(n < (3 * counts.max() if layout.pad_inputs else counts.sum()) for n in smaller)
    for num_rows in {size, size if layout.pad_inputs else sizes[-1]}:
        rows = layout.pack(jnp.asarray(starts), jnp.asarray(counts), num_rows)
        values = np.asarray(10 * rows.segment_ids + rows.positions)
        blocks = np.asarray(rows.scatter(jnp.asarray(values), 6))
        for sample, (start, count) in enumerate(zip(starts, counts, strict=True)):
            expected = 10 * sample + start + np.arange(count)
            np.testing.assert_array_equal(blocks[sample, :count], expected)
        fed = np.asarray(rows.segment_ids) < 3
        assert fed.sum() == (size if layout.pad_inputs else counts.sum())
        assert not np.diff(fed.astype(int)).max(initial=0) > 0  # padding comes last
        np.testing.assert_array_equal(
            rows.gather(rows.scatter(jnp.asarray(values), 6))[fed], values[fed]
        )


@pytest.mark.usefixtures("every_row_count")
def test_row_counts_of_long_drafts_are_few():
    for k1 in range(1, 40):
        widths = Layout(pad_inputs=True).row_counts(5, k1)
        assert len(widths) <= 12
        assert (widths[0], widths[-1]) == (5, 5 * k1)
        if k1 <= 11:
            assert widths == tuple(5 * n for n in range(1, k1 + 1))


def test_decoding_continues_after_the_longest_sample_of_a_prefilled_cache():
    empty = KVCache.init(3, 16, num_layers=1, kv_heads=2, head_dim=4, dtype=jnp.float32)
    cache = Layout(pad_kv_cache=True).arrange(
        dataclasses.replace(empty, lengths=jnp.array([2, 0, 5]))
    )
    assert int(cache.index) == 5
    np.testing.assert_array_equal(cache.mask.sum(axis=1), [2, 0, 5])
    assert Layout().arrange(empty) is empty
