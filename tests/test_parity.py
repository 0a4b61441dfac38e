"""Logits and greedy tokens equal those of torch's OPT in transformers.

The golden values are always checked, and torch itself where it is installed.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import tiny_models
from golden.tiny_models import GREEDY_LENGTHS, LOGIT_LENGTHS, MAX_NEW_TOKENS, POSITIONS
from transformers import AutoTokenizer

import emsjax
from emsjax.decode.pack import pack

variants = pytest.mark.parametrize("variant", tiny_models.VARIANTS)
DRAFTERS = {
    "plain": lambda: None,
    # The search includes generated tokens, as random prompts contain no repetitions.
    "prompt_lookup": lambda: emsjax.PromptLookup(
        match_length=2, max_draft_tokens=7, search_generated=True
    ),
}
# Drafting does not depend on the architecture, so all pairs would only add compilations.
GREEDY_CASES = [
    *[(variant, list(DRAFTERS)[i % 2]) for i, variant in enumerate(tiny_models.VARIANTS)],
    ("pre_norm", "prompt_lookup"),
]


@functools.cache
def golden(variant: str) -> dict[str, np.ndarray]:
    with np.load(tiny_models.GOLDEN) as values:
        return {
            name.removeprefix(f"{variant}."): values[name]
            for name in values.files
            if name.startswith(f"{variant}.")
        }


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A function that loads the variant's model from a checkpoint with the weights of a seed."""

    @functools.cache
    def load(variant: str, seed: int) -> emsjax.OPT:
        folder, config = tmp_path_factory.mktemp(variant), tiny_models.VARIANTS[variant]
        tiny_models.write_checkpoint(folder, config, tiny_models.tensors(config, seed))
        return emsjax.OPT.from_pretrained(folder, dtype=jnp.float32)

    return load


@jax.jit
def forward(model, token_ids, rows, cache):
    return model.logits(model(token_ids, rows, cache).hidden)


def packed_logits(model: emsjax.OPT, prompts) -> np.ndarray:
    """Logits of all prompts' tokens from one forward with two padding rows."""
    counts = jnp.array([len(prompt) for prompt in prompts], jnp.int32)
    num_rows = int(counts.sum())
    rows = pack(jnp.zeros_like(counts), counts, num_rows + 2)
    token_ids = jnp.array([*np.concatenate(prompts), 0, 0], jnp.int32)
    cache = model.init_cache(len(prompts), POSITIONS)
    return np.asarray(forward(model, token_ids, rows, cache))[:num_rows]


def golden_prompts(variant: str, lengths):
    config = tiny_models.VARIANTS[variant]
    return tiny_models.prompts(config, int(golden(variant)["seed"]), lengths)


@variants
def test_logits_of_packed_rows_equal_the_golden_ones(load, variant):
    values = golden(variant)
    model = load(variant, int(values["seed"]))
    logits = packed_logits(model, golden_prompts(variant, LOGIT_LENGTHS))
    np.testing.assert_allclose(logits, values["logits"], rtol=0, atol=1e-4)


@variants
def test_logits_of_packed_rows_equal_those_of_torch(load, variant):
    pytest.importorskip("torch")
    from golden import make_golden

    config, seed = tiny_models.VARIANTS[variant], 12345
    prompts = tiny_models.prompts(config, seed, LOGIT_LENGTHS)
    expected = make_golden.logits(make_golden.torch_model(config, seed), prompts)
    logits = packed_logits(load(variant, seed), prompts)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@variants
def test_golden_tokens_equal_torch_generate(variant):
    pytest.importorskip("torch")
    from golden import make_golden

    values, some = golden(variant), slice(None, None, 5)
    model = make_golden.torch_model(tiny_models.VARIANTS[variant], int(values["seed"]))
    prompts = golden_prompts(variant, GREEDY_LENGTHS)[some]
    tokens, lengths, _ = make_golden.greedy(model, prompts, MAX_NEW_TOKENS)
    np.testing.assert_array_equal(tokens, values["tokens"][some])
    np.testing.assert_array_equal(lengths, values["lengths"][some])


@pytest.mark.parametrize(("variant", "drafter"), GREEDY_CASES)
def test_greedy_tokens_of_a_ragged_batch_equal_torch_generate(load, variant, drafter):
    values = golden(variant)
    model = load(variant, int(values["seed"]))
    out = emsjax.generate(
        model,
        golden_prompts(variant, GREEDY_LENGTHS),
        max_new_tokens=MAX_NEW_TOKENS,
        drafter=DRAFTERS[drafter](),
    )
    assert out.tokens.dtype == np.int32
    assert (drafter == "plain") == (out.stats.num_accepted.sum() == 0)
    np.testing.assert_array_equal(out.tokens, values["tokens"])
    np.testing.assert_array_equal(out.lengths, values["lengths"])


@pytest.mark.parametrize(("batch", "drafter"), [(1, "prompt_lookup"), (7, "plain")])
def test_greedy_tokens_are_the_same_in_batches_of_any_size(load, batch, drafter):
    values = golden("head_dim_80")
    model = load("head_dim_80", int(values["seed"]))
    prompts = golden_prompts("head_dim_80", GREEDY_LENGTHS)
    out = emsjax.generate(
        model, prompts[-batch:], max_new_tokens=MAX_NEW_TOKENS, drafter=DRAFTERS[drafter]()
    )
    np.testing.assert_array_equal(out.tokens, values["tokens"][-batch:])
    np.testing.assert_array_equal(out.lengths, values["lengths"][-batch:])


def test_a_prompt_that_fills_every_position_gets_one_token(load):
    values = golden("pre_norm")
    model = load("pre_norm", int(values["seed"]))
    prompts = golden_prompts("pre_norm", LOGIT_LENGTHS)
    assert max(map(len, prompts)) == POSITIONS
    out = emsjax.generate(model, prompts, max_new_tokens=1)
    last_rows = values["logits"][np.cumsum(LOGIT_LENGTHS) - 1]
    np.testing.assert_array_equal(out.tokens[:, 0], last_rows.argmax(-1))


@pytest.mark.parametrize("name", tiny_models.EMBEDDED)
def test_greedy_tokens_of_the_embedded_models_equal_torch_generate(name):
    folder, values = tiny_models.EMBEDDED[name], golden(name)
    prompts = AutoTokenizer.from_pretrained(folder)(tiny_models.demo_prompts()).input_ids
    model = emsjax.OPT.from_pretrained(folder, dtype=jnp.float32)
    out = emsjax.generate(
        model,
        prompts,
        max_new_tokens=tiny_models.MAX_NEW_TOKENS_EMBEDDED,
        drafter=emsjax.PromptLookup(),
    )
    assert out.stats.num_accepted.sum() > 0
    np.testing.assert_array_equal(out.tokens, values["tokens"])
    np.testing.assert_array_equal(out.lengths, values["lengths"])


def test_golden_tokens_of_the_embedded_draft_model_equal_torch_generate():
    pytest.importorskip("torch")
    from golden import make_golden

    tokens, _, _ = make_golden.embedded("draft", tiny_models.MAX_NEW_TOKENS_EMBEDDED)
    np.testing.assert_array_equal(tokens, golden("draft")["tokens"])
