"""Products and normalisation: every implementation against float64 numpy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from kernel_cases import DTYPES, in_turn, lower_for_cuda

import pallas_kernels
from pallas_kernels import matmul
from pallas_kernels.common.implementations import runs_triton
from pallas_kernels.matmul import triton
from pallas_kernels.matmul.activations import ACTIVATIONS

pytestmark = pytest.mark.gpu
OPTIONS = [{"implementation": "xla"}, {"implementation": "triton", "interpret": not runs_triton()}]
every_implementation = pytest.mark.parametrize("options", OPTIONS, ids=["xla", "triton"])
every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
TOLERANCE = {"float32": 2e-6, "bfloat16": 2**-7, "float16": 2**-10}
ACTIVATIONS_IN_NUMPY = {
    None: lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * scipy.special.ndtr(x),
    "gelu_tanh": lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


def random(*shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def device_runs_triton(monkeypatch, does: bool):
    monkeypatch.setattr(matmul, "runs_triton", lambda: does)
    monkeypatch.setattr("pallas_kernels.common.implementations.runs_triton", lambda: does)


def close(actual, expected, dtype, scale=1.0):
    actual = np.asarray(actual, np.float64)
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * scale)


@every_implementation
@every_dtype
@pytest.mark.parametrize(
    ("rows", "biased"),
    [(1, True), (1, False), (16, False), (19, True), (19, False), (64, True), (100, False)],
)
def test_products_equal_numpy(options, dtype, rows, biased):
    activation = None if biased else "relu"
    check_product(rows, 768, dtype, activation=activation, biased=biased, options=options)


@every_implementation
@pytest.mark.parametrize(
    ("activation", "gated", "dtype"), in_turn(DTYPES, [None, *ACTIVATIONS], [False, True])
)
def test_activations_and_gates_equal_numpy(options, activation, gated, dtype):
    for rows, biased in ((3, True), (40, False)):
        epilogue = {"activation": activation, "gated": gated, "biased": biased}
        check_product(rows, 256, dtype, options=options, **epilogue)


def check_product(rows, outputs, dtype, *, activation, gated=False, biased, options):
    columns = 2 * outputs if gated else outputs
    x, weight = random(rows, 128, dtype=dtype), random(128, columns, dtype=dtype, seed=1)
    weight = weight / 4  # most outputs are where activations bend
    bias = random(columns, dtype=dtype, seed=2) if biased else None
    options = {"activation": activation, "gated": gated, **options}
    out = pallas_kernels.linear(x, weight, bias, **options)
    assert (out.shape, out.dtype) == ((rows, outputs), x.dtype)
    expected = np.float64(x) @ np.float64(weight)
    expected += np.float64(bias) if biased else 0
    expected, up = (expected[:, :outputs], expected[:, outputs:]) if gated else (expected, 1)
    close(out, ACTIVATIONS_IN_NUMPY[activation](expected) * up, dtype, scale=20)


def test_activations_and_gates_that_do_not_exist_are_errors():
    x, weight = random(2, 64), random(64, 129, seed=1)
    with pytest.raises(ValueError, match=r"activation must be None or one of 'relu'.*not 'swish'"):
        pallas_kernels.linear(x, weight, activation="swish")
    with pytest.raises(ValueError, match="even number of columns, not 129"):
        pallas_kernels.linear(x, weight, gated=True)


@every_implementation
@every_dtype
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    # 256 columns take narrow tiles; 2944 are enough for the tiling of each number of rows.
    [(5, 512, 256), (5, 256, 2944), (24, 256, 2944), (40, 256, 2944), (100, 256, 2944)],
)
def test_sums_add_up_to_the_product(options, dtype, rows, inputs, outputs):
    sums = check_sums(rows, inputs, outputs, dtype, options)
    if options["implementation"] == "triton" and outputs > 256:
        shares = triton.TILINGS[triton._tile_rows(rows)][True].splits
        assert sums.shape == (shares, rows, outputs)


def check_sums(rows, inputs, outputs, dtype, options, scale=40):
    """Check that sums are the product unrounded, or shares as accurate as the rounded product."""
    x = random(rows, inputs, dtype=dtype)
    weight = random(inputs, outputs, dtype=dtype, seed=1)
    sums = pallas_kernels.linear_sums(x, weight, **options)
    shares, product = sums.ndim == 3, np.float64(sums)
    assert sums.dtype == ("bfloat16" if shares and dtype == "bfloat16" else "float32")
    product = product.sum(axis=0) if shares else product
    expected = np.float64(x) @ np.float64(weight)
    close(product, expected, sums.dtype.name, scale)
    error = lambda values: np.sqrt(np.mean((np.float64(values) - expected) ** 2))
    rounding = error(jnp.asarray(expected, dtype))
    assert error(product) <= (1.1 if shares else 0.01) * rounding + 1e-5
    return sums


RMS_KINDS = [  # vectors, offset, dtype of the stream
    ((), 0.0, None),
    (("scale",), 0.0, "float32"),
    (("y_bias", "scale"), 1.0, "float32"),
    (("scale", "y_scale"), 1.0, "float32"),
    (("y_bias", "scale", "y_scale"), 0.0, None),
]


@every_implementation
@pytest.mark.parametrize(("shares", "kind", "dtype"), in_turn(DTYPES, [None, "rounded"], RMS_KINDS))
def test_sum_and_rms_normalisation_equal_numpy(options, shares, kind, dtype):
    (vectors, offset, stream), size = kind, 96
    x = random(7, size, dtype=stream or dtype)
    y = random(*((3, 7, size) if shares else (7, size)), dtype=dtype, seed=1)
    values = {name: random(size, dtype=dtype, seed=len(name)) for name in vectors}
    arguments = [values.get(name) for name in ("y_bias", "scale", "y_scale")]
    total, out = pallas_kernels.add_rms_norm(
        x, y, *arguments, epsilon=1e-5, offset=offset, dtype=dtype, **options
    )
    assert (total.dtype, out.dtype) == (x.dtype, dtype)

    def rms_norm(x, scale):
        x = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-5)
        return x * (np.float64(values[scale]) + offset) if scale in values else x

    addend = (np.float64(y).sum(axis=0) if shares else np.float64(y)) + np.float64(
        values.get("y_bias", 0)
    )
    addend = rms_norm(addend, "y_scale") if "y_scale" in values else addend
    close(total, np.float64(x) + addend, total.dtype.name, scale=4)
    close(out, rms_norm(np.float64(total), "scale"), dtype, scale=4)


LAYER_KINDS = [  # vectors, dtype of the stream
    ((), None),
    (("y_bias",), "float32"),
    (("bias",), None),
    (("y_bias", "scale", "bias"), None),
    (("y_bias", "scale", "bias"), "float32"),
]


@every_implementation
@pytest.mark.parametrize(
    ("shares", "kind", "dtype"), in_turn(DTYPES, [None, "float32", "rounded"], LAYER_KINDS)
)
def test_sum_and_normalisation_equal_numpy(options, shares, kind, dtype):
    """The sum stays in x's dtype even if the normalisation is rounded."""
    (vectors, stream), size = kind, 96
    x = random(7, size, dtype=stream or dtype)
    shape = (3, 7, size) if shares else (7, size)
    y = random(*shape, dtype="float32" if shares == "float32" else dtype, seed=1)
    values = {name: random(size, dtype=dtype, seed=ord(name[0])) for name in vectors}
    arguments = [values.get(name) for name in ("y_bias", "scale", "bias")]
    total, out = pallas_kernels.add_layer_norm(
        x, y, *arguments, epsilon=1e-5, dtype=stream and dtype, **options
    )
    assert (total.dtype, out.dtype) == (x.dtype, dtype)

    value = lambda name, default: np.float64(values.get(name, default))
    expected = np.float64(x) + (np.float64(y).sum(axis=0) if shares else np.float64(y))
    expected += value("y_bias", 0)
    close(total, expected, total.dtype.name, scale=4)
    rounded = np.float64(total)  # what is normalised is the sum as it was rounded
    centred = rounded - rounded.mean(axis=1, keepdims=True)
    expected = centred / np.sqrt(rounded.var(axis=1, keepdims=True) + 1e-5)
    close(out, expected * value("scale", 1) + value("bias", 0), dtype, scale=4)


