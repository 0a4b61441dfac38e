"""Automata of patterns allow just the token sequences whose text matches the whole pattern."""

import itertools
import json
import re
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import KINDS, read_lists

import emsjax
from emsjax.constraints import Constraint
from emsjax.text import automata, choices, from_regex, joined, json_schema, token_bytes
from emsjax.text.automata import minimised

# Tokens of a made-up vocabulary; the last but one adds no text, and the last is an end token.
SPELLINGS = [b"a", b"b", b"ab", b"ba", b"c", b"1", b".", b"1.1", b"bc", b"\xc3", b"\xa9"]
SPELLINGS += ["é".encode(), b"c\xc3", b"abc", b"", b"cc"]
VOCAB_SIZE, END = len(SPELLINGS), len(SPELLINGS) - 1
PATTERNS = [
    "a|ab",
    "a(bc)?",
    "(a|b)*a",
    "[^a]+",
    "a+?b*",
    r"-?(0|[1-9][0-9]*)(\.[0-9]+)?",
    "(?:ab|c){2,3}",
    ".é?|é.",
    "(a|b|c)*(ab|ba)c",
    "^ab*$",
    "^a|c$",
    "(?i)AB+",
    r"[$^ab]+\.",
    "(a*)(b*)(c*)",
    "",
]


@pytest.fixture(autouse=True, scope="module")
def made_up_vocabulary():
    """`token_bytes` of a list is the list."""
    with read_lists(automata):
        yield


def compiled(pattern):
    return from_regex(pattern, list(SPELLINGS), VOCAB_SIZE, [END])


def host(automaton):
    return map(np.asarray, (automaton.classes, automaton.table, automaton.final))


def state_after(automaton, tokens, start=0):
    """The state after these tokens from the start; -1: one is not allowed."""
    classes, table, _ = host(automaton)
    state = start
    for token in tokens:
        state = -1 if state < 0 else int(table[state, classes[token]])
    return state


def matches(pattern, spelled):
    """Whether bytes are text that matches the whole pattern."""
    try:
        return re.fullmatch(pattern, spelled.decode()) is not None
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("pattern", PATTERNS)
def test_short_sequences_are_final_just_if_they_match(pattern):
    automaton = compiled(pattern)
    final = np.asarray(automaton.final)
    found = 0
    with_text = [token for token in range(END) if SPELLINGS[token]]
    for length in range(4):
        for tokens in itertools.product(with_text, repeat=length):
            state = state_after(automaton, tokens)
            expected = matches(pattern, b"".join(SPELLINGS[token] for token in tokens))
            assert (state >= 0 and final[state]) == expected, tokens
            found += expected
    assert found


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=40)
@given(data=st.data())
def test_random_walks_end_in_matches(pattern, data):
    """Every state leads to a final one, and no walk along allowed tokens ends elsewhere."""
    automaton = compiled(pattern)
    classes, table, final = host(automaton)
    state, spelled = 0, b""
    for _ in range(data.draw(st.integers(0, 12))):
        allowed = np.flatnonzero(table[state][classes] >= 0).tolist()
        assert allowed or final[state]
        if not allowed:
            break
        token = data.draw(st.sampled_from(allowed))
        state, spelled = int(table[state, classes[token]]), spelled + SPELLINGS[token]
        assert final[state] == matches(pattern, spelled)
    reached = automata.reachable(table, [0])
    assert automata.coreachable(table, final)[reached].all()
    assert (table[~reached] == -1).all()  # places that round the number of states up
    assert not final[~reached].any()


def test_tokens_without_text_and_end_tokens_are_refused():
    automaton = compiled("c*a?")
    classes, table, final = host(automaton)
    assert (table[:, classes[[END, VOCAB_SIZE - 2]]] == -1).all()
    assert (table[0, classes[[0, 4]]] >= 0).all()
    assert final[0]
    assert table.dtype == classes.dtype == np.int32
    assert automaton.allowed(np.zeros(1, np.int32))[0].tolist() == (table[0][classes] >= 0).tolist()


def test_the_sign_that_marks_the_end_is_no_text():
    """Nothing is lost behind it, as it cannot follow a text that matches."""
    vocabulary = [b"a", automata.END_SIGN.encode(), "\U0010fffe".encode()]
    automaton = from_regex(".*", vocabulary, 3, [])
    assert state_after(automaton, [0, 1]) == -1
    assert automaton.final[state_after(automaton, [0, 2, 0])]


def test_nothing_follows_the_sign_whatever_the_compiler_says(monkeypatch):
    path = {0: {97: 0, 0xF4: 1}, 1: {0x8F: 2}, 2: {0xBF: 3}, 3: {0xBF: 4}, 4: {97: 0, 256: 4}}
    monkeypatch.setattr(automata, "_index", lambda pattern, compiled: (path, {4}, 0))
    table, final = automata._byte_automaton("a*")
    assert final.tolist() == [True]
    assert np.flatnonzero(table[0] == 0).tolist() == [97]


