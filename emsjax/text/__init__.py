"""Text on the host: bytes of tokens, and text that grows."""

from emsjax.text.incremental import TextStream, cut_at_stop, decode
from emsjax.text.vocabulary import token_bytes

__all__ = ["TextStream", "cut_at_stop", "decode", "token_bytes"]
