"""Every family equals transformers, keeps the properties of decoding, and survives a round trip.

The golden values are always checked, and torch itself where it is installed.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import tiny_families
from golden.tiny_families import GOLDEN, MAX_NEW_TOKENS, POSITIONS, VARIANTS, VOCAB
from test_generation import stepped
from test_parity import packed_logits

import emsjax
import pallas_kernels
from emsjax.models.families import FAMILIES
from emsjax.testing import assert_lossless

variants = pytest.mark.parametrize("variant", VARIANTS)
# Layers with windows and without, rotary positions and learned ones, several orders of norms.
some_variants = pytest.mark.parametrize("variant", ["gemma3", "gpt2", "codegen"])
LOOKUP = functools.partial(emsjax.PromptLookup, match_length=1, search_generated=True)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function that returns the folder of a variant's checkpoint."""

    @functools.cache
    def folder_of(variant: str):
        folder, config = tmp_path_factory.mktemp(variant), VARIANTS[variant]
        tiny_families.write_checkpoint(folder, config, tiny_families.tensors(config))
        return folder

    return folder_of


@pytest.fixture(scope="module")
def load(folder_of):
    """A function that loads a variant's model."""
    return functools.cache(lambda variant: emsjax.from_pretrained(folder_of(variant)))


@functools.cache
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as values:
        return dict(values)


def assert_close(logits, expected):
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_every_family_has_a_variant():
    assert {config["model_type"] for config in VARIANTS.values()} == {*FAMILIES} - {"opt"}


@variants
def test_logits_of_packed_rows_equal_the_golden_ones(load, variant):
    logits = packed_logits(load(variant), tiny_families.prompts())
    assert_close(logits, golden()[f"{variant}.logits"])


@variants
def test_greedy_tokens_of_a_ragged_batch_equal_torch_generate(load, variant):
    prompts = tiny_families.prompts()
    out = emsjax.generate(load(variant), prompts, LOOKUP(), max_new_tokens=MAX_NEW_TOKENS)
    real = np.arange(MAX_NEW_TOKENS) < out.lengths[:, None]
    np.testing.assert_array_equal(np.where(real, out.tokens, 0), golden()[f"{variant}.tokens"])


@variants
def test_logits_equal_those_of_torch(folder_of, load, variant):
    pytest.importorskip("torch")
    from golden import make_families, make_golden

    config, seed = VARIANTS[variant], 12345
    expected = make_golden.logits(make_families.torch_model(config, seed), tiny_families.prompts())
    folder = folder_of(variant).with_name(f"{variant}-live")
    tiny_families.write_checkpoint(folder, config, tiny_families.tensors(config, seed))
    logits = packed_logits(emsjax.from_pretrained(folder), tiny_families.prompts())
    assert_close(logits, expected)


@variants
def test_transformers_loads_what_is_saved(folder_of, load, variant, tmp_path):
    """Its own config, names and values: logits are equal, and nothing is missing or left over."""
    torch = pytest.importorskip("torch")
    from golden import make_golden
    from transformers import AutoModelForCausalLM

    load(variant).save_pretrained(tmp_path)
    options = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True}
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    assert not info["unexpected_keys"]
    assert set(info["missing_keys"]) <= {"lm_head.weight"}
    logits = make_golden.logits(theirs.eval(), tiny_families.prompts())
    assert_close(logits, golden()[f"{variant}.logits"])
    theirs.save_pretrained(tmp_path / "theirs")  # and in their own form it is read again
    again = emsjax.from_pretrained(tmp_path / "theirs")
    assert again.config.architecture == load(variant).config.architecture
    assert_close(packed_logits(again, tiny_families.prompts()), golden()[f"{variant}.logits"])


@variants
def test_a_saved_model_is_loaded_unchanged(load, variant, tmp_path):
    model = load(variant)
    model.save_pretrained(tmp_path)
    again = emsjax.from_pretrained(tmp_path)
    assert again.config == model.config
    for one, other in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, other)


@some_variants
def test_a_sample_does_not_depend_on_the_rest_of_the_batch(load, variant):
    model, prompts = load(variant), tiny_families.prompts()
    together = emsjax.generate(model, prompts, LOOKUP(), max_new_tokens=MAX_NEW_TOKENS)
    for i, prompt in enumerate(prompts):
        alone = emsjax.generate(model, [prompt], LOOKUP(), max_new_tokens=MAX_NEW_TOKENS)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[i])


@some_variants
def test_the_cache_after_ragged_acceptance_equals_a_fresh_prefill(load, variant):
    model, prompts = load(variant), tiny_families.prompts()
    state = emsjax.init_state(model, LOOKUP(), prompts, max_new_tokens=24, eos_token_ids=())
    state = stepped(model, LOOKUP(), state, 12, poison=True)
    lengths = np.asarray(state.lengths)
    grown = [row[:length] for row, length in zip(np.asarray(state.tokens), lengths, strict=True)]
    fresh = emsjax.init_state(model, None, grown, max_new_tokens=1)
    layers = (jax.tree.leaves(one.cache.layers) for one in (state, fresh))
    for old, new in zip(*layers, strict=True):
        for i, length in enumerate(lengths):
            np.testing.assert_allclose(old[i, : length - 1], new[i, : length - 1], atol=5e-5)


