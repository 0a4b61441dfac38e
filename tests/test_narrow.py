"""Products with narrow weights, against numpy in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernel_cases import lower_for_cuda
from test_linear import (
    ACTIVATIONS_IN_NUMPY,
    OPTIONS,
    device_runs_triton,
    every_implementation,
    random,
)

import pallas_kernels
from pallas_kernels.matmul import narrow, narrow_triton, narrow_xla, rounding
from pallas_kernels.matmul.narrow import FORMATS, GROUP, NarrowWeight

pytestmark = pytest.mark.gpu
every_format = pytest.mark.parametrize("format", FORMATS)
NAMES = {"int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn}
ROUNDING = tuple(NAMES)


def weight_of(format, inputs, outputs, seed=0):
    return narrow.quantize(random(inputs, outputs, seed=seed) / 16, format=format)


def rows_with_large(rows, inputs, dtype="float32", seed=3):
    """Normal numbers, of which few are 50 times as large; a group of the first row is zero.

    Every third row has zeros in place of negative numbers. The last rows have large ones in a group
    in which the others have none.
    """
    x = random(rows, inputs, seed=seed)
    x = x.at[1::3].set(jnp.maximum(x[1::3], 0))
    x = x.at[:, 3].multiply(50).at[-(rows // 4) :, -1].multiply(50)
    return x.at[0, :GROUP].set(0).astype(dtype)


def rounded_in_numpy(x, format, nudge=1.0):
    """Rows as their two terms, written out row by row.

    Numbers are multiplied by `nudge` before they are rounded.
    """
    out, limit = np.zeros(x.shape), {"int8": 127, "fp8": 448}[format]
    in_fp8 = lambda x: x.astype(NAMES[format]).astype(float)
    for number, row in enumerate(np.asarray(x, np.float32)):
        largest = abs(row).max()
        if largest == 0:
            continue
        units = np.rint(abs(row) * (np.float32(2**14) / largest)).sum()  # of largest / 2**14
        share = np.float32(1) / np.float32(np.count_nonzero(row))
        usual = np.float32(units) * (share * largest * np.float32(2**-14)) * FORMATS[format].large
        if format == "int8":
            top = max(min(largest, usual), largest / np.float32(255))
            steps = np.rint(np.clip(row * (limit / top) * nudge, -limit * 255, limit * 255))
        else:
            top, steps = largest, np.clip(row * (limit / largest) * nudge, -limit, limit)
            first = in_fp8(steps)
            steps = first + in_fp8(np.where(abs(row) > usual, steps - first, 0))
        out[number] = steps * (top / limit)
    return out


@every_implementation
@every_format
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "activation", "gated"), [(1, None, False), (21, "silu", True)])
def test_products_equal_numpy(options, format, dtype, rows, activation, gated, monkeypatch):
    monkeypatch.setattr(narrow_triton, "MAX_ROWS", 8)  # so that rows have several tiles
    monkeypatch.setattr(narrow_triton, "FEWEST_GROUPS", 2)  # and sums are left in shares
    x, weight = rows_with_large(rows, 512, dtype), weight_of(format, 512, 256)
    check_products(x, weight, activation, gated, options)


def check_products(x, weight, activation, gated, options):
    """Compares a product and its sums with numpy's, from rows that numpy rounds."""
    dtype, format = str(x.dtype), weight.format
    bias = random(weight.shape[1], seed=2).astype(dtype)
    exact, dense, near_ties = np.asarray(x, np.float64), np.asarray(weight.dense(), np.float64), 0
    if format in NAMES:
        rounded = functools.partial(rounded_in_numpy, np.asarray(x, np.float32), format)
        exact, up, down = (rounded(np.float32(1 + error)) for error in (0, 1e-6, -1e-6))
        # A GPU divides with an error in the last bit, so that near-ties may go either way.
        near_ties = (abs(up - exact) + abs(down - exact)) @ abs(dense)
    product = exact @ dense
    sums = pallas_kernels.linear_sums(x, weight, **options)
    in_shares = sums.ndim == 3
    assert sums.dtype == (dtype if in_shares else jnp.float32)
    total = np.asarray(sums, np.float64)
    total = total.sum(axis=0) if in_shares else total
    nearest = np.clip(total, product - near_ties, product + near_ties)
    close(total, nearest, dtype, format, rounded=in_shares)
    out = pallas_kernels.linear(x, weight, bias, activation=activation, gated=gated, **options)
    assert out.dtype == dtype

    def finished(first, second):
        """The output, where the sums of its halves differ so much from the product's."""
        halves = np.split(product + np.asarray(bias, np.float64), 2, axis=1)
        ties = np.split(np.broadcast_to(near_ties, product.shape), 2, axis=1)
        one, other = halves[0] + first * ties[0], halves[1] + second * ties[1]
        act = ACTIVATIONS_IN_NUMPY[activation] if activation else lambda x: x
        return act(one) * other if gated else act(np.concatenate([one, other], axis=1))

    corners = [finished(*signs) for signs in itertools.product((-1, 1), (-1, 1))]
    nearest = np.clip(np.asarray(out, np.float64), np.min(corners, axis=0), np.max(corners, axis=0))
    close(out, nearest, dtype, format, rounded=True)


