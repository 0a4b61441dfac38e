"""Lossless batched speculative decoding in JAX, unpadded (EMS-SD)."""

from emsjax import vanilla, verification
from emsjax.decoding import DecodeState, StepInfo, step
from emsjax.device import best_dtype
from emsjax.draft_length import (
    BassHeuristic,
    BatchSizeTable,
    DraftLength,
    FixedLength,
    StepView,
)
from emsjax.drafting import Draft, Drafter, DraftModel, PromptLookup
from emsjax.generation import generate, init_state
from emsjax.goodput import CostCapped, Goodput
from emsjax.opt import OPT, OPTConfig
from emsjax.output import GenerateOutput, Stats, rank_by_mean_logprob
from emsjax.sampling import Sampling
from emsjax.step_costs import StepCosts
from emsjax.streaming import Completion, stream

__version__ = "0.1.0"
__all__ = [
    "OPT",
    "BassHeuristic",
    "BatchSizeTable",
    "Completion",
    "CostCapped",
    "DecodeState",
    "Draft",
    "DraftLength",
    "DraftModel",
    "Drafter",
    "FixedLength",
    "GenerateOutput",
    "Goodput",
    "OPTConfig",
    "PromptLookup",
    "Sampling",
    "Stats",
    "StepCosts",
    "StepInfo",
    "StepView",
    "best_dtype",
    "generate",
    "init_state",
    "rank_by_mean_logprob",
    "step",
    "stream",
    "vanilla",
    "verification",
]
