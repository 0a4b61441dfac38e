"""No numbers that a drafter returns can change what is emitted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toy import VOCAB, ragged_prompts, shallow_model

import emsjax
from emsjax.verification import SUM_TOLERANCE, is_distribution

LENGTHS, K = (5, 9, 20), 3
OPTIONS = {
    "max_new_tokens": 12,
    "sampling": emsjax.Sampling(0.9, top_k=20),
    "key": jax.random.key(4),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Claims(emsjax.Drafter):
    """Drafts the token 3, and claims these probabilities for each draft position."""

    probs: jax.Array  # [k, v]
    max_draft_tokens: int = dataclasses.field(default=K, metadata={"static": True})

    def init(self, prompts, prompt_lengths, max_len):
        return ()

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        block = (len(lengths), *self.probs.shape)
        drafts = jnp.full(block[:2], 3, jnp.int32)
        return emsjax.Draft(drafts, draft_lengths, jnp.broadcast_to(self.probs, block)), state


def claims(*rows):
    """A drafter whose claims are the given rows; the other positions have a uniform one."""
    uniform = np.full(VOCAB, 1 / VOCAB, np.float32)
    return Claims(jnp.asarray([*rows, *[uniform] * (K - len(rows))]))


def changed(place, number):
    row = np.full(VOCAB, 1 / VOCAB, np.float32)
    row[place] = number
    return row


BAD = {
    "NaN": changed(7, np.nan),
    "infinite": changed(7, np.inf),
    "negative": changed([7, 8], [-0.5, 0.5 + 2 / VOCAB]),
    "zero": np.zeros(VOCAB, np.float32),
    "half": np.full(VOCAB, 0.5 / VOCAB, np.float32),
    "more than 1": np.full(VOCAB, (1 + 2 * SUM_TOLERANCE) / VOCAB, np.float32),
}


@pytest.mark.parametrize("row", BAD.values(), ids=BAD)
def test_a_token_drawn_from_no_distribution_is_no_draft(row):
    model, prompts = shallow_model(), ragged_prompts(LENGTHS)
    plain = emsjax.generate(model, prompts, **OPTIONS)
    out = emsjax.generate(model, prompts, claims(row), **OPTIONS)
    np.testing.assert_array_equal(out.tokens, plain.tokens)  # under the same keys
    assert out.stats.num_drafted.tolist() == [0] * 3
    # Every step but those near the end proposes three tokens, and none follows an invalid one.
    assert out.stats.num_invalid.tolist() == [9 * 3 + 2 + 1] * 3


def test_tokens_before_an_invalid_one_are_still_drafts():
    model, prompts = shallow_model(), ragged_prompts(LENGTHS)
    uniform = changed(0, 1 / VOCAB)
    out = emsjax.generate(model, prompts, claims(uniform, BAD["NaN"]), **OPTIONS)
    drafted, invalid = out.stats.num_drafted, out.stats.num_invalid
    assert (drafted > 0).all()
    assert (drafted <= out.stats.num_steps).all()
    assert (invalid > drafted).all()


def overflowing():
    """A draft model with finite weights whose activations overflow in float16."""
    small = nnx.clone(shallow_model(ffn_dim=32).astype(jnp.float16))
    kernel = small.layers[0].up_proj.kernel
    kernel[...] = 60_000 * jnp.sign(kernel[...])
    return small


def with_nan():
    small = nnx.clone(shallow_model(ffn_dim=32))
    kernel = small.layers[0].up_proj.kernel
    kernel[...] = kernel[...].at[0, 0].set(jnp.nan)
    return small


@pytest.mark.parametrize(("make", "batch_size"), [(with_nan, 2), (overflowing, None)])
def test_a_draft_model_that_is_not_finite_changes_nothing(make, batch_size):
    model, prompts = shallow_model(), ragged_prompts(LENGTHS)
    for sampled in (True, False):
        options = OPTIONS if sampled else {"max_new_tokens": 12}
        plain = emsjax.generate(model, prompts, **options)
        drafter = emsjax.DraftModel(make(), K)
        out = emsjax.generate(model, prompts, drafter, **options, batch_size=batch_size)
        np.testing.assert_array_equal(out.tokens, plain.tokens)
        assert out.finish_reasons == plain.finish_reasons
        assert (out.stats.num_invalid > 0).all() == sampled
        assert out.stats.num_accepted.sum() == 0 or not sampled


def test_a_completion_counts_invalid_tokens():
    (found,) = emsjax.stream(
        shallow_model(), ragged_prompts([5]), claims(BAD["zero"]), batch_size=1, **OPTIONS
    )
    assert (found.num_drafted, found.num_invalid) == (0, 30)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rounded_probabilities_of_a_large_vocabulary_are_a_distribution(dtype):
    logits = 3 * jax.random.normal(jax.random.key(0), (8, 50_272))
    probs = jax.nn.softmax(logits).astype(dtype)
    assert is_distribution(probs).all()
    assert not is_distribution(0.99 * probs.astype(jnp.float32)).any()