def close(actual, expected, dtype, format, rounded=False):
    """Differences relative to the largest number."""
    tolerance = 3e-6 if format in NAMES else 3e-4  # two terms of eight bits
    if dtype == "bfloat16" and (rounded or format not in NAMES):
        tolerance = 2**-7
    difference = np.max(abs(np.asarray(actual, np.float64) - expected))
    assert difference <= tolerance * np.max(abs(expected))


@every_format
def test_the_nearest_values_are_taken(format):
    matrix = np.asarray(random(200, 6), np.float64)
    matrix[:, 2] = 0
    weight = narrow.quantize(jnp.asarray(matrix, jnp.float32), format=format)
    assert weight.shape == (200, 6)
    dense = np.asarray(weight.dense(), np.float64)
    groups = (
        np.repeat(np.asarray(weight.scales), GROUP, axis=0)[:200]
        if format == "int4"
        else weight.scales
    )
    steps = np.broadcast_to(np.asarray(groups, np.float64), dense.shape)
    if format == "fp8":
        size = np.maximum(abs(dense), steps * 2.0**-6)
        steps = np.where(
            dense == 0,
            steps * 2.0**-9,
            2.0 ** np.floor(np.log2(np.where(size > 0, size / np.where(steps > 0, steps, 1), 1)))
            / 8
            * steps,
        )
    worst = steps * (1 if format == "int4" else 0.5)  # the largest int4 value is a step of its own
    assert np.all(abs(dense - matrix) <= worst * (1 + 1e-5))
    assert not dense[:, 2].any()
    largest = abs(matrix).max(axis=0)
    if format != "int4":
        np.testing.assert_allclose(abs(dense).max(axis=0), largest, rtol=1e-6)


def test_bytes_hold_values_of_both_halves_of_a_group():
    values = np.random.default_rng(0).integers(-8, 8, (3, 300))
    packed = np.asarray(narrow.pack(jnp.asarray(values)))
    assert packed.shape == (3, 192)
    assert packed.dtype == np.uint8
    for group, byte in np.ndindex(2, 64):
        low, high = values[:, group * 128 + byte], values[:, group * 128 + byte + 64]
        np.testing.assert_array_equal(packed[:, group * 64 + byte], (low & 15) + 16 * (high & 15))
    np.testing.assert_array_equal(narrow.unpack(jnp.asarray(packed))[:, :300], values)


@every_implementation
def test_groups_have_zeros_and_inputs_an_order(options):
    rng = np.random.default_rng(1)
    values, order = rng.integers(0, 16, (128, 256)), rng.permutation(256)
    zeros, scales = rng.integers(1, 16, (2, 128)), rng.uniform(0.01, 0.1, (2, 128))
    expected = np.zeros((256, 128))
    for place, number in enumerate(order):  # what published files mean by values of 0 to 15
        group = place // GROUP
        expected[number] = (values[:, place] - zeros[group]) * scales[group]
    weight = NarrowWeight(
        narrow.pack(jnp.asarray(values - 8)),
        jnp.asarray(scales, jnp.float32),
        jnp.asarray(zeros - 8, jnp.int8),
        jnp.asarray(order, jnp.int32),
        format="int4",
        inputs=256,
    )
    np.testing.assert_allclose(weight.dense(), expected, rtol=1e-6, atol=1e-8)
    x = random(5, 256)
    out = pallas_kernels.linear(x, weight, **options)
    close(out, np.asarray(x, np.float64) @ expected, "float32", "int4")


@every_format
@every_implementation
def test_a_row_has_the_same_bits_beside_any_others(options, format):
    x, weight = rows_with_large(40, 256), weight_of(format, 256, 128)
    x = x.at[1:4].set(1.0)  # rows without large numbers
    invariant = functools.partial(pallas_kernels.linear, numerics="invariant", **options)
    whole = invariant(x, weight)
    for start, count in ((0, 1), (2, 1), (1, 5), (3, 17), (7, 33)):
        part = invariant(x[start : start + count], weight)
        np.testing.assert_array_equal(part, whole[start : start + count])


@every_format
@every_implementation
def test_a_number_that_is_not_finite_spoils_its_row_and_no_other(options, format):
    x, weight = rows_with_large(6, 256), weight_of(format, 256, 128)
    product = lambda x: np.asarray(pallas_kernels.linear(x, weight, **options))
    spoilt = x.at[2, 200].set(jnp.nan).at[4, 5].set(jnp.inf)
    others = np.array([0, 1, 3, 5])
    out = product(spoilt)
    np.testing.assert_array_equal(out[others], product(x)[others])
    for row in (2, 4):
        assert not np.isfinite(out[row]).any()
        assert not np.isfinite(product(spoilt[row : row + 1])).any()
    assert (product(jnp.zeros((1, 256))) == 0).all()


