"""What `generate` returns."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from emsjax.engine.requests import Requests


class PaddingRatio(NamedTuple):
    """How much of the work was padding.

    Attributes:
        inputs: padding rows per real row, summed over the run.
        kv: masked KV slots per new token, both of all samples and steps; unpadded decoding
            has none.
    """

    inputs: float
    kv: float


class LatencyPerToken(NamedTuple):
    """Seconds per new token of a sequence, from the start of decoding to the sequence's end.

    Prefill is not included; the compilation in a process's first call is, so time a second call.
    Decoding starts with the sequence's batch or, in a slot that is refilled, with the sequence.

    Attributes:
        first: of the sequence that finished first.
        last: of the sequence that finished last.
        all: the mean over all sequences that emitted something.

    Reference: the latencies that BASS reports, arXiv 2404.15778.
    """

    first: float
    last: float
    all: float


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts per sequence, and what follows from them. s = sequences, k = max_draft_tokens.

    Attributes:
        num_steps: verification steps the sequence took part in: those until it finished.
        num_drafted: draft tokens fed to the target.
        num_accepted: draft tokens that were accepted.
        num_emitted: new tokens.
        accepted_histogram: steps by number of accepted draft tokens, 0..k.
        finish_seconds: from the start of decoding of the sequence's batch to the sequence's
            end, prefill not included. The loop runs on the device as a whole, so its time is
            shared out evenly over its steps. A first call's compilation is in it. Of a slot that
            is refilled: the sequence's own steps, at the mean time of all steps so far.
        model_calls: forward calls of the decode loop, for all sequences together.
        padding_ratio: see `PaddingRatio`.
    """

    num_steps: Int32[np.ndarray, "s"]
    num_drafted: Int32[np.ndarray, "s"]
    num_accepted: Int32[np.ndarray, "s"]
    num_emitted: Int32[np.ndarray, "s"]
    accepted_histogram: Int32[np.ndarray, "s k1"]
    finish_seconds: Float32[np.ndarray, "s"]
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

    @property
    def latency_per_token(self) -> LatencyPerToken:
        """Seconds per token, without prefill; all 0 if nothing was emitted."""
        emitted = self.num_emitted > 0
        if not emitted.any():
            return LatencyPerToken(0.0, 0.0, 0.0)
        seconds = self.finish_seconds[emitted]
        latency = seconds / self.num_emitted[emitted]
        first, last = latency[np.argmin(seconds)], latency[np.argmax(seconds)]
        return LatencyPerToken(float(first), float(last), float(latency.mean()))


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


def assemble(
    batches: Sequence[Mapping[str, np.ndarray]], requests: Requests, *, pad_token_id: int
) -> GenerateOutput:
    """The output of all batches' results, which are in the order of the sequences."""
    gather = lambda name: np.concatenate([batch[name] for batch in batches])
    total = lambda name: int(sum(batch[name] for batch in batches))
    tokens, prompt_lengths = gather("tokens"), gather("prompt_lengths")
    emitted = (gather("lengths") - prompt_lengths).astype(np.int32)
    width = int(requests.max_new_tokens.max())
    at = np.minimum(prompt_lengths[:, None] + np.arange(width), tokens.shape[1] - 1)
    real = np.arange(width) < emitted[:, None]
    reasons = finish_reasons(gather("ended"), gather("active")).tolist()
    counted = ("num_steps", "num_drafted", "num_accepted", "accepted_histogram", "finish_seconds")
    stats = Stats(
        **{name: gather(name) for name in counted},
        num_emitted=emitted,
        model_calls=total("model_calls"),
        padding_ratio=PaddingRatio(
            inputs=_ratio(total("padding_rows"), total("real_rows")),
            kv=_ratio(total("num_masked"), int(emitted.sum())),
        ),
    )
    of_new = lambda x: np.take_along_axis(x, at, axis=1)
    return GenerateOutput(
        tokens=np.where(real, of_new(tokens), pad_token_id).astype(np.int32),
        lengths=emitted,
        logprobs=np.where(real, of_new(gather("logprobs")), 0).astype(np.float32),
        finish_reasons=reasons,
        stats=stats,
        num_sequences=requests.num_sequences,
    )


def finish_reasons(ended, active) -> np.ndarray:
    """Why there are no more tokens, of one sequence or of an array of them."""
    return np.where(ended, "eos", np.where(active, "time", "length"))


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
