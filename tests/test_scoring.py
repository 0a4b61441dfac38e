"""Scores of given continuations equal the log-softmax of a plain forward, for any batch."""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import tiny_families
from golden.tiny_families import GOLDEN, VARIANTS
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import POSITIONS, VOCAB, ragged_prompts, shallow_model
from transformers import BatchEncoding

import emsjax
import pallas_kernels
from emsjax.engine import forest, memory, scores
from emsjax.testing.divergence import float32_logits
from emsjax.values import equal

# Rounding in sums of 60 and fewer numbers, whose order depends on the number of rows.
CLOSE = {"rtol": 1e-6, "atol": 1e-6}
# float32_logits calls the model in other shapes, so all layers' sums differ in their order.
SAME = {"rtol": 2e-6, "atol": 1e-5}
counts = st.lists(st.integers(1, 24), min_size=1, max_size=5)


@functools.cache
def mixed() -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """Prompts and continuations of many lengths; prompts have one to five continuations."""
    lengths = [[1, 4, 7], [3], [2, 20, 33], [8, 8, 8, 1, 15], [1], [63]]
    prompts = ragged_prompts([1, 9, 30, 5, 64, 2])
    continuations = [ragged_prompts(own, seed=place) for place, own in enumerate(lengths, 1)]
    return prompts, continuations


def one_by_one(model, prompts, continuations):
    """Scores each token by itself: the log-softmax of float32 logits after the tokens before."""
    prefixes, targets, ends = [], [], []
    for prompt, own in zip(prompts, continuations, strict=True):
        for tokens in own:
            prefixes += [np.append(prompt, tokens[:n]) for n in range(len(tokens))]
            targets.extend(tokens)
            ends.append(len(targets))
    logits = float32_logits(model, prefixes).astype(np.float64)
    largest = logits.max(axis=1, keepdims=True)
    logprobs = logits - largest - np.log(np.exp(logits - largest).sum(axis=1, keepdims=True))
    at_targets = logprobs[np.arange(len(targets)), targets]
    greedy = logits.argmax(axis=1) == targets
    return np.split(at_targets, ends[:-1]), [own.all() for own in np.split(greedy, ends[:-1])]


@functools.cache
def expected_of_mixed():
    return one_by_one(shallow_model(), *mixed())


def assert_scores(out, expected, **tolerance):
    assert len(out.logprobs) == len(expected)
    for one, other in zip(out.logprobs, expected, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, other, **(tolerance or SAME))


@pytest.mark.parametrize("batch_size", [None, 1, 3, 8])
def test_scores_equal_the_log_softmax_after_each_prefix(batch_size):
    expected, _ = expected_of_mixed()
    out = emsjax.score(shallow_model(), *mixed(), batch_size=batch_size)
    assert_scores(out, expected)
    assert out.num_continuations.tolist() == [3, 1, 3, 5, 1, 1]
    assert out.totals.dtype == np.float64
    totals = [one.sum(dtype=np.float64) for one in out.logprobs]
    np.testing.assert_allclose(out.totals, totals, rtol=1e-12)


def test_chunks_and_blocks_of_logits_do_not_change_scores(monkeypatch):
    """A chunk holds parts of several samples, and its last block of logits is not full."""
    monkeypatch.setattr(scores, "CHUNKS", (11,))
    monkeypatch.setattr(scores, "LOGIT_ROWS", 4)
    for most in (forest.MOST_ROWS, 0):
        monkeypatch.setattr(forest, "MOST_ROWS", most)
        scores.score_forest.clear_cache()  # the number is read while tracing
        assert_scores(emsjax.score(shallow_model(), *mixed()), expected_of_mixed()[0])
    scores.score_forest.clear_cache()


@pytest.fixture
def spied(monkeypatch):
    """The names of the programs that are run, and the static shapes of forests."""
    used = []
    for module, name in (("cached_scores", "score_tokens"), (None, "score_forest")):
        run = getattr(scores, name)
        spy = lambda *args, run=run, name=name, **options: (
            used.append((name, args, options)) or run(*args, **options)
        )
        place = "emsjax.scoring" if module is None else f"emsjax.engine.{module}"
        monkeypatch.setattr(f"{place}.{name}", spy)
    return used