def test_large_inputs_cost_int8_no_more_than_fp8():
    """One input in a thousand is 50 times as large as others."""
    x, matrix = np.array(random(64, 4096)), np.asarray(random(4096, 64, seed=1), np.float64)
    x[:, ::1000] *= 50
    exact = x @ matrix
    lost = {}
    for format in ROUNDING:
        rounded = np.asarray(narrow_xla.round_rows(jnp.asarray(x), FORMATS[format]), np.float64)
        lost[format] = np.square(rounded @ matrix - exact).mean()
    plain = (
        np.round(x / abs(x).max(axis=1, keepdims=True) * 127)
        * abs(x).max(axis=1, keepdims=True)
        / 127
    )
    assert lost["int8"] <= lost["fp8"]
    assert lost["int8"] < np.square(plain @ matrix - exact).mean() / 50  # one scale per row


@pytest.mark.parametrize(("format", "times"), [("int8", 8), ("fp8", 5.75)])
def test_numbers_are_large_from_so_many_times_the_mean_on(format, times):
    def has_second(factor):
        row = jnp.ones((4, GROUP)).at[1, 5].set(factor * times).at[1, 77].set(1.01 * factor * times)
        return rounding.round_groups(row, FORMATS[format]).has_second.tolist()

    assert has_second(1.2) == [False, True, False, False]
    assert not any(has_second(0.9))


def test_zeros_make_no_number_a_large_one():
    x = jax.nn.relu(random(64, 4096))
    has_large = lambda x: (
        rounding.round_groups(x.reshape(64, -1, GROUP), FORMATS["int8"]).has_second
    )
    assert not has_large(x).any()
    assert np.argwhere(has_large(x.at[5, 300].set(20.0))).tolist() == [[5, 2]]


def test_two_integers_take_numbers_of_any_size():
    """The first term is what its type holds, the second one is of large numbers alone."""
    kind, rng = FORMATS["int8"], np.random.default_rng(0)
    for factor in (1, 20, 250, 3000, 1e6):
        x = rng.standard_normal((3, 8, GROUP)).astype(np.float32)
        x[:, 2, 7] = factor
        rounded = rounding.round_groups(jnp.asarray(x), kind)
        first, second = (np.asarray(of, np.float64) for of in (rounded[0], rounded[2]))
        scales = np.asarray(rounded.scales)[..., None]
        assert np.max(abs((first + 255 * second) * scales - x) / scales) <= 0.5 + 1e-2
        assert (scales >= abs(x).max(axis=(1, 2), keepdims=True) / 127 / 255.01).all()
        assert not second[~np.asarray(rounded.has_second)].any()
        assert (factor < 20) == (not second.any())


@every_format
@pytest.mark.parametrize(("rows", "gated"), [(1, False), (8, True), (64, False), (200, True)])
def test_the_kernel_lowers_for_cuda(format, rows, gated, monkeypatch):
    device_runs_triton(monkeypatch, True)
    inputs, columns, kind = 512, 1024, FORMATS[format]

    def product(x, values, scales, bias):
        weight = NarrowWeight(values, scales, format=format, inputs=inputs)
        options = {"activation": "silu" if gated else None, "gated": gated}
        return pallas_kernels.linear(x, weight, bias, implementation="triton", **options)

    stored = (columns, inputs // 2, "uint8") if kind.is_packed else (columns, inputs, kind.dtype)
    groups = inputs // GROUP if kind.grouped else 1
    shapes = [
        (rows, inputs, "bfloat16"),
        stored,
        (groups, columns, "float32"),
        (columns, "bfloat16"),
    ]
    lower_for_cuda(product, *shapes)


def test_what_does_not_fit_is_an_error():
    with pytest.raises(
        ValueError, match="one of 'int8', 'fp8', 'int8-weights', 'int4', not 'int3'"
    ):
        narrow.quantize(jnp.ones((4, 4)), format="int3")
    weight = weight_of("int8", 100, 128)
    with pytest.raises(ValueError, match=r"multiples of \(128, 128\), not \(100, 128\)"):
        pallas_kernels.linear(jnp.ones((1, 100)), weight, **OPTIONS[1])
    with pytest.raises(ValueError, match="one of 'mosaic', 'triton', 'xla', not 'cuda'"):
        pallas_kernels.linear_sums(jnp.ones((1, 100)), weight, implementation="cuda")
    assert not narrow_triton.takes(weight, jnp.ones((1, 100)), split=False)
    assert pallas_kernels.linear(jnp.ones((1, 100)), weight).shape == (1, 128)
    jax.block_until_ready(weight.values)
