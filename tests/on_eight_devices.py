"""A model over eight devices, and eight devices in groups; `test_tensor_parallel.py` runs these
tests in a process that has as many.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from toy import POSITIONS, VOCAB, ragged_prompts

import emsjax
from emsjax.models.decoder import Decoder
from emsjax.models.llama import LlamaConfig

PROMPTS = ragged_prompts([9, 2, 21, 1, 14] * 2)


def model() -> Decoder:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,  # each on four of the devices
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
        eos_token_id=None,
    )
    return Decoder(config, rngs=nnx.Rngs(3), dtype=jnp.float32)


def lookup():
    return emsjax.PromptLookup(match_length=1, search_generated=True)


def meshes(size: int) -> list[jax.sharding.Mesh]:
    """All devices as groups of this size."""
    groups = np.reshape(jax.devices(), (-1, size))
    return [jax.make_mesh((size,), ("tp",), devices=group) for group in groups]


def test_tokens_equal_those_of_one_device():
    (mesh,) = meshes(8)
    options = {"max_new_tokens": 8, "sampling": emsjax.Sampling(0.8, 30), "key": jax.random.key(2)}
    expected = emsjax.generate(model(), PROMPTS, **options)
    out = emsjax.generate(model().split(mesh), PROMPTS, lookup(), **options)
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    assert out.stats.num_drafted.sum() > 0


def test_groups_complete_every_prompt_once():
    expected = emsjax.generate(model(), PROMPTS, max_new_tokens=6).tokens
    options = {"batch_size": 2, "max_new_tokens": 6, "devices": meshes(4)}
    done = list(emsjax.stream(model(), PROMPTS, lookup(), **options))
    assert sorted(c.prompt for c in done) == list(range(len(PROMPTS)))
    for completion in done:
        np.testing.assert_array_equal(completion.tokens, expected[completion.prompt])
