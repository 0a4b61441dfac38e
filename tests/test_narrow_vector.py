"""Products of one row with 4-bit weights: the kernel without a matrix unit."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from kernel_cases import cuda_without_a_gpu
from test_linear import OPTIONS, device_runs_triton, random
from test_narrow import check_products, rows_with_large, weight_of

import pallas_kernels
from pallas_kernels.common import implementations
from pallas_kernels.matmul import narrow_vector
from pallas_kernels.matmul.narrow import FORMATS, GROUP
from pallas_kernels.matmul.rounded import RoundedRows

NAME = "narrow_linear_vector"


# 4, 5 and 10 blocks: steps of 4, 1 and 2.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("inputs", "dtype", "activation", "gated"),
    [
        (512, "bfloat16", "relu", False),
        (640, "float32", "silu", True),
        (1280, "bfloat16", None, False),
    ],
)
def test_products_equal_numpy(inputs, dtype, activation, gated):
    x, weight = rows_with_large(1, inputs, dtype), weight_of("int4", inputs, 256)
    check_products(x, weight, activation, gated, OPTIONS[1])


@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 12288), (16384, 4096), (11008, 4096)])
@pytest.mark.parametrize("split", [False, True])
def test_steps_cover_all_blocks(inputs, outputs, split):
    sizes = {"dtype": jnp.bfloat16, "split": split}
    tiling = narrow_vector.tiling_for(1, inputs, outputs, FORMATS["int4"], **sizes)
    assert inputs // GROUP % (tiling.splits * tiling.together) == 0
    assert split or tiling.splits == 1


@pytest.mark.parametrize("capability", [8.0, 9.0])
def test_the_default_for_one_row(capability, monkeypatch):
    """Only fast numerics, and only the format that the kernel takes, also before Mosaic."""
    monkeypatch.setattr(implementations, "_compute_capability", lambda: capability)

    def kernel(rows, weight, **options):
        product = jax.jit(lambda x: pallas_kernels.linear(x, weight, None, **options))
        x = jax.ShapeDtypeStruct((rows, 512), "bfloat16")
        with cuda_without_a_gpu():
            text = product.trace(x).lower(lowering_platforms=("cuda",)).as_text()
        return NAME in text

    weight = weight_of("int4", 512, 256)
    assert kernel(1, weight)
    assert kernel(1, weight, implementation="triton")
    zeros = jnp.zeros(weight.scales.shape, jnp.int8)
    assert not kernel(2, weight)
    assert not any(kernel(1, weight_of(format, 512, 256)) for format in FORMATS if format != "int4")
    assert not kernel(1, dataclasses.replace(weight, zeros=zeros))
    assert not kernel(1, weight, numerics="invariant")
    assert not narrow_vector.takes(weight_of("int4", 500, 256), random(1, 500), split=False)


def test_one_row_is_not_rounded_by_the_norm_before_it(monkeypatch):
    device_runs_triton(monkeypatch, True)
    weight = weight_of("int4", 512, 256)
    assert pallas_kernels.rounding_for(1, jnp.bfloat16, weight) is None
    assert pallas_kernels.rounding_for(2, jnp.bfloat16, weight) is not None
    values = jnp.zeros((1, 2, 16, 512), jnp.int8)
    scales = jnp.zeros((4, 1, 2, 16))
    rows = RoundedRows(values, scales, jnp.zeros((2, 4), jnp.int32), 1, jnp.dtype("bfloat16"))
    assert not narrow_vector.takes(weight, rows, split=False)
