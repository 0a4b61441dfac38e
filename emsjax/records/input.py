"""Input records in JSON Lines, all checked before the work starts and read again as needed."""

import codecs
import dataclasses
import hashlib
import itertools
import json
import os
import string
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from typing import Any

from emsjax.records.digests import Digests, digest
from emsjax.records.writing import to_json

SHOWN = 40  # characters of an invalid line or value in an error message


@dataclasses.dataclass(frozen=True)
class Record:
    """One prompt.

    Attributes:
        id: None if the line has no valid id of its own.
        prompt: the text; "" if there are messages.
        line: number of its line in the input file, from 1.
        truncated: whether its tokens are cut; False before tokenization.
        error: why it has no prompt that can be decoded; None: it has one.
        messages: of a chat, {"role": ..., "content": ...} each, in place of a prompt.
        sampling: its own settings, as JSON text of an object; None: those of the run.
    """

    id: str | int | None
    prompt: str
    line: int
    truncated: bool = False
    error: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    sampling: str | None = None

    @property
    def key(self) -> "Key":
        """What identifies the record: its id, or else its line."""
        return ("line", self.line) if self.id is None else self.id

    def __str__(self) -> str:
        where = f"line {self.line}"
        return where if self.id is None else f"record {self.id!r} ({where})"


Key = str | int | tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Part:
    """Consecutive lines of an input file.

    Attributes:
        offset: bytes before its first line.
        line: number of its first line, from 1.
        lines: number of its lines; None: all that follow.
        index: number of records before it in the whole input.
    """

    offset: int = 0
    line: int = 1
    lines: int | None = None
    index: int = 0


WHOLE = Part()


class Records:
    """The records of a JSON Lines file, read line by line in each iteration.

    Args:
        path: the file.
        template: builds a prompt from a record's fields; None: the field "prompt" or "messages".
        keep_invalid: invalid records are yielded with their `error`.
        part: the part of the file that is read.

    Raises:
        ValueError: a bad template, or not a regular file; in an iteration, a file that has
            changed, or the first bad line with its number unless invalid ones are kept.
    """

    def __init__(
        self,
        path: Path,
        template: str | None,
        *,
        keep_invalid: bool = False,
        part: Part = WHOLE,
    ):
        self.path, self.template, self.keep_invalid = path, template, keep_invalid
        self.fields, self.part = template_fields(template, "--prompt-template"), part
        self.repeated: Set[bytes] = frozenset()  # digests of ids that several lines have
        self.first: dict[bytes, str] = {}  # where these were seen first
        self.of_file = ""  # follows the number of a line where an input has several files
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is not a regular file: it is read more than once")
        self.version = _version(path.stat())

    def __iter__(self) -> Iterator[Record]:
        """All records; blank lines are skipped."""
        return (record for _, record in self.lines() if record is not None)

    def lines(self) -> Iterator[tuple[bytes, Record | None]]:
        """Every line of the file and its record, which is None for a blank line."""
        with self.path.open("rb") as file:
            file.seek(self.part.offset)
            lines = itertools.islice(file, self.part.lines)
            for number, line in enumerate(lines, start=self.part.line):
                if _version(os.fstat(file.fileno())) != self.version:
                    raise ValueError(f"{self.path} has changed while it was in use")
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                read = lambda text=text: parse_json(text.decode())
                record = self.record(read, number) if text.strip() else None
                if record is not None and record.error and not self.keep_invalid:
                    raise ValueError(f"{self.path}, line {number}: {record.error}")
                yield line, record

    def record(self, read: Callable[[], Any], number: int) -> Record:
        """The record on a line, whose value `read` returns or raises a ValueError."""
        found = None
        try:
            value = read()
            name = id_of(value)
            if (known := digest(name)) in self.repeated:
                here = f"line {number}{self.of_file}"
                if (seen := self.first.setdefault(known, here)) != here:
                    raise ValueError(f"duplicate id {name!r}, first seen on {seen}")
            found = name
            asked = asked_of(value, self.template, self.fields)
            return Record(found, line=number, sampling=sampling_of(value), **asked)
        except ValueError as error:  # bad UTF-8 included
            return Record(found, "", number, error=str(error))


def parse_json(line: str) -> Any:
    """The JSON value of a line.

    Raises:
        ValueError: the line is not JSON; the message shows its beginning.
    """
    line = line.strip()
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        message = f"not JSON: {_shown(line)} ({error.msg}, column {error.colno})"
        raise ValueError(message) from error
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error


