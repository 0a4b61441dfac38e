"""Products whose bits do not depend on the number of rows, by every implementation."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kernel_cases import lower_for_cuda
from test_linear import ACTIVATIONS_IN_NUMPY, close, random

import pallas_kernels
from emsjax.benchmarks.shapes import MODELS
from emsjax.models.decoder import Decoder
from emsjax.models.families import OPTConfig
from pallas_kernels import matmul
from pallas_kernels.matmul import gate, mosaic, triton

CAPABILITY = "pallas_kernels.common.implementations._compute_capability"
NAN = float("nan")
INVARIANT = {"numerics": "invariant"}
TRITON = {**INVARIANT, "implementation": "triton", "interpret": True}
IS_OLD = jax.__version_info__ < (0, 11)
needs_mosaic = pytest.mark.skipif(IS_OLD, reason="jax 0.11 is the first to run it")
both_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def products(inputs, outputs, dtype, options):
    """Each kind of product of rows with weights of these sizes."""
    weight, wide = (random(inputs, n, dtype=dtype, seed=n) / 4 for n in (outputs, 2 * outputs))
    bias, both = (random(n, dtype=dtype, seed=n + 1) for n in (outputs, 2 * outputs))
    linear = functools.partial(pallas_kernels.linear, **options)
    sums = functools.partial(pallas_kernels.linear_sums, **options)
    gated = functools.partial(linear, activation="silu", gated=True)
    return {
        "biased": (lambda x: linear(x, weight, bias), weight, bias, None),
        "gelu": (lambda x: linear(x, weight, activation="gelu"), weight, None, "gelu"),
        "gated": (lambda x: gated(x, wide, both), wide, both, "silu"),
        "sums": (lambda x: sums(x, weight), weight, None, None),
        "transposed": (lambda x: sums(x, weight.T, transposed=True), weight, None, None),
    }


KINDS = ("biased", "gelu", "gated", "sums", "transposed")
every_kind = pytest.mark.parametrize("kind", KINDS)


def differing(product, counts, x, first=37):
    """The numbers of rows that have other bits than the same rows of a larger product."""
    product = jax.jit(product)
    whole = np.asarray(product(x))
    part = lambda n: np.asarray(product(x[first : first + n]))
    return [n for n in counts if part(n).tobytes() != whole[first : first + n].tobytes()]


COUNTS = (1, 2, 3, 15, 16, 17, 33, 130)


@both_dtypes
@every_kind
def test_rows_have_the_same_bits_in_calls_of_any_number_of_rows(kind, dtype):
    """A kind has every second number of rows with one dtype, and the others with the other."""
    product = products(512, 512, dtype, INVARIANT)[kind][0]
    counts = COUNTS[(KINDS.index(kind) + (dtype == "float32")) % 2 :: 2]
    assert differing(product, counts, random(300, 512, dtype=dtype)) == []


def test_rows_of_fast_products_have_other_bits_in_calls_of_other_numbers_of_rows():
    """Otherwise the test above could not fail."""
    product = products(512, 512, "float32", {"numerics": "fast"})["sums"][0]
    assert differing(product, COUNTS, random(300, 512))


@pytest.fixture
def poison_outside(monkeypatch):
    """What an interpreted kernel reads or writes outside of its arrays makes its results NaN."""

    def poisoned(values, ref, mask):
        sizes, places = ref.ref.shape, ref.transforms[0].indices
        inside = True if mask is None else ~mask
        fit = [(place >= 0) & (place < size) for place, size in zip(places, sizes, strict=True)]
        return values + jnp.where(jnp.all(inside | functools.reduce(jnp.logical_and, fit)), 0, NAN)

    load, store = triton.plgpu.load, triton.plgpu.store
    read = lambda ref, mask=None, **rest: poisoned(load(ref, mask=mask, **rest), ref, mask)
    write = lambda ref, values, mask: store(ref, poisoned(values, ref, mask), mask=mask)
    monkeypatch.setattr(triton, "plgpu", SimpleNamespace(**vars(triton.plgpu)))
    monkeypatch.setattr(triton.plgpu, "load", read)
    monkeypatch.setattr(triton.plgpu, "store", write)
    triton.launch.clear_cache()
    yield
    triton.launch.clear_cache()


@both_dtypes
@every_kind
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    # The last has three whole tiles of rows, and its sums are in shares of whole blocks.
    [(1, 32, 61), (3, 100, 150), (130, 100, 61), (384, 512, 70)],
)
@pytest.mark.usefixtures("poison_outside")
def test_interpreted_triton_kernels_take_any_sizes(rows, inputs, outputs, kind, dtype):
    x = random(rows, inputs, dtype=dtype)
    product, weight, bias, activation = products(inputs, outputs, dtype, TRITON)[kind]
    actual = np.float64(product(x))
    actual = actual.sum(axis=0) if actual.ndim == 3 else actual
    expected = np.float64(x) @ np.float64(weight) + (0 if bias is None else np.float64(bias))
    expected, up = np.split(expected, 2, axis=1) if kind == "gated" else (expected, 1)
    close(actual, ACTIVATIONS_IN_NUMPY[activation](expected) * up, dtype, scale=20)


def weights(config):
    """The inputs and outputs of a model's products, and the kind of each."""
    a, split, transposed = config.architecture, {"split": True}, {"transposed": True}
    yield a.width, sum(a.columns), {}
    yield a.width, sum(a.columns), split
    yield a.heads * a.head_dim, a.width, split
    yield a.width, (1 + a.gated) * a.ffn_size, {}
    yield a.ffn_size, a.width, split
    yield a.embedding_width or a.width, a.vocab_size, transposed


