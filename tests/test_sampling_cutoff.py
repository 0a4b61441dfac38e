"""Top-k and top-p cutoffs: every implementation against sorting in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import lower_for_cuda
from test_linear import every_implementation, random

import pallas_kernels

pytestmark = pytest.mark.gpu
LIMITS = [(0, 0.3), (5, 1.0), (9000, 0.9), (1, 1e-6), (40, 0.5), (0, 1.0), (3, 0.0001)]
LIMITS += [(0, 1e-40), (7, 0.0)]


def kept(logits, top_k, top_p):
    """Whether each logit of a row is kept, by sorting, in float64."""
    logits = np.float64(logits)
    ordered = np.sort(logits)[::-1]
    if top_k:
        ordered = ordered[ordered >= ordered[min(top_k, len(ordered)) - 1]]
    if top_p < 1:
        weights = np.exp(ordered - ordered[0])
        share = np.cumsum(weights) / weights.sum()
        ordered = ordered[ordered >= ordered[np.argmax(share >= top_p)]]
    return logits >= ordered[-1]


compiled = jax.jit(pallas_kernels.sampling_cutoff, static_argnames=("implementation", "interpret"))


def cutoffs(logits, limits, options):
    top_k, top_p = zip(*limits, strict=True)
    limits = jnp.array(top_k, jnp.int32), jnp.array(top_p, jnp.float32)
    return compiled(jnp.asarray(logits), *limits, **options)


@every_implementation
@pytest.mark.parametrize("vocab", [7, 4096, 9001])
def test_what_is_kept_is_what_sorting_keeps(options, vocab):
    logits = 3 * random(len(LIMITS), vocab)
    found = cutoffs(logits, LIMITS, options)
    for row, limits, cutoff in zip(logits, LIMITS, found, strict=True):
        np.testing.assert_array_equal(row >= cutoff, kept(row, *limits))


@every_implementation
@settings(max_examples=40)
@given(
    logits=st.lists(st.integers(-12, 12), min_size=7, max_size=7),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([0.11, 0.53, 0.871, 1.0]),
)
def test_equal_logits_are_kept_together(options, logits, top_k, top_p):
    logits = np.array([logits], np.float32) / 4
    (cutoff,) = cutoffs(logits, [(top_k, top_p)], options)
    np.testing.assert_array_equal(logits[0] >= cutoff, kept(logits[0], top_k, top_p))


@every_implementation
@pytest.mark.parametrize("start", [2.5, -2.5])
def test_neighbouring_floats_are_told_apart(options, start):
    logits = [np.float32(start)]
    while len(logits) < 5:
        logits.append(np.nextafter(logits[-1], np.float32(-9)))
    for k in (1, 2, 3, 4):
        (cutoff,) = cutoffs(np.array([logits]), [(k, 1.0)], options)
        assert cutoff == logits[k - 1]


@every_implementation
def test_both_zeros_are_equal(options):
    (cutoff,) = cutoffs(np.array([[-0.0, 0.0, -1.0]], np.float32), [(1, 1.0)], options)
    assert cutoff == 0


@every_implementation
def test_a_limit_that_nobody_has_is_as_one_that_keeps_all(options):
    logits = random(2, 50)
    top_k, top_p = jnp.array([4, 0], jnp.int32), jnp.array([1, 0.4], jnp.float32)
    cut = lambda *limits: pallas_kernels.sampling_cutoff(logits, *limits, **options)
    np.testing.assert_array_equal(cut(top_k, None), cut(top_k, jnp.ones(2)))
    np.testing.assert_array_equal(cut(None, top_p), cut(jnp.zeros(2, jnp.int32), top_p))
    assert cut(top_k, None)[1] == cut(None, top_p)[0] == -jnp.inf


@every_implementation
def test_a_row_does_not_depend_on_the_others(options):
    logits, limits = random(3, 300), [(0, 0.7)] * 3
    alone = cutoffs(logits[1:2], limits[:1], options)
    poisoned = logits.at[0].set(jnp.nan).at[2].set(jnp.inf)
    np.testing.assert_array_equal(cutoffs(poisoned, limits, options)[1:2], alone)


def test_cutoffs_lower_for_cuda(monkeypatch):
    monkeypatch.setattr("pallas_kernels.common.implementations.runs_triton", lambda: True)
    cut = functools.partial(pallas_kernels.sampling_cutoff, implementation="triton")
    lower_for_cuda(cut, (24, 50272, "float32"), (24, "int32"), (24, "float32"))
