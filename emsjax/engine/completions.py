"""What a stream yields: sequences as they finish, and pieces of those that still decode."""

import contextlib
import dataclasses
from collections.abc import Generator, Iterator

import numpy as np
from jaxtyping import Float32, Int32

from emsjax.engine.output import TopLogprobs, finish_reasons
from emsjax.engine.requests import Requests
from emsjax.engine.slots import Row
from emsjax.text.incremental import TextStream
from emsjax.values import comparable


@comparable
class Completion:
    """One sequence of a prompt; k = max_draft_tokens.

    Attributes:
        prompt: index of the prompt in input order, from 0.
        sequence: index of the sequence among the prompt's sequences, from 0.
        tokens: emitted tokens, including the end token.
        logprobs: log-probability of each token, as in `GenerateOutput`.
        finish_reason: "eos", "length", "stop" or "error" as in `GenerateOutput`, "refused" if the
            prompt cannot be decoded, or None: it still decodes, and this is a piece of it.
        text: the text of the tokens, up to a stop; None without a tokenizer.
        top_logprobs: the likeliest tokens; None unless they were asked for.
        num_steps, num_drafted, num_accepted, num_invalid, accepted_histogram, finish_seconds: as in
            `Stats`.
        error: why the prompt was refused; None otherwise.
    """

    prompt: int
    sequence: int
    tokens: Int32[np.ndarray, "n"]
    logprobs: Float32[np.ndarray, "n"]
    finish_reason: str | None
    text: str | None = None
    top_logprobs: TopLogprobs | None = None
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_invalid: int = 0
    accepted_histogram: Int32[np.ndarray, "k1"] | None = None
    finish_seconds: float = 0.0
    error: str | None = None


def completions_of(
    rows: Generator[Row, None, None], requests: Requests, *, partial: bool = False
) -> Iterator[Completion]:
    """Yields completions and refusals. Closing the iterator also stops decoding.

    Args:
        rows: of finished sequences; with `partial` also of those that still decode.
        partial: whether pieces of sequences are yielded too.
    """
    pieces = Pieces(requests)
    with contextlib.closing(rows):
        for row in rows:
            one = row if isinstance(row, Completion) else completion(row, requests)
            if partial and one.error is None:
                yield from pieces.of(one)
            if one.finish_reason is not None:
                yield one


def completion(row: Row, requests: Requests) -> Completion:
    """The sequence of a row; its `finish_reason` is None if it still decodes."""
    new = slice(int(row["prompt_lengths"]), int(row["lengths"]))
    prompt, sequence = divmod(int(row["sequence_ids"]), requests.num_sequences)
    tokens, reason, text, top = row["tokens"][new], None, None, None
    if not row["active"]:
        reason = finish_reasons(row["end"], row["active"]).item()
        text = None if requests.texts is None else requests.texts.of(prompt, tokens, reason)
    if requests.common.top_logprobs:
        top = TopLogprobs(row["top_tokens"][new], row["top_logprobs"][new])
    return Completion(
        prompt,
        sequence,
        tokens,
        row["logprobs"][new],
        reason,
        text,
        top,
        num_steps=int(row["num_steps"]),
        num_drafted=int(row["num_drafted"]),
        num_accepted=int(row["num_accepted"]),
        num_invalid=int(row["num_invalid"]),
        accepted_histogram=row["accepted_histogram"],
        finish_seconds=float(row["finish_seconds"]),
    )


def refusal(place: int, sequence: int, error: str) -> Completion:
    """The completion of a prompt that cannot be decoded."""
    nothing = np.zeros(0, np.int32)
    return Completion(place, sequence, nothing, nothing.astype(np.float32), "refused", error=error)


class Pieces:
    """What sequences have gained since their last pieces."""

    def __init__(self, requests: Requests):
        self.requests = requests
        self.running: dict[tuple[int, int], tuple[int, TextStream | None]] = {}

    def of(self, so_far: Completion) -> Iterator[Completion]:
        """Yields the piece that a sequence has gained, if it has gained anything."""
        place, texts = (so_far.prompt, so_far.sequence), self.requests.texts
        if place not in self.running:
            strings = () if texts is None else texts.strings(so_far.prompt)
            self.running[place] = 0, texts and TextStream(texts.tokenizer, strings)
        seen, stream = self.running[place]
        new, text = slice(seen, None), None
        if so_far.finish_reason is not None:
            text = stream and stream.finish(so_far.text)
            del self.running[place]
        else:
            text = stream and stream.add(so_far.tokens[new].tolist())
            self.running[place] = len(so_far.tokens), stream
        if len(so_far.tokens) == seen and not text:
            return
        top = so_far.top_logprobs
        yield dataclasses.replace(
            so_far,
            tokens=so_far.tokens[new],
            logprobs=so_far.logprobs[new],
            top_logprobs=top and TopLogprobs(top.tokens[new], top.logprobs[new]),
            text=text,
            finish_reason=None,
        )