def test_states_that_tokens_do_not_leave_are_pruned():
    automaton = from_regex("ab|cd", [b"a", b"b", b"c"], 3, [])
    assert state_after(automaton, [2]) == -1
    assert np.asarray(automaton.final)[state_after(automaton, [0, 1])]
    assert (np.asarray(automaton.table) >= 0).any(axis=1).sum() == 2  # and a state at the end


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "not a regular expression"),
        ("a)(?:b", "not a regular expression"),
        ("a)|(?:b", "not a regular expression"),
        ("[a", "not a regular expression"),
        ("a{3,2}", "not a regular expression"),
        (r"(a)\1", "not a regular expression"),
        ("a(?=b)", "not a regular expression"),
        (r"\bab", "not a regular expression"),
        ("a\\", "not a regular expression"),
        ("\ud800", "not a regular expression"),
        ("a$|b", "no \\^ or \\$ but as its first and last"),
        ("(^a)", "no \\^ or \\$ but as its first and last"),
        ("x", "impossible"),
        ("axb", "impossible"),
        ("[^\\s\\S]", "impossible"),
        ("ü", "impossible"),
        (3, "must be a regular expression as a string, not 3"),
        (b"a", "must be a regular expression as a string"),
    ],
)
def test_wrong_patterns_are_refused(pattern, message):
    with pytest.raises(ValueError, match=f"^pattern .*{message}"):
        compiled(pattern)


def test_tables_have_a_limit(monkeypatch):
    monkeypatch.setattr("emsjax.text.composition.MAX_BYTES", 1 << 10)
    with pytest.raises(ValueError, match=r"needs a table of \d+ states and at least \d+ classes"):
        compiled("(a|b|c){1,200}")


def test_without_outlines_core_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "outlines_core", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'emsjax[constraints]'")):
        compiled("a")
    with pytest.raises(ImportError, match=re.escape("pip install 'emsjax[constraints]'")):
        json_schema({"type": "string"})


def test_minimal_automata_have_no_equal_states():
    # The words a and ba over two symbols, with a copy of the state behind the first symbol.
    table = np.array([[1, 2], [-1, -1], [3, -1], [-1, -1], [4, 4]])
    final = np.array([False, True, False, True, True])
    small, ends = minimised(table, final)
    assert small.tolist() == [[1, 2], [-1, -1], [1, -1], [3, 3]]
    assert ends.tolist() == [False, True, False, True]


def test_joined_automata_read_what_each_of_them_reads():
    # The vocabularies of every third are smaller by three ids, of which one has text.
    sizes = [VOCAB_SIZE - 3 * (i % 3 == 1) for i in range(len(PATTERNS))]
    parts = [
        from_regex(pattern, list(SPELLINGS[:size]), size, [])
        for pattern, size in zip(PATTERNS, sizes, strict=True)
    ]
    automaton, starts = joined(parts)
    assert len(automaton.classes) == VOCAB_SIZE
    assert len(set(starts.tolist())) == len(PATTERNS)
    _, table, final = host(automaton)
    used = sum(int(automata.reachable(np.asarray(one.table), [0]).sum()) for one in parts)
    assert (table[used:] == -1).all()  # places that round the number of states up
    for part, size, start in zip(parts, sizes, starts, strict=True):
        ends = np.asarray(part.final)
        for length in range(3):
            for tokens in itertools.product(range(VOCAB_SIZE), repeat=length):
                known = all(token < size for token in tokens)
                expected = state_after(part, tokens) if known else -1
                found = state_after(automaton, tokens, start)
                assert (found >= 0) == (expected >= 0)
                assert found < 0 or final[found] == ends[expected]


def test_joined_classes_are_no_more_than_needed():
    automaton, starts = joined([compiled("a+"), compiled("b|c")])
    # Tokens of "a", of "b" or "c", and all others.
    assert len(set(np.asarray(automaton.classes).tolist())) == 3
    assert starts.tolist() == [0, 2]
    assert joined([])[1].tolist() == []


def test_a_constraint_of_several_prompts_is_held_once():
    several, other = (Constraint.of(compiled(pattern)) for pattern in ("a+", "(b|c){3}"))
    each = emsjax.constraints.each([several, None, other, several])
    assert each.num_prompts == 4
    assert each.starts[:4].tolist() == [0, -2, 2, 0]
    assert (each.starts[4:] == -1).all()
    # Tokens without a choice are known by their new states.
    single = Constraint.of(from_regex("(ab){2}", [b"ab", b"c"], 2, []))
    each = emsjax.constraints.each([None, several, single])
    only, at = np.asarray(each.only), int(each.starts[2])
    assert only[at : at + 3].tolist() == single.only[:3].tolist() == [0, 0, -1]
    assert only[:at].tolist() == several.only[:2].tolist() == [0, -1]


