"""Products as a Mosaic GPU kernel, interpreted and lowered: jax 0.11 has both."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import lower_for_cuda
from test_linear import check_product, check_sums, close, device_runs_triton, random

import pallas_kernels
from pallas_kernels import matmul
from pallas_kernels.common.implementations import runs_mosaic
from pallas_kernels.matmul import mosaic, mosaic_tiles

IS_OLD = jax.__version_info__ < (0, 11)
needs_new_jax = pytest.mark.skipif(IS_OLD, reason="jax 0.11 is the first to interpret it")
INTERPRET = not runs_mosaic()
MOSAIC = {"implementation": "mosaic", "interpret": INTERPRET}


@pytest.mark.gpu
@needs_new_jax
@pytest.mark.parametrize(
    ("rows", "outputs", "activation", "biased", "gated"),
    [
        (160, 256, "relu", True, False),
        (192, 768, None, True, False),
        (296, 256, "silu", False, False),
        (504, 192, None, True, False),
        (72, 64, "silu", True, True),
        (160, 96, "gelu_tanh", False, True),
        (504, 192, None, True, True),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_equal_numpy(rows, outputs, activation, biased, gated, dtype):
    epilogue = {"activation": activation, "gated": gated, "biased": biased}
    check_product(rows, outputs, dtype, options=MOSAIC, **epilogue)


# Rows, columns, cluster, warpgroups, swapped, shares_weights.
TILES = {
    "rows in three units": (192, 96, 2, 3, False, False),
    "units of several rows": (384, 64, 1, 2, False, False),
    "swapped": (80, 128, 2, 2, True, False),
    "swapped, weights shared": (40, 192, 2, 3, True, True),
    "swapped, weights shared, several clusters": (16, 128, 2, 2, True, True),
    "swapped, alone, an unfinished tile": (56, 64, 1, 1, True, False),
    "swapped, a cluster beyond the rows": (80, 64, 2, 1, True, True),
}


@pytest.mark.gpu
@needs_new_jax
@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("splits", [1, 2])
def test_every_kind_of_tile_gives_the_same_product(name, splits):
    rows, columns, cluster, warpgroups, *kind = TILES[name]
    x, weight = random(72, 256, dtype="bfloat16"), random(256, 768, dtype="bfloat16", seed=1)
    bias = random(768, dtype="bfloat16", seed=2) if splits == 1 else None
    tiling = mosaic_tiles.Tiling(rows, columns, splits, cluster, warpgroups, 3, *kind)
    options = {"tiling": tiling, "dtype": x.dtype, "interpret": INTERPRET}
    activation = "relu" if splits == 1 else None
    out = np.float64(mosaic.launch(x, weight, bias, activation=activation, **options))
    out = out if splits == 1 else out.sum(axis=0)
    expected = np.float64(x) @ np.float64(weight)
    expected = expected if bias is None else np.maximum(expected + np.float64(bias), 0)
    close(out, expected, "bfloat16", scale=60)


@pytest.mark.gpu
@needs_new_jax
@pytest.mark.parametrize("outputs", [96, 160, 288])  # of tiles of 96, the last two are unfinished
@pytest.mark.parametrize("cluster", [1, 2])
def test_the_last_tile_of_a_head_may_be_unfinished(outputs, cluster):
    x, table = random(72, 128, dtype="bfloat16"), random(outputs, 128, dtype="bfloat16", seed=1)
    tiling = mosaic_tiles.Tiling(64, 96, 1, cluster, 1, 3, partial=True)
    options = {"tiling": tiling, "transposed": True, "dtype": jnp.float32, "interpret": INTERPRET}
    out = mosaic.launch(x, table, None, **options)
    close(out, np.float64(x) @ np.float64(table).T, "float32", scale=20)


@pytest.mark.gpu
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
    gated = functools.partial(products, activation="silu", gated=True)
    lower(gated, x, (4096, 24576, "bfloat16"), vector(24576))
    sums = functools.partial(pallas_kernels.linear_sums, **options)
    lower(sums, (rows, 16384, "bfloat16"), (16384, 4096, "bfloat16"))
    head = functools.partial(pallas_kernels.linear_sums, transposed=True, **options)
    lower(head, x, (50272, 4096, "bfloat16"))


@needs_new_jax
@pytest.mark.parametrize("name", TILES)
def test_every_kind_of_tile_lowers_for_cuda(name):
    rows, columns, cluster, warpgroups, *kind = TILES[name]
    tiling = mosaic_tiles.Tiling(rows, columns, 2, cluster, warpgroups, 3, *kind)
    options = {"tiling": tiling, "dtype": jnp.bfloat16, "interpret": False}
    product = lambda x, weight: mosaic.launch(x, weight, None, **options)
    shapes = (72, 256, "bfloat16"), (256, 768, "bfloat16")
    lower_for_cuda(product, *shapes, backend="mosaic_gpu")


# What ptxas of CUDA 13 compiled for an H200: columns of an instruction, and warpgroups.
@pytest.mark.parametrize(
    ("columns", "warpgroups", "compiles"),
    [(192, 3, True), (208, 3, False), (224, 3, False), (240, 3, False), (192, 2, True)],
)
def test_an_instruction_needs_registers(columns, warpgroups, compiles):
    assert mosaic_tiles.instruction_fits(columns, warpgroups) == compiles


@pytest.mark.parametrize("rows", [1, 64, 136, 160, 192, 200, 240, 384, 416, 448, 464, 512, 1000])
@pytest.mark.parametrize(
    ("inputs", "outputs", "kind"),
    [
        (4096, 12288, {}),
        (4096, 4096, {"split": True}),
        (4096, 4096, {"split": True, "dtype": jnp.float16}),
        (16384, 4096, {"split": True}),
        (768, 2304, {}),
        (3072, 768, {"split": True}),
        (4096, 24576, {}),
        (1024, 50272, {"transposed": True}),
        (4096, 151936, {"transposed": True}),
    ],
)
def test_tiles_cover_the_product_and_fit_on_the_device(rows, inputs, outputs, kind):
    tiling = mosaic_tiles.tiling_for(rows, inputs, outputs, **kind)
    of_inputs, of_outputs = tiling.multiples
    assert inputs % of_inputs == outputs % of_outputs == 0
    if tiling.partial:
        assert kind.get("transposed")
        assert not tiling.swapped
    elif tiling.shares_weights:
        assert outputs % tiling.columns == 0
    else:
        assert outputs % (tiling.columns * tiling.cluster) == 0
    instruction_rows = tiling.columns if tiling.swapped else tiling.rows
    assert instruction_rows / tiling.warpgroups % 64 == 0
    if tiling.swapped:
        neighbours = 1 if tiling.shares_weights else tiling.cluster
        assert tiling.rows / neighbours % 8 == 0
        assert tiling.rows <= 256
        assert kind.get("dtype") != jnp.float16 or tiling.splits == 1
    assert mosaic_tiles.sums_fit(tiling.rows, tiling.columns, tiling.warpgroups)
    instruction_columns = tiling.rows if tiling.swapped else tiling.columns
    assert mosaic_tiles.instruction_fits(instruction_columns, tiling.warpgroups)
    assert tiling.stages >= 3
    tiles = -(-rows // tiling.rows)
    assert (tiles - 1) * tiling.rows < rows <= tiles * tiling.rows
    assert not tiling.shares_weights or tiles % tiling.cluster == 0


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


# Microseconds of launches on an H200 (jax 0.11.2), by rows, columns, neighbours, and whether
# operands are swapped (S), and neighbours share weights (W).
QKV, OUT, DOWN = (4096, 6144, 2), (4096, 4096, 2), (12288, 4096, 2)
FC1, GATE_UP, HEAD = (4096, 16384, 1), (4096, 24576, 1), (4096, 151936, 1)
N, S, W = (False, False), (True, False), (True, True)
MEASURED = {
    (136, DOWN): {
        (72, 128, 2, W): 41.8,
        (144, 64, 2, S): 41.8,
        (136, 128, 1, S): 45.2,
        (144, 128, 2, S): 46.0,
        (192, 64, 2, N): 52.0,
        (72, 64, 2, W): 57.7,
    },
    (168, DOWN): {
        (88, 128, 2, W): 44.0,
        (176, 64, 2, S): 45.2,
        (192, 64, 2, N): 48.0,
        (168, 128, 1, S): 53.1,
        (88, 256, 2, W): 59.7,
        (88, 64, 2, W): 60.2,
    },
    (168, GATE_UP): {
        (176, 192, 2, S): 63.2,
        (192, 192, 2, N): 64.6,
        (88, 192, 2, W): 72.7,
        (88, 128, 2, W): 77.8,
        (168, 256, 1, S): 78.0,
        (176, 256, 2, S): 78.3,
    },
    (192, DOWN): {
        (192, 64, 2, S): 45.7,
        (96, 128, 2, S): 46.0,
        (192, 64, 2, N): 47.9,
        (192, 128, 1, S): 53.4,
        (256, 64, 2, N): 58.6,
    },
    (192, OUT): {
        (192, 64, 2, S): 18.7,
        (192, 64, 2, N): 20.1,
        (96, 128, 2, S): 20.4,
        (192, 128, 1, S): 22.7,
        (256, 64, 2, N): 25.6,
    },
    (192, HEAD): {(192, 128, 2, N): 416.4, (192, 192, 2, N): 418.8, (256, 192, 2, N): 503.9},
    (192, FC1): {
        (192, 128, 2, S): 45.6,
        (192, 128, 2, N): 47.2,
        (96, 256, 2, S): 50.2,
        (256, 128, 2, N): 58.1,
    },
    (384, QKV): {
        (192, 192, 2, S): 34.4,
        (192, 192, 2, N): 34.8,
        (192, 256, 2, S): 41.0,
        (384, 96, 2, N): 41.2,
    },
    (384, DOWN): {
        (192, 128, 2, S): 63.0,
        (192, 128, 2, N): 64.1,
        (128, 256, 1, S): 74.9,
        (128, 256, 2, S): 75.2,
        (256, 128, 2, N): 96.4,
    },
    (384, OUT): {(192, 128, 2, N): 26.2, (192, 128, 2, S): 27.0, (128, 256, 2, S): 29.6},
    (384, HEAD): {(384, 128, 2, N): 677.2, (192, 192, 2, N): 698.0, (384, 96, 2, N): 787.6},
    (512, DOWN): {(256, 128, 2, N): 81.6, (256, 128, 2, S): 82.0, (192, 256, 2, S): 105.0},
    (512, HEAD): {(256, 192, 2, N): 888.0, (256, 128, 2, N): 926.9, (192, 192, 2, N): 1021.2},
}


@pytest.mark.parametrize(("rows", "weight"), MEASURED)
def test_the_tiles_that_are_estimated_to_be_fastest_are_fast(rows, weight):
    inputs, outputs, splits = weight
    found = MEASURED[rows, weight]
    kind = {"transposed": True} if weight == HEAD else {"split": splits > 1}

    def estimate(of_rows, columns, cluster, swapped):
        tiling = mosaic_tiles.Tiling(of_rows, columns, splits, cluster, 1, 3, *swapped)
        return mosaic_tiles.clocks(rows, inputs, outputs, tiling)

    estimates = {tile: estimate(*tile) for tile in found}
    if weight == DOWN:  # long enough for the launch itself not to matter
        fastest = min(found, key=found.get)
        assert estimates[fastest] / 1550 == pytest.approx(found[fastest], rel=0.12)  # at 1.55 GHz
    assert found[min(estimates, key=estimates.get)] < 1.07 * min(found.values())
    chosen = mosaic_tiles.tiling_for(rows, inputs, outputs, splits=splits, **kind)
    assert mosaic_tiles.clocks(rows, inputs, outputs, chosen) <= min(estimates.values())


@needs_new_jax
@pytest.mark.parametrize(
    ("rows", "outputs", "split", "expected"),
    [
        (16, 10240, False, "triton"),
        (24, 10240, False, "mosaic"),  # 160 programs, each with a multiprocessor to itself
        (24, 24576, False, "triton"),  # 192 programs, of which two share one
        (72, 24576, False, "mosaic"),
        (72, 12288, False, "triton"),
        (72, 6144, True, "mosaic"),
        (70, 6144, True, "triton"),  # Mosaic takes rows in multiples of 8
        (136, 6144, True, "xla"),
    ],
)
def test_few_rows_go_to_mosaic_if_programs_would_wait(rows, outputs, split, expected, monkeypatch):
    device_runs_triton(monkeypatch, True)
    monkeypatch.setattr(matmul, "runs_mosaic", lambda: True)
    x = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((4096, outputs), jnp.bfloat16)
    found = matmul._kernel_for(x, weight, None, True, split=split)
    name = "xla" if found is None else found[0].__name__.rpartition(".")[2]
    assert name == expected
