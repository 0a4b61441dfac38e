"""Keys and values from where queries lie beside them: they keep their bits."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_kernels import COMPILED, lower_for_cuda

import pallas_kernels

pytestmark = pytest.mark.gpu


SHAPES = [  # rows, heads, head_dim, num_rows
    (5, 2, 8, 9, "float32"),
    (3, 3, 80, 64, "bfloat16"),
    (1, 5, 1024, 2, "float16"),
    (7, 2, 4, 7, "float32"),
    (4, 1, 12, 4, "bfloat16"),
]
module = importlib.import_module("pallas_kernels.keys_and_values")
every_shape = pytest.mark.parametrize(("rows", "heads", "head_dim", "num_rows", "dtype"), SHAPES)
either_implementation = pytest.mark.parametrize("implementation", ["triton", "xla"])


@either_implementation
@pytest.mark.parametrize("count", [1, 3, 9], ids="{} layers".format)
@every_shape
def test_they_come_first(implementation, count, rows, heads, head_dim, num_rows, dtype):
    check(implementation, count, rows, heads, head_dim, num_rows, dtype)


@every_shape
def test_more_layers_than_a_launch_takes(monkeypatch, rows, heads, head_dim, num_rows, dtype):
    monkeypatch.setattr(module, "ARRAYS_PER_LAUNCH", 11)
    check("triton", 25, rows, heads, head_dim, num_rows, dtype)


@either_implementation
def test_more_layers_than_any_model_has(implementation):
    assert module.ARRAYS_PER_LAUNCH < 130
    check(implementation, 130, *SHAPES[0])


def check(implementation, count, rows, heads, head_dim, num_rows, dtype):
    rng = np.random.default_rng(count)
    shape = (rows, 3, heads, head_dim)
    qkv = [jnp.asarray(rng.normal(size=shape), dtype) for _ in range(count)]
    call = jax.jit(
        lambda qkv: pallas_kernels.keys_and_values(
            qkv, num_rows, implementation=implementation, interpret=not COMPILED
        )
    )
    keys, values = call(qkv)
    assert len(keys) == len(values) == count
    for given, key, value in zip(qkv, keys, values, strict=True):
        assert key.shape == value.shape == (num_rows, heads, head_dim)
        assert key.dtype == value.dtype == given.dtype
        np.testing.assert_array_equal(key[:rows], given[:, 1])
        np.testing.assert_array_equal(value[:rows], given[:, 2])


def test_the_triton_kernel_lowers_for_cuda(monkeypatch):
    monkeypatch.setattr("pallas_kernels.implementations.runs_triton", lambda: True)
    take = lambda *qkv: pallas_kernels.keys_and_values(qkv, 192)
    lower_for_cuda(take, *[(24, 3, 32, 80, "bfloat16")] * 10)


def test_an_unknown_implementation_and_too_few_rows_are_refused():
    qkv = [jnp.zeros((2, 3, 2, 2))]
    with pytest.raises(ValueError, match="fast"):
        pallas_kernels.keys_and_values(qkv, 2, implementation="fast")
    with pytest.raises(ValueError, match="num_rows must be at least 2"):
        pallas_kernels.keys_and_values(qkv, 1)
