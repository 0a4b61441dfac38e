"""Packed rows in longer arrays: the given rows keep their bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_kernels import COMPILED, lower_for_cuda

import pallas_kernels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("implementation", ["triton", "xla"])
@pytest.mark.parametrize("count", [1, 3, 9, 130], ids="{} arrays".format)
@pytest.mark.parametrize(
    ("shape", "num_rows", "dtype"),
    [
        ((5, 2, 8), 9, "float32"),
        ((3, 3, 80), 64, "bfloat16"),
        ((1, 5, 1024), 2, "float16"),
        ((7, 2, 4), 7, "float32"),
    ],
)
def test_the_given_rows_come_first(implementation, count, shape, num_rows, dtype):
    rng = np.random.default_rng(count)
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for _ in range(count)]
    call = jax.jit(
        lambda arrays: pallas_kernels.extend_rows(
            arrays, num_rows, implementation=implementation, interpret=not COMPILED
        )
    )
    for given, extended in zip(arrays, call(arrays), strict=True):
        assert extended.shape == (num_rows, *shape[1:])
        assert extended.dtype == given.dtype
        np.testing.assert_array_equal(extended[: shape[0]], given)


def test_the_triton_kernel_lowers_for_cuda(monkeypatch):
    monkeypatch.setattr("pallas_kernels.implementations.runs_triton", lambda: True)
    extend = lambda *arrays: pallas_kernels.extend_rows(arrays, 192)
    lower_for_cuda(extend, *[(24, 32, 80, "bfloat16")] * 10)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="fast"):
        pallas_kernels.extend_rows([jnp.zeros((1, 2))], 2, implementation="fast")
