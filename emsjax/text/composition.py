"""Automata over bytes become automata over tokens."""

import itertools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from emsjax.sampling.automaton import REFUSED, TokenAutomaton

MAX_BYTES = 256 << 20  # the largest table
LEAST_STATES, LEAST_CLASSES = 64, 256  # of smaller automata too


def unique_rows(
    rows: Int[np.ndarray, "n m"],
) -> tuple[Int[np.ndarray, "k m"], Int[np.ndarray, "n"]]:
    """The distinct rows in the order in which they first occur, and the place of each row there."""
    known: dict[bytes, int] = {}
    places = np.array([known.setdefault(row.tobytes(), len(known)) for row in rows], np.int64)
    first = np.full(len(known), len(rows))
    np.minimum.at(first, places, np.arange(len(rows)))
    return rows[first], places


class TooLargeError(ValueError):
    """A table of more than `MAX_BYTES`."""


def check_size(num_states: int, num_classes: int) -> None:
    """Check that a table is not too large.

    Raises:
        TooLargeError: it is; the text says how many states and classes there are.
    """
    if 4 * num_states * num_classes > MAX_BYTES:
        raise TooLargeError(
            f"a table of {num_states} states and at least {num_classes} classes of tokens, "
            f"more than {MAX_BYTES >> 20} MiB"
        )


def compose(
    table: Int[np.ndarray, "s 256"], spellings: Sequence[bytes]
) -> tuple[Int[np.ndarray, "s c"], Int[np.ndarray, "v"]]:
    """The states after whole tokens, from those after bytes.

    Bytes that behave alike are one symbol, and tokens that lead from each state to the same one
    are a class. What a longer spelling does follows from the class of its beginning and its last
    symbol, so each pair of these is computed once.

    Args:
        table: the state after a state and a byte; -1: the byte is not allowed there.
        spellings: the bytes of each token.

    Returns:
        The state after a state and a token of a class, and the class of each token.

    Raises:
        TooLargeError: the table would be.
    """
    num_states = len(table)
    steps, symbols = unique_rows(np.ascontiguousarray(table.T, dtype=np.int32))  # [symbols, s]
    # A state -1 remains: as an index it is the last entry.
    steps = np.concatenate([steps, np.full((len(steps), 1), REFUSED, np.int32)], axis=1)
    translate = symbols.astype(np.uint8).tobytes()
    columns = [np.arange(num_states, dtype=np.int32)]  # of no bytes
    known = {columns[0].tobytes(): 0}
    longer: dict[tuple[int, int], int] = {}  # by column and the symbol behind it
    numbers: dict[int, int] = {}  # classes of tokens by column
    class_of: dict[bytes, int] = {}
    for spelled in dict.fromkeys(one.translate(translate) for one in spellings):
        column = 0
        for symbol in spelled:
            after = longer.get((column, symbol))
            if after is None:
                states = steps[symbol][columns[column]]
                after = known.setdefault(states.tobytes(), len(columns))
                if after == len(columns):
                    columns.append(states)
                longer[column, symbol] = after
            column = after
        if column not in numbers:
            numbers[column] = len(numbers)
            check_size(num_states, len(numbers))
        class_of[spelled] = numbers[column]
    classes = np.array([class_of[one.translate(translate)] for one in spellings], np.int64)
    kept = np.array([columns[column] for column in numbers], np.int32)
    return kept.reshape(-1, num_states).T, classes


def reachable(table: Int[np.ndarray, "s c"], starts: Sequence[int]) -> Bool[np.ndarray, "s"]:
    """The states that can be reached from the starts."""
    found = np.zeros(len(table), bool)
    found[list(starts)] = True
    new = np.flatnonzero(found)
    while new.size:
        after = np.unique(table[new])
        after = after[after >= 0]
        new = after[~found[after]]
        found[new] = True
    return found


def coreachable(
    table: Int[np.ndarray, "s c"], final: Bool[np.ndarray, "s"]
) -> Bool[np.ndarray, "s"]:
    """The states from which a final state can be reached."""
    sources = np.repeat(np.arange(len(table)), table.shape[1])
    targets = table.reshape(-1)
    sources, targets = sources[targets >= 0], targets[targets >= 0]
    order = np.argsort(targets, kind="stable")
    sources, targets = sources[order], targets[order]
    bounds = np.searchsorted(targets, np.arange(len(table) + 1))
    before = [sources[a:b] for a, b in itertools.pairwise(bounds)]
    found = final.copy()
    waiting = np.flatnonzero(found).tolist()
    while waiting:
        for source in np.unique(before[waiting.pop()]).tolist():
            if not found[source]:
                found[source] = True
                waiting.append(source)
    return found


def keep_states(
    table: Int[np.ndarray, "s c"], kept: Bool[np.ndarray, "s"]
) -> Int[np.ndarray, "k c"]:
    """The table of some of the states, in their order; tokens that lead to others are refused."""
    numbers = np.append(np.where(kept, np.cumsum(kept) - 1, REFUSED), REFUSED)
    return numbers[table[kept]]


def token_automaton(
    classes: Int[np.ndarray, "v"],
    table: Int[np.ndarray, "s c"],
    final: Bool[np.ndarray, "s"],
) -> TokenAutomaton:
    """The automaton as arrays on the device, with one class of tokens for each distinct column.

    Numbers of states and classes are rounded up, so that similar automata share compiled programs.
    """
    columns, places = unique_rows(np.ascontiguousarray(table.T, dtype=np.int32))
    num_classes, num_states = columns.shape
    states = rounded(num_states, LEAST_STATES) - num_states
    padding = ((0, states), (0, rounded(num_classes, LEAST_CLASSES) - num_classes))
    return TokenAutomaton(
        classes=jnp.asarray(places[classes], jnp.int32),
        table=jnp.asarray(np.pad(columns.T, padding, constant_values=REFUSED), jnp.int32),
        final=jnp.asarray(np.pad(final, (0, states)), bool),
    )


def rounded(count: int, least: int) -> int:
    """The next of few numbers: powers of two and three between each two of them."""
    count = max(count, least)
    unit = max(1, (1 << (count - 1).bit_length()) // 8)
    return -(-count // unit) * unit
