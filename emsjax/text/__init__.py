"""Text on the host: bytes of tokens, stop strings, constraints, and text that grows."""

from emsjax.text.automata import from_regex
from emsjax.text.composition import TooLargeError, rounded
from emsjax.text.incremental import TextStream, cut_at_stop, decode
from emsjax.text.joining import joined
from emsjax.text.patterns import choices
from emsjax.text.schemas import json_schema
from emsjax.text.stops import read_stops, stop_automaton
from emsjax.text.vocabulary import token_bytes

__all__ = [
    "TextStream",
    "TooLargeError",
    "choices",
    "cut_at_stop",
    "decode",
    "from_regex",
    "joined",
    "json_schema",
    "read_stops",
    "rounded",
    "stop_automaton",
    "token_bytes",
]
