"""The output of `generate`: completions and statistics."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from emsjax.decode.refill import COUNTED
from emsjax.decode.verify import End
from emsjax.engine.requests import Requests
from emsjax.values import comparable

REASONS = {End.TOKEN: "eos", End.ERROR: "error", End.STOP: "stop"}


class PaddingRatio(NamedTuple):
    """Share of padding in the work.

    Attributes:
        inputs: padding rows per real row, over the whole run.
        kv: masked KV cache places per new token, over all samples and steps; 0 for unpadded
            decoding.
    """

    inputs: float
    kv: float


class LatencyPerToken(NamedTuple):
    """Seconds per new token of a sequence, from the start of decoding to the sequence's end.

    Prefill is not included. Compilation in a process's first call is included, so time a second
    call. Decoding starts with the sequence's batch or, in a refilled slot, with the sequence.

    Attributes:
        first: latency of the sequence that finished first.
        last: latency of the sequence that finished last.
        all: mean latency of all sequences that emitted at least one token.

    Reference: BASS, arXiv 2404.15778, reports these latencies.
    """

    first: float
    last: float
    all: float


@comparable
class Stats:
    """Counts per sequence and derived statistics. s = sequences, k = max_draft_tokens.

    Attributes:
        num_steps: verification steps until the sequence finished.
        num_drafted: draft tokens fed to the target.
        num_accepted: draft tokens that were accepted.
        num_invalid: draft tokens that were dropped because the `probs` that they were drawn from
            are no distributions: see `emsjax.verification.is_distribution`.
        num_emitted: new tokens.
        accepted_histogram: number of steps for each number of accepted draft tokens, 0..k.
        finish_seconds: time from the start of decoding of the sequence's batch to the sequence's
            end, without prefill. The loop runs on the device as a whole, so its time is divided
            evenly among its steps. Compilation in a first call is included. In a refilled slot
            only the sequence's own steps count, each at the mean time of all steps so far.
        model_calls: forward calls of the decode loop, for all sequences together.
        padding_ratio: see `PaddingRatio`.
    """

    num_steps: Int32[np.ndarray, "s"]
    num_drafted: Int32[np.ndarray, "s"]
    num_accepted: Int32[np.ndarray, "s"]
    num_invalid: Int32[np.ndarray, "s"]
    num_emitted: Int32[np.ndarray, "s"]
    accepted_histogram: Int32[np.ndarray, "s k1"]
    finish_seconds: Float32[np.ndarray, "s"]
    model_calls: int
    padding_ratio: PaddingRatio

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens per drafted token; 0 if nothing was drafted."""
        return _ratio(int(self.num_accepted.sum()), int(self.num_drafted.sum()))

    @property
    def mean_acceptance_length(self) -> float:
        """Emitted tokens per sample and step, including the bonus token."""
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


@comparable
class TopLogprobs:
    """The n likeliest tokens at the place of each emitted token, the likeliest one first.

    Attributes:
        tokens: the tokens; 0 after the end.
        logprobs: their log-probabilities, under the same distribution as those of the emitted
            tokens: -inf for tokens that could not be chosen; 0 after the end.
    """

    tokens: Int32[np.ndarray, "*s n"]
    logprobs: Float32[np.ndarray, "*s n"]


@comparable
class GenerateOutput:
    """Completions in prompt-major order: s = prompts x num_sequences, m = largest max_new_tokens.

    Attributes:
        tokens: emitted tokens, followed by the config's pad_token_id, or by the first end token if
            that is None.
        lengths: number of emitted tokens per sequence, including the end token.
        logprobs: log-probability of each emitted token under the distribution it was chosen from
            (at temperature 0 the unwarped softmax); 0 after the end.
        finish_reasons: for each sequence "eos", "length", "time", "stop": its last token completed
            a stop, or "error": the model's logits after its last token are not finite.
        stats: see `Stats`.
        num_sequences: sequences per prompt.
        texts: the text of each sequence, up to its stop; None without a tokenizer.
        top_logprobs: the likeliest tokens; None unless they were asked for.
    """

    tokens: Int32[np.ndarray, "s m"]
    lengths: Int32[np.ndarray, "s"]
    logprobs: Float32[np.ndarray, "s m"]
    finish_reasons: list[str]
    stats: Stats
    num_sequences: int = 1
    texts: list[str] | None = None
    top_logprobs: TopLogprobs | None = None


def rank_by_mean_logprob(out: GenerateOutput) -> Int32[np.ndarray, "p n"]:
    """Ranks each prompt's sequences by mean log-probability, the best one first.

    Returns:
        Row indices into `out.tokens`, for p prompts with n sequences each. Sequences without
        tokens come last; sequences of equal rank keep their order.

    Reference: BASS, arXiv 2404.15778, uses this ranking for Pass@First.
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
    """Assembles the output from the results of all batches, given in sequence order."""
    gather = lambda name: np.concatenate([batch[name] for batch in batches])
    total = lambda name: int(sum(batch[name] for batch in batches))
    tokens, prompt_lengths = gather("tokens"), gather("prompt_lengths")
    emitted = (gather("lengths") - prompt_lengths).astype(np.int32)
    width = int(requests.max_new_tokens.max())
    at = np.minimum(prompt_lengths[:, None] + np.arange(width), tokens.shape[1] - 1)
    real = np.arange(width) < emitted[:, None]
    reasons = finish_reasons(gather("end"), gather("active")).tolist()
    counted = (*COUNTED, "finish_seconds")
    stats = Stats(
        **{name: gather(name) for name in counted},
        num_emitted=emitted,
        model_calls=total("model_calls"),
        padding_ratio=PaddingRatio(
            inputs=_ratio(total("padding_rows"), total("real_rows")),
            kv=_ratio(total("num_masked"), int(emitted.sum())),
        ),
    )
    of_new = lambda x: np.take_along_axis(x, at.reshape(*at.shape, *[1] * (x.ndim - 2)), axis=1)
    tokens = np.where(real, of_new(tokens), pad_token_id).astype(np.int32)
    top = None
    if requests.common.top_logprobs:
        likeliest = (of_new(gather(name)) for name in ("top_tokens", "top_logprobs"))
        top = TopLogprobs(*(np.where(real[..., None], x, x.dtype.type(0)) for x in likeliest))
    texts = None
    if requests.texts is not None:
        each = enumerate(zip(tokens, emitted, reasons, strict=True))
        texts = [
            requests.texts.of(i // requests.num_sequences, ids[:length], reason)
            for i, (ids, length, reason) in each
        ]
    return GenerateOutput(
        tokens=tokens,
        lengths=emitted,
        logprobs=np.where(real, of_new(gather("logprobs")), 0).astype(np.float32),
        finish_reasons=reasons,
        stats=stats,
        num_sequences=requests.num_sequences,
        texts=texts,
        top_logprobs=top,
    )


def finish_reasons(end, active) -> np.ndarray:
    """Returns why decoding stopped, for one sequence or for an array of sequences."""
    early = np.array([REASONS.get(reason, "") for reason in End])
    return np.where(end == End.NONE, np.where(active, "time", "length"), early[end])


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
