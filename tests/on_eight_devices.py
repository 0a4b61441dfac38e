"""A model over eight devices, and eight devices in groups; `test_tensor_parallel.py` runs these
tests in a process that has as many.
"""

import jax
import numpy as np
from on_mesh import LENGTHS, LOOKUP, SAMPLED, grouped_model
from toy import ragged_prompts

import emsjax

PROMPTS = ragged_prompts(LENGTHS * 2)


def model():
    """Each of its two heads of keys and values is on four of the devices."""
    return grouped_model(hidden_size=64, num_attention_heads=8, intermediate_size=48)


def meshes(size: int) -> list[jax.sharding.Mesh]:
    """All devices as groups of this size."""
    groups = np.reshape(jax.devices(), (-1, size))
    return [jax.make_mesh((size,), ("tp",), devices=group) for group in groups]


def test_tokens_equal_those_of_one_device():
    (mesh,) = meshes(8)
    expected = emsjax.generate(model(), PROMPTS, max_new_tokens=8, **SAMPLED)
    out = emsjax.generate(model().split(mesh), PROMPTS, LOOKUP(), max_new_tokens=8, **SAMPLED)
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    assert out.stats.num_drafted.sum() > 0


def test_groups_complete_every_prompt_once():
    expected = emsjax.generate(model(), PROMPTS, max_new_tokens=6).tokens
    options = {"batch_size": 2, "max_new_tokens": 6, "devices": meshes(4)}
    done = list(emsjax.stream(model(), PROMPTS, LOOKUP(), **options))
    assert sorted(c.prompt for c in done) == list(range(len(PROMPTS)))
    for completion in done:
        np.testing.assert_array_equal(completion.tokens, expected[completion.prompt])
