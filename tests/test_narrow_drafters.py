"""Drafters of hidden states with narrow weights."""

import jax.numpy as jnp
import numpy as np
import pytest
from feature_drafters import llama_target
from flax import nnx
from test_distillation_features import PROMPTS, drafted, student_of

import emsjax
from emsjax.benchmarks import drafting
from emsjax.benchmarks.runs import random_model
from emsjax.benchmarks.shapes import MODELS
from emsjax.models.linears import LINEARS, NarrowLinear, dense_weight

DRAFTERS = {"eagle3": (emsjax.Eagle3, "int4"), "dspark": (emsjax.BlockDrafter, "int8-weights")}


def narrowed(network):
    """The linear layers that are to be narrow, each with its owner and its name."""
    found = [(layer, name) for layer in network.layers for name in LINEARS]
    return [(owner, name, getattr(owner, name)) for owner, name in [(network, "fc"), *found]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The drafters of `DRAFTERS`, as they were saved and as they are loaded with narrow weights."""
    pairs = {}
    for kind, (make, format) in DRAFTERS.items():
        student, folder = student_of(kind), tmp_path_factory.mktemp(kind)
        wide = student.drafter(student.module, llama_target(), 3)
        wide.save_pretrained(folder)
        options = {"quantize": format, "max_draft_tokens": 3}
        pairs[kind] = wide, make.from_pretrained(folder, llama_target(), **options)
    return pairs


@pytest.mark.parametrize("kind", DRAFTERS)
def test_narrow_drafters_draft_from_the_rounded_weights(kind, loaded):
    wide, narrow = loaded[kind]
    assert narrow.network.quantization == DRAFTERS[kind][1]
    dense = nnx.merge(*nnx.split(wide.network))
    for (_, _, one), (owner, name, other) in zip(
        narrowed(narrow.network), narrowed(dense), strict=True
    ):
        assert isinstance(one, NarrowLinear)
        rounded, exact = dense_weight(one), np.asarray(other.kernel[...])
        assert 0 < np.abs(rounded - exact).max() < 0.2 * np.abs(exact).max()
        getattr(owner, name).kernel[...] = rounded
    for name in ("embeddings", "draft_ids"):
        np.testing.assert_array_equal(getattr(narrow, name), getattr(wide, name))
    if narrow.network.lm_head is None:  # the target's
        np.testing.assert_array_equal(narrow.head, wide.head)
    else:
        rounded, exact = narrow.head.dense().T, np.asarray(wide.head)
        assert 0 < np.abs(rounded - exact).max() < 0.2 * np.abs(exact).max()
        dense.lm_head.embedding[...] = rounded
    assert any(one.network.lm_head is not None for one, _ in loaded.values())
    _, expected = drafted(
        type(wide)(dense, wide.draft_ids, wide.shared, max_draft_tokens=3), PROMPTS
    )
    _, found = drafted(narrow, PROMPTS)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_greedy_tokens_equal_plain_decoding(loaded):
    """Also with a format that rounds rows."""
    wide, _ = loaded["eagle3"]
    network = wide.network.quantize("int8")
    drafter = emsjax.Eagle3(network, wide.draft_ids, wide.shared, max_draft_tokens=3)
    plain, out = (
        emsjax.generate(llama_target(), PROMPTS, one, max_new_tokens=8) for one in (None, drafter)
    )
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert out.stats.num_drafted.sum() > 10


def test_what_cannot_be_done_with_narrow_weights_is_an_error(loaded, tmp_path):
    for kind, (make, format) in DRAFTERS.items():
        wide, narrow = loaded[kind]
        with pytest.raises(ValueError, match="quantize must be None or one of 'int8', "):
            make.from_pretrained(tmp_path / "none", quantize="int7")
        with pytest.raises(ValueError, match=f"the weights are in {format} already"):
            narrow.network.quantize("int8")
        with pytest.raises(ValueError, match=f"weights in {format} have no other dtype"):
            narrow.network.astype(jnp.bfloat16)
        with pytest.raises(ValueError, match=f"with weights in {format} cannot be saved"):
            narrow.save_pretrained(tmp_path / kind)
        assert wide.network.quantization is None
    assert not any(tmp_path.iterdir())


def test_the_benchmark_times_narrow_drafters():
    sources = drafting.Sources(random_model(MODELS["tiny"]), "tiny", None, "int4")
    for name in (drafting.EAGLE3, drafting.BLOCK):
        assert sources.make(name).network.quantization == "int4"
    assert sources.make(drafting.MODEL).draft_model.quantization == "int4"
