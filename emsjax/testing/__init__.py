"""Checks of your own drafters, draft-length policies and attention."""

from emsjax.testing.distribution import assert_same_distribution
from emsjax.testing.lossless import Lossless, assert_lossless

__all__ = ["Lossless", "assert_lossless", "assert_same_distribution"]
