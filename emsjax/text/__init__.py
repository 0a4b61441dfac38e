"""Text on the host: bytes of tokens, stop strings, constraints, and text that grows."""

from emsjax.text.automata import from_regex
from emsjax.text.incremental import TextStream, cut_at_stop, decode
from emsjax.text.patterns import choices
from emsjax.text.schemas import json_schema
from emsjax.text.stops import read_stops, stop_automaton
from emsjax.text.vocabulary import token_bytes

__all__ = [
    "TextStream",
    "choices",
    "cut_at_stop",
    "decode",
    "from_regex",
    "json_schema",
    "read_stops",
    "stop_automaton",
    "token_bytes",
]