def kernel_for(rows, inputs, outputs, *, transposed=False, dtype="bfloat16", **kind):
    shape = (outputs, inputs) if transposed else (inputs, outputs)
    x, weight = (jax.ShapeDtypeStruct(n, jnp.dtype(dtype)) for n in ((rows, inputs), shape))
    return matmul._kernel_for(x, weight, None, False, transposed=transposed, **kind)


ROWS = (1, 2, 16, 17, 32, 33, 40, 64, 65, 100, 128, 129, 200, 256, 300, 392, 500, 512, 800, 1024)


@pytest.mark.parametrize("name", MODELS)
def test_shares_depend_on_the_weight_alone(name, monkeypatch):
    monkeypatch.setattr(CAPABILITY, lambda: 9.0)
    for inputs, outputs, kind in weights(MODELS[name]):
        invariant = functools.partial(kernel_for, invariant=True, **kind)
        kernels = {rows: invariant(rows, inputs, outputs) for rows in ROWS}
        assert len({tiling.splits for _, tiling in kernels.values()}) == 1
        for rows, (module, tiling) in kernels.items():
            assert inputs % tiling.multiples[0] == 0 or tiling.splits == 1
            # The last tile of a head may be an unfinished one.
            unit = 32 if kind.get("transposed") else 64
            is_mosaic = rows > 128 and outputs % unit == inputs % 64 == 0 and not IS_OLD
            assert module is (mosaic if is_mosaic else triton)
            if module is triton:
                programs = -(-rows // 128) * (outputs // tiling.columns) * tiling.splits
                assert programs >= triton.PROGRAMS_WANTED or tiling.columns == 32
            else:
                assert tiling.divides(inputs, outputs)
                assert tiling.stages >= 3
        fast = kernel_for(1, inputs, outputs, **kind)
        assert fast in (None, kernels[1])
        of_float32 = {invariant(rows, inputs, outputs, dtype="float32") for rows in ROWS}
        assert {module for module, _ in of_float32} == {triton}
        assert len({(tiling.splits, tiling.depth) for _, tiling in of_float32}) == 1


@needs_mosaic
@pytest.mark.parametrize("rows", [131, 136])
def test_many_rows_take_mosaic_where_the_device_runs_it(rows, monkeypatch):
    monkeypatch.setattr(CAPABILITY, lambda: 9.0)
    launches, launch = [], mosaic.launch
    record = lambda x, *rest, **options: launches.append(x.shape) or launch(x, *rest, **options)
    monkeypatch.setattr(mosaic, "launch", record)
    x, weight = random(rows, 512, dtype="bfloat16"), random(512, 128, dtype="bfloat16", seed=1)
    options = {**INVARIANT, "interpret": True}
    sums = pallas_kernels.linear_sums(x, weight, **options)
    assert launches == [(136, 512)]
    few = pallas_kernels.linear_sums(x[:8], weight, **options)
    assert launches == [(136, 512)]
    assert (sums.shape[1:], sums.shape[0], sums.dtype) == ((rows, 128), few.shape[0], few.dtype)
    expected = np.float64(x) @ np.float64(weight)
    close(np.float64(sums).sum(axis=0), expected, "bfloat16", scale=40)
    product = pallas_kernels.linear(x, weight, activation="relu", **options)
    close(product, np.maximum(expected, 0), "bfloat16", scale=20)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
# On a CPU the bits of a tangent depend on what it is compiled with.
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_a_gate_by_itself_has_the_bits_of_one_in_a_product(activation, dtype):
    rng = np.random.default_rng(0)
    integers = lambda *shape: jnp.asarray(rng.integers(-99, 100, shape), dtype)
    x, weight, bias = integers(5, 128) / 16, integers(128, 2 * 96), integers(2 * 96) / 4
    y = pallas_kernels.linear(x, weight, bias, **TRITON)  # exact before it is rounded
    options = {"activation": activation, "interpret": True}
    apart = gate.launch(y, **options)
    tiling = triton.tiling_for(5, *weight.shape)
    options |= {"tiling": tiling, "gated": True, "dtype": x.dtype}
    inside = functools.partial(triton.launch, x, weight, bias, **options)
    np.testing.assert_array_equal(apart, inside(rounded=True))
    assert np.array_equal(apart, inside(rounded=False)) == (dtype == "float32")
    invariant = {**TRITON, **INVARIANT, "activation": activation, "gated": True}
    np.testing.assert_array_equal(apart, pallas_kernels.linear(x, weight, bias, **invariant))


@pytest.mark.parametrize("capability", [8.0, 9.0])
@pytest.mark.parametrize("rows", [3, 16, 200])
def test_the_launches_lower_for_cuda(rows, capability, monkeypatch):
    monkeypatch.setattr(CAPABILITY, lambda: capability)
    linear = functools.partial(pallas_kernels.linear, activation="silu", **INVARIANT)
    sums = functools.partial(pallas_kernels.linear_sums, **INVARIANT)
    many = rows > 128 and capability == 9.0 and not IS_OLD
    for dtype in ("bfloat16", "float16", "float32"):
        x, odd = (rows, 1024, dtype), (rows, 100, dtype)
        backend = "mosaic_gpu" if many and dtype != "float32" else "triton"
        lower_for_cuda(sums, x, (1024, 1024, dtype), backend=backend)
        gated = functools.partial(linear, gated=True)
        lower_for_cuda(gated, x, (1024, 6144, dtype), (6144, dtype), backend=backend)
        lower_for_cuda(linear, odd, (100, 61, dtype), (61, dtype))
        lower_for_cuda(gated, odd, (100, 122, dtype), (122, dtype))
        lower_for_cuda(sums, odd, (100, 61, dtype))
        head = functools.partial(sums, transposed=True)
        lower_for_cuda(head, x, (50272, 1024, dtype), backend=backend)
        lower_for_cuda(head, odd, (61, 100, dtype))


@every_kind
@pytest.mark.parametrize("options", [INVARIANT, TRITON], ids=["xla", "triton"])
def test_gradients_equal_those_of_fast_products(kind, options):
    x, fast = random(19, 100), products(100, 61, "float32", {"implementation": "xla"})
    loss = lambda product: lambda x: jnp.sum(jnp.sin(product(x)))
    actual = jax.grad(loss(products(100, 61, "float32", options)[kind][0]))(x)
    close(actual, jax.grad(loss(fast[kind][0]))(x), "float32", scale=100)


def test_logits_and_embeddings_of_a_row_do_not_depend_on_other_rows():
    config = OPTConfig(
        vocab_size=1536,
        hidden_size=512,
        word_embed_proj_dim=256,
        ffn_dim=64,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    model = Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.float32)
    model.final_norm = None  # only products are tested here
    embed = lambda ids: model.embed(ids, 0 * ids)[0]
    x, ids = random(300, 512), jnp.arange(300)
    assert differing(model.logits, COUNTS[::2], x)
    with pallas_kernels.numerics("invariant"):
        assert differing(model.logits, COUNTS[::2], x) == []
        assert differing(embed, COUNTS[::2], ids) == []


@pytest.mark.parametrize("operation", [pallas_kernels.linear, pallas_kernels.linear_sums])
def test_other_numerics_raise_an_error(operation):
    with pytest.raises(ValueError, match="numerics must be 'fast' or 'invariant'"):
        operation(random(2, 64), random(64, 64), numerics="exact")
