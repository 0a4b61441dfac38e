"""Input records of `emsjax generate`: JSON Lines, checked before any work, read as needed."""

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

TOLD = 40  # characters of a line that is no JSON


@dataclasses.dataclass(frozen=True)
class Record:
    """One prompt.

    Attributes:
        line: counts from 1 in the input file.
        truncated: whether its tokens are cut, as far as that is known.
    """

    id: str | int
    prompt: str
    line: int
    truncated: bool = False


class Records:
    """The records of a JSON Lines file, read line by line each time they are gone through.

    Args:
        path: the file.
        template: how to make a prompt of a record's fields; None: field "prompt" is it.

    Raises:
        ValueError: a bad template, or no regular file; while going through, the first bad line
            with its number, or that the file has changed.
    """

    def __init__(self, path: Path, template: str | None):
        self.path, self.template = path, template
        self.fields = template_fields(template)
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no regular file: it has to be read more than once")
        self.version = _version(path.stat())

    def __iter__(self) -> Iterator[Record]:
        """All but blank lines."""
        return (record for _, record in self.lines() if record is not None)

    def lines(self) -> Iterator[tuple[bytes, Record | None]]:
        """Every line as it stands in the file, and its record; None: blank."""
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if _version(os.fstat(file.fileno())) != self.version:
                    raise ValueError(f"{self.path} has changed while it was in use")
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                yield line, self._record(text, number) if text.strip() else None

    def _record(self, line: bytes, number: int) -> Record:
        try:
            return make_record(read_json(line.decode()), self.template, self.fields, number)
        except ValueError as error:  # bad UTF-8 included
            raise ValueError(f"{self.path}, line {number}: {error}") from error


def read_json(line: str) -> Any:
    """What a line holds.

    Raises:
        ValueError: it is not JSON; the message has the line's beginning.
    """
    line = line.strip()
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        told = line if len(line) <= TOLD else line[:TOLD] + "..."
        raise ValueError(f"not JSON: {told!r} ({error.msg}, column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("not JSON that can be read: nested too deeply") from error


def _version(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclasses.dataclass(frozen=True)
class Survey:
    """What is known of an input when all of it has been checked.

    Attributes:
        count: records.
        ids: theirs.
        sha256: of the file.
    """

    count: int
    ids: Digests
    sha256: str


def survey(records: Records) -> Survey:
    """Check every record; keeps nothing of them but a digest of each id.

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
    """Raises a ValueError for the first record whose id has occurred before."""
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


def make_record(value: Any, template: str | None, fields: list[str], line: int) -> Record:
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
        raise ValueError("the prompt is empty")
    (prompt + str(record_id)).encode()  # lone surrogates have no UTF-8: fail here, not later
    return Record(record_id, prompt, line)


def template_fields(template: str | None) -> list[str]:
    """Names of the fields that the prompt is made of.

    Raises:
        ValueError: no field, or anything but plain `{name}`.
    """
    if template is None:
        return ["prompt"]
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"--prompt-template {template!r}: {error}") from error
    named = [(name, spec or conversion) for _, name, spec, conversion in parts if name is not None]
    if not named or any(extra or not name.isidentifier() for name, extra in named):
        raise ValueError(f"--prompt-template {template!r} must name fields as {{name}}")
    return [name for name, _ in named]
