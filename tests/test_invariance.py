"""Invariant numerics: the bits of a sequence do not depend on what is computed beside it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import ragged_prompts, shallow_model

import emsjax
import pallas_kernels
from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.decode.layout import Layout
from emsjax.testing import assert_invariant, assert_lossless, invariant, lossless
from emsjax.testing.divergence import Divergence
from pallas_kernels.common.numerics import current_numerics

PROMPT_SIXTEENTHS = (6, 16)  # of the row counts of steps that feed prompts
PROMPTS, NEW = ragged_prompts([5, 14, 3]), 6
LOOKUP = emsjax.PromptLookup(match_length=1, search_generated=True)
SAMPLED = {"sampling": emsjax.Sampling(temperature=0.9, top_p=0.8), "key": jax.random.key(3)}


@pytest.fixture(autouse=True, scope="module")
def small_parts():
    """Parts so small that the short sequences here have several."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (pallas_kernels.attention.tilings, pallas_kernels.attention.xla_parts):
            patch.setattr(module, "PART_KEYS", 8)
        jax.clear_caches()
        yield
    jax.clear_caches()


def keys_of(count):
    return jax.vmap(functools.partial(jax.random.fold_in, SAMPLED["key"]))(jnp.arange(count))


def emitted(out, sequence=0):
    length = int(out.lengths[sequence])
    return np.asarray(out.tokens)[sequence, :length], np.asarray(out.logprobs)[sequence, :length]