def test_the_default_for_few_16_bit_rows_is_triton_if_the_sizes_fit(monkeypatch):
    def choose(x, weight):
        found = matmul._kernel_for(x, weight, None, False)
        return "xla" if found is None else found[0].__name__.rpartition(".")[2]

    few, weight = jnp.zeros((128, 128), "bfloat16"), jnp.zeros((128, 384), "bfloat16")
    assert choose(few, weight) == ("triton" if runs_triton() else "xla")
    device_runs_triton(monkeypatch, True)
    assert choose(few, weight) == "triton"
    assert choose(jnp.zeros((129, 128), "bfloat16"), weight) == "xla"
    assert choose(few.astype("float32"), weight.astype("float32")) == "xla"
    assert choose(few[:, :100], weight[:100]) == "xla"
    assert choose(few, weight[:, :300]) == "xla"


@pytest.mark.parametrize(
    ("triton", "beyond", "inputs", "dtype", "shares"),
    [
        (True, 0, 128, "bfloat16", (2,)),
        (True, 0, 128, "float16", (2,)),
        (True, 1, 128, "bfloat16", ()),
        (True, 0, 127, "bfloat16", ()),
        (True, 0, 128, "float32", ()),
        (False, 0, 128, "bfloat16", ()),
    ],
)
def test_sums_stay_in_shares_up_to_a_number_of_rows(
    monkeypatch, triton, beyond, inputs, dtype, shares
):
    device_runs_triton(monkeypatch, triton)
    rows = matmul.MAX_ROWS_IN_SHARES + beyond
    sums = check_sums(rows, inputs, 64, dtype, {}, scale=20)
    assert sums.shape == (*shares, rows, 64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_shares_that_cancel_have_no_error_beyond_the_rounding_of_each(monkeypatch, dtype):
    """Both shares overflow in float16, and their sum does not."""
    device_runs_triton(monkeypatch, True)
    x = random(200, 128, dtype=dtype) + 300 * jnp.repeat(jnp.array([1, -1], dtype), 64)
    weight = abs(random(128, 64, dtype=dtype, seed=1)) + jnp.array(4, dtype)
    halves = np.einsum("rsi,sio->sro", np.float64(x).reshape(200, 2, 64), weight.reshape(2, 64, 64))
    assert np.abs(halves).min() > 65504
    actual = np.float64(pallas_kernels.linear_sums(x, weight)).sum(axis=0)
    rounding = {"bfloat16": 2**-8, "float16": 1e-5}[dtype]
    assert np.all(np.abs(actual - halves.sum(axis=0)) <= rounding * np.abs(halves).sum(axis=0))


@pytest.mark.parametrize("shares", [True, False])
def test_sums_have_the_gradient_of_the_product(monkeypatch, shares):
    """It is computed from 16-bit factors, whatever the dtype of the sums."""
    device_runs_triton(monkeypatch, shares)
    rng, asked = np.random.default_rng(0), jnp.arange(64.0) % 2
    # Small numbers, which nothing rounds.
    x, weight = (
        jnp.asarray(rng.integers(-1, 2, shape), "bfloat16") for shape in ((200, 128), (128, 64))
    )

    def loss(x, weight):
        sums = pallas_kernels.linear_sums(x, weight)
        assert sums.ndim == (3 if shares else 2)
        return jnp.sum((sums.astype("float32").sum(axis=0) if shares else sums) * asked)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    factors = re.findall(r"dot_general.* : \((.*)\) ->", gradient.lower(x, weight).as_text())
    assert len(factors) >= 2
    assert not any("f32" in kinds for kinds in factors)
    by_x, by_weight = gradient(x, weight)
    np.testing.assert_array_equal(by_x, np.tile(np.float64(weight) @ asked, (200, 1)))
    np.testing.assert_array_equal(by_weight, np.outer(np.float64(x).sum(axis=0), asked))


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "split"),
    [(8, 768, 2304, False), (8, 768, 768, True), (8, 3072, 768, True), (64, 2048, 6144, False)],
)
def test_a_small_weight_is_split_into_enough_programs(rows, inputs, outputs, split):
    tiling = triton.tiling_for(rows, inputs, outputs, split=split)
    assert outputs % tiling.columns == inputs % (tiling.depth * tiling.splits) == 0
    assert outputs // tiling.columns * tiling.splits >= 72
    large = triton.tiling_for(rows, 4096, 16384, split=split)
    assert large.columns >= 64