@pytest.mark.parametrize("most", [4096, 63, 0], ids=["as trees", "some as trees", "with a cache"])
@pytest.mark.parametrize("together", [True, False], ids=["several", "one each"])
def test_trees_and_samples_over_a_cache_have_the_same_scores(most, together, spied, monkeypatch):
    """Too long trees are fed in parts over a cache. Here the longest sample has 64 rows."""
    monkeypatch.setattr("emsjax.scoring._most_rows", lambda run: most)
    prompts, continuations = mixed()
    if not together:
        flat = [(p, c) for p, own in zip(prompts, continuations, strict=True) for c in own]
        prompts, continuations = zip(*flat, strict=True)
    out = emsjax.score(shallow_model(), prompts, continuations)
    assert_scores(out, expected_of_mixed()[0])
    names = {4096: {"score_forest"}, 63: {"score_forest", "score_tokens"}, 0: {"score_tokens"}}
    assert {name for name, *_ in spied} == names[most]


@pytest.mark.parametrize("rows", [63, 64, 65, 66, 100])
def test_lengths_around_the_bound_of_rows_per_sample(rows):
    model = shallow_model(max_position_embeddings=128)
    prompts, continuations = ragged_prompts([rows - 3, 2]), ragged_prompts([4, 9], seed=1)
    expected, _ = one_by_one(model, prompts, [[own] for own in continuations])
    assert_scores(emsjax.score(model, prompts, continuations), expected)


def test_greedy_continuations_are_marked():
    model, prompts = shallow_model(), ragged_prompts([5, 1, 30])
    out = emsjax.generate(model, prompts, max_new_tokens=6)
    continuations = []
    for tokens in out.tokens:
        first, last = tokens.copy(), tokens.copy()
        first[0], last[-1] = (first[0] + 1) % VOCAB, (last[-1] + 1) % VOCAB
        continuations.append([tokens, first, last, tokens[:1]])
    scored = emsjax.score(model, prompts, continuations)
    assert scored.is_greedy.tolist() == [True, False, False, True] * 3
    assert emsjax.score(model, *mixed()).is_greedy.tolist() == expected_of_mixed()[1]


def test_the_first_of_equal_logits_is_greedy():
    """As for argmax, by which greedy decoding chooses."""
    model = types.SimpleNamespace(logits=lambda hidden: hidden)
    logits = np.array([[1, 3, 3, 2], [0, 0, 0, 0], [5, 1, 2, 5], [np.nan, 1, 2, 0]], np.float32)
    for target in range(4):
        found = scores._scores_of(model, jnp.asarray(logits), jnp.full(4, target))
        assert found.is_greedy.tolist() == [*(logits[:3].argmax(axis=1) == target), False]
        assert np.isnan(found.logprobs[3])


@pytest.mark.parametrize("sampling", [None, emsjax.Sampling(1.0)], ids=["greedy", "sampled"])
def test_generated_tokens_have_the_scores_that_generate_reports(sampling):
    model, prompts = shallow_model(), ragged_prompts([5, 1, 30])
    several = {} if sampling is None else {"num_sequences": 3, "key": jax.random.key(0)}
    out = emsjax.generate(model, prompts, max_new_tokens=9, sampling=sampling, **several)
    continuations = out.tokens.reshape(3, -1, 9)
    scored = emsjax.score(model, prompts, continuations)
    assert_scores(scored, out.logprobs)
    assert scored.num_continuations.tolist() == [out.num_sequences] * 3


@settings(max_examples=6)
@given(lengths=counts, seed=st.integers(0, 99))
def test_a_score_does_not_depend_on_the_rest_of_the_batch(lengths, seed):
    model = shallow_model()
    prompts, continuations = ragged_prompts(lengths, seed), ragged_prompts(lengths[::-1], seed + 1)
    together = emsjax.score(model, prompts, continuations)
    for i, prompt in enumerate(prompts):
        alone = emsjax.score(model, [prompt], [continuations[i]])
        np.testing.assert_allclose(alone.logprobs[0], together.logprobs[i], **CLOSE)
        assert alone.is_greedy[0] == together.is_greedy[i]


