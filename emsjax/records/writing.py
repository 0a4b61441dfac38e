"""How JSON text and files are written."""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Line ends for some readers of text, such as Python's `splitlines` and JavaScript, but not in JSON,
# which escapes only those below U+0020.
LINE_ENDS = re.compile("[\x85\u2028\u2029]")
# Streams even where a shell has redirected them to a file.
STANDARD_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")


def to_json(value: Any, **options: Any) -> str:
    """JSON text, with null for each number that is not finite, for which JSON has no text.

    Args:
        options: arguments of `json.dumps`.
    """
    return json.dumps(_finite_or_none(value), allow_nan=False, **options)


def to_json_line(value: Any) -> bytes:
    """A line of JSON in UTF-8 with its end, which holds nothing that any reader takes for one."""
    text = LINE_ENDS.sub(
        lambda found: f"\\u{ord(found[0]):04x}", to_json(value, ensure_ascii=False)
    )
    return (text + "\n").encode()


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite_or_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_or_none(item) for item in value]
    return value


def is_stream(path: Path) -> bool:
    """Whether what is written there passes by: a pipe, a device or a standard stream.

    It cannot be read again, so a run cannot be resumed with it, and no file belongs beside it.
    """
    return str(path.absolute()).startswith(STANDARD_STREAMS) or (
        path.exists() and not path.is_file() and not path.is_dir()
    )


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is complete or absent after a crash; a stream is written plainly."""
    if is_stream(path):
        path.write_text(text, encoding="utf-8")
        return
    with replacing(path, path.with_name(path.name + ".tmp")) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing(path: Path, unfinished: Path) -> Iterator[Path]:
    """A context that writes the file `unfinished`, which then becomes `path` at once."""
    yield unfinished
    with unfinished.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