@some_variants
def test_refilled_slots_emit_the_sampled_tokens_of_plain_decoding(load, variant):
    model, prompts = load(variant), tiny_families.prompts(seed=4, lengths=[3, 30, 1, 12, 7, 22])
    options = {"max_new_tokens": [5, 20, 9, 3, 14, 8], "key": jax.random.key(3)}
    options["sampling"] = emsjax.Sampling(temperature=0.7, top_p=0.9)
    out = assert_lossless(model, LOOKUP(), prompts, batch_size=2, **options).output
    assert out.stats.num_drafted.sum() > 0


@some_variants
def test_the_padded_baseline_emits_the_tokens_of_plain_decoding(load, variant):
    """Its cache has gaps, which are neither tokens nor positions."""
    model, prompts = load(variant), tiny_families.prompts()
    options = {"drafter": LOOKUP(), "max_new_tokens": MAX_NEW_TOKENS}
    plain = emsjax.generate(model, prompts, max_new_tokens=MAX_NEW_TOKENS)
    padded = emsjax.vanilla.generate(model, prompts, **options)
    np.testing.assert_array_equal(padded.tokens, plain.tokens)


def test_a_model_of_one_family_drafts_for_another(load):
    """Of vocabularies of other sizes, as those of Qwen models of different sizes are."""
    target, draft = load("qwen3"), load("gpt2")
    drafter = emsjax.DraftModel(draft, max_draft_tokens=3)
    assert_lossless(target, drafter, tiny_families.prompts(), max_new_tokens=MAX_NEW_TOKENS)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("variant", ["mistral", "gemma3"])
def test_every_attention_computes_the_same(load, variant, implementation):
    prompts = tiny_families.prompts()
    attention = implementation
    if implementation == "triton":
        options = {"implementation": "triton", "interpret": True}
        attention = functools.partial(pallas_kernels.ragged_attention, **options)
    options = {"max_new_tokens": 6, "attention_implementation": attention}
    out = emsjax.generate(load(variant), prompts, LOOKUP(), **options)
    np.testing.assert_array_equal(out.tokens, golden()[f"{variant}.tokens"][:, :6])


# What a config.json may say that is not supported or contradicts itself, and what the error names.
WRONG = [
    ("llama", {"num_key_value_heads": 3}, ["num_attention_heads (4)", "num_key_value_heads (3)"]),
    ("llama", {"hidden_act": "swiglu"}, ["hidden_act", "silu", "swiglu"]),
    ("llama", {"rope_scaling": {"rope_type": "longrope"}}, ["rope_scaling.rope_type", "yarn"]),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor"]),
    ("llama", {"rope_scaling": {"type": "linear"}}, ["rope_scaling", "factor"]),
    ("llama", {"head_dim": 7}, ["head_dim", "even"]),
    ("llama", {"model_type": "mixtral"}, ["model_type", "mixtral", "qwen3", "gpt_neox"]),
    ("llama", {"model_type": "gemma3"}, ["model_type", "gemma3", "gemma3_text"]),
    ("mistral", {"sliding_window": 0}, ["sliding_window", "0"]),
    ("qwen3", {"layer_types": ["full_attention"]}, ["layer_types", "num_hidden_layers"]),
    ("qwen3", {"layer_types": ["chunked_attention"] * 3}, ["layer_types[0]", "chunked_attention"]),
    ("gemma3", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50"]),
    ("gpt2", {"n_head": 5}, ["n_embd", "n_head"]),
    ("pythia", {"rotary_pct": 0.01}, ["rotary_pct"]),
    ("codegen", {"n_head": 2}, ["n_head", "4"]),
    ("codegen", {"rotary_dim": 64}, ["rotary_dim"]),
]


@pytest.mark.parametrize(("variant", "changes", "parts"), WRONG)
def test_a_config_that_is_not_supported_is_named(folder_of, tmp_path, variant, changes, parts):
    (tmp_path / "config.json").write_text(json.dumps(VARIANTS[variant] | changes))
    (tmp_path / "model.safetensors").symlink_to(folder_of(variant) / "model.safetensors")
    with pytest.raises(ValueError, match="config") as error:
        emsjax.from_pretrained(tmp_path)
    for part in (str(tmp_path / "config.json"), *parts):
        assert part in str(error.value)


def test_tensors_of_another_family_are_named(folder_of, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(VARIANTS["gpt2"]))
    (tmp_path / "model.safetensors").symlink_to(folder_of("qwen3") / "model.safetensors")
    with pytest.raises(ValueError, match=r"wpe\.weight is missing"):
        emsjax.from_pretrained(tmp_path)


def test_a_trained_head_is_kept_where_the_family_may_have_one(folder_of, tmp_path):
    """The config says that it is tied, and the file that it is not: transformers keeps it."""
    config = VARIANTS["llama_biases_tied"]
    values = tiny_families.tensors(config)
    head = np.random.RandomState(5).standard_normal((VOCAB, 32)).astype(np.float32)
    tiny_families.write_checkpoint(tmp_path, config, values | {"lm_head.weight": head})
    model = emsjax.from_pretrained(tmp_path)
    np.testing.assert_array_equal(model.lm_head.embedding[...], head)
    assert not model.config.tie_word_embeddings


def test_models_of_random_weights_are_made_from_a_config():
    from flax import nnx

    config = emsjax.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=POSITIONS,
    )
    model = emsjax.Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.float32)
    out = emsjax.generate(model, [[3, 4, 5]], max_new_tokens=4)
    assert out.lengths.tolist() == [4]
