"""A sample whose numbers are not finite ends with an error and leaves the others alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toy import CARELESS, POSITIONS, ragged_prompts, shallow_model

import emsjax
from emsjax.models.opt import POSITION_OFFSET

GOOD = 40  # positions with a finite embedding
LENGTHS, NEW = (5, 9, 20), 12
SAMPLED = emsjax.Sampling(0.9, top_k=20, top_p=0.9)
numbers = pytest.mark.parametrize("number", [np.nan, np.inf])


@functools.cache
def poisoned(number):
    """The model whose table of positions is not finite beyond the first ones."""
    model = nnx.clone(shallow_model())
    table = model.embed_positions.embedding
    table[...] = table[...].at[GOOD + POSITION_OFFSET :, 3].set(number)
    return model


def drafters():
    return {
        "plain": None,
        "prompt lookup": emsjax.PromptLookup(match_length=1),
        "draft model": emsjax.DraftModel(shallow_model(ffn_dim=32), 3),
        "no pytree": CARELESS,
    }


every_drafter = pytest.mark.parametrize("drafter", list(drafters()))


def check_apart(out, clean, number_of_bad=1):
    """Other sequences equal those of a clean batch; the bad ones come last."""
    good = len(clean.lengths) - number_of_bad
    np.testing.assert_array_equal(out.tokens[:good], clean.tokens[:good])
    np.testing.assert_array_equal(out.lengths[:good], clean.lengths[:good])
    np.testing.assert_allclose(out.logprobs[:good], clean.logprobs[:good], atol=2e-5)
    assert out.finish_reasons == clean.finish_reasons[:good] + ["error"] * number_of_bad
    assert np.isfinite(out.logprobs).all()


@numbers
@pytest.mark.parametrize(
    ("attention", "sampling"), [("reference", None), (None, SAMPLED)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("drafter", ["plain", "prompt lookup", "draft model"])
def test_a_bad_prompt_ends_at_once_and_leaves_the_others_alone(
    drafter, sampling, attention, number
):
    options = {
        "drafter": drafters()[drafter],
        "max_new_tokens": NEW,
        "sampling": sampling,
        "key": jax.random.key(1),
        "attention_implementation": attention,
    }
    prompts = ragged_prompts([*LENGTHS, 50])
    clean = emsjax.generate(shallow_model(), prompts, **options)  # of the same compiled loop
    out = emsjax.generate(poisoned(number), prompts, **options)
    check_apart(out, clean)
    assert out.lengths[3] == out.stats.num_accepted[3] == 0


@every_drafter
@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_before_the_error_are_kept_whatever_is_drafted(drafter, sampling):
    """The row at the first bad position has no next token; all rows before it have theirs."""
    prompts = ragged_prompts([*LENGTHS, GOOD - 4, GOOD, GOOD + 1])
    options = {"sampling": sampling, "key": jax.random.key(2), "max_new_tokens": NEW}
    options["drafter"] = drafters()[drafter]
    clean = emsjax.generate(shallow_model(), prompts, **options)
    out = emsjax.generate(poisoned(np.nan), prompts, **options)
    assert out.lengths.tolist() == [NEW, NEW, NEW, 5, 1, 0]
    assert out.finish_reasons == ["length"] * 3 + ["error"] * 3
    if sampling is None or drafter != "draft model":  # whose drafts differ beside the last row
        for row, length in enumerate(out.lengths):
            np.testing.assert_array_equal(out.tokens[row, :length], clean.tokens[row, :length])


@every_drafter
def test_slots_of_bad_sequences_are_refilled(drafter):
    """Slots that held NaN serve the next sequences, and copies of a bad prompt fail as it does."""
    prompts = ragged_prompts([50, *LENGTHS, 45, 36, 7, 3])
    options = {"max_new_tokens": NEW, "num_sequences": 2, "drafter": drafters()[drafter]}
    options |= {"sampling": SAMPLED, "key": jax.random.key(3)}
    whole = emsjax.generate(poisoned(np.nan), prompts, **options)
    out = emsjax.generate(poisoned(np.nan), prompts, **options, batch_size=3)
    expected = np.repeat([0, NEW, NEW, NEW, 0, 5, NEW, NEW], 2)
    np.testing.assert_array_equal(whole.lengths, expected)
    np.testing.assert_array_equal(out.lengths, expected)
    np.testing.assert_array_equal(out.tokens, whole.tokens)
    assert out.finish_reasons == whole.finish_reasons
    assert out.finish_reasons.count("error") == 6


@pytest.mark.parametrize("unpad_kv_cache", [False, True])
@pytest.mark.parametrize("unpad_inputs", [False, True])
def test_padded_methods_keep_a_bad_sample_apart(unpad_kv_cache, unpad_inputs):
    options = {"unpad_kv_cache": unpad_kv_cache, "unpad_inputs": unpad_inputs}
    options |= {"max_new_tokens": NEW, "drafter": drafters()["prompt lookup"]}
    prompts = ragged_prompts([*LENGTHS, 50, 36])
    clean = emsjax.vanilla.generate(shallow_model(), prompts, **options)
    out = emsjax.vanilla.generate(poisoned(np.nan), prompts, **options)
    check_apart(out, clean, 2)
    assert out.lengths[3:].tolist() == [0, 5]


def test_one_step_reports_no_token_and_stops_the_sample():
    prompts = ragged_prompts([5, 50])
    model = poisoned(np.nan)
    state = emsjax.init_state(model, None, prompts, max_new_tokens=NEW)
    state, info = jax.jit(emsjax.step)(model, None, state)
    assert info.num_emitted.tolist() == [1, 0]
    assert state.active.tolist() == [True, False]


def test_an_end_token_before_the_error_counts_first():
    """A draft that ends with an accepted end token is followed by a row that is not finite."""
    prompt = ragged_prompts([GOOD - 4])
    clean = emsjax.generate(shallow_model(), prompt, max_new_tokens=8)
    for end in range(1, 6):  # tokens emitted up to the end token
        token = int(clean.tokens[0, end - 1])
        if token in clean.tokens[0, : end - 1]:
            continue
        for drafter in (None, Oracle(tuple(clean.tokens[0].tolist()), len(prompt[0]))):
            out = emsjax.generate(
                poisoned(np.nan), prompt, drafter, max_new_tokens=8, eos_token_ids=[token]
            )
            assert (out.finish_reasons, out.lengths.tolist()) == (["eos"], [end])


class Oracle(emsjax.Drafter):
    """Drafts a known continuation of one prompt."""

    max_draft_tokens = 7

    def __init__(self, continuation, prompt_length):
        self.continuation, self.prompt_length = continuation, prompt_length

    def init(self, prompts, prompt_lengths, max_len):
        return ()

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        known = jnp.asarray((*self.continuation, *[0] * POSITIONS), jnp.int32)
        at = lengths[:, None] - self.prompt_length + jnp.arange(self.max_draft_tokens)
        return emsjax.Draft(known[at], draft_lengths), state
