"""Products of one row with narrow weights: the kernel without a matrix unit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import cuda_without_a_gpu
from test_linear import OPTIONS, device_runs_triton, random
from test_narrow import check_products, close, rows_with_large, weight_of

import pallas_kernels
from pallas_kernels import matmul
from pallas_kernels.matmul import narrow, narrow_vector
from pallas_kernels.matmul.narrow import FORMATS, GROUP
from pallas_kernels.matmul.rounded import RoundedRows

INTEGERS = ("int8", "int4", "int8-weights")
every_format = pytest.mark.parametrize("format", INTEGERS)
NAME = "narrow_linear_vector"


@pytest.fixture(autouse=True)
def chosen(monkeypatch):
    """The kernel is used where it takes the arrays."""
    monkeypatch.setattr(matmul, "ONE_ROW_WITHOUT_MATRIX_UNIT", True)


# 4, 5 and 10 blocks: steps of 4, 1 and 2.
@pytest.mark.gpu
@every_format
@pytest.mark.parametrize(
    ("inputs", "dtype", "activation", "gated"),
    [
        (512, "bfloat16", "relu", False),
        (640, "float32", "silu", True),
        (1280, "bfloat16", None, False),
    ],
)
def test_products_equal_numpy(format, inputs, dtype, activation, gated):
    x, weight = rows_with_large(1, inputs, dtype), weight_of(format, inputs, 256)
    check_products(x, weight, activation, gated, OPTIONS[1])


@pytest.mark.gpu
@pytest.mark.parametrize("large", [None, 700])
def test_second_terms_may_be_in_any_step(large, monkeypatch):
    monkeypatch.setattr(narrow_vector, "TOGETHER", 2)
    x, weight = random(1, 1024), weight_of("int8", 1024, 128)
    x = x if large is None else x.at[0, large].set(100.0)
    out = pallas_kernels.linear(x, weight, None, **OPTIONS[1])
    rounded = np.asarray(narrow.round_rows(x, FORMATS["int8"]), np.float64)
    close(out, rounded @ np.asarray(weight.dense(), np.float64), "float32", "int8")


@pytest.mark.gpu
@every_format
def test_rows_of_zeros_and_of_what_is_not_finite(format):
    weight = weight_of(format, 512, 128)
    product = lambda x: np.asarray(pallas_kernels.linear(x, weight, None, **OPTIONS[1]))
    assert (product(jnp.zeros((1, 512))) == 0).all()
    for bad in (np.nan, np.inf):
        assert not np.isfinite(product(random(1, 512).at[0, 300].set(bad))).any()


@every_format
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 12288), (16384, 4096), (11008, 4096)])
@pytest.mark.parametrize("split", [False, True])
def test_steps_cover_all_blocks(format, inputs, outputs, split):
    sizes = {"dtype": jnp.bfloat16, "split": split}
    tiling = narrow_vector.tiling_for(1, inputs, outputs, FORMATS[format], **sizes)
    assert inputs // GROUP % (tiling.splits * tiling.together) == 0
    assert split or tiling.splits == 1


def test_the_default_for_one_row(monkeypatch):
    """Only fast numerics, and only of formats that the kernel takes."""
    device_runs_triton(monkeypatch, True)

    def kernel(rows, weight, **options):
        product = jax.jit(lambda x: pallas_kernels.linear(x, weight, None, **options))
        x = jax.ShapeDtypeStruct((rows, 512), "bfloat16")
        with cuda_without_a_gpu():
            text = product.trace(x).lower(lowering_platforms=("cuda",)).as_text()
        return NAME in text

    assert all(kernel(1, weight_of(format, 512, 256)) for format in INTEGERS)
    weight = weight_of("int4", 512, 256)
    zeros = jnp.zeros(weight.scales.shape, jnp.int8)
    assert not kernel(2, weight)
    assert not kernel(1, weight_of("fp8", 512, 256))
    assert not kernel(1, dataclasses.replace(weight, zeros=zeros))
    assert not kernel(1, weight, numerics="invariant")
    assert not narrow_vector.takes(weight_of("int8", 500, 256), random(1, 500), split=False)


def test_rows_that_are_rounded_already_go_to_other_kernels(monkeypatch):
    device_runs_triton(monkeypatch, True)
    weight = weight_of("int8", 512, 256)
    assert pallas_kernels.rounding_for(1, jnp.bfloat16, weight) is None
    assert pallas_kernels.rounding_for(2, jnp.bfloat16, weight) is not None
    values = jnp.zeros((1, 2, 16, 512), jnp.int8)
    scales = jnp.zeros((4, 1, 2, 16))
    rows = RoundedRows(values, scales, jnp.zeros((2, 4), jnp.int32), 1, jnp.dtype("bfloat16"))
    assert not narrow_vector.takes(weight, rows, split=False)
