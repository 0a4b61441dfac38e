"""A drafter that is another form of the target, and shares its cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import compiled_step, ragged_prompts, tiny_model

import emsjax
from emsjax.decode.cache import KVCache
from emsjax.decode.row_counts import chunk_rows
from emsjax.testing import assert_invariant, assert_lossless, assert_same_distribution
from pallas_kernels import ragged_attention

PROMPTS = ragged_prompts([5, 14, 3])


def target(**changes):
    """A model whose matrices have the size of a group of 4-bit numbers."""
    sizes = {"hidden_size": 128, "ffn_dim": 128, "word_embed_proj_dim": 128}
    return tiny_model(**(sizes | changes))


def test_a_copy_of_the_target_drafts_what_the_target_emits():
    model = target()
    same = emsjax.SelfDraft(model, max_draft_tokens=3)
    out = emsjax.generate(model, PROMPTS, same, max_new_tokens=9, eos_token_ids=())
    assert np.array_equal(out.stats.num_accepted, out.stats.num_drafted)
    assert np.all(out.stats.num_steps == 3)
    # A draft model with a cache of its own drafts the same.
    own = emsjax.generate(
        model, PROMPTS, emsjax.DraftModel(model, 3), max_new_tokens=9, eos_token_ids=()
    )
    assert np.array_equal(out.tokens, own.tokens)
    assert np.array_equal(out.stats.num_drafted, own.stats.num_drafted)


@pytest.mark.parametrize(("format", "kv_dtype"), [("int4", None), ("int8", "int8")])
def test_a_narrow_copy_drafts_for_its_target(format, kv_dtype):
    model = target(num_hidden_layers=1)
    drafter = emsjax.SelfDraft(model.quantize(format), max_draft_tokens=3)
    options = {"max_new_tokens": 9, "eos_token_ids": (), "kv_dtype": kv_dtype}
    found = assert_lossless(model, drafter, PROMPTS, **options)
    assert np.any(found.output.stats.num_accepted)


def test_slots_that_are_refilled():
    model = target(num_hidden_layers=1)
    drafter = emsjax.SelfDraft(model.quantize("int8"), max_draft_tokens=2)
    assert_lossless(model, drafter, PROMPTS, max_new_tokens=[7, 2, 5], batch_size=2)


def test_drawn_drafts_keep_the_distribution():
    model = target(num_hidden_layers=1)
    drafter = emsjax.SelfDraft(model.quantize("int4"), max_draft_tokens=2)
    sampling = emsjax.Sampling(temperature=1.0, top_k=4)
    key = jax.random.key(0)
    assert_same_distribution(model, drafter, PROMPTS[0], sampling=sampling, key=key, detects=0.2)


def test_bits_do_not_depend_on_the_batch():
    model = target(num_hidden_layers=1).astype("bfloat16")
    drafter = emsjax.SelfDraft(model.quantize("int4"), max_draft_tokens=2)
    assert_invariant(model, PROMPTS[:2], drafter, max_new_tokens=4)


def test_the_cache_in_front_of_the_drafts_is_left_alone():
    model = target()
    drafter = emsjax.SelfDraft(model.quantize("int4"), max_draft_tokens=3)
    state = emsjax.init_state(model, drafter, PROMPTS, max_new_tokens=6)
    assert state.drafter_state == ()
    before = jax.tree.map(jnp.copy, state.cache)
    lengths = np.asarray(before.lengths)
    after, info = compiled_step(model, drafter, state)
    assert np.any(np.asarray(info.num_drafted) > 0)
    for old, new in zip(before.layers, after.cache.layers, strict=True):
        for sample, length in enumerate(lengths):
            np.testing.assert_array_equal(old.keys[sample, :length], new.keys[sample, :length])
            np.testing.assert_array_equal(old.values[sample, :length], new.values[sample, :length])
    # What is committed is the target's own.
    plain = emsjax.init_state(model, None, PROMPTS, max_new_tokens=6)
    for _ in range(4):
        plain, _ = compiled_step(model, None, plain)
    for sample, length in enumerate(np.asarray(after.cache.lengths)):
        got, want = (of.cache.layers[1].keys[sample, :length] for of in (after, plain))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert isinstance(after.cache, KVCache)


@pytest.mark.parametrize("kind", [emsjax.SelfDraft, emsjax.DraftModel])
def test_a_draft_step_feeds_one_row_of_a_sample_unless_the_draft_model_is_behind(kind):
    fed = []

    def attention(query, key, value, key_cache, *rest, **options):
        fed.append(query.shape[0])
        return ragged_attention(query, key, value, key_cache, *rest, **options)

    model = target(num_hidden_layers=1)
    drafter = kind(model, max_draft_tokens=3, attention_implementation=attention)
    state = emsjax.init_state(model, drafter, PROMPTS, max_new_tokens=6)
    jax.make_jaxpr(lambda state: emsjax.step(model, drafter, state))(state)
    # A draft model with a cache of its own reads prompts, and if all drafts were accepted it has
    # not read the last one.
    batch, prompts = len(PROMPTS), chunk_rows(*state.tokens.shape)
    assert fed == ([batch] if kind is emsjax.SelfDraft else [prompts, 2 * batch, batch])


def test_another_architecture_is_refused():
    drafter = emsjax.SelfDraft(target(num_hidden_layers=1))
    with pytest.raises(ValueError, match="must have the target's config"):
        emsjax.generate(target(), PROMPTS, drafter, max_new_tokens=4)
