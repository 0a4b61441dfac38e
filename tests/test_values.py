"""Results compare, copy and pickle as other values do."""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import ragged_prompts, tiny_model

import emsjax
from emsjax.testing import assert_lossless
from emsjax.values import equal

PROMPTS = ragged_prompts([5, 9])
LOOKUP = emsjax.PromptLookup(match_length=1)
SAMPLED = {"max_new_tokens": 4, "sampling": emsjax.Sampling([0.5, 0.9]), "key": jax.random.key(1)}


def outcomes():
    """One value of each public dataclass that holds arrays, and one that differs from it."""
    model = tiny_model()
    out = emsjax.generate(model, PROMPTS, LOOKUP, max_new_tokens=4)
    other = emsjax.generate(model, PROMPTS[::-1], LOOKUP, max_new_tokens=4)
    state = emsjax.init_state(model, LOOKUP, PROMPTS, **SAMPLED)
    after, info = emsjax.step(model, LOOKUP, state)
    streamed = list(emsjax.stream(model, PROMPTS, batch_size=2, max_new_tokens=4))
    checked = [
        assert_lossless(model, LOOKUP, prompts, max_new_tokens=4)
        for prompts in (PROMPTS, PROMPTS[::-1])
    ]
    costs = [emsjax.StepCosts.of({1: 1.0, 8: ms}) for ms in (2.0, 3.0)]
    return {
        "output": (out, other),
        "stats": (out.stats, other.stats),
        "completion": streamed,
        "refusal": (
            next(emsjax.stream(model, iter([[]]), batch_size=1, max_new_tokens=1, max_len=8)),
            streamed[0],
        ),
        "state": (state, after),
        "info": (info, dataclasses.replace(info, num_rows=info.num_rows + 1)),
        "lossless": checked,
        "sampling": (emsjax.Sampling([0.5, 0.9]), emsjax.Sampling([0.5, 0.8])),
        "costs": costs,
        "goodput": [emsjax.Goodput(one) for one in costs],
        "capped": [emsjax.CostCapped(emsjax.BassHeuristic(), one) for one in costs],
        "scores": [emsjax.score(model, PROMPTS, PROMPTS[::step]) for step in (1, -1)],
        "draft": [emsjax.Draft(jnp.full((1, 2), n), jnp.ones(1, jnp.int32)) for n in (3, 4)],
    }


@pytest.mark.usefixtures("unchecked_annotations")
def test_results_equal_their_copies_and_differ_from_others():
    for name, (one, other) in outcomes().items():
        assert one == one, name
        assert one != other, name
        assert one != 3, name
        for copied in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert copied == one, name
            assert copied != other, name


def test_arrays_are_equal_if_shape_and_entries_are():
    nan = np.array([1.0, np.nan])
    assert equal(nan, nan.copy())
    assert equal(np.arange(3), jnp.arange(3))
    assert not equal(np.zeros(2), np.zeros((2, 1)))
    assert not equal(np.zeros(1), 0.0)
    assert not equal(np.zeros(2), None)
    assert not equal(None, np.zeros(2))
    assert not equal(jax.random.key(1), jax.random.key(2))
    assert not equal(jax.random.key(0), np.zeros(()))
    assert equal(jax.random.key(1), jax.random.key(1))
    assert equal([np.zeros(2), (1, None)], [np.zeros(2), (1, None)])
    assert not equal([np.zeros(2)], (np.zeros(2),))


def test_settings_without_arrays_can_be_hashed():
    assert hash(emsjax.Sampling(0.5)) == hash(emsjax.Sampling(0.5))
    assert emsjax.Sampling(0.5) in {emsjax.Sampling(0.5)}