@pytest.mark.parametrize("rows", [1, 24, 64, 96])
def test_the_triton_kernels_lower_for_cuda(rows, monkeypatch):
    monkeypatch.setattr("pallas_kernels.common.implementations.runs_triton", lambda: True)
    products = functools.partial(pallas_kernels.linear, implementation="triton")
    x, vector = (rows, 2560, "bfloat16"), (2560, "bfloat16")
    lower_for_cuda(products, x, (2560, 7680, "bfloat16"), (7680, "bfloat16"))
    sums = functools.partial(pallas_kernels.linear_sums, implementation="triton")
    lower_for_cuda(sums, (rows, 10240, "bfloat16"), (10240, 2560, "bfloat16"))
    lower_for_cuda(sums, (rows, 16384, "bfloat16"), (16384, 4096, "bfloat16"))
    for activation in ("silu", "gelu_tanh"):
        epilogue = {"activation": activation, "gated": True, "implementation": "triton"}
        gated = functools.partial(pallas_kernels.linear, **epilogue)
        lower_for_cuda(gated, x, (2560, 10240, "bfloat16"))
    norm = functools.partial(pallas_kernels.add_layer_norm, epsilon=1e-5, implementation="triton")
    for kind in ("float32", "bfloat16"):
        lower_for_cuda(norm, x, (4, rows, 2560, kind), *[vector] * 3)
    rms = functools.partial(pallas_kernels.add_rms_norm, epsilon=1e-6, implementation="triton")
    lower_for_cuda(rms, x, (4, rows, 2560, "bfloat16"), *[vector] * 3)
    narrow = functools.partial(norm, dtype=jnp.bfloat16)
    lower_for_cuda(narrow, (rows, 2560, "float32"), x, *[vector] * 3)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(129, 128, 128), (4, 96, 128), (4, 64, 80)]
)
def test_triton_raises_an_error_for_sizes_that_do_not_fit(rows, inputs, outputs):
    x, weight = jnp.zeros((rows, inputs)), jnp.zeros((inputs, outputs))
    with pytest.raises(ValueError, match="at most 128 rows and weights whose sizes are multiples"):
        pallas_kernels.linear(x, weight, implementation="triton", interpret=True)


