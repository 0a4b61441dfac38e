"""Products as a Mosaic GPU kernel, interpreted and lowered: jax 0.11 has both."""

import functools

import jax
import jax.numpy as jnp
import pytest
from kernel_cases import lower_for_cuda
from test_linear import check_product, check_sums

import pallas_kernels
from pallas_kernels.matmul import mosaic

IS_OLD = jax.__version_info__ < (0, 11)
needs_new_jax = pytest.mark.skipif(IS_OLD, reason="jax 0.11 is the first to interpret it")
MOSAIC = {"implementation": "mosaic", "interpret": True}


@needs_new_jax
@pytest.mark.parametrize(
    ("rows", "outputs", "activation", "biased", "gated"),
    [
        (160, 256, "relu", True, False),  # fewer than a tile's, and three warpgroups
        (192, 768, None, True, False),
        (296, 256, "silu", False, False),  # of a tile of 384: warpgroups of more than one unit
        (504, 192, None, True, False),  # two tiles of rows, and columns in tiles of 96
        (72, 64, "silu", True, True),
        (160, 96, "gelu_tanh", False, True),  # one tile of columns, so no neighbour
        (504, 192, None, True, True),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_equal_numpy(rows, outputs, activation, biased, gated, dtype):
    epilogue = {"activation": activation, "gated": gated, "biased": biased}
    check_product(rows, outputs, dtype, options=MOSAIC, **epilogue)


@needs_new_jax
@pytest.mark.parametrize("columns", [64, 128, 192])
def test_every_width_of_a_gated_tile_gives_the_same_product(columns, monkeypatch):
    monkeypatch.setattr(mosaic, "COLUMNS_GATED", (columns,))
    epilogue = {"activation": "silu", "gated": True, "biased": True}
    check_product(136, 192, "bfloat16", options=MOSAIC, **epilogue)
    assert mosaic.tiling_for(136, 128, 384, gated=True).columns == columns


@needs_new_jax
@pytest.mark.parametrize(
    ("rows", "inputs", "shares", "dtype"),
    [
        (104, 512, (8,), "bfloat16"),
        (264, 512, (8,), "bfloat16"),
        (264, 512, (8,), "float16"),
        (104, 64, (), "bfloat16"),  # too few to be cut
    ],
)
def test_sums_add_up_to_the_product(rows, inputs, shares, dtype):
    sums = check_sums(rows, inputs, 256, dtype, MOSAIC)
    assert sums.shape == (*shares, rows, 256)


@needs_new_jax
@pytest.mark.parametrize("rows", [104, 160, 384, 512])
def test_the_kernels_lower_for_cuda(rows, monkeypatch):
    """The sizes are OPT-6.7B's, for which tiles of 96 columns fill the device best."""
    monkeypatch.setattr("pallas_kernels.common.implementations._compute_capability", lambda: 9.0)
    options = {"implementation": "mosaic"}
    x, vector = (rows, 4096, "bfloat16"), lambda size: (size, "bfloat16")
    lower = functools.partial(lower_for_cuda, backend="mosaic_gpu")
    products = functools.partial(pallas_kernels.linear, **options)
    lower(products, x, (4096, 12288, "bfloat16"), vector(12288))
    relu = functools.partial(pallas_kernels.linear, activation="relu", **options)
    lower(relu, x, (4096, 16384, "bfloat16"), vector(16384))
    for activation in ("silu", "gelu_tanh"):  # Qwen3-8B's sizes, for which 192 columns are best
        gated = functools.partial(products, activation=activation, gated=True)
        lower(gated, x, (4096, 24576, "bfloat16"), vector(24576))
    sums = functools.partial(pallas_kernels.linear_sums, **options)
    lower(sums, (rows, 16384, "bfloat16"), (16384, 4096, "bfloat16"))


@pytest.mark.parametrize("rows", [1, 64, 160, 192, 200, 384, 448, 512, 1000])
@pytest.mark.parametrize(
    ("inputs", "outputs", "kind"),
    [
        (4096, 12288, {}),
        (4096, 4096, {"split": True}),
        (4096, 16384, {}),
        (16384, 4096, {"split": True}),
        (768, 2304, {}),
        (3072, 768, {"split": True}),
        (4096, 24576, {"gated": True}),
        (1024, 6144, {"gated": True}),
    ],
)
def test_tiles_cover_the_product_and_fit_on_the_device(rows, inputs, outputs, kind):
    tiling = mosaic.tiling_for(rows, inputs, outputs, **kind)
    of_inputs, of_outputs = tiling.multiples
    assert inputs % of_inputs == outputs % of_outputs == 0
    assert outputs % (tiling.columns * tiling.cluster) == 0
    assert tiling.rows / tiling.warpgroups % 64 == 0
    assert mosaic.sums_fit(tiling.rows, tiling.columns, tiling.warpgroups)
    assert tiling.stages >= 3
    tiles = -(-rows // tiling.rows)
    assert (tiles - 1) * tiling.rows < rows <= tiles * tiling.rows


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((jnp.zeros((8, 128)), jnp.zeros((128, 128))), "16-bit numbers"),
        ((jnp.zeros((9, 128), "bfloat16"), jnp.zeros((128, 128), "bfloat16")), "multiples of 8"),
        ((jnp.zeros((8, 96), "bfloat16"), jnp.zeros((96, 128), "bfloat16")), r"of \(64, 64\)"),
        ((jnp.zeros((8, 64), "bfloat16"), jnp.zeros((64, 80), "bfloat16")), r"of \(64, 64\)"),
    ],
)
def test_arrays_that_the_kernel_does_not_take_raise_an_error(arguments, error):
    with pytest.raises(ValueError, match="needs jax 0.11" if IS_OLD else error):
        pallas_kernels.linear(*arguments, **MOSAIC)


def test_another_device_raises_an_error(monkeypatch):
    monkeypatch.setattr("pallas_kernels.common.implementations._compute_capability", lambda: 10.0)
    x = jnp.zeros((8, 128), "bfloat16")
    with pytest.raises(ValueError, match="needs jax 0.11" if IS_OLD else "capability 9.0"):
        pallas_kernels.linear(x, jnp.zeros((128, 128), "bfloat16"), implementation="mosaic")


# Microseconds of launches with tiles of these rows and columns, on an H200 (jax 0.11.2).
QKV, GATE_UP, DOWN = (4096, 6144, 1, False), (4096, 24576, 1, True), (12288, 4096, 2, False)
MEASURED = {
    (192, QKV): {(192, 64): 28.3, (192, 96): 32.5},
    (192, GATE_UP): {(192, 192): 72.5, (192, 128): 85.4},
    (192, DOWN): {(192, 64): 43.4, (192, 128): 55.2},
    (384, QKV): {(192, 128): 39.3, (384, 64): 55.8},
    (384, GATE_UP): {(192, 192): 120.1, (384, 64): 202.7},
    (384, DOWN): {(192, 128): 66.0, (384, 64): 88.7},
}


FROM_MEMORY = 192, GATE_UP, (192, 192)  # one tile for each multiprocessor: memory is the limit


@pytest.mark.parametrize(("rows", "weight"), MEASURED)
def test_estimated_clocks_are_near_those_measured(rows, weight):
    inputs, outputs, splits, gated = weight
    found = MEASURED[rows, weight]
    estimates = {t: mosaic.clocks(rows, inputs, outputs, *t, splits, gated=gated) for t in found}
    for tile, us in found.items():
        if (rows, weight, tile) != FROM_MEMORY:
            assert estimates[tile] / 1550 == pytest.approx(us, rel=0.14)  # at 1.55 GHz
    assert min(estimates, key=estimates.get) == min(found, key=found.get)
    chosen = mosaic.tiling_for(rows, inputs, outputs, gated=gated, splits=splits)
    assert mosaic.clocks(rows, inputs, outputs, *chosen[:3], gated=gated) <= min(estimates.values())
