"""First differences of two runs, their margins, and the benchmark that lists them."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import emsjax
from emsjax.benchmarks import divergences
from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.decode.pack import pack
from emsjax.demo import DRAFT
from emsjax.models.opt import OPTConfig
from emsjax.testing.divergence import NEAR_TIE, Divergence, first_divergences, float32_logits

NEW = 6
CONFIG = OPTConfig(
    vocab_size=60,
    hidden_size=32,
    ffn_dim=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=80,
    init_std=0.3,
)


@pytest.fixture(scope="module")
def model():
    return emsjax.OPT(CONFIG, rngs=nnx.Rngs(0), dtype=jnp.float32)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(5, 60, length) for length in (3, 9, 1, 30, 7, 12, 5, 2, 20)]


@pytest.fixture(scope="module")
def plain(model, prompts):
    return emsjax.generate(model, prompts, max_new_tokens=NEW, eos_token_ids=())


def test_astype_equals_loading_in_that_dtype():
    narrow = emsjax.OPT.from_pretrained(DRAFT, dtype=jnp.float32).astype(jnp.bfloat16)
    loaded = emsjax.OPT.from_pretrained(DRAFT, dtype=jnp.bfloat16)
    assert jax.tree.structure(narrow) == jax.tree.structure(loaded)
    for one, other in zip(jax.tree.leaves(narrow), jax.tree.leaves(loaded), strict=True):
        assert one.dtype == other.dtype == jnp.bfloat16
        np.testing.assert_array_equal(one, other)


def test_scores_equal_the_log_probabilities_of_decoding(model, prompts, plain):
    """There are more prefixes than are scored at once, of many lengths."""
    for at in (0, NEW - 1):
        prefixes = [np.append(p, t[:at]) for p, t in zip(prompts, plain.tokens, strict=True)]
        logits = float32_logits(model, prefixes)
        np.testing.assert_array_equal(logits.argmax(axis=1), plain.tokens[:, at])
        logprobs = np.asarray(jax.nn.log_softmax(logits)).max(axis=1)
        np.testing.assert_allclose(logprobs, plain.logprobs[:, at], rtol=1e-4, atol=1e-5)


def test_scores_are_of_the_rounded_weights_in_float32(model, prompts):
    narrow = model.astype(jnp.bfloat16)
    expected = float32_logits(narrow.astype(jnp.float32), prompts)
    np.testing.assert_array_equal(float32_logits(narrow, prompts), expected)
    assert np.abs(float32_logits(model, prompts) - expected).max() > 1e-3


def test_sixteen_bits_of_a_deep_model_stay_near_float32(prompts):
    """The residual stream, to which every layer adds, is not rounded each time."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=24, init_std=0.1)
    narrow = emsjax.OPT(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    exact = float32_logits(narrow, prompts)
    lengths = [len(prompt) for prompt in prompts]
    rows = pack(jnp.zeros(len(prompts), jnp.int32), jnp.array(lengths), sum(lengths))
    cache = narrow.init_cache(len(prompts), 64)
    out = narrow(jnp.concatenate(list(map(jnp.asarray, prompts))).astype(jnp.int32), rows, cache)
    logits = narrow.logits(out.hidden)[jnp.cumsum(jnp.array(lengths)) - 1]
    error = np.sqrt(np.mean((np.asarray(logits) - exact) ** 2)) / np.abs(exact).max()
    assert 1e-4 < error < 2.6e-3  # 3.3e-3 or more if it were rounded


def test_the_first_differing_token_is_reported(model, prompts, plain):
    tokens = np.array(plain.tokens)
    tokens[1, 3:] = (tokens[1, 3:] + 1) % 60
    tokens[8, 0] = (tokens[8, 0] + 7) % 60
    actual = dataclasses.replace(plain, tokens=tokens)
    found = first_divergences(model, prompts, plain, actual)
    assert [(one.sequence, one.position) for one in found] == [(1, 3), (8, 0)]
    for one in found:
        assert one.expected == plain.tokens[one.sequence, one.position]
        assert one.token == tokens[one.sequence, one.position]
        prefix = np.append(prompts[one.sequence], plain.tokens[one.sequence, : one.position])
        (scores,) = float32_logits(model, [prefix])
        assert one.margin == pytest.approx(scores[one.expected] - scores[one.token], rel=1e-4)
        assert one.largest == pytest.approx(np.abs(scores).max(), rel=1e-4)
        assert one.likeliest[0] == one.expected
        assert one.lead == pytest.approx(np.diff(np.sort(scores)[-2:])[0], rel=1e-3)
        first, second = (scores[token] for token in one.likeliest)
        assert first - second == pytest.approx(one.lead, rel=1e-3)
    assert first_divergences(model, prompts, plain, plain) == []


def test_a_near_tie_is_relative_to_the_largest_logit():
    divergence = functools.partial(Divergence, 0, 0, 1, 2, likeliest=(1, 2), lead=0.5)
    assert divergence(margin=1.0, largest=64.0).is_near_tie
    assert not divergence(margin=1.01, largest=64.0).is_near_tie
    assert divergence(margin=0.0, largest=0.0).is_near_tie


def bench(path, *options):
    arguments = ["--models", "tiny", "--draft-shape", "tiny", "--batch-sizes", "2"]
    return BENCHMARKS["divergences"].main(
        [*arguments, "--max-new-tokens", "8", "--output", str(path), *options]
    )


@pytest.fixture
def standard_promotion():
    """A benchmark may promote dtypes, in its threads as well."""
    strict = jax.config.jax_numpy_dtype_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    yield
    jax.config.update("jax_numpy_dtype_promotion", strict)


@pytest.mark.usefixtures("standard_promotion")
def test_the_benchmark_lists_every_drafter(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("emsjax.benchmarks.workloads.PROMPT_TOKENS", (8, 12))
    path = tmp_path / "divergences.json"
    assert bench(path, "--commit", "abc") == 0
    results = json.loads(path.read_bytes())
    assert (results["commit"], results["settings"]["dtype"]) == ("abc", "bfloat16")
    drafters = ["prompt-lookup", "draft-model", "own-tokens", "prompt-lookup, refilled slots"]
    entries = results["entries"]
    assert [entry["drafter"] for entry in entries] == 2 * drafters
    assert [entry["numerics"] for entry in entries] == ["invariant"] * 4 + ["fast"] * 4
    assert all(entry["tokens"] == 16 for entry in entries)
    assert entries[2]["mean_acceptance_length"] > 1.5
    assert len(capsys.readouterr().out.splitlines()) == 2 * (1 + len(drafters))

    # A run that was interrupted repeats the batch of which it has a part.
    path.write_bytes(json.dumps(results | {"entries": entries[:5]}).encode())
    assert bench(path) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(drafters)
    again = json.loads(path.read_bytes())["entries"]
    assert [entry["drafter"] for entry in again] == 2 * drafters
    path.unlink()

    far = Divergence(0, 3, 5, 6, margin=1.0, largest=32.0, likeliest=(5, 6), lead=1.0)
    monkeypatch.setattr(divergences, "first_divergences", lambda *args: [far])
    assert bench(path) == 1
    (found,) = json.loads(path.read_bytes())["entries"][0]["divergences"]
    assert found["share"] == 1 / 32 / NEAR_TIE
    assert found["position"] == 3


def test_the_embedded_pair_is_measured_in_bfloat16():
    subject = divergences.find_pair("embedded", "tiny", 8)
    assert subject.model.dtype == subject.draft_model.dtype == jnp.bfloat16
    assert len(subject.prompts(3)) == 3
