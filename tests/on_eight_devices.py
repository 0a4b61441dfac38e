"""A model over eight devices, and eight devices in groups; `test_tensor_parallel.py` runs these
tests in a process that has as many.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toy import POSITIONS, VOCAB, ragged_prompts, tiny_model

import emsjax
from emsjax.models.decoder import Decoder
from emsjax.models.llama import LlamaConfig

MODELS = {
    "opt": lambda: tiny_model(num_attention_heads=8, hidden_size=64, word_embed_proj_dim=64),
    "llama": lambda: Decoder(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,  # each on four of the devices
            max_position_embeddings=POSITIONS,
            initializer_range=0.3,
            eos_token_id=None,
        ),
        rngs=nnx.Rngs(3),
        dtype=jnp.float32,
    ),
}
PROMPTS = ragged_prompts([9, 2, 21, 1, 14] * 2)


def lookup():
    return emsjax.PromptLookup(match_length=1, search_generated=True)


def meshes(size: int) -> list[jax.sharding.Mesh]:
    """All devices as groups of this size."""
    groups = np.reshape(jax.devices(), (-1, size))
    return [jax.make_mesh((size,), ("tp",), devices=group) for group in groups]


@pytest.mark.parametrize("family", MODELS)
def test_tokens_equal_those_of_one_device(family):
    model = MODELS[family]()
    (mesh,) = meshes(8)
    options = {"max_new_tokens": 12, "sampling": emsjax.Sampling(0.8, 30)}
    expected = emsjax.generate(model, PROMPTS, key=jax.random.key(2), **options)
    out = emsjax.generate(model.split(mesh), PROMPTS, lookup(), key=jax.random.key(2), **options)
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    assert out.stats.num_drafted.sum() > 0


@pytest.mark.parametrize("size", [2, 4, 8])
def test_groups_complete_every_prompt_once(size):
    model = MODELS["llama"]()
    expected = emsjax.generate(model, PROMPTS, max_new_tokens=6).tokens
    options = {"batch_size": 2, "max_new_tokens": 6, "devices": meshes(size)}
    done = list(emsjax.stream(model, PROMPTS, lookup(), **options))
    assert sorted(c.prompt for c in done) == list(range(len(PROMPTS)))
    for completion in done:
        np.testing.assert_array_equal(completion.tokens, expected[completion.prompt])
