"""What `generate` returns."""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32


class PaddingRatio(NamedTuple):
    """How much of the work was padding.

    Attributes:
        inputs: padding rows per real row, summed over the run.
        kv: masked KV slots per new token; unpadded decoding has none.
    """

    inputs: float
    kv: float


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts per sequence, and what follows from them. s = sequences, k = max_draft_tokens.

    Attributes:
        num_steps: verification steps the sequence took part in.
        num_drafted: draft tokens fed to the target.
        num_accepted: draft tokens that stood.
        num_emitted: new tokens.
        accepted_histogram: steps by number of accepted draft tokens, 0..k.
        model_calls: forward calls of the decode loop, for all sequences together.
        padding_ratio: see `PaddingRatio`.
    """

    num_steps: Int32[np.ndarray, "s"]
    num_drafted: Int32[np.ndarray, "s"]
    num_accepted: Int32[np.ndarray, "s"]
    num_emitted: Int32[np.ndarray, "s"]
    accepted_histogram: Int32[np.ndarray, "s k1"]
    model_calls: int
    padding_ratio: PaddingRatio

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token; 0 when nothing was drafted."""
        return _ratio(int(self.num_accepted.sum()), int(self.num_drafted.sum()))

    @property
    def mean_acceptance_length(self) -> float:
        """Emitted tokens per sample and step, bonus included."""
        return _ratio(int(self.num_emitted.sum()), int(self.num_steps.sum()))


@dataclasses.dataclass(frozen=True)
class GenerateOutput:
    """Completions, prompt-major: s = prompts x num_sequences, m = largest max_new_tokens.

    Attributes:
        tokens: emitted tokens, pad_token_id after the end.
        lengths: emitted tokens per sequence, the end token included.
        logprobs: of each emitted token under the distribution it was chosen from
            (temperature 0: the unwarped softmax); 0 after the end.
        finish_reasons: "eos", "length" or "time" for each sequence.
        stats: see `Stats`.
        num_sequences: sequences per prompt.
    """

    tokens: Int32[np.ndarray, "s m"]
    lengths: Int32[np.ndarray, "s"]
    logprobs: Float32[np.ndarray, "s m"]
    finish_reasons: list[str]
    stats: Stats
    num_sequences: int = 1


def rank_by_mean_logprob(out: GenerateOutput) -> Int32[np.ndarray, "p n"]:
    """Each prompt's sequences, the one with the best mean log-probability first.

    Returns:
        Rows of `out.tokens`, for p prompts with n sequences each. A sequence without
        tokens comes last; equal ones keep their order.

    Reference: the ranking behind Pass@First in BASS, arXiv 2404.15778.
    """
    total = out.logprobs.sum(axis=1, dtype=np.float64)
    mean = np.where(out.lengths > 0, total / np.maximum(out.lengths, 1), -np.inf)
    mean = mean.reshape(-1, out.num_sequences)
    order = np.argsort(-mean, axis=1, kind="stable")
    first = np.arange(len(mean))[:, None] * out.num_sequences
    return (first + order).astype(np.int32)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