@pytest.mark.parametrize("kind", ["byte_level", "gemma", "slow_bytes"])
def test_constraints_hold_for_tokenizers(kind):
    tokenizer = KINDS[kind]()
    size = len(tokenizer) + 3
    strings = ["print(x)", "日本 🙂", "a.b*", "\n\t #&~<>-\"'", "a", "a $"]
    automaton = from_regex(choices(strings), tokenizer, size, [tokenizer.eos_token_id])
    final, spellings = np.asarray(automaton.final), token_bytes(tokenizer, size)
    for text in strings:
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        assert b"".join(spellings[token] for token in tokens).decode() == text
        assert final[state_after(automaton, tokens)]
    for text in ("print(y)", "日", "axb", "a.bb"):
        tokens = tokenizer(text, add_special_tokens=False).input_ids
        state = state_after(automaton, tokens)
        assert state < 0 or not final[state]


@pytest.mark.parametrize(
    ("strings", "message"),
    [
        ([], "^choices is empty"),
        ("ab", "^choices must be a list of strings, not str"),
        (["a", 1], r"^choices\[1\] must be a string, not 1"),
        (None, "^choices must be a list of strings"),
    ],
)
def test_wrong_choices_are_refused(strings, message):
    with pytest.raises(ValueError, match=message):
        choices(strings)


POINT = {
    "$defs": {"side": {"title": "Side", "enum": ["left", "right", None]}},
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "code": {"type": "string", "pattern": "^a|bc$"},
        "x": {"type": "number", "description": "metres"},
        "side": {"$ref": "#/$defs/side"},
        "tags": {"type": "array", "items": {"type": ["integer", "null"]}, "maxItems": 2},
        "more": {"anyOf": [{"type": "boolean"}, {"allOf": [{"const": 7}]}]},
    },
    "required": ["name", "code", "x", "side", "tags"],
    "additionalProperties": False,
}
DOCUMENT = {"name": "é", "code": "bc", "x": -1.5, "side": None, "tags": [3, None]}


@pytest.mark.parametrize("schema", [POINT, json.dumps(POINT)], ids=["mapping", "text"])
@pytest.mark.parametrize(
    ("changed", "valid"),
    [
        ({}, True),
        ({"more": True}, True),
        ({"more": 7}, True),
        ({"code": "a"}, True),
        ({"code": "ac"}, False),
        ({"name": "é" * 6}, False),
        ({"x": "1"}, False),
        ({"side": "up"}, False),
        ({"tags": [1, 2, 3]}, False),
        ({"more": 8}, False),
        ({"other": 1}, False),
    ],
    ids=repr,
)
def test_documents_match_just_if_they_follow_the_schema(schema, changed, valid):
    tokenizer = KINDS["slow_bytes"]()
    automaton = from_regex(json_schema(schema), tokenizer, len(tokenizer), [])
    text = json.dumps(DOCUMENT | changed, ensure_ascii=False)
    state = state_after(automaton, tokenizer(text).input_ids)
    assert (state >= 0 and bool(automaton.final[state])) == valid


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be a mapping"),
        (None, "must be a mapping"),
        ({"type": "nope"}, "Unsupported type: nope"),
        ({"type": "string", "format": "foo"}, "Format foo"),
        ({"type": "integer", "minimum": 3}, "the keyword minimum"),
        ({"not": {"type": "string"}}, "the keyword not"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "maxLength, pattern, type together"),
        ({"anyOf": [{"type": "null"}], "type": "string"}, "anyOf, type together"),
        ({"allOf": [{"type": "null"}, {"type": "null"}]}, "allOf of several schemas"),
        ({}, "no type"),
        ({"anyOf": []}, "anyOf without a list"),
        ({"enum": 3}, "enum without a list"),
        ({"properties": {"a": {}}}, "no type"),
        ({"properties": [1]}, "properties without a mapping"),
        ({"properties": {"a": 3}}, "something other than keywords"),
        ({"properties": {"a": {"type": "null"}}, "required": ["z"]}, "the required 'z'"),
        ({"$ref": "#/$defs/a"}, "a reference to nothing"),
        ({"$ref": "http://x/y"}, "a reference to another document"),
        ({"type": "object", "additionalProperties": False}, "something other than keywords"),
        ({"$ref": "#"}, "a reference to a schema that holds it"),
        ({"const": {1, 2}}, "cannot be written as JSON"),
        ({"type": "string", "pattern": "a$|b"}, "no \\^ or \\$"),
    ],
    ids=repr,
)
def test_schemas_that_would_not_be_kept_to_are_refused(schema, message):
    with pytest.raises(ValueError, match=message):
        json_schema(schema)