def test_shared_prompts_give_the_scores_of_single_ones():
    prompts, continuations = mixed()
    flat = [(p, c) for p, own in zip(prompts, continuations, strict=True) for c in own]
    single = emsjax.score(shallow_model(), *zip(*flat, strict=True))
    together = emsjax.score(shallow_model(), prompts, continuations)
    assert_scores(together, single.logprobs, **CLOSE)
    assert single.num_continuations.tolist() == [1] * len(flat)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A function that loads a family's tiny model."""

    @functools.cache
    def load(variant):
        folder, config = tmp_path_factory.mktemp(variant), VARIANTS[variant]
        tiny_families.write_checkpoint(folder, config, tiny_families.tensors(config))
        return emsjax.from_pretrained(folder, dtype="float32")

    return load


@pytest.mark.parametrize("variant", ["qwen3", "gemma3", "qwen2_windows", "gpt2", "codegen"])
def test_scores_of_families_equal_those_of_torch(load, variant):
    """The golden logits are those of transformers."""
    prompts = tiny_families.prompts()
    with np.load(GOLDEN) as golden:
        logits = golden[f"{variant}.logits"].astype(np.float64)
    ends = np.cumsum([len(prompt) for prompt in prompts])
    heads, tails, expected = [], [], []
    for prompt, rows in zip(prompts, np.split(logits, ends[:-1]), strict=True):
        if len(prompt) == 1:
            continue
        logprobs = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
        of_tokens = logprobs[np.arange(len(prompt) - 1), prompt[1:]]
        cut = (len(prompt) + 1) // 2
        heads.append(prompt[:cut])
        tails.append([prompt[cut:], prompt[cut : cut + 1], prompt[cut:][:5]])
        expected += [of_tokens[cut - 1 :], of_tokens[cut - 1 : cut], of_tokens[cut - 1 :][:5]]
    close = {"atol": 2e-4 * np.abs(logits).max()}
    assert_scores(emsjax.score(load(variant), heads, tails), expected, **close)
    whole = emsjax.score(load(variant), heads, [own[0] for own in tails])
    assert_scores(whole, expected[::3], **close)


def test_a_token_without_a_finite_embedding_spoils_its_own_scores_only(load):
    model = load("qwen3").astype(jnp.float32)
    bad = 7
    prompts, continuations = mixed()
    clean = [[np.where(c == bad, 8, c) for c in own] for own in continuations]
    prompts = [np.where(prompt == bad, 8, prompt) for prompt in prompts]
    expected = emsjax.score(model, prompts, clean)
    embedding = model.embed_tokens.embedding
    embedding[...] = embedding[...].at[bad].set(jnp.nan)
    spoilt = [[c.copy() for c in own] for own in clean]
    spoilt[2][1][4] = spoilt[3][0][0] = bad
    out = emsjax.score(model, prompts, spoilt)
    for place, (one, other) in enumerate(zip(out.logprobs, expected.logprobs, strict=True)):
        if place == 5:  # the spoilt token itself is scored before it is read
            np.testing.assert_allclose(one[:4], other[:4], **CLOSE)
            assert np.isfinite(one[4])
            assert np.isnan(one[5:]).all()
        elif place == 7:
            assert np.isnan(one[1:]).all()
        else:
            np.testing.assert_allclose(one, other, **CLOSE)
    assert not out.is_greedy[[5, 7]].any()


def test_ragged_batches_share_a_few_programs():
    model, rng = shallow_model(), np.random.default_rng(0)
    scores.score_forest.clear_cache()
    for seed in range(10):
        count = rng.integers(40, 60)
        prompts = ragged_prompts(rng.integers(1, 33, count), seed)
        emsjax.score(model, prompts, ragged_prompts(rng.integers(1, 33, count), seed))
    lengths = [1, 4, 9, 16, 30] * 10
    for seed in range(4):
        continuations = [ragged_prompts(rng.integers(1, 33, 4), seed) for _ in lengths]
        emsjax.score(model, ragged_prompts(lengths, seed), continuations)
    assert scores.score_forest._cache_size() <= 5


