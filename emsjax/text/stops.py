"""Stop strings and stop sequences of tokens: what users pass, and automata that find them."""

import numbers
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Int32

from emsjax.checks import as_token_ids, check_list, plain, refuse, shown
from emsjax.sampling.automaton import TokenAutomaton
from emsjax.text.composition import (
    TooLargeError,
    check_size,
    compose,
    keep_states,
    reachable,
    token_automaton,
    unique_rows,
)
from emsjax.text.vocabulary import token_bytes

Stop = str | tuple[int, ...]
# Classes of tokens, the states after them, and which states are final. Before the states are
# doubled, which steps are.
Part = tuple[np.ndarray, np.ndarray, np.ndarray]
RULE = (
    "string, a sequence of token ids, a list of these for all prompts, or one such list per prompt"
)
ONE_RULE = "a string or a sequence of token ids"


def read_stops(stop: Any, num_prompts: int, vocab_size: int) -> list[tuple[Stop, ...]]:
    """The stops of each prompt.

    Args:
        stop: None, a string, a sequence of token ids, a list of strings and sequences of token
            ids for all prompts, or one such list per prompt, which may be empty.

    Returns:
        One tuple per prompt, with strings as `str` and sequences of token ids as tuples of `int`.

    Raises:
        ValueError: `stop` is anything else, or a token id is outside the vocabulary.
    """
    if stop is None:
        return [()] * num_prompts
    if isinstance(stop, str) or _is_tokens(stop):
        return [(_read_stop("stop", stop, vocab_size),)] * num_prompts
    if isinstance(stop, numbers.Number | bytes | bytearray):
        refuse("stop", f"a {RULE}", stop)
    stops = list(check_list("stop", stop, RULE))
    if not _is_per_prompt(stops, num_prompts):
        return [_read_list("stop", stops, vocab_size)] * num_prompts
    if len(stops) != num_prompts:
        raise ValueError(
            f"stop must be one list of stops or one per prompt: got {len(stops)} lists for "
            f"{num_prompts} prompts"
        )
    return [_read_list(f"stop[{i}]", one, vocab_size) for i, one in enumerate(stops)]


def _is_per_prompt(stops: list[Any], num_prompts: int) -> bool:
    """Whether these are lists of stops rather than stops."""
    if not all(isinstance(one, list | tuple) and not _is_tokens(one) for one in stops):
        return False
    return any(map(len, stops)) or len(stops) == num_prompts


def _is_tokens(value: Any) -> bool:
    """Whether this is a sequence of numbers, and be they wrong ones."""
    if isinstance(value, list | tuple):
        return len(value) > 0 and all(isinstance(plain(one), numbers.Number) for one in value)
    kind = getattr(getattr(value, "dtype", None), "kind", "O")
    return getattr(value, "ndim", None) == 1 and kind in "biufc"


def _read_list(name: str, stops: Any, vocab_size: int) -> tuple[Stop, ...]:
    return tuple(_read_stop(f"{name}[{i}]", one, vocab_size) for i, one in enumerate(stops))


def _read_stop(name: str, stop: Any, vocab_size: int) -> Stop:
    """One stop as a `str` or a tuple of `int`.

    Raises:
        ValueError: it is empty, text without UTF-8, or neither text nor token ids inside the
            vocabulary.
    """
    if isinstance(stop, str):
        if not stop:
            raise ValueError(f"{name} is an empty string, which ends every text")
        try:
            stop.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} has no UTF-8: {shown(stop)}") from error
        return str(stop)
    if isinstance(stop, bytes | bytearray | numbers.Number) or not hasattr(stop, "__len__"):
        refuse(name, ONE_RULE, stop)
    if len(stop) and not _is_tokens(stop):
        refuse(name, ONE_RULE, stop)
    return tuple(as_token_ids(name, stop, vocab_size).tolist())


def stop_automaton(
    stop_lists: Sequence[Sequence[str | Sequence[int]]], vocab_size: int, tokenizer: Any = None
) -> tuple[TokenAutomaton, Int32[np.ndarray, "n"]]:
    """An automaton over new tokens that is final where the last token completed a stop.

    A string is found in the UTF-8 of the new text wherever tokens begin and end, and also if the
    token that completes it goes on behind it. Finding goes on after a stop, so that a caller may
    ignore one that comes too early. No token is refused.

    Args:
        stop_lists: the distinct lists of stops.
        vocab_size: the model's vocabulary size.
        tokenizer: a tokenizer of transformers, which strings need.

    Returns:
        The automaton, and the state of each list before the first new token.

    Raises:
        ValueError: a stop is empty, of another kind or outside the vocabulary; a string has no
            tokenizer, or no sequence of tokens spells it; or the table is too large.
    """
    lists = [[_read_stop("stop", one, vocab_size) for one in stops] for stops in stop_lists]
    strings = [one for stops in lists for one in stops if isinstance(one, str)]
    spellings: list[bytes] = []
    if strings:
        if tokenizer is None:
            raise ValueError(f"stop needs tokenizer= to find the string {shown(strings[0])}")
        spellings = token_bytes(tokenizer, vocab_size)
    parts, starts, num_states = [], [], 0
    try:
        _check_spelled(strings, spellings)
        for stops in lists:
            classes, table, final = _automaton(stops, vocab_size, spellings)
            parts.append((classes, table + num_states, final))
            starts.append(num_states)
            num_states += len(table)
        classes, table, final = _joined(parts, vocab_size)
    except TooLargeError as error:
        raise ValueError(f"stop needs {error}") from error
    return token_automaton(classes, table, final), np.array(starts, np.int32)


