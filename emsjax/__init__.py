"""Lossless batched speculative decoding in JAX, unpadded (EMS-SD)."""

import emsjax.interrupts  # noqa: F401 - first: a command may be interrupted during the others
from emsjax import constraints, ray, vanilla, verification
from emsjax.decode.base import Draft, Drafter, DraftLength, StepView
from emsjax.decode.state import DecodeState, StepInfo
from emsjax.device import best_dtype
from emsjax.drafters import (
    BlockDrafter,
    DraftModel,
    Eagle3,
    Mixed,
    PromptLookup,
    SelfDraft,
    SuffixDrafter,
    SuffixMemory,
)
from emsjax.engine.completions import Completion
from emsjax.engine.output import GenerateOutput, Stats, TopLogprobs, rank_by_mean_logprob
from emsjax.generation import generate, init_state, step
from emsjax.models.decoder import Decoder
from emsjax.models.families import (
    CodeGenConfig,
    Gemma3Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
)
from emsjax.models.pretrained import OPT, from_pretrained
from emsjax.policies.costs import StepCosts
from emsjax.policies.goodput import CostCapped, Goodput
from emsjax.policies.lengths import BassHeuristic, BatchSizeTable, FixedLength
from emsjax.sampling import LogitsContext, LogitsProcessor, Sampling
from emsjax.scoring import ScoreOutput, score
from emsjax.serving import Engine
from emsjax.streaming import stream

__version__ = "0.1.0"
__all__ = [
    "OPT",
    "BassHeuristic",
    "BatchSizeTable",
    "BlockDrafter",
    "CodeGenConfig",
    "Completion",
    "CostCapped",
    "DecodeState",
    "Decoder",
    "Draft",
    "DraftLength",
    "DraftModel",
    "Drafter",
    "Eagle3",
    "Engine",
    "FixedLength",
    "GPT2Config",
    "GPTNeoXConfig",
    "Gemma3Config",
    "GenerateOutput",
    "Goodput",
    "LlamaConfig",
    "LogitsContext",
    "LogitsProcessor",
    "MistralConfig",
    "Mixed",
    "OPTConfig",
    "PromptLookup",
    "Qwen2Config",
    "Qwen3Config",
    "Sampling",
    "ScoreOutput",
    "SelfDraft",
    "Stats",
    "StepCosts",
    "StepInfo",
    "StepView",
    "SuffixDrafter",
    "SuffixMemory",
    "TopLogprobs",
    "best_dtype",
    "constraints",
    "from_pretrained",
    "generate",
    "init_state",
    "rank_by_mean_logprob",
    "ray",
    "score",
    "step",
    "stream",
    "vanilla",
    "verification",
]