@pytest.mark.usefixtures("unchecked_annotations")
def test_logits_exist_for_few_rows_at_a_time():
    model, batch, width = shallow_model(), 64, 128
    lowered = scores.score_tokens.trace(
        model,
        model.init_cache(batch, width),
        jnp.zeros((batch, width), jnp.int32),
        *(jnp.full(batch, n, jnp.int32) for n in (width, 1)),
        num_rows=scores.chunk_rows_for(batch * width),
        row_bound=None,
        kernels=emsjax.decode.kernels.resolve_kernels(None),
    )
    text = str(lowered.jaxpr)
    assert f"f32[{scores.CHUNKS[-1]},{model.config.hidden_size}]" in text
    assert f"f32[{scores.LOGIT_ROWS},{VOCAB}]" in text
    assert f"[{scores.CHUNKS[-1]},{VOCAB}]" not in text
    assert f"[{batch},{width},{VOCAB}]" not in text
    tokens = np.ones(1000, np.int32)
    [tree] = forest.grow(tokens[:500], [forest.Continuation(0, 0, tokens[:501])], 4096, 64)
    [(shape, bins)] = forest.plant([tree], 64)
    arguments = jax.tree.map(jnp.asarray, forest.lay_out(shape, bins))
    options = {"shape": shape, "kernels": emsjax.decode.kernels.resolve_kernels(None)}
    text = str(scores.score_forest.trace(model, arguments, **options).jaxpr)
    assert f"f32[{shape.bin_rows},{model.config.hidden_size}]" in text
    assert f"f32[{scores.LOGIT_ROWS},{VOCAB}]" in text
    assert f"[{shape.bin_rows},{VOCAB}]" not in text


def limit_memory(monkeypatch, num_bytes):
    monkeypatch.setattr(memory, "available_bytes", lambda device: num_bytes)


def test_a_batch_that_does_not_fit_is_halved_unless_it_was_asked_for(monkeypatch, spied):
    model, (prompts, continuations) = shallow_model(), mixed()
    plan = functools.partial(memory.MemoryPlan.for_run, model, max_len=128, max_draft_tokens=63)
    needed = plan(slots=4, prompt_slots=4)
    monkeypatch.setattr(forest, "MOST_ROWS", 0)  # over a cache, whose size the batch decides
    limit_memory(monkeypatch, needed.total - needed.weights)
    assert_scores(emsjax.score(model, prompts, continuations), expected_of_mixed()[0])
    assert max(len(args[-1]) for _, args, _ in spied) == 4
    with pytest.raises(ValueError, match=r"^batch_size 8 .* largest batch_size that fits is "):
        emsjax.score(model, prompts, continuations, batch_size=8)


def test_trees_have_as_many_rows_as_fit_into_memory(monkeypatch, spied):
    model = shallow_model()
    needed = {
        rows: next(n for n in itertools.count(0, 1 << 16) if fits_in(monkeypatch, n, model, rows))
        for rows in (512, 1024)
    }
    assert needed[512] < needed[1024]
    run = emsjax.scoring.make_run(model, None)
    for available, most in ((needed[1024], 1024), (needed[1024] - (1 << 16), 512), (0, 0)):
        limit_memory(monkeypatch, available)
        assert emsjax.scoring._most_rows(run) == most


def fits_in(monkeypatch, num_bytes, model, rows):
    limit_memory(monkeypatch, num_bytes)
    return memory.forest_fits(model, rows, None)


def test_an_attention_of_your_own_is_used():
    prompts, continuations = mixed()
    reference = pallas_kernels.reference.ragged_attention
    triton = functools.partial(
        pallas_kernels.ragged_attention, implementation="triton", interpret=True
    )
    strict = lambda *args, max_rows_per_sample: reference(*args)  # knows no trees
    for attention in ("reference", functools.partial(reference), triton, strict):
        own = emsjax.score(
            shallow_model(), prompts, continuations, attention_implementation=attention
        )
        assert_scores(own, expected_of_mixed()[0])
    blind = emsjax.score(
        shallow_model(),
        prompts,
        continuations,
        attention_implementation=lambda query, *args, **options: jnp.zeros_like(query),
    )
    assert np.abs(blind.totals - [one.sum() for one in expected_of_mixed()[0]]).max() > 0.1


