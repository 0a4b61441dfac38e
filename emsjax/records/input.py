"""Input records in JSON Lines, all checked before the work starts and read again as needed."""

import codecs
import dataclasses
import hashlib
import json
import os
import string
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from emsjax.records.digests import Digests, digest

SHOWN = 40  # characters of an invalid line in an error message


@dataclasses.dataclass(frozen=True)
class Record:
    """One prompt.

    Attributes:
        line: number of its line in the input file, from 1.
        truncated: whether its tokens are cut; False before tokenization.
    """

    id: str | int
    prompt: str
    line: int
    truncated: bool = False


class Records:
    """The records of a JSON Lines file, read line by line in each iteration.

    Args:
        path: the file.
        template: builds a prompt from a record's fields; None: the field "prompt".

    Raises:
        ValueError: a bad template, or not a regular file; in an iteration, the first bad line
            with its number, or a file that has changed.
    """

    def __init__(self, path: Path, template: str | None):
        self.path, self.template = path, template
        self.fields = template_fields(template, "--prompt-template")
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is not a regular file: it is read more than once")
        self.version = _version(path.stat())

    def __iter__(self) -> Iterator[Record]:
        """All records; blank lines are skipped."""
        return (record for _, record in self.lines() if record is not None)

    def lines(self) -> Iterator[tuple[bytes, Record | None]]:
        """Every line of the file and its record, which is None for a blank line."""
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if _version(os.fstat(file.fileno())) != self.version:
                    raise ValueError(f"{self.path} has changed while it was in use")
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                yield line, self._record(text, number) if text.strip() else None

    def _record(self, line: bytes, number: int) -> Record:
        try:
            return make_record(parse_json(line.decode()), self.template, self.fields, number)
        except ValueError as error:  # bad UTF-8 included
            raise ValueError(f"{self.path}, line {number}: {error}") from error


def parse_json(line: str) -> Any:
    """The JSON value of a line.

    Raises:
        ValueError: the line is not JSON; the message shows its beginning.
    """
    line = line.strip()
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        shown = line if len(line) <= SHOWN else line[:SHOWN] + "..."
        raise ValueError(f"not JSON: {shown!r} ({error.msg}, column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error


def _version(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclasses.dataclass(frozen=True)
class Survey:
    """Facts about an input whose records have all been checked.

    Attributes:
        count: number of records.
        ids: the records' ids.
        sha256: digest of the file.
    """

    count: int
    ids: Digests
    sha256: str


def survey(records: Records) -> Survey:
    """Check every record. Only a digest of each id is kept in memory.

    Raises:
        ValueError: a bad line, a duplicate id with the numbers of both lines, or no records.
    """
    sha256, ids = hashlib.sha256(), Digests()
    for line, record in records.lines():
        sha256.update(line)
        if record is not None:
            ids.add(record.id)
    if not len(ids):
        raise ValueError(f"{records.path} holds no records")
    repeated = ids.freeze()
    if repeated:
        _name_duplicate(records, repeated)
    return Survey(len(ids), ids, sha256.hexdigest())


def _name_duplicate(records: Records, repeated: Set[bytes]) -> None:
    """Raise a ValueError for the first record whose id has occurred before."""
    first: dict[str | int, int] = {}
    for record in records:
        if (
            digest(record.id) in repeated
            and first.setdefault(record.id, record.line) != record.line
        ):
            raise ValueError(
                f"{records.path}, line {record.line}: duplicate id {record.id!r}, first seen on "
                f"line {first[record.id]}"
            )


def make_record(
    value: Any, template: str | None, fields: list[str], line: int, kind: str = "prompt"
) -> Record:
    """The record of a JSON value.

    Args:
        kind: what the text is, for messages.

    Raises:
        ValueError: a missing field, one of the wrong type, or an empty text.
    """
    if not isinstance(value, dict):
        raise ValueError("a record must be a JSON object")
    for field in ("id", *fields):
        if field not in value:
            raise ValueError(f'missing field "{field}"')
    record_id = value["id"]
    if not isinstance(record_id, str | int) or isinstance(record_id, bool):
        raise ValueError(f'field "id" must be a string or an integer, not {record_id!r}')
    for field in fields:
        if field != "id" and not isinstance(value[field], str):
            raise ValueError(f'field "{field}" must be a string, not {value[field]!r}')
    prompt = value["prompt"] if template is None else template.format(**value)
    if not prompt:
        raise ValueError(f"the {kind} is empty")
    (prompt + str(record_id)).encode()  # lone surrogates have no UTF-8: fail here, not later
    return Record(record_id, prompt, line)


def template_fields(template: str | None, option: str) -> list[str]:
    """Names of the fields that the prompt is built from.

    Args:
        template: None: the field "prompt".
        option: the option that gave the template, for messages.

    Raises:
        ValueError: no field, or a field in another form than `{name}`.
    """
    if template is None:
        return ["prompt"]
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{option} {template!r}: {error}") from error
    named = [(name, spec or conversion) for _, name, spec, conversion in parts if name is not None]
    if not named or any(extra or not name.isidentifier() for name, extra in named):
        raise ValueError(f"{option} {template!r} must name fields as {{name}}")
    return [name for name, _ in named]
