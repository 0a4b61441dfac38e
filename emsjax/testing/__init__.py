"""Checks of your own drafters, draft-length policies and attention."""

from emsjax.testing.distribution import assert_same_distribution
from emsjax.testing.invariant import Invariant, assert_invariant
from emsjax.testing.lossless import Lossless, assert_lossless

__all__ = [
    "Invariant",
    "Lossless",
    "assert_invariant",
    "assert_lossless",
    "assert_same_distribution",
]