def test_the_gpu_kernel_reads_trees(load, monkeypatch):
    """Of layers with windows, too. By its name it cannot be chosen where it is interpreted."""
    model = load("gemma3").astype(jnp.float32)
    expected = emsjax.score(model, *mixed())
    kernel = functools.partial(
        pallas_kernels.ragged_attention, implementation="triton", interpret=True
    )
    call = lambda self, *args, **options: kernel(*args, **options)
    monkeypatch.setattr(emsjax.decode.kernels.OwnAttention, "__call__", call)
    scores.score_forest.clear_cache()  # of programs for the other kernel
    assert_scores(emsjax.score(model, *mixed()), expected.logprobs)
    scores.score_forest.clear_cache()


def test_one_continuation_is_a_sequence_of_integers_and_several_are_sequences():
    model, prompts = shallow_model(), [[5, 6], [7]]
    single = emsjax.score(model, prompts, [[8, 9], [10]])
    assert single.num_continuations.tolist() == [1, 1]
    for continuations in (
        [np.array([8, 9]), jnp.array([10])],
        [[[8, 9]], [[10]]],
        [np.array([[8, 9]]), [(10,)]],
        [(8, 9), [np.array([10])]],
    ):
        other = emsjax.score(model, prompts, continuations)
        assert equal(other.logprobs, single.logprobs)
    tokenised = BatchEncoding({"input_ids": [[0, 5, 6], [7, 0, 0]]})
    tokenised["attention_mask"] = [[0, 1, 1], [1, 0, 0]]
    assert equal(emsjax.score(model, tokenised, [[8, 9], [10]]).logprobs, single.logprobs)


@pytest.mark.parametrize(
    ("prompts", "continuations", "message"),
    [
        ([[]], [[1]], r"prompts\[0\] is empty"),
        ([], [], "prompts is empty"),
        ("text", [[1]], "prompts must be a sequence"),
        ([[3]], [[]], r"continuations\[0\] is empty"),
        ([[3]], [[[]]], r"continuations\[0\]\[0\] is empty"),
        ([[3]], [[[2], []]], r"continuations\[0\]\[1\] is empty"),
        ([[3]], [[2, [3]]], r"continuations\[0\] mixes token ids and sequences"),
        ([[3]], [[[[2]]]], r"continuations\[0\]\[0\] must be a 1-D sequence"),
        ([[3]], [["a"]], r"continuations\[0\] must hold integer token ids"),
        ([[3]], ["a"], r"continuations\[0\] must be a sequence of token ids .* not str"),
        ([[3]], [3], r"continuations\[0\] must be a sequence of token ids .* not int"),
        ([[3]], [[2.0]], r"continuations\[0\] must hold integer token ids, not float64"),
        ([[3]], [[VOCAB]], rf"continuations\[0\] holds the token id {VOCAB}, outside 0..60"),
        ([[3]], [[[2], [-1]]], r"continuations\[0\]\[1\] holds the token id -1"),
        ([[3], [2]], [[1]], "continuations must have one entry per prompt: got 1 for 2"),
        ([[3]], {"input_ids": [[1]]}, "continuations must be a sequence .* not dict"),
        ([[3]], 5, "continuations must be a sequence .* not int"),
        (
            [[3], [3] * 60],
            [[2], [[2] * 5, [2] * 6]],
            r"prompts\[1\] has 60 tokens and continuations\[1\]\[1\] has 6: 65 positions are "
            rf"needed, but the model's limit max_position_embeddings is {POSITIONS}",
        ),
    ],
)
def test_wrong_prompts_and_continuations_are_named(prompts, continuations, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        emsjax.score(shallow_model(), prompts, continuations)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": None}, "model must be a model"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": 1.5}, "batch_size must be"),
        ({"batch_size": 2**31}, "batch_size"),
        ({"attention_implementation": "other"}, "attention_implementation"),
    ],
)
def test_wrong_options_are_named(options, message):
    given = {"model": shallow_model(), "prompts": [[3]], "continuations": [[2]]} | options
    if options.get("batch_size") == 2**31:  # more than there are continuations: all at once
        assert len(emsjax.score(**given).logprobs) == 1
        return
    with pytest.raises(ValueError, match=f"^{message}"):
        emsjax.score(**given)
