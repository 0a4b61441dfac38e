"""How the next token is chosen: settings, logits processors, random bits and draws."""

from emsjax.sampling.distributions import log_softmax, residual, softmax
from emsjax.sampling.draws import Purpose, RandomBits, draw, position_keys, random_bits, warp
from emsjax.sampling.processors import LogitsContext, LogitsProcessor
from emsjax.sampling.settings import Controls, Sampling, Settings

__all__ = [
    "Controls",
    "LogitsContext",
    "LogitsProcessor",
    "Purpose",
    "RandomBits",
    "Sampling",
    "Settings",
    "draw",
    "log_softmax",
    "position_keys",
    "random_bits",
    "residual",
    "softmax",
    "warp",
]
