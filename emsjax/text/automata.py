"""Automata of regular expressions, which constrain tokens."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from emsjax.checks import refuse, shown
from emsjax.sampling.automaton import REFUSED, TokenAutomaton
from emsjax.text.composition import (
    TooLargeError,
    compose,
    coreachable,
    keep_states,
    reachable,
    token_automaton,
    unique_rows,
)
from emsjax.text.patterns import opens_what_it_closes, outlines_module, without_anchors
from emsjax.text.vocabulary import token_bytes

# Marks the end of the text for the compiler: the last code point, which is no character.
END_SIGN = "\U0010ffff"


def from_regex(
    pattern: str, tokenizer: Any, vocab_size: int, end_token_ids: Iterable[int]
) -> TokenAutomaton:
    """The automaton of the sequences of tokens whose text matches a pattern.

    State 0 is the start, and final states are those after texts that match the whole pattern. A
    final state can be reached from every state. Tokens without text and end tokens are refused in
    every state: whether a text may end is what `final` tells. U+10FFFF, which is no character, is
    refused behind a text that matches.

    Args:
        pattern: a regular expression of Rust's crate `regex`, without look-around, references to
            groups and word boundaries. It matches whole texts, with or without a `^` at its
            beginning and a `$` at its end.
        tokenizer: a tokenizer of transformers.
        vocab_size: the model's vocabulary size.
        end_token_ids: tokens that end a sequence.

    Raises:
        ImportError: outlines-core is missing.
        ValueError: the pattern is no such expression, no sequence of tokens matches it, or its
            table would exceed `MAX_BYTES`.
    """
    if not isinstance(pattern, str):
        refuse("pattern", "a regular expression as a string", pattern)
    spellings = token_bytes(tokenizer, vocab_size)
    for token in end_token_ids:
        spellings[token] = b""
    impossible = (
        f"pattern {shown(pattern)} is impossible: no sequence of the tokenizer's tokens matches it"
    )
    table, final = _byte_automaton(pattern)
    if not final.size:
        raise ValueError(impossible)
    table, final = minimised(table, final)
    with_text = np.array([len(one) > 0 for one in spellings], bool)
    try:
        columns, classes_with_text = compose(table, [one for one in spellings if one])
    except TooLargeError as error:
        raise ValueError(f"pattern {shown(pattern)} needs {error}") from error
    refused = np.full((len(table), 1), REFUSED, columns.dtype)
    classes = np.zeros(vocab_size, np.int64)
    classes[with_text] = classes_with_text + 1
    table, final = _trimmed(np.concatenate([refused, columns], axis=1), final)
    if not final.size:
        raise ValueError(impossible)
    return token_automaton(classes, table, final)


def _byte_automaton(pattern: str) -> tuple[Int[np.ndarray, "s 256"], Bool[np.ndarray, "s"]]:
    """The states after a state and a byte, and those in which the whole pattern matches.

    State 0 is the start. There are no states if nothing matches.

    outlines-core's `Index` follows the search for a leftmost match, which drops texts that go on
    behind a shorter match: "ab" for "a|ab", and for "a(bc)?" even "abc" byte by byte. So the
    pattern is compiled with a sign behind it, and is matched where that sign may follow.

    Raises:
        ImportError: outlines-core is missing.
        ValueError: the pattern is no regular expression.
    """
    inner = without_anchors(pattern)
    if not opens_what_it_closes(inner):
        raise ValueError(f"pattern {shown(pattern)} is not a regular expression: unopened )")
    transitions, ends, start = _index(pattern, f"(?:{inner})\\x{{{ord(END_SIGN):x}}}")
    numbers = {start: 0}
    for state in transitions:
        numbers.setdefault(state, len(numbers))
    for state in ends:
        numbers.setdefault(state, len(numbers))
    table = np.full((len(numbers), 256), REFUSED, np.int64)
    for state, after in transitions.items():
        for byte, target in after.items():
            if byte < 256:
                table[numbers[state], byte] = numbers[target]
    ended = np.zeros(len(numbers), bool)
    ended[[numbers[state] for state in ends]] = True
    # Final is a state from which the sign leads to an end.
    states = np.arange(len(numbers))
    for byte in END_SIGN.encode():
        states = np.where(states == REFUSED, REFUSED, table[states, byte])
    final = (states != REFUSED) & ended[states]
    return _trimmed(np.where((table != REFUSED) & ended[table], REFUSED, table), final & ~ended)


def _index(pattern: str, compiled: str) -> tuple[dict[int, dict[int, int]], set[int], int]:
    """Transitions of byte values, final states and start of a compiled pattern.

    There are no transitions if nothing matches.

    Raises:
        ImportError: outlines-core is missing.
        ValueError: it is no regular expression.
    """
    outlines = outlines_module()
    letters = outlines.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
    try:
        index = outlines.Index(compiled, letters)
    except ValueError as error:
        if "incompatible" in str(error):
            return {}, set(), 0
        raise ValueError(
            f"pattern {shown(pattern)} is not a regular expression that can be used: {error}"
        ) from error
    return index.get_transitions(), index.get_final_states(), index.get_initial_state()


def _trimmed(
    table: Int[np.ndarray, "s c"], final: Bool[np.ndarray, "s"]
) -> tuple[Int[np.ndarray, "k c"], Bool[np.ndarray, "k"]]:
    """The states that can be reached and that reach a final one; none if the start does not."""
    useful = coreachable(table, final)
    if not useful[0]:
        return table[:0], final[:0]
    table, final = keep_states(table, useful), final[useful]
    kept = reachable(table, [0])
    return keep_states(table, kept), final[kept]


def minimised(
    table: Int[np.ndarray, "s c"], final: Bool[np.ndarray, "s"]
) -> tuple[Int[np.ndarray, "k c"], Bool[np.ndarray, "k"]]:
    """The same automaton with the fewest states, by Moore's refinement of a partition."""
    columns, _ = unique_rows(np.ascontiguousarray(table.T))
    some = columns.T  # one column for symbols that behave alike
    blocks, count = final.astype(np.int64), 0
    while True:
        after = np.where(some == REFUSED, REFUSED, blocks[some])
        rows, blocks = unique_rows(np.concatenate([blocks[:, None], after], axis=1))
        if len(rows) == count:
            break
        count = len(rows)
    # Blocks are numbered in the order of their first states, so the start stays state 0.
    first = np.unique(blocks, return_index=True)[1]
    after = table[first]
    return np.where(after == REFUSED, REFUSED, blocks[after]), final[first]
