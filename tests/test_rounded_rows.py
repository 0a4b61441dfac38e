"""Rows that the kernel of a norm rounds for the product that follows."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import cuda_without_a_gpu
from test_linear import random
from test_linear_mosaic import INTERPRET, MOSAIC, needs_new_jax
from test_narrow import ROUNDING, rows_with_large, weight_of
from toy import tiny_model

import emsjax
import pallas_kernels
from pallas_kernels.common import implementations
from pallas_kernels.common.implementations import runs_triton
from pallas_kernels.matmul import narrow_mosaic, narrow_tiles, narrow_triton
from pallas_kernels.matmul.narrow import FORMATS, GROUP
from pallas_kernels.matmul.rounded import RoundedRows, Rounding, round_rows

TRITON = {"implementation": "triton", "interpret": not runs_triton()}
EPSILON = 1e-5


def normalise(rows, size, rounding, *, centred=True, dtype="bfloat16"):
    """A norm of rows of which some have large numbers, with a sum in shares before it."""
    x = rows_with_large(rows, size)
    shares = jnp.stack([random(rows, size, seed=seed).astype(dtype) for seed in (5, 6)])
    bias, scale, shift = (random(size, seed=seed).astype(dtype) for seed in (7, 8, 9))
    # One group has large numbers in all rows, and the last one in the last rows alone.
    scale = scale.at[3].set(40).at[-1].set(2)
    options = {"epsilon": EPSILON, "dtype": dtype, "rounding": rounding, **TRITON}
    if centred:
        return pallas_kernels.add_layer_norm(x, shares, bias, scale, shift, **options)
    return pallas_kernels.add_rms_norm(x, shares, bias, scale, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("rows", "tiles", "size", "centred"),
    [(5, 1, 384, True), (5, 2, 384, True), (16, 1, 512, False)],
)
def test_a_norm_rounds_as_the_product_would(format, rows, tiles, size, centred):
    rounding = Rounding(FORMATS[format], 16, tiles)
    total, rounded = normalise(rows, size, rounding, centred=centred)
    expected_total, normalised = normalise(rows, size, None, centred=centred)
    np.testing.assert_array_equal(total, expected_total)
    assert (rounded.shape, rounded.dtype) == (normalised.shape, normalised.dtype)
    interpret = TRITON["interpret"]
    expected = round_rows(normalised, rounding, interpret=interpret)
    for name in ("values", "scales", "second"):
        one, other = (np.asarray(getattr(of, name)).astype(float) for of in (rounded, expected))
        np.testing.assert_array_equal(one, other)
    words = np.ascontiguousarray(rounded.second[:, :rows].T)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    has_second = bits[:, : size // GROUP].astype(bool)
    assert has_second.any()
    assert has_second.all() != rounding.kind.rounds_rows
    if rounding.kind.rounds_rows:  # see `normalise`
        assert not bits[:, size // GROUP :].any()
        assert has_second[:, 0].all()
    terms = np.asarray(rounded.values).astype(float).swapaxes(0, 1).reshape(2, 16, size)
    assert not terms[:, rows:].any()
    assert not rounded.scales.swapaxes(1, 2).reshape(-1, 16)[:, rows:].any()
    together = round_rows(normalised, Rounding(rounding.kind, 16), interpret=interpret)
    np.testing.assert_array_equal(terms, np.asarray(together.values[0]).astype(float))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [pytest.param(MOSAIC, marks=needs_new_jax), TRITON], ids=["mosaic", "triton"]
)
@pytest.mark.parametrize(
    ("format", "rows"), [*itertools.product(ROUNDING, [5, 70]), ("int4", 5), ("int4", 70)]
)
@pytest.mark.parametrize("sums", [False, True])
def test_products_of_rounded_rows_have_the_same_bits(options, format, rows, sums, monkeypatch):
    monkeypatch.setattr(narrow_tiles, "FEWEST_GROUPS", 2)  # so that sums of int4 are left in shares
    inputs = 512 if format == "int4" or rows == 70 else 384
    weight, dtype = weight_of(format, inputs, 128), jnp.dtype("bfloat16")
    module = narrow_mosaic if options is MOSAIC else narrow_triton
    tiling = module.tiling_for(rows, *weight.shape, weight.kind, dtype=dtype, split=sums)
    rounding = module.rounding_for(rows, weight, tiling)
    product = pallas_kernels.linear_sums if sums else pallas_kernels.linear
    rounded, plain = (normalise(rows, inputs, kind)[1] for kind in (rounding, None))
    assert isinstance(rounded, RoundedRows)
    one, other = (product(x, weight, **options) for x in (rounded, plain))
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_rows_rounded_for_another_kernel_are_an_error():
    rounded = normalise(5, 384, Rounding(FORMATS["int8"], 32))[1]
    weight = weight_of("int8", 384, 128)
    with pytest.raises(
        ValueError, match="rounded for 32 rows in 1 tiles, and the kernel takes 16 in 1"
    ):
        pallas_kernels.linear(rounded, weight, **TRITON)
    with pytest.raises(ValueError, match="'xla' takes rows as they are"):
        pallas_kernels.linear(rounded, weight, implementation="xla")
    with pytest.raises(ValueError, match="for 16 rows at most, not 20"):
        normalise(20, 384, Rounding(FORMATS["int8"], 16))


@pytest.mark.parametrize("capability", [8.0, 9.0])
def test_the_rounding_is_that_of_the_default_kernel(capability, monkeypatch):
    args, weight = (5, jnp.dtype("bfloat16")), weight_of("int8", 384, 128)
    assert pallas_kernels.rounding_for(*args, weight) is None or not INTERPRET
    monkeypatch.setattr(implementations, "_compute_capability", lambda: capability)
    of_mosaic = implementations.runs_mosaic()
    padded = 8 if of_mosaic else 16
    assert pallas_kernels.rounding_for(*args, weight) == Rounding(FORMATS["int8"], padded)
    padded = 16 if of_mosaic else 8
    in_bytes = weight_of("int4", 384, 128)
    assert pallas_kernels.rounding_for(*args, in_bytes) == Rounding(FORMATS["int4"], padded)
    assert pallas_kernels.rounding_for(*args, random(384, 128)) is None
    assert pallas_kernels.rounding_for(*args, weight_of("int8", 384, 100)) is None


def test_a_layer_rounds_twice_after_its_norms(monkeypatch):
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "ffn_dim": 512, "num_hidden_layers": 1}
    model = tiny_model(**sizes).astype("bfloat16").quantize("int8")
    state = emsjax.init_state(model, None, [[2, 3, 4], [5, 6]], max_new_tokens=4)
    monkeypatch.setattr(implementations, "_compute_capability", lambda: 8.0)

    def roundings():
        step = jax.jit(lambda: emsjax.step(model, None, state))
        with cuda_without_a_gpu():
            lowered = step.trace().lower(lowering_platforms=("cuda",))
        return lowered.as_text().count('name = "round_rows"')

    apart = 2  # of attention's output and after the feed-forward part's activation
    assert roundings() == apart
    monkeypatch.setattr(pallas_kernels, "rounding_for", lambda *args, **kwargs: None)
    jax.clear_caches()
    assert roundings() == 2 * apart
