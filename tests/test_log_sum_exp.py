"""The logarithm of sums of exponentials: every implementation against float64 numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from kernel_cases import lower_for_cuda
from test_linear import close, every_implementation, random

import pallas_kernels

pytestmark = pytest.mark.gpu


@every_implementation
@pytest.mark.parametrize("vocab", [1, 61, 4096, 4097, 50272])
def test_log_sum_exp_equals_numpy(options, vocab):
    logits = np.array(random(8, vocab)) * np.float32([[1], [30], *[[3]] * 6])
    logits[2] += 1e4
    logits[3, vocab // 2 :] = -np.inf
    logits[3, 0] = -1e4  # a chunk without a token must not exceed it
    logits[4], logits[5, -1], logits[6, 0] = -np.inf, np.inf, np.nan
    logits[7, 0], logits[7, -1] = np.inf, np.nan
    run = functools.partial(pallas_kernels.log_sum_exp, numerics="invariant", **options)
    found = run(jnp.asarray(logits))
    np.testing.assert_array_equal(found[4:], jax.nn.logsumexp(jnp.asarray(logits[4:]), axis=1))
    close(found[:4], scipy.special.logsumexp(np.float64(logits[:4]), axis=1), "float32")


def test_log_sum_exp_lowers_for_cuda(monkeypatch):
    monkeypatch.setattr("pallas_kernels.common.implementations.runs_triton", lambda: True)
    for vocab in (1, 50272, 151936):
        run = functools.partial(pallas_kernels.log_sum_exp, numerics="invariant")
        lower_for_cuda(run, (24, vocab, "float32"))
    assert "triton" not in jax.jit(pallas_kernels.log_sum_exp).lower(random(2, 9)).as_text()