@pytest.mark.parametrize("interpret", [False, True], ids=["xla", "triton"])
def test_gradients_equal_those_of_the_plain_formulas(interpret):
    """The expected gradients are jax's, of the plainest way to write the operations."""
    options = OPTIONS[1] if interpret else OPTIONS[0]
    x, y, weight = random(5, 512), random(5, 256, seed=1), random(512, 256, seed=2)
    vectors = [random(256, seed=seed) for seed in (3, 4, 5)]
    rms_norm = functools.partial(pallas_kernels.add_rms_norm, epsilon=1e-5, offset=1.0, **options)
    norm = functools.partial(pallas_kernels.add_layer_norm, epsilon=1e-5, **options)

    def ours(x, y, weight, bias, scale, shift):
        product = pallas_kernels.linear(x, weight, bias, activation="relu", **options)
        sums = pallas_kernels.linear_sums(x, weight, **options)
        total, normal = norm(y, sums, bias, scale, shift)
        other, rms = rms_norm(y, sums, bias, scale, shift)
        plain = pallas_kernels.linear(x, weight, None, **options)
        gated = pallas_kernels.linear(x, weight, bias, activation="silu", gated=True, **options)
        exact = pallas_kernels.linear(x, weight, bias, activation="gelu", **options)
        waves = jnp.sin(product) + jnp.cos(normal) + jnp.sin(rms)
        squares = plain**2 + total**2 + other**2
        return jnp.sum(waves + squares + exact) + jnp.sum(gated)

    def plain(x, y, weight, bias, scale, shift):
        z = jnp.dot(x, weight, precision="highest")
        total = y + z + bias
        centred = total - total.mean(axis=1, keepdims=True)
        normal = centred / jnp.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
        normal = normal * scale + shift
        rms_norm = lambda x, scale: x / jnp.sqrt((x**2).mean(1, keepdims=True) + 1e-5) * (scale + 1)
        other = y + rms_norm(z + bias, shift)
        half = z.shape[1] // 2
        gate, up = jnp.split(z + bias, [half], axis=1)
        gated = gate / (1 + jnp.exp(-gate)) * up
        exact = (z + bias) * jax.scipy.special.ndtr(z + bias)
        squares = total**2 + z**2 + other**2
        waves = (
            jnp.sin(jnp.maximum(z + bias, 0)) + jnp.cos(normal) + jnp.sin(rms_norm(other, scale))
        )
        return jnp.sum(squares + waves + exact) + jnp.sum(gated)

    arguments = (x, y, weight, *vectors)
    every = tuple(range(len(arguments)))
    actual, expected = (jax.grad(f, argnums=every)(*arguments) for f in (ours, plain))
    for one, other in zip(actual, expected, strict=True):
        scale = float(np.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * scale)
