"""The output lines of `emsjax generate`, and what it says about them at the end."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console

from emsjax.cli.generate_arguments import RunOptions
from emsjax.records.input import Record
from emsjax.terminal.reporting import line

# Decimals of `mean_logprob`. In float32 it differs by about 3e-7 between batches, because sums of
# another number of rows are rounded differently: few values are so near the border of two.
DECIMALS = 3
NAMED = 3  # records that a warning names


@dataclasses.dataclass
class Named:
    """A number of sequences, and the first records that they belong to."""

    count: int = 0
    names: list[str] = dataclasses.field(default_factory=list)

    def add(self, record: Record) -> None:
        self.merge(Named(1, [str(record)]))

    def merge(self, other: "Named") -> None:
        self.count += other.count
        new = [name for name in other.names if name not in self.names]
        self.names = [*self.names, *new][:NAMED]

    def __str__(self) -> str:
        return ", ".join(self.names) + (", ..." if self.count > len(self.names) else "")


@dataclasses.dataclass
class Tally:
    """Counts of the sequences since `start`; the speed includes compilation.

    Attributes:
        errors: sequences that ended with an error.
        dropping: sequences some of whose draft tokens were dropped, `dropped` in all.
        invalid: sequences of invalid records.
    """

    start: float
    emitted: int = 0
    steps: int = 0
    dropped: int = 0
    errors: Named = dataclasses.field(default_factory=Named)
    dropping: Named = dataclasses.field(default_factory=Named)
    invalid: int = 0

    def add(self, record: Record, completion) -> None:
        self.emitted += len(completion.tokens)
        self.steps += completion.num_steps
        self.invalid += completion.finish_reason == "refused"
        self.dropped += completion.num_invalid
        if completion.num_invalid:
            self.dropping.add(record)
        if completion.finish_reason == "error":
            self.errors.add(record)

    def merge(self, other: Mapping[str, Any]) -> None:
        """Add the fields of another tally, as `dataclasses.asdict` returns them."""
        for name in ("emitted", "steps", "dropped", "invalid"):
            setattr(self, name, getattr(self, name) + other[name])
        for name in ("errors", "dropping"):
            getattr(self, name).merge(Named(**other[name]))

    @property
    def speed(self) -> str:
        return f"{self.emitted / (time.perf_counter() - self.start):.1f} tokens/s"

    def report(self, console: Console, results: int) -> None:
        """Print a summary of this many results, and a warning if draft tokens were dropped."""
        invalid = f", {self.invalid} of them errors of invalid records" if self.invalid else ""
        line(
            console,
            f"{results} results{invalid}, {self.emitted} tokens, {self.speed}, "
            f"mean acceptance length {self.emitted / max(self.steps, 1):.2f}",
        )
        if self.dropped:
            line(
                console,
                f"Warning: {self.dropped} draft tokens of {self.dropping.count} sequences were "
                "dropped, as the probabilities they were drawn from are no distributions: "
                f"{self.dropping}",
            )


def report_errors(console: Console, count: int, here: Named | None = None) -> int:
    """Warn of sequences that ended with an error; the exit code is 1 if there are any.

    Args:
        count: number of such sequences in the output.
        here: those of this run.
    """
    if not count:
        return 0
    named = f", such as {here}" if here is not None and here.count else ""
    line(
        console,
        f"Warning: {count} sequences ended early, because the model's logits were not finite"
        f'{named}: their finish_reason is "error"',
    )
    return 1


def output_line(record: Record, completion, tokenizer, options: RunOptions) -> dict:
    """The fields of a sequence's line; see `docs/how-to/files.md`."""
    tokens, error = completion.tokens.tolist(), record.error or completion.error
    text = completion.text
    if text is None:
        text = tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""
    likeliest = {}
    if options.top_logprobs and completion.top_logprobs is not None:
        rounded = lambda values: np.round(values.astype(float), DECIMALS).tolist()
        top = completion.top_logprobs
        likeliest = {
            "logprobs": rounded(completion.logprobs),
            "top_tokens": top.tokens.tolist(),
            "top_logprobs": rounded(top.logprobs),
        }
    return {
        "id": record.id,
        **({"line": record.line} if record.id is None else {}),
        **({"sequence": completion.sequence} if options.num_sequences > 1 else {}),
        "text": text,
        "tokens": tokens,
        "mean_logprob": mean_logprob(completion.logprobs),
        **likeliest,
        "finish_reason": completion.finish_reason,
        **({"truncated": True} if record.truncated else {}),
        **({"error": error} if error is not None else {}),
    }


def mean_logprob(logprobs: np.ndarray) -> float | None:
    """The mean, to the decimals that do not depend on the batch; None if there is no number."""
    if not len(logprobs) or not np.isfinite(logprobs).all():
        return None
    return round(float(logprobs.mean(dtype=np.float64)), DECIMALS) + 0.0  # never -0.0
