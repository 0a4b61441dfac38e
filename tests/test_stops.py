"""The automaton finds the stops that a search of the decoded bytes and of the tokens finds."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import KINDS, read_lists

from emsjax.text import read_stops, stop_automaton, token_bytes
from emsjax.text import stops as stops_module
from emsjax.text.composition import coreachable, reachable, unique_rows

# Tokens of a made-up vocabulary; the last ones add no text.
SPELLINGS = [b"a", b"b", b"aab", b"ba", b"abb", b"c", b"\xc3", b"\xa9", b"a\xc3", b"\xa9b"]
SPELLINGS += ["é".encode(), b"bab", b"", b""]
VOCAB_SIZE = len(SPELLINGS)
TOKENS = st.integers(0, VOCAB_SIZE - 1)
STOPS = st.text("abé", min_size=1, max_size=5) | st.lists(TOKENS, min_size=1, max_size=3).map(tuple)


@pytest.fixture(autouse=True, scope="module")
def made_up_vocabulary():
    """`token_bytes` of a list is the list."""
    with read_lists(stops_module):
        yield


def naive_finals(tokens, stops, spellings=SPELLINGS):
    """Whether each token completes a stop."""
    finals = []
    for end in range(1, len(tokens) + 1):
        before = b"".join(spellings[token] for token in tokens[: end - 1])
        text = before + spellings[tokens[end - 1]]
        sequences = [list(stop) for stop in stops if not isinstance(stop, str)]
        found = any(tokens[:end][-len(one) :] == one for one in sequences)
        for stop in stops:
            if isinstance(stop, str):
                word = stop.encode()
                ends = (
                    place + len(word) for place in range(len(text)) if text[place:].startswith(word)
                )
                found |= any(place > len(before) for place in ends)
        finals.append(found)
    return finals


def finals_of(automaton, start, tokens):
    """Whether the state after each token is final, by the arrays on the host."""
    classes, table, final = map(np.asarray, (automaton.classes, automaton.table, automaton.final))
    finals, state = [], int(start)
    for token in tokens:
        state = table[state, classes[token]]
        finals.append(bool(final[state]))
    return finals


@settings(max_examples=400)
@given(
    lists=st.lists(st.lists(STOPS, max_size=3), min_size=1, max_size=3),
    tokens=st.lists(TOKENS, max_size=25),
)
def test_the_automaton_finds_what_a_naive_search_finds(lists, tokens):
    automaton, starts = stop_automaton(lists, VOCAB_SIZE, SPELLINGS)
    assert starts.shape == (len(lists),)
    assert starts.dtype == np.int32
    assert automaton.table.dtype == automaton.classes.dtype == jnp.int32
    assert not np.asarray(automaton.final)[starts].any()
    for stops, start in zip(lists, starts, strict=True):
        assert finals_of(automaton, start, tokens) == naive_finals(tokens, stops), stops


@pytest.mark.parametrize(
    ("stop", "spelled", "expected"),
    [
        ("ab", [b"aab"], [1]),
        ("bb", [b"ab", b"ba"], [0, 1]),
        ("aab", [b"aa", b"ab"], [0, 1]),
        ("aab", [b"a", b"a", b"a", b"b"], [0, 0, 0, 1]),
        ("abcab", [b"a", b"bca", b"b", b"cab"], [0, 0, 1, 1]),
        ("é", [b"\xc3", b"\xa9"], [0, 1]),
        ("é", [b"x\xc3", b"", b"\xa9y"], [0, 0, 1]),
        ("a", [b"a", b"", b"b", b"ba"], [1, 0, 0, 1]),
        ("xx", [b"xxx", b"x", b"y"], [1, 1, 0]),
    ],
    ids=repr,
)
def test_a_stop_is_found_across_tokens_and_inside_them(stop, spelled, expected):
    vocabulary = list(dict.fromkeys(spelled))
    automaton, starts = stop_automaton([[stop]], len(vocabulary), vocabulary)
    tokens = [vocabulary.index(one) for one in spelled]
    assert finals_of(automaton, starts[0], tokens) == [bool(one) for one in expected]


def test_the_device_walks_as_the_host_does():
    lists = [["ab", (5, 5)], [], ["é"]]
    automaton, starts = stop_automaton(lists, VOCAB_SIZE, SPELLINGS)
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, (3, 9))
    finals = automaton.is_final(automaton.walk(jnp.asarray(starts), jnp.asarray(tokens, jnp.int32)))
    for row, start, line in zip(np.asarray(finals), starts, tokens, strict=True):
        assert row[1:].tolist() == finals_of(automaton, start, line)
    assert not finals[1].any()
    assert finals.any()


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "gemma", "slow_bytes"])
def test_stops_are_found_in_the_text_of_tokenizers(kind):
    tokenizer = KINDS[kind]()
    size = len(tokenizer) + 3
    stops = ["x):\n", "日本語", "🙂", "world')"]
    automaton, starts = stop_automaton([stops], size, tokenizer)
    spellings = token_bytes(tokenizer, size)
    for text in ("def f(x):\n  return", "(日本語)", "🙂🙂 smile", "hello, world'), wor"):
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        finals = finals_of(automaton, starts[0], tokens)
        assert finals == naive_finals(tokens, stops, spellings)
        assert any(finals)


def test_no_lists_and_empty_lists_find_nothing():
    automaton, starts = stop_automaton([], 5)
    assert starts.shape == (0,)
    assert not automaton.final.any()
    automaton, starts = stop_automaton([[], []], 5)
    assert finals_of(automaton, starts[1], [0, 1, 2, 3, 4]) == [False] * 5


def test_similar_automata_have_the_same_shapes():
    """They share compiled programs."""
    lists = [[["a"]], [["abé"], []], [[(1, 2, 3)]], [["abab", (1,)], ["éa"]]]
    shapes = {stop_automaton(one, VOCAB_SIZE, SPELLINGS)[0].table.shape for one in lists}
    assert len(shapes) == 1


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("", "^stop is an empty string"),
        ((), "^stop is empty"),
        ((VOCAB_SIZE,), "^stop holds the token id 14, outside 0..13"),
        ((-1,), "^stop holds the token id -1"),
        (1.5, "^stop must be a string or a sequence of token ids, not 1.5"),
        (None, "^stop must be a string or a sequence of token ids, not None"),
        (b"a", "^stop must be a string or a sequence of token ids, not b'a'"),
        ({3}, "^stop must be a string or a sequence of token ids"),
        ("\ud800", "^stop has no UTF-8"),
        ("abd", "^stop 'abd' cannot be spelled"),
        ("ü", "^stop 'ü' cannot be spelled"),
    ],
)
def test_wrong_stops_are_refused(stop, message):
    with pytest.raises(ValueError, match=message):
        stop_automaton([["a"], [stop]], VOCAB_SIZE, SPELLINGS)


def test_what_only_several_tokens_spell_is_spelled():
    stop_automaton([["xyz"]], 2, [b"wx", b"yzw"])
    for vocabulary in ([b"wxw", b"yzw"], [b"", b""]):
        with pytest.raises(ValueError, match="cannot be spelled"):
            stop_automaton([["xyz"]], 2, vocabulary)


def test_strings_need_a_tokenizer_and_tables_have_a_limit():
    with pytest.raises(ValueError, match=r"^stop needs tokenizer= to find the string 'a'"):
        stop_automaton([[(1,)], ["a"]], VOCAB_SIZE)
    with pytest.raises(ValueError, match=r"^stop needs a table of \d+ states and at least"):
        stop_automaton([[tuple(range(9000))]], 9000)


ONE, TWO = ("a",), ((1, 2),)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (None, [(), ()]),
        ("a", [ONE, ONE]),
        ([1, 2], [TWO, TWO]),
        (np.array([1, 2]), [TWO, TWO]),
        (["a"], [ONE, ONE]),
        (("a", [1, 2]), [ONE + TWO] * 2),
        ([[1, 2]], [TWO, TWO]),
        ([np.array([1, 2]), (3,)], [((1, 2), (3,))] * 2),
        (jnp.array([[1, 2], [3, 4]]), [((1, 2), (3, 4))] * 2),
        ([], [(), ()]),
        ([[], []], [(), ()]),
        ([["a"], []], [ONE, ()]),
        ([["a"], [[1, 2]]], [ONE, TWO]),
        ([[[1, 2], "a"], ("a",)], [TWO + ONE, ONE]),
        ([np.int64(1), np.array(2)], [TWO, TWO]),
    ],
    ids=repr,
)
def test_stops_are_read_for_each_prompt(stop, expected):
    found = read_stops(stop, 2, 10)
    assert found == expected
    assert all(type(token) is int for one in found for s in one if s != "a" for token in s)


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("", "^stop is an empty string"),
        (3, "^stop must be a string, a sequence of token ids, a list of these .*, not 3"),
        (b"a", "^stop must be a string, a sequence .*, not b'a'"),
        ({"a": 1}, "^stop must be a string, a sequence .*, not dict"),
        pytest.param(
            (one for one in "ab"),
            "^stop must be a string, a sequence .*, not generator",
            id="generator",  # whose repr is another in every process
        ),
        ([1, 10], "^stop holds the token id 10, outside 0..9"),
        ([1.5], "^stop must hold integer"),
        ([True], "^stop must hold integer token ids, not booleans"),
        (["a", ""], r"^stop\[1\] is an empty string"),
        (["a", []], r"^stop\[1\] is empty"),
        ([[1, 2], []], r"^stop\[1\] is empty"),
        ([1, "a"], r"^stop\[0\] must be a string or a sequence of token ids, not 1"),
        (["a", None], r"^stop\[1\] must be a string or a sequence of token ids, not None"),
        (["a", ["b"]], r"^stop\[1\] must be a string or a sequence of token ids, not \['b'\]"),
        ([["a"]], "^stop must be one list of stops or one per prompt: got 1 lists for 2 prompts"),
        ([["a"], ["b"], []], "got 3 lists for 2 prompts"),
        ([[], [], []], r"^stop\[0\] is empty"),
        ([["a"], [[1], [-1]]], r"^stop\[1\]\[1\] holds the token id -1"),
        ([["a"], [["b"]]], r"^stop\[1\]\[0\] must be a string or a sequence of token ids"),
        (np.zeros((2, 2, 2), int), r"^stop\[0\] must be a string or a sequence of token ids"),
        (str, "^stop must be a string"),
    ],
    ids=repr,
)
def test_stops_of_other_kinds_are_refused(stop, message):
    with pytest.raises(ValueError, match=message):
        read_stops(stop, 2, 10)


def test_distinct_rows_and_states_that_lead_somewhere():
    rows = np.array([[3, 1], [0, 0], [3, 1], [5, 5], [0, 0]])
    kept, places = unique_rows(rows)
    assert kept.tolist() == [[3, 1], [0, 0], [5, 5]]
    assert places.tolist() == [0, 1, 0, 2, 1]
    table = np.array([[1, -1], [2, 3], [-1, -1], [3, 3], [2, 0]])
    assert reachable(table, [0]).tolist() == [True, True, True, True, False]
    final = np.array([False, False, True, False, False])
    assert coreachable(table, final).tolist() == [True, True, True, False, True]
