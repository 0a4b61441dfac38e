"""Several automata become one."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from emsjax.sampling.automaton import REFUSED, TokenAutomaton
from emsjax.text.composition import check_size, keep_states, reachable, token_automaton


def joined(
    automata: Sequence[TokenAutomaton],
) -> tuple[TokenAutomaton, Int32[np.ndarray, "n"]]:
    """One automaton that has the states of several side by side.

    Tokens are of one class if they are so in each of the automata. Ids beyond the vocabulary of
    one are refused in its states.

    Args:
        automata: each begins in its state 0; states that cannot be reached from there are left
            out.

    Returns:
        The automaton, and the state in which each of them begins.

    Raises:
        TooLargeError: the table would be.
    """
    parts = [_reached(one) for one in automata]
    vocab_size = max((len(classes) for classes, _, _ in parts), default=1)
    sizes = [len(table) for _, table, _ in parts]
    kinds = np.zeros(vocab_size, np.int64)
    for classes, table, _ in parts:
        own = _padded(classes, vocab_size, table.shape[1])
        kinds = np.unique(kinds * (table.shape[1] + 1) + own, return_inverse=True)[1]
        check_size(sum(sizes), int(kinds.max()) + 1)
    some = np.unique(kinds, return_index=True)[1]  # a token of each class
    rows, starts = [np.zeros((0, len(some)), np.int32)], np.cumsum([0, *sizes]).astype(np.int32)
    for (classes, table, _), start in zip(parts, starts, strict=False):
        own = _padded(classes, vocab_size, table.shape[1])[some]
        after = np.pad(table, ((0, 0), (0, 1)), constant_values=REFUSED)[:, own]
        rows.append(np.where(after == REFUSED, REFUSED, after + start))
    final = np.concatenate([np.zeros(0, bool), *(final for _, _, final in parts)])
    return token_automaton(kinds, np.concatenate(rows), final), starts[:-1]


def _reached(automaton: TokenAutomaton) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Classes, table and final states in host arrays, without states that cannot be reached."""
    classes, table, final = map(np.asarray, (automaton.classes, automaton.table, automaton.final))
    kept = reachable(table, [0])
    return classes, keep_states(table, kept).astype(np.int32), final[kept]


def _padded(
    classes: Int32[np.ndarray, "n"], vocab_size: int, missing: int
) -> Int32[np.ndarray, "v"]:
    """The classes of a larger vocabulary, whose other ids are in the class `missing`."""
    return np.pad(classes, (0, vocab_size - len(classes)), constant_values=missing)
