"""Lossless batched speculative decoding in JAX, unpadded (EMS-SD)."""

from emsjax.opt import OPT, OPTConfig

__all__ = ["OPT", "OPTConfig"]
