"""Evaluations by the lm-evaluation-harness; importing this registers its model "emsjax"."""

from emsjax.evaluation.model import EmsjaxLM

__all__ = ["EmsjaxLM"]
