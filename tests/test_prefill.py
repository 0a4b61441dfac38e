"""Prefill gives the same cache for any chunk size, with activations of one chunk at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import VOCAB, tiny_model

from emsjax.decode import row_counts
from emsjax.decode.kernels import resolve_kernels
from emsjax.decode.prefill import prefill

LENGTHS = [9, 0, 33, 1, 20]


def filler():
    """A new function, which is traced with the present value of MAX_CHUNK_ROWS."""
    return lambda *args: prefill(*args, kernels=resolve_kernels(None))


def filled(lengths, already=0):
    """The cache after prefilling to `already` tokens, then to `lengths`."""
    model, batch = tiny_model(), len(lengths)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (batch, 64)), jnp.int32)
    cache = model.init_cache(batch, 64)
    for target in (np.minimum(lengths, already), lengths):
        cache = jax.jit(filler())(model, cache, tokens, jnp.asarray(target, jnp.int32))
    return cache


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_chunks_do_not_change_the_cache(rows, monkeypatch):
    whole = filled(LENGTHS)
    monkeypatch.setattr(row_counts, "MAX_CHUNK_ROWS", rows)
    chunked = filled(LENGTHS, already=8)
    assert chunked.lengths.tolist() == whole.lengths.tolist() == LENGTHS
    for old, new in zip(
        jax.tree.leaves(whole.layers), jax.tree.leaves(chunked.layers), strict=True
    ):
        for sample, length in enumerate(LENGTHS):
            np.testing.assert_allclose(new[sample, :length], old[sample, :length], atol=2e-5)
            assert (np.asarray(new[sample, length:]) == 0).all()


def test_activations_of_long_prompts_are_as_large_as_one_chunk():
    model, batch, width = tiny_model(), 24, 2048
    tokens, lengths = jnp.zeros((batch, width), jnp.int32), jnp.full(batch, 1919, jnp.int32)
    text = str(jax.make_jaxpr(filler())(model, model.init_cache(batch, width), tokens, lengths))
    assert f"f32[{row_counts.MAX_CHUNK_ROWS},{model.config.hidden_size}]" in text
    assert f"[{batch * width}," not in text
    assert f",{VOCAB}]" not in text  # no logits are computed
