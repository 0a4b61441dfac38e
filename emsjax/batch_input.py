"""Input records of `emsjax generate`: JSON Lines, validated before any work starts."""

import dataclasses
import json
import string
from typing import Any


@dataclasses.dataclass(frozen=True)
class Record:
    """One prompt; `line` counts from 1 in the input file."""

    id: str | int
    prompt: str
    line: int


def read_records(source: bytes, name: str, template: str | None) -> list[Record]:
    """All records of a JSON Lines file; blank lines are skipped.

    Args:
        source: the file's bytes.
        name: the file's name, for errors.
        template: how to make a prompt of a record's fields; None: field "prompt" is it.

    Raises:
        ValueError: the first bad line with its number, a duplicate id with both
            numbers, a bad template, or no records at all.
    """
    fields = template_fields(template)
    records: dict[str | int, Record] = {}
    for number, line in enumerate(source.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = make_record(json.loads(line.decode()), template, fields, number)
            first = records.setdefault(record.id, record)
            if first is not record:
                raise ValueError(f"duplicate id {record.id!r}, first seen on line {first.line}")
        except ValueError as error:  # bad JSON and bad UTF-8 included
            raise ValueError(f"{name}, line {number}: {error}") from error
    if not records:
        raise ValueError(f"{name} holds no records")
    return list(records.values())


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
        if not isinstance(value[field], str):
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