def _shown(value: Any) -> str:
    """The beginning of a value, as Python writes it."""
    if isinstance(value, str):
        return repr(value if len(value) <= SHOWN else value[:SHOWN] + "...")
    text = repr(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _version(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclasses.dataclass(frozen=True)
class Survey:
    """Facts about an input whose records have all been checked.

    Attributes:
        count: number of records.
        keys: the records' keys.
        sha256: digest of the file.
    """

    count: int
    keys: Digests
    sha256: str


def survey(records: Records) -> Survey:
    """Check every record. Only a digest of each key is kept in memory.

    From then on, iterations know which ids are repeated.

    Raises:
        ValueError: there are no records; unless invalid ones are kept, also a bad line, or a
            duplicate id with the numbers of both lines.
    """
    sha256, keys = hashlib.sha256(), Digests()
    for line, record in records.lines():
        sha256.update(line)
        if record is not None:
            keys.add(record.key)
    if not len(keys):
        raise ValueError(f"{records.path} holds no records")
    records.repeated = keys.freeze()
    if records.repeated:
        keys = Digests()
        for record in records:  # raises unless duplicates are kept as invalid records
            keys.add(record.key)
        keys.freeze()
    return Survey(len(keys), keys, sha256.hexdigest())


def id_of(value: Any) -> str | int:
    """The id of a record's JSON value.

    Raises:
        ValueError: not an object, no id, or one that is no string or integer.
    """
    found = _fields(value, ["id"])["id"]
    if not isinstance(found, str | int) or isinstance(found, bool):
        raise ValueError(f'field "id" must be a string or an integer, not {_shown(found)}')
    str(found).encode()  # lone surrogates have no UTF-8: fail here, not later
    return found


def asked_of(value: Any, template: str | None, fields: list[str]) -> dict[str, Any]:
    """The fields `prompt` and `messages` of a `Record` with this JSON value.

    Raises:
        ValueError: as `text_of` and `messages_of`.
    """
    if template is None and value.get("messages") is not None:
        return {"prompt": "", "messages": messages_of(value)}
    return {"prompt": text_of(value, template, fields)}


def text_of(value: Any, template: str | None, fields: list[str], kind: str = "prompt") -> str:
    """The text that a record's JSON value holds.

    Args:
        template: builds it from the fields; None: the field "prompt".
        fields: see `template_fields`.
        kind: what the text is, for messages.

    Raises:
        ValueError: not an object, a missing field or one of the wrong type, or an empty text.
    """
    _fields(value, fields)
    for field in fields:
        if field == "id":
            id_of(value)
        elif not isinstance(value[field], str):
            raise ValueError(f'field "{field}" must be a string, not {_shown(value[field])}')
    text = value["prompt"] if template is None else template.format(**value)
    if not text:
        raise ValueError(f"the {kind} is empty")
    text.encode()  # as for ids
    return text


def messages_of(value: Any) -> tuple[dict[str, str], ...]:
    """The messages that a record's JSON value holds.

    Raises:
        ValueError: there is a prompt too, there are none, or one has no role or content as text.
    """
    if value.get("prompt") is not None:
        raise ValueError('a record has a "prompt" or "messages", not both')
    messages = value["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'field "messages" must be a list of messages, not {_shown(messages)}')
    for place, message in enumerate(messages):
        for name in ("role", "content"):
            text = message.get(name) if isinstance(message, dict) else None
            if not isinstance(text, str):
                raise ValueError(f'messages[{place}] must have a "{name}", a string')
            text.encode()  # as for ids
    return tuple(messages)


def sampling_of(value: Any) -> str | None:
    """The settings of a record's JSON value, as JSON text; None: it has none.

    Raises:
        ValueError: they are not an object.
    """
    settings = value.get("sampling")
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise ValueError(f'field "sampling" must be an object, not {_shown(settings)}')
    # The order of settings does not matter, unlike that of a schema's properties among them.
    return to_json(dict(sorted(settings.items())))


def _fields(value: Any, names: list[str]) -> dict[str, Any]:
    """The JSON object itself, which has fields of these names."""
    if not isinstance(value, dict):
        raise ValueError("a record must be a JSON object")
    for name in names:
        if name not in value:
            raise ValueError(f'missing field "{name}"')
    return value


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
