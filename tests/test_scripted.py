"""Scripted models output their text; acceptance profiles follow their distributions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import POSITIONS, VOCAB, ragged_prompts, tiny_model

import emsjax
from emsjax.benchmarks.acceptance import PROFILES, CopyAcceptance, Mixed, TokenAcceptance
from emsjax.benchmarks.scripted import script, scripted_model
from emsjax.decode.pack import pack
from emsjax.models.numbers import NumberFormats

LENGTHS, NEW_TOKENS = [1, 9, 30, 33], [64, 17, 35, 1]  # two sequences reach the last position
SMALL = tiny_model(num_hidden_layers=1).config
DEEP = dataclasses.replace(
    SMALL,
    vocab_size=500,
    hidden_size=256,
    word_embed_proj_dim=256,
    num_hidden_layers=12,
    ffn_dim=1024,
    init_std=0.02,
)
SIZES = {
    "vocab_size": 500,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "eos_token_id": None,
    "bos_token_id": None,
}
FAMILIES = {
    "qwen3": emsjax.Qwen3Config(num_key_value_heads=2, **SIZES),
    "llama, tied": emsjax.LlamaConfig(tie_word_embeddings=True, **SIZES),
    "gemma3": emsjax.Gemma3Config(num_key_value_heads=2, sliding_window=16, head_dim=64, **SIZES),
    "pythia": emsjax.GPTNeoXConfig(**SIZES),
    "codegen": emsjax.CodeGenConfig(
        vocab_size=500,
        n_embd=256,
        n_layer=6,
        n_head=4,
        n_positions=POSITIONS,
        rotary_dim=16,
        bos_token_id=None,
        eos_token_id=None,
    ),
}
# flax's LayerNorm promotes bfloat16 to float32 on its own.
standard_dtypes = functools.partial(jax.numpy_dtype_promotion, "standard")


def text_of(vocab_size=VOCAB, length=POSITIONS + 1, seed=3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, length)


@functools.cache
def model_of_text() -> emsjax.OPT:
    return scripted_model(SMALL, text_of(), numbers=NumberFormats(jnp.float32))


def generate(drafter, model=None, **options) -> emsjax.GenerateOutput:
    """The output after prompts that are unrelated to the text."""
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_ids": ()} | options
    return emsjax.generate(model or model_of_text(), ragged_prompts(LENGTHS), drafter, **options)


def assert_outputs_text(out):
    for prompt_length, new, tokens in zip(LENGTHS, NEW_TOKENS, out.tokens, strict=True):
        np.testing.assert_array_equal(tokens[:new], text_of()[prompt_length:][:new])


@jax.jit
def forward(model, *fed) -> tuple[jax.Array, jax.Array]:
    hidden = model(*fed).hidden
    return hidden, model.logits(hidden)


@pytest.mark.parametrize("config", [SMALL, DEEP], ids=["1x32", "12x256"])
def test_every_position_predicts_the_text_by_a_wide_margin_in_bfloat16(config):
    text = text_of(config.vocab_size)
    fed = jnp.asarray(text_of(config.vocab_size, POSITIONS, seed=4), jnp.int32)
    with standard_dtypes():
        model = scripted_model(config, text)
        rows = pack(jnp.zeros(1, jnp.int32), jnp.array([POSITIONS], jnp.int32), POSITIONS)
        hidden, logits = forward(model, fed, rows, model.init_cache(1, POSITIONS))
    logits = np.asarray(logits)
    np.testing.assert_array_equal(logits.argmax(axis=1), text[1:])
    second, first = np.sort(logits, axis=1)[:, -2:].T
    margins = (first - second) / np.abs(logits).max(axis=1)
    assert margins.min() > 8 / 64
    expected = 1 - np.sqrt(2 * np.log(config.vocab_size) / config.hidden_size)
    assert margins.mean() == pytest.approx(expected, abs=0.1)
    # The scale of the position embeddings is as large as needed, and not much larger.
    entries = np.asarray(model.embed_positions.embedding[...], np.float32)[2:]
    assert 3 < entries.std() / (np.asarray(hidden, np.float32) - entries).std() < 20


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_models_without_learned_positions_are_forced_by_their_tokens(config):
    """The margin is as wide as with a table of positions, in bfloat16, and so is the output."""
    text = script(config, POSITIONS + 1, seed=6)
    prompts = [text[:length].copy() for length in LENGTHS]
    for prompt in prompts:
        prompt[:-1] = 7  # only the last token matters
    with standard_dtypes():
        model = scripted_model(config, text)
        rows = pack(jnp.zeros(1, jnp.int32), jnp.array([POSITIONS], jnp.int32), POSITIONS)
        fed = jnp.asarray(text[:-1], jnp.int32)
        _, logits = forward(model, fed, rows, model.init_cache(1, POSITIONS))
        out = emsjax.generate(model, prompts, max_new_tokens=NEW_TOKENS, eos_token_ids=())
    logits = np.asarray(logits)
    np.testing.assert_array_equal(logits.argmax(axis=1), text[1:])
    second, first = np.sort(logits, axis=1)[:, -2:].T
    assert ((first - second) / np.abs(logits).max(axis=1)).min() > 8 / 64
    for length, new, tokens in zip(LENGTHS, NEW_TOKENS, out.tokens, strict=True):
        np.testing.assert_array_equal(tokens[:new], text[length:][:new])


def test_texts_that_tokens_cannot_force_are_refused():
    untied, tied = FAMILIES["qwen3"], FAMILIES["gemma3"]
    with pytest.raises(ValueError, match="one token throughout"):
        scripted_model(tied, [5, 6])
    with pytest.raises(ValueError, match="the same token after each occurrence"):
        scripted_model(untied, [5, 6, 5, 7])
    scripted_model(untied, [5, 6, 5, 6])


def test_text_may_be_shorter_than_the_models_positions():
    out = generate(None, scripted_model(SMALL, text_of()[:40], numbers=NumberFormats(jnp.float32)))
    for row, start in zip(out.tokens, LENGTHS, strict=True):
        new = min(40 - start, 1 if start == 33 else 10)
        np.testing.assert_array_equal(row[:new], text_of()[start : start + new])


def test_plain_decoding_outputs_the_text_after_every_prompt():
    assert_outputs_text(generate(None))


def shares(values) -> np.ndarray:
    return np.bincount(values.ravel()) / values.size


def draw(profile, batch=100, width=1000):
    counts, right = profile.draw(np.random.default_rng(0), batch, width)
    assert counts.shape == right.shape == (batch, width)
    assert counts.dtype == right.dtype == np.int32
    assert (right <= counts).all()
    return counts, right


def test_copies_are_drawn_from_their_distribution():
    counts, right = draw(PROFILES["llma"])
    np.testing.assert_allclose(shares(counts), [0.3, 0, 0, 0, 0, 0, 0, 0.7], atol=0.01)
    weights = [0.6**a for a in range(7)]
    expected = [0.35 * weight / sum(weights) for weight in weights] + [0.35]
    expected[0] += 0.3
    np.testing.assert_allclose(shares(right), expected, atol=0.01)
    assert np.dot(expected, range(8)) + 1 == pytest.approx(3.904, abs=0.001)
    assert right.mean() + 1 == pytest.approx(3.904, abs=0.05)


def test_a_draft_models_tokens_are_correct_at_the_given_rate():
    counts, right = draw(PROFILES["draft-model"])
    assert (counts == 4).all()
    expected = [0.2, 0.8 * 0.2, 0.8**2 * 0.2, 0.8**3 * 0.2, 0.8**4]
    np.testing.assert_allclose(shares(right), expected, atol=0.01)


def test_a_draft_models_correct_tokens_do_not_depend_on_where_the_draft_began():
    for k in (1, 4, 16):
        right = draw(TokenAcceptance(0.8, k), 20, 300)[1]
        following = np.minimum(right[:, 1:] + 1, k)
        np.testing.assert_array_equal(right[:, :-1], np.where(right[:, :-1] > 0, following, 0))
    longer, shorter = (draw(TokenAcceptance(0.8, k), 20, 300 - k)[1] for k in (16, 4))
    np.testing.assert_array_equal(np.minimum(longer, 4), shorter[:, :284])


def test_acceptance_in_successive_steps_is_independent():
    k, pairs = 2, np.zeros((3, 3))
    for of_sample in draw(TokenAcceptance(0.6, k), 100, 1000)[1]:
        at, before = 0, None
        while at < len(of_sample):
            if before is not None:
                pairs[before, of_sample[at]] += 1
            before = of_sample[at]
            at += before + 1
    alone = np.array([0.4, 0.6 * 0.4, 0.6**2])
    np.testing.assert_allclose(pairs / pairs.sum(), np.outer(alone, alone), atol=0.01)


def test_samples_take_turns_with_mixed_profiles():
    mixed = Mixed(TokenAcceptance(1, 2), TokenAcceptance(0, 3), CopyAcceptance(miss=1))
    counts, right = draw(mixed, 7, 5)
    np.testing.assert_array_equal(counts[:, 0], [2, 3, 0, 2, 3, 0, 2])
    np.testing.assert_array_equal(right[:, 0], [2, 0, 0, 2, 0, 0, 2])
    assert mixed.max_draft_tokens == 7
    assert draw(mixed, 2, 5)[0].shape == (2, 5)


def test_extreme_profiles():
    for n in (0, 1):
        assert (draw(CopyAcceptance(0, n, 0.5, 0))[0] == n).all()
        assert (draw(TokenAcceptance(1, n))[1] == n).all()
    assert (draw(CopyAcceptance(0, 7, 0, 0))[1] == 0).all()
    np.testing.assert_allclose(shares(draw(CopyAcceptance(0, 4, 0, 1))[1]), 0.25, atol=0.01)


def changed(**changes) -> emsjax.OPTConfig:
    return dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("config", "text", "message"),
    [
        (changed(word_embed_proj_dim=16), [1], r"as wide as the layers \(32\), not 16"),
        (changed(do_layer_norm_before=False), [1], "must not end with a norm"),
        (changed(vocab_size=50272), [1], "width must be at least 44, not 32"),
        (changed(init_std=0.0), [1], "init_std must be above 0"),
        (SMALL, [0, VOCAB], "text holds the token id 61"),
        (SMALL, [0] * (POSITIONS + 2), "text must have at most 65 tokens, not 66"),
        (SMALL, [], "text is empty"),
    ],
)
def test_models_that_cannot_output_the_text_are_rejected(config, text, message):
    with pytest.raises(ValueError, match=message):
        scripted_model(config, text)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CopyAcceptance(miss=-0.1), r"miss must lie in \[0, 1\]"),
        (lambda: CopyAcceptance(whole=1.1), r"whole must lie in \[0, 1\]"),
        (lambda: CopyAcceptance(decay=float("nan")), r"decay must lie in \[0, 1\]"),
        (lambda: CopyAcceptance(draft_tokens=-1), "draft_tokens must be at least 0"),
        (lambda: TokenAcceptance(2, 4), r"rate must lie in \[0, 1\]"),
        (lambda: TokenAcceptance(0.8, 1.5), "draft_tokens must be an integer"),
        (lambda: Mixed(), "profiles is empty"),
    ],
)
def test_invalid_profiles_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()
