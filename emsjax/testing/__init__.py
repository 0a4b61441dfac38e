"""Checks for drafters, draft-length policies and attention of your own."""

from emsjax.testing.lossless import Lossless, assert_lossless, assert_same_distribution

__all__ = ["Lossless", "assert_lossless", "assert_same_distribution"]