def check_equal(out, other, sequence, other_sequence=0):
    for one, two in zip(emitted(out, sequence), emitted(other, other_sequence), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(("dtype", "options"), [("float32", {}), ("bfloat16", SAMPLED)])
def test_rows_tokens_and_logprobs_have_the_same_bits_in_every_batch(dtype, options):
    model = shallow_model().astype(dtype)
    prompts = PROMPTS[:2]
    found = assert_invariant(model, prompts, LOOKUP, max_new_tokens=NEW, **options)
    assert found.num_tokens == 2 * NEW * len(prompts)
    assert found.num_rows > 2 * sum(map(len, prompts))


def batch_dependent(*arrays, **options):
    """Attention that cuts keys by the number of samples."""
    numerics = "fast" if arrays[3].shape[0] > 1 else "invariant"
    return pallas_kernels.ragged_attention(*arrays, numerics=numerics, **options)


def backwards_if_odd(product):
    """Products whose sums run from the last input to the first if the number of rows is odd."""

    def multiply(x, weight, *bias):
        if x.shape[0] % 2:
            x, weight = x[:, ::-1], weight[::-1]
        return product(x, weight, *bias)

    return multiply


def test_the_first_operation_with_other_bits_is_named(monkeypatch):
    model = shallow_model()
    with pytest.raises(AssertionError, match=r"^layer 0, attention: of prompt \d, the row at"):
        assert_invariant(model, PROMPTS[:2], None, batch_dependent, max_new_tokens=NEW)
    monkeypatch.setattr(pallas_kernels.matmul, "_kernel_for", lambda *_, **__: None)
    monkeypatch.setattr(pallas_kernels.matmul.xla, "in_row_blocks", backwards_if_odd)
    jax.clear_caches()
    with pytest.raises(AssertionError, match=r"^layer 0, "):
        assert_invariant(shallow_model(), PROMPTS[:2], max_new_tokens=NEW)
    jax.clear_caches()


def test_completions_are_compared_too(monkeypatch):
    generate, calls = invariant.generate, []

    def off_by_one(*args, **options):
        out = generate(*args, **options)
        calls.append(out)
        if len(calls) == 1:  # all prompts together
            logprobs = np.asarray(out.logprobs).copy()
            logprobs[1, 2] = np.nextafter(logprobs[1, 2], np.float32(0))
            out = dataclasses.replace(out, logprobs=logprobs)
        return out

    monkeypatch.setattr(invariant, "_check_rows", lambda *_: 0)  # which comes first, and passes
    monkeypatch.setattr(invariant, "generate", off_by_one)
    with pytest.raises(AssertionError, match="prompt 1: the log-probability at position 2 of the"):
        assert_invariant(shallow_model(), PROMPTS[:2], max_new_tokens=NEW)


def test_scores_are_the_logprobs_of_generated_tokens():
    model = shallow_model().astype("bfloat16")
    options = {"numerics": "invariant"}
    out = emsjax.generate(model, PROMPTS, LOOKUP, max_new_tokens=NEW, **options)
    continuations = [emitted(out, i)[0].tolist() for i in range(len(PROMPTS))]
    scores = emsjax.score(model, PROMPTS, continuations, **options)
    for i, logprobs in enumerate(scores.logprobs):
        np.testing.assert_array_equal(logprobs, emitted(out, i)[1])


def test_tokens_of_a_draft_model_do_not_depend_on_the_batch_at_fixed_lengths():
    model = shallow_model().astype("bfloat16")
    options = {"max_new_tokens": NEW, "numerics": "invariant", "sampling": SAMPLED["sampling"]}
    options["draft_length"] = emsjax.FixedLength(2)
    draft = shallow_model(ffn_dim=32).astype("bfloat16")
    drafter = emsjax.DraftModel(draft, max_draft_tokens=2)
    together = emsjax.generate(model, PROMPTS, drafter, key=keys_of(3), **options)
    for i, prompt in enumerate(PROMPTS):
        alone = emsjax.generate(model, [prompt], drafter, key=keys_of(3)[i : i + 1], **options)
        check_equal(together, alone, i)


def test_bfloat16_is_lossless_without_near_ties():
    found = assert_lossless(
        shallow_model().astype("bfloat16"),
        LOOKUP,
        PROMPTS,
        max_new_tokens=NEW,
        numerics="invariant",
        **SAMPLED,
    )
    assert found.near_ties == ()


def test_a_near_tie_is_a_fault_if_numerics_are_invariant(monkeypatch):
    tie = Divergence(0, 3, 5, 6, margin=0.01, largest=32.0, likeliest=(5, 6), lead=0.01)
    assert tie.is_near_tie
    monkeypatch.setattr(lossless, "first_divergences", lambda *arguments: [tie])
    check = functools.partial(
        assert_lossless, shallow_model().astype("bfloat16"), LOOKUP, PROMPTS, max_new_tokens=NEW
    )
    assert check().near_ties == (tie,)
    with pytest.raises(AssertionError, match="With invariant numerics no difference is allowed"):
        check(numerics="invariant")


def seen_numerics():
    """Attention that notes the numerics with which it is traced, and the list of these."""
    seen = []

    def attention(*arrays, **options):
        seen.append(current_numerics())
        return pallas_kernels.ragged_attention(*arrays, **options)

    return attention, seen


def test_every_entry_takes_numerics_and_streams_keep_them():
    model, own = shallow_model(), {"max_new_tokens": 2}

    def stepped(**options):
        state = emsjax.init_state(model, None, PROMPTS, **own, **options)
        emsjax.step(model, None, state, **options)

    def engine(attention_implementation, numerics):
        kind = {"attention_implementation": attention_implementation, "numerics": numerics}
        with pallas_kernels.numerics("fast"):
            list(emsjax.Engine(model, batch_size=2, **kind).stream(PROMPTS, **own))

    device = {"devices": jax.local_devices()[:1]}  # decodes in a thread of its own
    entries = {
        "generate": lambda **kind: emsjax.generate(model, PROMPTS, batch_size=2, **own, **kind),
        "stream": lambda **kind: list(emsjax.stream(model, PROMPTS, batch_size=2, **own, **kind)),
        "iterator": lambda **kind: list(
            emsjax.stream(model, iter(PROMPTS), batch_size=2, **device, **own, **kind)
        ),
        "step": stepped,
        "score": lambda **kind: emsjax.score(model, PROMPTS, [[5, 6]] * 3, **kind),
        "vanilla": lambda **kind: emsjax.vanilla.generate(
            model, PROMPTS, unpad_kv_cache=True, **own, **kind
        ),
        "engine": engine,
    }
    for name, entry in entries.items():
        attention, seen = seen_numerics()
        entry(attention_implementation=attention, numerics="invariant")
        assert set(seen) == {"invariant"}, name
        assert current_numerics() == "fast"


def test_numerics_of_the_context_are_the_default():
    model = shallow_model()
    attention, seen = seen_numerics()
    options = {"attention_implementation": attention, "max_new_tokens": 2}
    with pallas_kernels.numerics("invariant"):
        results = emsjax.stream(model, PROMPTS, batch_size=2, **options)
    list(results)
    assert set(seen) == {"invariant"}


@pytest.mark.parametrize("numerics", ["Invariant", "", 1, True])
def test_unknown_numerics_are_an_error(numerics):
    calls = [
        lambda: emsjax.generate(shallow_model(), PROMPTS, numerics=numerics),
        lambda: pallas_kernels.numerics(numerics),
        lambda: pallas_kernels.linear(jnp.ones((2, 4)), jnp.ones((4, 4)), numerics=numerics),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="numerics must be 'fast' or 'invariant', or None"):
            call()


def test_what_cannot_be_invariant_is_refused():
    model, kind = shallow_model(), {"numerics": "invariant"}
    with pytest.raises(ValueError, match="unpad_kv_cache=True"):
        emsjax.vanilla.generate(model, PROMPTS, **kind)
    with pytest.raises(ValueError, match="pad_kv_cache"):
        emsjax.init_state(model, None, PROMPTS, layout=Layout(pad_kv_cache=True), **kind)
    with pytest.raises(ValueError, match="attention_implementation 'triton' or 'xla'"):
        emsjax.generate(model, PROMPTS, attention_implementation="reference", **kind)
    cache, ints = jnp.zeros((1, 4, 1, 8)), jnp.zeros(1, jnp.int32)
    rows = (jnp.ones((1, 3, 8)), None, None, cache, cache, ints, ints, ints)
    with pytest.raises(ValueError, match="takes no cache_mask"):
        pallas_kernels.ragged_attention(*rows, cache_mask=jnp.ones((1, 4), bool), **kind)


def test_the_benchmark_finds_rows_with_other_bits(capsys, monkeypatch, tmp_path):
    run = BENCHMARKS["invariance"].main
    sizes = ["--row-counts", "1,2,17", "--batches", "1", "--context", "40", "--layers", "1"]
    output = ["--output", str(tmp_path / "bits.json")]
    assert run(["--models", "tiny", *sizes, *output, "--processes", "2", "--skip-fast"]) == 0
    (told,) = capsys.readouterr().out.splitlines()
    assert told.startswith("tiny, invariant: 0 of ")
    assert run(["--models", "tiny", *sizes, *output]) == 0  # it continues
    (told,) = capsys.readouterr().out.splitlines()
    assert told.startswith("tiny, fast: ")

    by_rows = lambda logits: jax.nn.log_softmax(logits) - len(logits) % 2  # of the call
    monkeypatch.setattr("emsjax.benchmarks.invariance.log_softmax", by_rows)
    jax.clear_caches()
    assert run(["--models", "tiny", *sizes, "--skip-fast"]) == 1
    jax.clear_caches()