def _joined(parts: Sequence[Part], vocab_size: int) -> Part:
    """Automata with all states one after the other, and classes that all of them tell apart."""
    if not parts:
        return np.zeros(vocab_size, np.int64), np.zeros((1, 1), np.int64), np.zeros(1, bool)
    kinds, classes = unique_rows(np.stack([one for one, _, _ in parts], axis=1))
    check_size(sum(len(table) for _, table, _ in parts), len(kinds))
    tables = [table[:, kinds[:, place]] for place, (_, table, _) in enumerate(parts)]
    return classes, np.concatenate(tables), np.concatenate([final for _, _, final in parts])


def _automaton(stops: Sequence[Stop], vocab_size: int, spellings: Sequence[bytes]) -> Part:
    """Classes, table and final states for one list; the start is state 0.

    The states are pairs of one that reads bytes and one that reads tokens, each twice: after a
    token that completed a stop and after one that did not.
    """
    strings = [one.encode() for one in stops if isinstance(one, str)]
    sequences = [one for one in stops if not isinstance(one, str)]
    text_classes, text_table, text_hit = _over_text(strings, vocab_size, spellings)
    token_classes, token_table, token_hit = _over_tokens(sequences, vocab_size)
    kinds, classes = unique_rows(np.stack([text_classes, token_classes], axis=1))
    check_size(2 * len(text_table) * len(token_table), len(kinds))
    texts, text_hits = (x[:, None, kinds[:, 0]] for x in (text_table, text_hit))
    tokens, token_hits = (x[None, :, kinds[:, 1]] for x in (token_table, token_hit))
    pairs = (texts * len(token_table) + tokens).reshape(-1, len(kinds))
    hits = (text_hits | token_hits).reshape(-1, len(kinds))
    table = np.tile(pairs + len(pairs) * hits, (2, 1))
    kept = reachable(table, [0])
    final = np.arange(len(table)) >= len(pairs)
    return classes, keep_states(table, kept), final[kept]


def _over_tokens(sequences: Sequence[tuple[int, ...]], vocab_size: int) -> Part:
    """Classes of tokens, the states after them, and whether one completes a sequence."""
    named = sorted({token for one in sequences for token in one})
    classes = np.zeros(vocab_size, np.int64)  # 0: tokens in no sequence
    classes[named] = np.arange(1, len(named) + 1)
    words = [tuple(classes[list(one)].tolist()) for one in sequences]
    table, final = aho_corasick(words, len(named) + 1)
    return classes, table, final[table]


def _over_text(strings: Sequence[bytes], vocab_size: int, spellings: Sequence[bytes]) -> Part:
    """Classes of tokens, the states after them, and whether one's bytes complete a string."""
    if not strings:
        return np.zeros(vocab_size, np.int64), np.zeros((1, 1), np.int64), np.zeros((1, 1), bool)
    table, final = aho_corasick(strings, 256)
    size = len(table)
    # Each state again for the rest of a token that has completed a string.
    again = table + size * final[table]
    columns, classes = compose(np.concatenate([again, table + size]), spellings)
    after = columns[:size]
    return classes, after % size, after >= size


def aho_corasick(
    words: Sequence[Sequence[int]], num_symbols: int
) -> tuple[Int[np.ndarray, "s symbols"], Bool[np.ndarray, "s"]]:
    """The automaton that finds words: the state after each symbol, and where a word ends.

    The states are the beginnings of words; a state is the longest beginning with which the
    symbols so far end. State 0 is the empty one.

    Raises:
        TooLargeError: the table would be.

    Reference: Aho and Corasick, "Efficient string matching" (1975).
    """
    children: list[dict[int, int]] = [{}]
    final = [False]
    for word in words:
        state = 0
        for symbol in word:
            if symbol not in children[state]:
                children[state][symbol] = len(children)
                children.append({})
                final.append(False)
            state = children[state][symbol]
        final[state] = True
    check_size(len(children), num_symbols)
    table = np.zeros((len(children), num_symbols), np.int64)
    shorter = [0] * len(children)  # the longest beginning that the state's own ends with
    waiting = deque([0])
    while waiting:
        state = waiting.popleft()
        if state:
            table[state] = table[shorter[state]]
            final[state] |= final[shorter[state]]
        for symbol, child in children[state].items():
            shorter[child] = int(table[state, symbol])
            table[state, symbol] = child
            waiting.append(child)
    return table, np.array(final)


def _check_spelled(strings: Sequence[str], spellings: Sequence[bytes]) -> None:
    """Check that tokens can spell each string.

    Raises:
        ValueError: no sequence of tokens does.
    """
    whole = set(spellings)
    for text in dict.fromkeys(strings):
        if not all(bytes([one]) in whole for one in text.encode()):
            _, table, hit = _over_text([text.encode()], len(spellings), spellings)
            if not hit[reachable(table, [0])].any():
                raise ValueError(f"stop {shown(text)} cannot be spelled by the tokenizer's tokens")
