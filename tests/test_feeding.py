"""Wherever a step commits it says the same, and no cache is copied."""

import re

import jax
import numpy as np
import pytest
from toy import ragged_prompts, tiny_model

import emsjax
from emsjax import generation, vanilla
from emsjax.decode import forward as feeding
from emsjax.decode.cache import FreshRows
from emsjax.decode.refill import refill_loop
from emsjax.decode.step import decode_loop
from emsjax.engine import slots

LENGTHS = [5, 9, 20, 3, 14, 1]
RUNS = {
    "ems": emsjax.generate,
    "vanilla": vanilla.generate,
    "refilled": lambda *args, **options: emsjax.generate(*args, batch_size=4, **options),
}
every_run = pytest.mark.parametrize("name", RUNS)
pytestmark = pytest.mark.usefixtures("few_row_counts", "two_row_counts", "unchecked_annotations")


def drafter() -> emsjax.DraftModel:
    """Right at times."""
    return emsjax.DraftModel(tiny_model(num_hidden_layers=1), 3)


@every_run
def test_a_step_says_the_same_wherever_it_commits(fresh_loops, monkeypatch, name):
    sampled = {"sampling": emsjax.Sampling(0.9), "key": jax.random.key(3)}
    options = {"max_new_tokens": 12, **({} if name == "vanilla" else sampled)}

    copies, keys_values = [], FreshRows.keys_values

    def watched(fresh, num_rows):
        copies.append(num_rows)
        return keys_values(fresh, num_rows)

    def decode(inside: bool):
        fresh_loops()
        monkeypatch.setattr(feeding, "BRANCHES_COMMIT", inside)
        return RUNS[name](tiny_model(), ragged_prompts(LENGTHS), drafter(), **options)

    monkeypatch.setattr(FreshRows, "keys_values", watched)
    after = decode(False)
    assert copies
    copies.clear()
    inside = decode(True)
    assert not copies
    np.testing.assert_array_equal(inside.tokens, after.tokens)
    np.testing.assert_allclose(inside.logprobs, after.logprobs, atol=1e-5)
    np.testing.assert_array_equal(inside.stats.num_accepted, after.stats.num_accepted)
    assert 0 < inside.stats.num_accepted.sum() < inside.stats.num_drafted.sum()


@every_run
def test_no_loop_copies_a_cache(monkeypatch, name):
    compiled = []

    def watched(loop):
        def call(model, drafter, state, *rest, **options):
            arguments = (model, drafter, state, *rest)
            if not compiled:  # of a refilled run there are several
                text = loop.lower(*arguments, **options).compile().as_text()
                compiled.append((text, state.cache.layers.keys[0].shape))
            return loop(*arguments, **options)

        return call

    monkeypatch.setattr(generation, "decode_loop", watched(decode_loop))
    monkeypatch.setattr(slots, "refill_loop", watched(refill_loop))
    RUNS[name](tiny_model(), ragged_prompts(LENGTHS), emsjax.PromptLookup(), max_new_tokens=12)
    ((text, shape),) = compiled
    cache = re.escape(f"f32[{','.join(map(str, shape))}]")
    assert re.search(rf"{cache}\S* parameter\(", text)
    assert re.findall(rf"= {cache}\S* copy\(.*", text) == []
