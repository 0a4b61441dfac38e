"""Suffix drafts are compared with the rule written with lists, and output with plain decoding."""

import contextlib
import dataclasses
import functools
import re
import zipfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import ragged_prompts, shallow_model

import emsjax
from emsjax.decode.step import decode_loop
from emsjax.drafters import suffix as drafting
from emsjax.drafters import suffix_memory
from emsjax.drafters.suffix_memory import CONTEXT, SEPARATOR

WIDTH, BATCH, K = 40, 3, 6
MOST = drafting.OCCURRENCES
SETTINGS = (
    {},
    {"min_match_length": 3, "length_factor": 0.75, "length_offset": 1.0, "min_probability": 0.5},
)


def shared(text, end, history):
    """How many of the last tokens of text[:end] and of a history are the same, up to CONTEXT."""
    most = min(end, len(history), CONTEXT)
    return next((i for i in range(most) if text[end - 1 - i] != history[-1 - i]), most)


def longest(text, history):
    """The longest match in a text of token ids and separators, and its places, in order."""
    inside = [p for p in range(1, len(text)) if SEPARATOR not in text[p - 1 : p + 1]]
    matches = {p: shared(text, p, history) for p in inside}
    most = max(matches.values(), default=0)
    return most, [p for p in inside if matches[p] == most > 0]


def own_candidates(history):
    """The longest match in a history, and its latest continuations, which go on with the draft."""
    most, places = longest(history, history)
    found = [history[p:] * K for p in places[::-1][:MOST]]
    return most, [one[:K] for one in found]


