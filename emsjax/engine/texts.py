"""The text of new tokens, and the stops that end sequences."""

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from emsjax.checks import check_flag
from emsjax.sampling.automaton import TokenAutomaton
from emsjax.text.incremental import cut_at_stop, decode
from emsjax.text.stops import read_stops, stop_automaton

Stops = tuple[str | tuple[int, ...], ...]
MOST_KNOWN = 8  # automata that are kept for each tokenizer
_known: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Texts:
    """Turns new tokens into text.

    Attributes:
        tokenizer: a tokenizer of transformers.
        stops: the stops of each row of settings.
        include_stop: whether the text keeps the stop that ended it.
        row_of: the row of settings of each prompt.
    """

    tokenizer: Any
    stops: Sequence[Stops]
    include_stop: bool = False
    row_of: Callable[[int], int] = lambda prompt: prompt

    def strings(self, prompt: int) -> tuple[str, ...]:
        """The stops of a prompt that are strings."""
        return tuple(one for one in self._stops(prompt) if isinstance(one, str))

    def of(self, prompt: int, tokens: np.ndarray, finish_reason: str) -> str:
        """The text of a finished sequence, which ends at its stop if it has one."""
        tokens = np.asarray(tokens).tolist()
        text = decode(self.tokenizer, tokens)
        if finish_reason != "stop" or (self.include_stop and not self.strings(prompt)):
            return text
        # The last token completed a stop. What comes before it may end within a character.
        before = decode(self.tokenizer, tokens[:-1]).rstrip("\N{REPLACEMENT CHARACTER}")
        cut = cut_at_stop(text, self.strings(prompt), len(before), keep=self.include_stop)
        if cut != text or self.include_stop:
            return cut
        ends = lambda stop: not isinstance(stop, str) and tuple(tokens[-len(stop) :]) == stop
        longest = max((len(stop) for stop in self._stops(prompt) if ends(stop)), default=0)
        return decode(self.tokenizer, tokens[: len(tokens) - longest])

    def _stops(self, prompt: int) -> Stops:
        return self.stops[self.row_of(prompt)]


def check_stops(
    asked: Any, num_prompts: int, vocab_size: int
) -> tuple[Texts | None, TokenAutomaton | None, np.ndarray | None]:
    """What turns tokens into text, the automaton that finds stops, and where each prompt enters it.

    Args:
        asked: what the user asked for, with `stop`, `tokenizer` and `include_stop`.

    Raises:
        ValueError: see `generate`.
    """
    stops = read_stops(asked.stop, num_prompts, vocab_size)
    include_stop = check_flag("include_stop", asked.include_stop)
    tokenizer = asked.tokenizer
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        kind = type(tokenizer).__name__
        raise ValueError(f"tokenizer must be a tokenizer of transformers, not {kind}")
    texts = None if tokenizer is None else Texts(tokenizer, stops, include_stop)
    if not any(stops):
        return texts, None, None
    distinct = tuple(dict.fromkeys(stops))
    automaton, starts = _automaton(distinct, vocab_size, tokenizer)
    place = {one: i for i, one in enumerate(distinct)}
    return texts, automaton, starts[[place[one] for one in stops]].astype(np.int32)


def _automaton(
    distinct: tuple[Stops, ...], vocab_size: int, tokenizer: Any
) -> tuple[TokenAutomaton, np.ndarray]:
    """`stop_automaton` in host arrays, as the loop may overwrite arrays on the device.

    The last few are kept: for a large vocabulary one takes as long as many steps.
    """
    known = {} if tokenizer is None else _known.setdefault(tokenizer, {})
    asked = (distinct, vocab_size, None if tokenizer is None else len(tokenizer))
    if asked not in known:
        automaton, starts = stop_automaton(distinct, vocab_size, tokenizer)
        while len(known) >= MOST_KNOWN:
            del known[next(iter(known))]
        known[asked] = jax.tree.map(np.asarray, automaton), starts
    return known[asked]
