"""Products with narrow weights as a Mosaic GPU kernel, interpreted and lowered."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from kernel_cases import COMPILED, cuda_without_a_gpu, lower_for_cuda
from test_linear import random
from test_linear_mosaic import INTERPRET, IS_OLD, MOSAIC, needs_new_jax
from test_narrow import ROUNDING, check_products, close, rows_with_large, weight_of

import pallas_kernels
from pallas_kernels.common import implementations
from pallas_kernels.common.implementations import runs_triton
from pallas_kernels.matmul import (
    mosaic_tiles,
    narrow,
    narrow_mosaic,
    narrow_tiles,
    second_terms,
)
from pallas_kernels.matmul.narrow import FORMATS, GROUP
from pallas_kernels.matmul.rounded import Rounding, round_rows


@pytest.mark.gpu
@needs_new_jax
@pytest.mark.parametrize(
    ("format", "rows", "activation", "gated"),
    [
        ("int8", 70, None, False),
        ("fp8", 40, "silu", True),
        ("int8", 5, "relu", False),
        ("fp8", 9, None, False),
        ("int4", 3, "silu", True),
        ("int4", 70, "relu", False),
    ],
)
def test_products_equal_numpy(format, rows, activation, gated, monkeypatch):
    monkeypatch.setattr(narrow_tiles, "FEWEST_GROUPS", 2)  # so that sums are left in shares
    x, weight = rows_with_large(rows, 512, "bfloat16"), weight_of(format, 512, 128)
    check_products(x, weight, activation, gated, MOSAIC)


# Rows, columns, cluster, warpgroups, shares, stages and inputs.
TILES = [
    (64, 64, 1, 1, 1, 3, 512),
    (192, 96, 2, 3, 1, 4, 512),
    (256, 64, 1, 2, 3, 3, 384),
    (128, 192, 1, 2, 1, 2, 1280),
    (64, 64, 1, 1, 2, 3, 5120),  # shares of 20 groups, whose bits lie in two words
]


@pytest.mark.gpu
@needs_new_jax
@pytest.mark.parametrize(("number", "tile"), list(enumerate(TILES)))
def test_every_tile_gives_the_same_product(number, tile):
    rows, columns, cluster, warpgroups, splits, stages, inputs = tile
    format = ROUNDING[number % 2]
    x, weight = rows_with_large(70, inputs), weight_of(format, inputs, columns * cluster)
    tiling = mosaic_tiles.Tiling(rows, columns, splits, cluster, warpgroups, stages, depth=GROUP)
    options = {"tiling": tiling, "dtype": jnp.float32, "interpret": INTERPRET}
    out = np.asarray(narrow_mosaic.launch(x, weight, None, **options), np.float64)
    total = out if splits == 1 else out.sum(axis=0)
    expected = rounded_by_kernel(x, weight.kind) @ np.float64(weight.dense())
    if COMPILED and format == "fp8":  # a matrix unit keeps fewer bits of the sums of its products
        assert np.max(abs(total - expected)) <= 2**-9 * np.max(abs(expected))
        return
    close(total, expected, "float32", format)


@pytest.mark.gpu
@needs_new_jax
@pytest.mark.parametrize(
    ("format", "together", "splits"),
    [("int8", 1, 1), ("int8", 2, 2), ("fp8", 4, 1), ("int4", 1, 1), ("int4", 2, 2)],
)
def test_groups_of_few_rows_may_be_multiplied_together(format, together, splits):
    x, weight = rows_with_large(5, 512, "bfloat16"), weight_of(format, 512, 128)
    bits = 4 if format == "int4" else 8
    tiling = narrow_tiles.swapped(5, 128, splits, 8, together, bits)
    options = {"tiling": tiling, "dtype": jnp.bfloat16, "interpret": INTERPRET}
    out = np.asarray(narrow_mosaic.launch(x, weight, None, **options), np.float64)
    total = out if splits == 1 else out.sum(axis=0)
    expected = rounded_by_kernel(x, weight.kind) @ np.float64(weight.dense())
    close(total, expected, "bfloat16", format, rounded=True)


def rounded_by_kernel(x, kind):
    """Rounded rows as the kernel has them: near-ties may go another way than in XLA."""
    rows = round_rows(x, Rounding(kind, len(x)), interpret=not runs_triton())
    first, second = np.asarray(rows.values, np.float64)[0]
    scales = np.asarray(rows.scales, np.float64)[:, 0, 0].T  # [rows, scales]
    groups = (first + second * kind.second_step).reshape(len(x), scales.shape[1], -1)
    return (groups * scales[..., None]).reshape(len(x), -1)


# Shares that are parts of a word, several words, and neither.
@pytest.mark.parametrize(("groups", "splits"), [(32, 1), (32, 4), (128, 2), (86, 2), (12, 2)])
def test_groups_with_second_terms_are_found(groups, splits):
    rows, steps = 70, groups // splits
    second = np.random.default_rng(0).random((rows, groups)) < 0.5 / rows
    second[-1, [0, -1]] = True
    padded = np.pad(second, ((0, 0), (0, -groups % pl.next_power_of_2(groups))))
    words = jax.vmap(second_terms.in_words, out_axes=1)(jnp.asarray(padded))
    assert words.shape == (pl.cdiv(padded.shape[1], second_terms.BITS), rows)
    found = []
    for first in range(0, groups, steps):
        of_share = []
        for part, (begin, end) in enumerate(second_terms.ranges_of_steps(steps)):
            number = first // second_terms.BITS + part
            at = (words, 1, rows - 1, jnp.int32(number))
            word = jnp.int32(0)
            for step in range(end - begin):
                read = second_terms.read(*at, jnp.int32(step), end - begin)
                assert len(read) == second_terms.words_of_step(rows - 1, end - begin)
                word = second_terms.union(word, read)
            word = second_terms.bits_of_share(word, number, first, steps)
            bits = [i for i in range(second_terms.BITS) if second_terms.flags_of(word, i)]
            assert second_terms.count_bits(word) == len(bits)
            of_share += [number * second_terms.BITS + bit for bit in bits]
        assert all(first <= group < first + steps for group in of_share)
        found += of_share
    assert found == np.flatnonzero(second[1:].any(axis=0)).tolist()
    assert 0 < len(found) < groups


@pytest.mark.parametrize("word", [0, 1, -1, 2**31 - 1, -(2**31), 0x5A0F_1234])
def test_bits_are_counted(word):
    assert second_terms.count_bits(jnp.int32(word)) == bin(word & 0xFFFF_FFFF).count("1")


def test_steps_of_the_second_term_have_an_inverse_in_32_bits():
    sums = jnp.array([0, 1, -77, 2**31 - 1, -(2**31)], jnp.int32)
    step = jnp.int32(FORMATS["int8"].second_step)
    np.testing.assert_array_equal(sums * narrow_mosaic.SECOND_INVERSE * step, sums)


@pytest.mark.skipif(IS_OLD, reason="jax 0.11 is the first to lower it")
@pytest.mark.parametrize(
    ("format", "rows"),
    [*itertools.product(ROUNDING, [1, 24, 70, 192]), ("int4", 1), ("int4", 192)],
)
def test_the_kernel_lowers_for_cuda(format, rows):
    kind = FORMATS[format]
    tiling = narrow_mosaic.tiling_for(
        rows, 2048, 1024, kind, split=True, dtype=jnp.dtype("bfloat16")
    )

    def product(x, values, scales):
        weight = narrow.NarrowWeight(values, scales, format=format, inputs=2048)
        options = {"tiling": tiling, "dtype": jnp.bfloat16, "interpret": False}
        return narrow_mosaic.launch(x, weight, None, **options)

    values, scales = (1024, 2048, kind.dtype), (1, 1024, jnp.float32)
    if kind.is_packed:
        values, scales = (1024, 1024, jnp.uint8), (2048 // GROUP, 1024, jnp.bfloat16)
    shapes = (rows, 2048, jnp.bfloat16), values, scales
    lower_for_cuda(product, *shapes, backend="mosaic_gpu")


@needs_new_jax
@pytest.mark.parametrize(
    ("format", "rows"), [("int8", 1), ("fp8", 200), ("int4", 2), ("int4", 200)]
)
def test_the_default_on_its_devices(format, rows, monkeypatch):
    """For fast numerics and 16-bit rows; other products go to Triton."""
    monkeypatch.setattr(implementations, "_compute_capability", lambda: 9.0)
    weight = weight_of(format, 512, 128)

    def is_mosaic(dtype, numerics):
        product = lambda x: pallas_kernels.linear(x, weight, None, numerics=numerics)
        x = jax.ShapeDtypeStruct((rows, 512), dtype)
        with cuda_without_a_gpu():
            text = jax.jit(product).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        return "mosaic_gpu" in text

    assert is_mosaic("bfloat16", "fast")
    assert not is_mosaic("float32", "fast")
    assert not is_mosaic("bfloat16", "invariant")


@pytest.mark.parametrize("rows", [1, 8, 30, 64, 192, 512])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(4096, 12288), (16384, 4096), (128, 64), (1152, 9216)]
)
@pytest.mark.parametrize(("split", "sums"), [(True, 1), (False, 1), (True, 2)])
def test_tiles_cover_the_product_and_fit_on_the_device(rows, inputs, outputs, split, sums):
    tiling = narrow_tiles.tiling_for(rows, inputs, outputs, split=split, swap=True, sums=sums)
    assert (
        inputs % (tiling.splits * tiling.depth) == outputs % (tiling.columns * tiling.cluster) == 0
    )
    assert split or tiling.splits == 1
    if inputs > GROUP:
        lanes = 2 * tiling.rows if tiling.swapped else tiling.rows
        assert narrow_tiles.sums_fit(lanes, tiling.columns, tiling.warpgroups, sums)
        own = (tiling.columns if tiling.swapped else tiling.rows) // tiling.warpgroups
        assert own % mosaic_tiles.UNIT == 0
        assert not tiling.swapped or tiling.rows >= rows
        stage = tiling.depth * (lanes + tiling.columns)
        staged = tiling.warpgroups * mosaic_tiles.UNIT * mosaic_tiles.LINE
        assert tiling.stages * stage + staged <= mosaic_tiles.SHARED_BYTES


@pytest.mark.parametrize("rows", [1, 24, 64, 192, 512])
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(4096, 12288), (16384, 4096), (20480, 5120), (36864, 9216)]
)
@pytest.mark.parametrize("split", [True, False])
def test_tiles_of_bytes_with_two_values_fit_on_the_device(rows, inputs, outputs, split):
    tiling = narrow_tiles.swapped_tiling(rows, inputs, outputs, split=split, bits=4)
    assert (tiling.splits > 1) == split  # the tile writes no whole sums
    assert inputs % (tiling.splits * tiling.depth) == outputs % tiling.columns == 0
    lanes, together = 2 * tiling.rows, tiling.depth // GROUP
    assert lanes <= 2 * narrow_tiles.MOST_PACKED_ROWS
    assert narrow_tiles.sums_fit(lanes, tiling.columns, tiling.warpgroups, together)
    numbers = GROUP * (lanes + tiling.columns // 2)
    stage = together * (numbers + 4 * (lanes + tiling.columns))
    staged = tiling.warpgroups * mosaic_tiles.UNIT * mosaic_tiles.LINE
    assert tiling.stages >= 4
    assert tiling.stages * stage + staged <= mosaic_tiles.SHARED_BYTES


@needs_new_jax
@pytest.mark.parametrize(
    ("product", "format", "numerics", "error"),
    [
        ("linear_sums", "int4", "fast", "enough for two shares"),
        ("linear", "int8", "invariant", "no invariant numerics"),
    ],
)
def test_what_the_kernel_does_not_take_raises_an_error(product, format, numerics, error):
    x, weight = random(65, 256), weight_of(format, 256, 128)
    with pytest.raises(ValueError, match=error):
        getattr(pallas_kernels, product)(x.astype("bfloat16"), weight, numerics=numerics, **MOSAIC)
