"""Text on the host: bytes of tokens, stop strings, and text that grows."""

from emsjax.text.incremental import TextStream, cut_at_stop, decode
from emsjax.text.stops import read_stops, stop_automaton
from emsjax.text.vocabulary import token_bytes

__all__ = [
    "TextStream",
    "cut_at_stop",
    "decode",
    "read_stops",
    "stop_automaton",
    "token_bytes",
]
