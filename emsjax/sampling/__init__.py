"""How the next token is chosen: settings, random bits, and what acts on logits."""

from emsjax.sampling.settings import (
    Purpose,
    Sampling,
    draw,
    position_keys,
    warp,
)

__all__ = ["Purpose", "Sampling", "draw", "position_keys", "warp"]
