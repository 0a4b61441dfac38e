"""Sampled tokens have the right distribution and do not depend on the drafts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import CARELESS, ragged_prompts, shallow_model

import emsjax
from emsjax.sampling import Purpose, Sampling, draw, position_keys, warp


def expected_probs(logits, temperature, top_k, top_p, min_p):
    """The warped distribution, computed by sorting in float64."""
    logits = np.asarray(logits, np.float64)
    if temperature > 0:
        logits = logits / temperature
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    if temperature > 0 and top_k:
        kth = np.sort(probs)[::-1][min(top_k, len(probs)) - 1]
        probs = np.where(probs >= kth, probs, 0)
        probs /= probs.sum()
    if temperature > 0 and top_p < 1:
        ordered = np.sort(probs)[::-1]
        last = ordered[np.argmax(np.cumsum(ordered) >= top_p)]
        probs = np.where(probs >= last, probs, 0)
        probs /= probs.sum()
    if temperature > 0:
        probs = np.where(probs >= min_p * probs.max(), probs, 0)
        probs /= probs.sum()
    return probs


@settings(max_examples=60)
@given(
    logits=st.lists(st.integers(-12, 12), min_size=7, max_size=7),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([0.11, 0.53, 0.871, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.3, 0.83]),
)
def test_warped_distribution_equals_the_sorted_one(logits, temperature, top_k, top_p, min_p):
    logits = np.array(logits, np.float32) / 4  # ties are frequent
    one = lambda value, dtype: jnp.full(1, value, dtype)
    drawn = {"top_k": one(top_k, "int32"), "top_p": one(top_p, "float32")}
    sampling = Sampling(one(temperature, "float32"), **drawn, min_p=one(min_p, "float32"))
    probs = jax.nn.softmax(warp(jnp.asarray(logits)[None], sampling)[0])
    expected = expected_probs(logits, temperature, top_k, top_p, min_p)
    np.testing.assert_allclose(probs, expected, atol=1e-6)


def warped_normal(min_p):
    """Logits without ties [64, 50], and their distribution under all settings."""
    logits = np.random.default_rng(3).normal(0, 2, (64, 50)).astype(np.float32)
    column = lambda value, dtype: jnp.full(len(logits), value, dtype)
    drawn = {"top_k": column(30, "int32"), "top_p": column(0.85, "float32")}
    sampling = Sampling(column(0.7, "float32"), **drawn, min_p=column(min_p, "float32"))
    return logits, jax.nn.softmax(warp(jnp.asarray(logits), sampling))


@pytest.mark.parametrize("min_p", [0.05, 0.4])
def test_the_warped_distribution_of_many_tokens_equals_the_sorted_one(min_p):
    logits, probs = warped_normal(min_p)
    expected = [expected_probs(row, 0.7, 30, 0.85, min_p) for row in logits]
    np.testing.assert_allclose(probs, expected, atol=1e-6)


@pytest.mark.parametrize("min_p", [0.05, 0.4])
def test_the_warped_distribution_is_that_of_transformers(min_p):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process

    logits, probs = warped_normal(min_p)
    warpers = [
        logits_process.TemperatureLogitsWarper(0.7),
        logits_process.TopKLogitsWarper(30),
        logits_process.TopPLogitsWarper(0.85),
        logits_process.MinPLogitsWarper(min_p),
    ]
    theirs = torch.from_numpy(logits)
    for warper in warpers:
        theirs = warper(None, theirs)
    np.testing.assert_allclose(probs, torch.softmax(theirs, dim=1).numpy(), atol=1e-6)


@pytest.mark.parametrize("sampling", [(1e-12, 0, 1.0), (1e-30, 5, 0.9), (1.0, 0, 1e-46)])
def test_nearly_greedy_settings_are_greedy(sampling):
    model, prompts = shallow_model(), ragged_prompts([5, 9])
    greedy = emsjax.generate(model, prompts, max_new_tokens=7)
    for drafter in (None, emsjax.DraftModel(shallow_model(ffn_dim=32), 3)):
        options = {"sampling": Sampling(*sampling), "key": jax.random.key(2)}
        out = emsjax.generate(model, prompts, drafter, max_new_tokens=7, **options)
        np.testing.assert_array_equal(out.tokens, greedy.tokens)
        np.testing.assert_array_equal(out.logprobs, 0)


def test_draws_follow_the_distribution():
    count = 20000
    log_probs = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05, 0.0]))
    keys = position_keys(
        jnp.broadcast_to(jax.random.key(3), count), jnp.arange(count), Purpose.TARGET
    )
    drawn = draw(jnp.tile(log_probs, (count, 1)), jnp.ones(count), keys)
    expected = np.array([0.5, 0.3, 0.15, 0.05]) * count
    observed = np.bincount(drawn, minlength=5)
    assert observed[4] == 0
    chi_square = ((observed[:4] - expected) ** 2 / expected).sum()
    assert chi_square < 16.3  # 3 degrees of freedom, p = 0.001


def test_bits_depend_on_key_position_and_purpose():
    key, other = jax.random.split(jax.random.key(0))
    keys = jnp.stack([key, key, other, key])
    positions = jnp.array([1, 2, 1, 1])
    bits = jax.vmap(jax.random.bits)(position_keys(keys, positions, Purpose.TARGET))
    draft_bits = jax.vmap(jax.random.bits)(position_keys(keys, positions, Purpose.DRAFT))
    assert bits[0] == bits[3]
    assert len({int(b) for b in (*bits, *draft_bits)}) == 6


def test_sampled_tokens_do_not_depend_on_drafts_or_batches():
    model, prompts = shallow_model(), ragged_prompts([5, 9, 20, 3])
    sampling = Sampling([0.0, 1.0, 0.5, 1.5], [0, 0, 5, 0], [1.0, 1.0, 0.9, 0.7])
    options = {"max_new_tokens": 20, "sampling": sampling, "key": jax.random.key(5)}
    plain = emsjax.generate(model, prompts, num_sequences=3, **options)
    assert len({tuple(row) for row in plain.tokens[3:6]}) == 3  # different keys
    greedy = emsjax.generate(model, prompts[:1], max_new_tokens=20)
    np.testing.assert_array_equal(plain.tokens[0], greedy.tokens[0])
    lookup = emsjax.PromptLookup(match_length=1, search_generated=True)
    for drafter in (lookup, CARELESS):
        out = emsjax.generate(model, prompts, drafter, num_sequences=3, batch_size=5, **options)
        np.testing.assert_array_equal(out.tokens, plain.tokens)
        np.testing.assert_allclose(out.logprobs, plain.logprobs, atol=1e-4)


def test_logprobs_are_those_of_the_warped_distribution():
    model, prompt = shallow_model(), ragged_prompts([6])[0]
    sampling = Sampling(0.7, 4, 0.9)
    out = emsjax.generate(
        model, [prompt], max_new_tokens=3, sampling=sampling, key=jax.random.key(1)
    )
    first = emsjax.generate(
        model, [prompt], max_new_tokens=1, sampling=Sampling(0.0), key=jax.random.key(1)
    )
    assert first.logprobs[0, 0] < 0
    state = emsjax.init_state(model, None, [prompt], max_new_tokens=1)
    rows = emsjax.decode.pack.pack(state.lengths - 1, jnp.ones(1, jnp.int32), 1)
    hidden = model(jnp.asarray(prompt[-1:], jnp.int32), rows, state.cache).hidden
    probs = expected_probs(model.logits(hidden)[0], 0.7, 4, 0.9, 0.0)
    np.testing.assert_allclose(np.exp(out.logprobs[0, 0]), probs[out.tokens[0, 0]], rtol=1e-4)


def test_sequences_are_ranked_by_mean_logprob_within_their_prompt():
    options = {"max_new_tokens": [6, 9], "sampling": Sampling(1.5), "key": jax.random.key(2)}
    out = emsjax.generate(shallow_model(), ragged_prompts([4, 7]), num_sequences=3, **options)
    ranks = emsjax.rank_by_mean_logprob(out)
    for prompt, row in enumerate(ranks):
        assert sorted(row) == [3 * prompt + i for i in range(3)]
        means = [np.mean(out.logprobs[i][: out.lengths[i]]) for i in row]
        assert means == sorted(means, reverse=True)
    assert len({tuple(row % 3) for row in ranks}) == 2  # not simply in their order
