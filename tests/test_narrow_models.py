"""Models with narrow weights: decoding is lossless, and the weights are those that are read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden import tiny_families
from golden.tiny_families import VARIANTS

import emsjax
from emsjax import embedded
from emsjax.benchmarks.shapes import MODELS
from emsjax.device import tree_bytes
from emsjax.models.linears import NarrowLinear, dense_weight
from emsjax.models.numbers import NumberFormats
from emsjax.testing import assert_lossless
from pallas_kernels.matmul.narrow import FORMATS

every_format = pytest.mark.parametrize("format", FORMATS)
PROMPTS = [[5, 6, 7, 5, 6], [9, 8], [11, 12, 13, 11, 12, 13, 11]]
NEW = 12


@functools.cache
def target():
    """The smaller embedded model, which has fewer layers to compile."""
    return emsjax.from_pretrained(embedded.DRAFT, dtype="float32")


def generated(model, drafter=None, **options):
    return emsjax.generate(model, PROMPTS, drafter, max_new_tokens=NEW, **options).tokens


@every_format
def test_weights_are_rounded_alike_while_loading_and_after(format):
    loaded = emsjax.from_pretrained(embedded.DRAFT, dtype="float32", quantize=format)
    made = target().quantize(format)
    assert loaded.quantization == made.quantization == format
    jax.tree.map(np.testing.assert_array_equal, nnx.state(loaded), nnx.state(made))
    bits = {"int4": 4}.get(format, 8)
    rounded = sum(dense_weight(one).size for one in linears(target()))
    others = sum(one.size for one in jax.tree.leaves(nnx.state(target()))) - rounded
    needed = 4 * others + rounded * bits // 8
    assert needed < tree_bytes(loaded) < 1.02 * needed  # scales
    assert made.embed_tokens.embedding[...] is target().embed_tokens.embedding[...]


def linears(model):
    names = ("qkv_proj", "out_proj", "up_proj", "down_proj")
    return [getattr(layer, name) for layer in model.layers for name in names]


@every_format
def test_decoding_is_lossless(format):
    assert_lossless(target().quantize(format), emsjax.PromptLookup(), PROMPTS, max_new_tokens=NEW)


@pytest.mark.parametrize("format", ["int4", "int8-weights"])
def test_tokens_are_those_of_the_dense_model_with_the_same_values(format):
    narrow, dense = (
        target().quantize(format),
        emsjax.from_pretrained(embedded.DRAFT, dtype="float32"),
    )
    for one, other in zip(linears(narrow), linears(dense), strict=True):
        assert isinstance(one, NarrowLinear)
        other.kernel[...] = dense_weight(one)
    scores = [emsjax.score(model, PROMPTS, PROMPTS).logprobs for model in (narrow, dense)]
    for one, other in zip(*scores, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    np.testing.assert_array_equal(generated(narrow), generated(dense))
    assert (generated(narrow) != generated(target())).any() or format == "int8-weights"


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_has_narrow_weights(variant, tmp_path):
    config = VARIANTS[variant]
    tiny_families.write_checkpoint(tmp_path, config, tiny_families.tensors(config))
    load = functools.partial(emsjax.from_pretrained, tmp_path, dtype="float32")
    dense = load()
    # What int8 does to rows depends on no family: those with another order of columns have it too.
    for format in ("int8", "int4") if variant in ("codegen", "gemma3", "gpt2") else ("int4",):
        narrow = load(quantize=format)
        for one, other in zip(linears(narrow), linears(dense), strict=True):
            other.kernel[...] = dense_weight(one)
        scores = [emsjax.score(model, PROMPTS[:1], PROMPTS[:1]) for model in (narrow, dense)]
        one, other = (np.asarray(score.logprobs[0]) for score in scores)
        # With int8 the rows are rounded as well.
        np.testing.assert_allclose(one, other, atol=0.2 if format == "int8" else 1e-4)


def test_a_model_drafts_for_itself():
    model = emsjax.from_pretrained(embedded.TARGET, dtype="float32")
    drafter = emsjax.DraftModel(model.quantize("int4"))
    out = assert_lossless(model, drafter, PROMPTS, max_new_tokens=48).output
    assert out.stats.acceptance_rate > 0.7


def test_what_cannot_be_is_an_error():
    load = functools.partial(emsjax.from_pretrained, embedded.TARGET)
    with pytest.raises(ValueError, match=r"quantize must be None or one of 'int8', .* not 'int3'"):
        load(quantize="int3")
    with pytest.raises(ValueError, match="quantize must be None or one of"):
        target().quantize("q4")
    narrow = target().quantize("int8")
    with pytest.raises(ValueError, match="the weights are in int8 already"):
        narrow.quantize("int4")
    with pytest.raises(ValueError, match="weights in int8 have no other dtype"):
        narrow.astype(jnp.bfloat16)


@pytest.mark.parametrize("quantize", [None, *FORMATS])
def test_a_model_made_narrow_layer_by_layer_is_one_made_narrow_at_once(quantize):
    numbers = NumberFormats(jnp.float32, quantize, "fp8")
    made, wide = (of.model(MODELS["tiny"], seed=3) for of in (numbers, NumberFormats(jnp.float32)))
    expected = (wide if quantize is None else wide.quantize(quantize)).with_kv_dtype("fp8")
    assert nnx.graphdef(made) == nnx.graphdef(expected)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(made), nnx.state(expected))
    assert NumberFormats.of(made) == numbers
    weights = "" if quantize is None else f", weights in {quantize}"
    assert str(numbers) == f"float32{weights}, caches in fp8"