def remembered_candidates(sequences, history):
    """The same in a memory: evenly spaced in the order of the tokens before them, latest first."""
    text = [SEPARATOR] * CONTEXT
    for one in sequences:
        text += [*one, SEPARATOR]
    most, places = longest(text, history)
    places.sort(key=lambda p: (text[p - CONTEXT : p][::-1], p))
    if len(places) > MOST:
        places = [places[i * len(places) // MOST] for i in range(MOST)]
    rest = lambda p: text[p : text.index(SEPARATOR, p)]
    padded = [rest(p) + [SEPARATOR] * K for p in sorted(places, reverse=True)]
    return most, [one[:K] for one in padded]


def expected_draft(history, sequences, limit, **given):
    """The draft by the rule of `SuffixDrafter`."""
    drafter = emsjax.SuffixDrafter(K, **given)
    most, candidates = own_candidates(history)
    elsewhere = remembered_candidates(sequences, history)
    if elsewhere[0] > most:
        most, candidates = elsewhere
    if most < drafter.min_match_length:
        return []
    length = int(most * drafter.length_factor + drafter.length_offset)
    draft, total = [], len(candidates)
    for at in range(min(length, K, limit)):
        tokens = [one[at] for one in candidates]
        token = max(tokens, key=tokens.count)  # the first one of those that are equally frequent
        candidates = [one for one in candidates if one[at] == token]
        if token == SEPARATOR or len(candidates) / total < drafter.min_probability - 1e-6:
            break
        draft.append(token)
    return draft


@jax.jit
def propose(drafter, tokens, lengths, limits):
    return drafter.propose((), tokens, lengths, limits, None, None)[0]


def drafts(drafter, histories, limits, *, beyond=0):
    """The drafts after histories; the arrays hold the token `beyond` behind them."""
    tokens = np.full((len(histories), WIDTH), beyond, np.int32)
    for row, history in zip(tokens, histories, strict=True):
        row[: len(history)] = history
    lengths = np.array(list(map(len, histories)), np.int32)
    draft = propose(drafter, tokens, lengths, np.array(limits, np.int32))
    return [row[:n].tolist() for row, n in zip(draft.tokens, draft.counts, strict=True)]


def memory_of(sequences):
    memory = emsjax.SuffixMemory()
    memory.add(sequences)
    return memory


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.integers(1, 5),
    count=st.none() | st.integers(0, 9),
    quoted=st.booleans(),
    given=st.sampled_from(SETTINGS),
)
def test_drafts_follow_the_rule(seed, vocab_size, count, quoted, given):
    rng = np.random.default_rng(seed)
    draw = lambda least, most: rng.integers(0, vocab_size, rng.integers(least, most)).tolist()
    histories = [draw(1, WIDTH + 1) for _ in range(BATCH)]
    sequences = [draw(0, 30) for _ in range(count or 0)]
    if quoted:  # long matches in the memory
        histories = [(one + s[:20])[-WIDTH:] for one, s in zip(histories, sequences, strict=False)]
        histories += [draw(1, WIDTH + 1) for _ in range(BATCH - len(histories))]
    limits = rng.integers(0, K + 3, BATCH).tolist()
    drafter = emsjax.SuffixDrafter(K, None if count is None else memory_of(sequences), **given)
    found = drafts(drafter, histories, limits, beyond=rng.integers(vocab_size))
    for history, limit, draft in zip(histories, limits, found, strict=True):
        assert draft == expected_draft(history, sequences, limit, **given)


@pytest.mark.parametrize(
    ("history", "sequences", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], [], [3, 4, 1, 2]),  # twice the match
        ([7, 7, 7], [], [7, 7, 7, 7]),  # the draft goes on with itself
        ([1, 2, 3], [], []),
        ([5], [[5, 6, 7]], [6, 7]),
        ([9, 5], [[5, 6], [4, 5]], [6]),  # nothing follows the last token of a sequence
        ([4, 5], [[4], [5, 6, 8], [9, 5, 6, 7]], [6, 7]),  # nor is a match longer than a sequence
        ([5, 1, 5], [[5, 2]], [1, 5]),  # its own tokens win a tie
        ([3, 5, 1, 3, 5], [[3, 5, 2]], [1, 3, 5, 1]),
        ([5, 1, 3, 5], [[3, 5, 2]], [2]),
        ([5], [[5, 1, 1], [5, 2, 2], [5, 1, 3], [5, 2, 2]], [2, 2]),  # most frequent, then latest
        ([5], [[5, i] for i in range(6, 12)], []),  # one of six is not enough
    ],
)
def test_drafts_of_small_examples(history, sequences, expected):
    drafter = emsjax.SuffixDrafter(K, memory_of(sequences))
    assert drafts(drafter, [history] * BATCH, [K] * BATCH) == [expected] * BATCH


