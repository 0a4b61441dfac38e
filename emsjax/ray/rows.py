"""Rows of a dataset as prompts, and their completions as columns."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from emsjax.checks import check_at_least
from emsjax.engine.completions import Completion, refusal
from emsjax.ray.background import Ask
from emsjax.records.digests import digest
from emsjax.records.input import Record, asked_of
from emsjax.records.prompts import Prompts

PROMPT_COLUMNS = ("prompt", "messages", "tokens")
KEY_COLUMNS = ("index", "id")
KEY_BYTES = 8  # of the digest of an id; the probability that two of 10^6 ids agree is about 10^-8
EXACT = 2**53  # floats below this one have all digits of an integer


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a batch as records, in the form that `Prompts` reads."""

    values: Sequence[Mapping[str, Any]]
    path = Path("the batch")

    def __iter__(self) -> Iterator[Record]:
        for number, value in enumerate(self.values, start=1):
            try:
                yield Record(None, line=number, **asked_of(value, None, ["prompt"]))
            except ValueError as error:
                yield Record(None, "", number, error=str(error))


def asks_of(values: Sequence[Mapping[str, Any]], tokenizer: Any, *, drawn: bool) -> list[Ask | str]:
    """What each row asks for, or why it cannot be completed.

    A row with `tokens` needs no tokenizer. `max_new_tokens` is optional.

    Args:
        drawn: whether tokens are sampled, so that each row needs a number for its random keys.
    """
    texts = [value for value in values if value.get("tokens") is None]
    prompts = iter(Prompts(Rows(texts), tokenizer, None, None))
    asks: list[Ask | str] = []
    for value in values:
        tokens, error = value.get("tokens"), None
        if tokens is None:
            record, tokens = next(prompts)
            error = record.error
        elif value.get("prompt") is not None or value.get("messages") is not None:
            error = 'a row has "tokens", or else a "prompt" or "messages"'
        try:
            number = key_number(value, drawn=drawn)
            most = whole("max_new_tokens", value)
        except ValueError as found:
            error = error or str(found)
        asks.append(Ask(tokens, most, number) if error is None else error)
    return asks


def whole(name: str, value: Mapping[str, Any]) -> Any:
    """A row's value in a column of integers, which are floats if the column has nulls.

    That is so in batches of numpy: null is NaN there.

    Raises:
        ValueError: it is a float so large that digits of the integer may have been lost.
    """
    found = value.get(name)
    if not isinstance(found, float):
        return found
    if math.isnan(found):
        return None
    if abs(found) >= EXACT:
        raise ValueError(
            f"{name} {found!r} is a float, which has lost digits of the integer: use the batch "
            'format "pyarrow"'
        )
    return int(found) if found.is_integer() else found


def key_number(value: Mapping[str, Any], *, drawn: bool) -> int:
    """The number that decides a row's random keys: its `index`, or else a digest of its `id`.

    Args:
        drawn: whether tokens are sampled; otherwise a row may have neither.

    Raises:
        ValueError: the index is no integer from 0 to 2**64 - 1, or there is none and no id.
    """
    index = whole("index", value)
    if index is not None:
        return check_at_least("index", index, 0, 2**64 - 1)
    name = whole("id", value)
    if name is not None:
        return int.from_bytes(digest(name)[:KEY_BYTES], "big")
    if drawn:
        raise ValueError(
            "the row has neither an index nor an id, from which its random keys are made"
        )
    return 0  # nothing is drawn


def refused(error: str, num_sequences: int) -> list[Completion]:
    """The completions of a row that cannot be completed."""
    return [refusal(0, sequence, error) for sequence in range(num_sequences)]


def with_completions(table: Any, rows: Sequence[Sequence[Completion]], num_sequences: int) -> Any:
    """A pyarrow table with a row for each sequence, and the columns of its completion.

    Args:
        table: the batch.
        rows: the sequences of each of its rows.
        num_sequences: how many each row has; with several, there is a column `sequence`.
    """
    import pyarrow as pa

    done = [one for sequences in rows for one in sequences]
    several = num_sequences > 1
    if several:
        table = table.take(np.repeat(np.arange(len(rows)), num_sequences))
    if "tokens" in table.column_names:
        renamed = {"tokens": "prompt_tokens"}
        table = table.rename_columns([renamed.get(name, name) for name in table.column_names])
    columns = {
        **({"sequence": pa.array([one.sequence for one in done], pa.int32())} if several else {}),
        "tokens": pa.array([one.tokens for one in done], pa.list_(pa.int32())),
        "text": pa.array([one.text or "" for one in done], pa.string()),
        "finish_reason": pa.array([one.finish_reason for one in done], pa.string()),
        "logprobs": pa.array([one.logprobs for one in done], pa.list_(pa.float32())),
        "error": pa.array([one.error for one in done], pa.string()),
    }
    for name in ("num_steps", "num_drafted", "num_accepted"):
        columns[name] = pa.array([getattr(one, name) for one in done], pa.int32())
    kept = [name for name in table.column_names if name not in columns]
    table = table.select(kept)
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table