def test_a_large_memory_is_searched_exactly():
    """Its suffix array is searched in several rounds; most matches have many occurrences."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 3, n).tolist() for n in rng.integers(1, 40, 90)]
    histories = [rng.integers(0, 3, n).tolist() for n in (1, 2, 3, 5, 8, 13)]
    histories += [sequences[i][-20:-3] for i in (4, 40, 80)]
    drafter = emsjax.SuffixDrafter(K, memory_of(sequences))
    assert len(drafter.index.order) > suffix_memory.BRANCHES
    for history in filter(None, histories):
        (draft, *_) = drafts(drafter, [history] * BATCH, [K] * BATCH)
        assert draft == expected_draft(history, sequences, K)


def test_padding_of_a_memory_is_never_read_into_a_draft():
    sequences = [[1, 2, 3, 1, 2], [2, 3, 3, 1]]
    drafter = emsjax.SuffixDrafter(K, memory_of(sequences))
    index, histories = drafter.index, [[1], [2, 3], [4, 4]]
    used = CONTEXT + sum(len(one) + 1 for one in sequences)
    spoilt = dataclasses.replace(
        index,
        text=index.text.at[used:].set(4),
        order=index.order.at[index.size :].set(used + 5),
    )
    poisoned = emsjax.SuffixDrafter.tree_unflatten(drafter.tree_flatten()[1], (spoilt,))
    limits = [K] * BATCH
    assert drafts(poisoned, histories, limits) == drafts(drafter, histories, limits)


def test_a_samples_drafts_do_not_depend_on_the_batch():
    rng = np.random.default_rng(1)
    histories = [rng.integers(0, 3, n).tolist() for n in (40, 7, 22)]
    drafter = emsjax.SuffixDrafter(K, memory_of([rng.integers(0, 3, 50).tolist()]))
    limits = [K] * BATCH
    whole = drafts(drafter, histories, limits)
    assert whole[::-1] == drafts(drafter, histories[::-1], limits)
    for i, history in enumerate(histories):
        others = [history if i == j else [2] for j in range(BATCH)]
        assert drafts(drafter, others, limits)[i] == whole[i]


# Whole calls.

PROMPTS = ragged_prompts([5, 9, 20, 3, 14, 1, 2])
NEW = [7, 20, 3, 12, 9, 1, 25]
GREEDY = {"max_new_tokens": NEW}
SAMPLED = {"sampling": emsjax.Sampling(0.7, top_p=0.95), "key": jax.random.key(5)}
OPTIONS = {"greedy": GREEDY, "sampled": GREEDY | SAMPLED | {"num_sequences": 2}}


@functools.cache
def plain(name):
    return emsjax.generate(shallow_model(), PROMPTS, **OPTIONS[name])


def outputs(out):
    return [tokens[:n] for tokens, n in zip(out.tokens, out.lengths, strict=True)]


@functools.cache
def drafters(name):
    """Drafters for the options of this name, with a memory of some of their outputs and without."""
    memory = memory_of(outputs(plain(name))[::2])
    return {False: emsjax.SuffixDrafter(K), True: emsjax.SuffixDrafter(K, memory)}


@functools.cache
def whole(name, remembers):
    return emsjax.generate(shallow_model(), PROMPTS, drafters(name)[remembers], **OPTIONS[name])


def assert_same(out, other, *, steps=True):
    np.testing.assert_array_equal(out.tokens, other.tokens)
    np.testing.assert_array_equal(out.lengths, other.lengths)
    np.testing.assert_allclose(out.logprobs, other.logprobs, atol=2e-5)
    for name in ("num_steps", "num_drafted", "num_accepted") if steps else ():
        np.testing.assert_array_equal(getattr(out.stats, name), getattr(other.stats, name))


@pytest.mark.parametrize("remembers", [False, True], ids=["own", "memory"])
@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_equal_plain_decoding(name, remembers):
    out = whole(name, remembers)
    assert_same(out, plain(name), steps=False)
    assert out.stats.num_drafted.sum() > 0
    if remembers:  # the drafts of outputs that the memory holds are right
        assert out.stats.mean_acceptance_length > 1.3
        assert out.stats.num_steps.sum() < whole(name, False).stats.num_steps.sum()


@pytest.mark.parametrize("name", OPTIONS)
def test_refilled_and_streamed_sequences_draft_as_in_one_batch(name):
    model, drafter = shallow_model(), drafters(name)[True]
    out = emsjax.generate(model, PROMPTS, drafter, batch_size=4, **OPTIONS[name])
    assert_same(out, whole(name, True))
    streamed = emsjax.stream(model, PROMPTS, drafter, batch_size=4, **OPTIONS[name])
    count = OPTIONS[name].get("num_sequences", 1)
    for one in streamed:
        i = one.prompt * count + one.sequence
        assert one.tokens.tolist() == outputs(out)[i].tolist()
        assert one.num_drafted == out.stats.num_drafted[i]
        assert one.num_accepted == out.stats.num_accepted[i]


def test_a_policy_limits_the_drafts():
    drafter, policy = drafters("greedy")[True], emsjax.FixedLength(2)
    out = emsjax.generate(shallow_model(), PROMPTS, drafter, policy, **GREEDY)
    assert_same(out, plain("greedy"), steps=False)
    assert (out.stats.num_drafted <= 2 * out.stats.num_steps).all()
    assert not out.stats.accepted_histogram[:, 3:].any()
    assert out.stats.accepted_histogram[:, 2].any()


def test_a_drafter_keeps_the_memory_that_it_was_made_with_and_growth_compiles_nothing():
    memory = memory_of(outputs(plain("greedy"))[::2])
    drafter = emsjax.SuffixDrafter(K, memory)
    before = emsjax.generate(shallow_model(), PROMPTS, drafter, **GREEDY)
    compiled = decode_loop._cache_size()
    memory.add(outputs(plain("greedy")))
    after = emsjax.generate(shallow_model(), PROMPTS, drafter, **GREEDY)
    assert_same(after, before)
    grown = emsjax.SuffixDrafter(K, memory)
    out = emsjax.generate(shallow_model(), PROMPTS, grown, **GREEDY)
    assert_same(out, before, steps=False)
    assert out.stats.num_steps.sum() < before.stats.num_steps.sum()
    assert decode_loop._cache_size() == compiled


# The memory.


def content(memory):
    return [one.tolist() for one in memory.sequences]


def test_the_oldest_sequences_leave_first():
    memory = emsjax.SuffixMemory(max_bytes=1024)  # 112 tokens and ends of sequences
    memory.add([[1] * 50, [2] * 50])
    assert content(memory) == [[1] * 50, [2] * 50]
    memory.add([[3] * 9])
    assert content(memory) == [[1] * 50, [2] * 50, [3] * 9]
    memory.add([[4]])
    assert content(memory) == [[2] * 50, [3] * 9, [4]]
    memory.add([list(range(300))])
    assert content(memory) == [list(range(300 - 111, 300))]


@given(lengths=st.lists(st.integers(0, 90), max_size=12), max_bytes=st.integers(1024, 3000))
def test_a_memory_keeps_its_limit(lengths, max_bytes):
    memory, added = emsjax.SuffixMemory(max_bytes), []
    for i, n in enumerate(lengths):
        memory.add([[i] * n])
        added += [[i] * n] if n else []
    index = memory.index
    assert index.text.nbytes + index.order.nbytes <= max_bytes
    kept = content(memory)
    assert kept == added[len(added) - len(kept) :]
    assert 8 * (CONTEXT + sum(len(one) + 1 for one in added[-len(kept) - 1 :])) > max_bytes or (
        len(kept) == len(added)
    )


def test_a_drafter_may_be_made_in_a_trace():
    memory = memory_of([[1, 2, 3]])
    size = jax.jit(lambda: emsjax.SuffixDrafter(K, memory).index.size + 1)()
    assert (int(size), int(memory.index.size)) == (3, 2)


def test_sizes_of_the_arrays_are_powers_of_two():
    sizes = set()
    for n in range(100, 4000, 150):
        sizes.add(memory_of([np.arange(n)]).index.order.size)
    assert sizes == {1024, 2048, 4096}


@pytest.mark.parametrize("sequences", [[], [[1, 2, 3], [4], [5, 0]]], ids=["empty", "three"])
def test_a_saved_memory_is_loaded(sequences, tmp_path):
    memory, path = emsjax.SuffixMemory(max_bytes=2048), tmp_path / "memory"
    memory.add(sequences)
    memory.save(path)
    assert [one.name for one in tmp_path.iterdir()] == ["memory"]
    loaded = emsjax.SuffixMemory.load(str(path))
    assert content(loaded) == sequences
    assert loaded.max_bytes == 2048
    memory.add([[7] * 120])
    memory.save(path)
    smaller = emsjax.SuffixMemory.load(path, max_bytes=1024)
    assert content(smaller) == [[7] * 111]


@settings(max_examples=60)
@given(place=st.floats(0, 0.999), change=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_file_is_a_named_error(place, change, cut, tmp_path_factory):
    path = tmp_path_factory.mktemp("damaged") / "memory.npz"
    memory = memory_of([[1, 2, 3], [4]])
    memory.save(path)
    data = bytearray(path.read_bytes())
    at = int(place * len(data))
    data[at] ^= change
    path.write_bytes(data[:at] if cut else data)
    refused = pytest.raises(ValueError, match=f"^{re.escape(str(path))} is damaged, or no memory")
    if cut:
        with refused:
            emsjax.SuffixMemory.load(path)
        return
    with contextlib.suppress(ValueError):  # some bytes carry nothing, such as those of a date
        assert content(emsjax.SuffixMemory.load(path)) == content(memory)
        return
    with refused:
        emsjax.SuffixMemory.load(path)


class Touching(NamedTuple):
    """An object whose pickle creates a file when it is read."""

    path: Path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_files_that_hold_something_else_are_refused(tmp_path):
    path = tmp_path / "memory.npz"
    with pytest.raises(FileNotFoundError):
        emsjax.SuffixMemory.load(path)
    good = {"tokens": np.arange(3, dtype=np.int32), "lengths": np.array([2, 1]), "max_bytes": 2048}
    wrong = [
        {"tokens": np.arange(3.0)},
        {"tokens": np.array([1, -1, 2])},
        {"tokens": np.array([1, Touching(tmp_path / "touched"), 2], object)},
        {"lengths": np.array([2, 2])},
        {"lengths": np.array([4, -1])},
        {"lengths": np.array([[2, 1]])},
        {"max_bytes": 3},
    ]
    for change in wrong:
        np.savez(path, **{**good, **change})
        with pytest.raises(ValueError, match=r"memory\.npz is damaged, or no memory"):
            emsjax.SuffixMemory.load(path)
    assert not (tmp_path / "touched").exists()
    with zipfile.ZipFile(path, "w"):
        pass
    with pytest.raises(ValueError, match=r"memory\.npz is damaged, or no memory"):
        emsjax.SuffixMemory.load(path)


# Annotations are not checked from here on.


@pytest.mark.usefixtures("unchecked_annotations")
def test_a_proposal_is_few_kernels():
    """One kernel for each fusion of the compiler's, roughly, and no loop."""
    shapes = (BATCH, 2048), (BATCH,), (BATCH,)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    memory = memory_of([np.arange(1 << 20)])
    for drafter, most in ((emsjax.SuffixDrafter(), 24), (emsjax.SuffixDrafter(16, memory), 64)):
        traced = propose.trace(drafter, *arguments)
        traced.lower(lowering_platforms=("cuda",))
        text = traced.lower().compile().as_text()
        assert " while(" not in text
        assert text[text.index("ENTRY") :].count(" fusion(") <= most


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: emsjax.SuffixDrafter(0), "max_draft_tokens must be"),
        (lambda: emsjax.SuffixDrafter(memory=[[1, 2]]), "memory must be an emsjax.SuffixMemory"),
        (lambda: emsjax.SuffixDrafter(min_match_length=17), "min_match_length must be .*16"),
        (lambda: emsjax.SuffixDrafter(length_factor=-1), "length_factor must be a number from 0"),
        (lambda: emsjax.SuffixDrafter(length_offset="1"), "length_offset must be a number from 0"),
        (lambda: emsjax.SuffixDrafter(min_probability=1.5), "min_probability must be a number"),
        (lambda: emsjax.SuffixMemory(max_bytes=100), "max_bytes must be"),
        (lambda: emsjax.SuffixMemory().add("text"), "sequences must be a list of token-id"),
        (lambda: emsjax.SuffixMemory().add([[1], [-2]]), r"sequences\[1\] holds the token id -2"),
        (lambda: emsjax.SuffixMemory().add([[1], 2]), r"sequences\[1\] must be"),
    ],
)
@pytest.mark.usefixtures("unchecked_annotations")
def test_wrong_arguments_are_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
