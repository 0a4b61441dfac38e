"""Files of a checkpoint folder, which may be broken or hostile: what every reader of them checks.

Whoever wrote the folder can cost its reader an error, but no more time and memory than the size of
its files suggests: files are regular, headers and their numbers of objects are limited, and tensors
are located, not read.
"""

import dataclasses
import json
import math
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from emsjax.models.schema import MAX_COUNT, is_whole, shown

MAX_HEADER_BYTES = 32 << 20  # of JSON, or of names and shapes; the largest published index has 9 MB
MAX_OBJECTS = 300_000  # operations of a header; a state dict of 1,000 tensors has about 30,000
MAX_TENSORS = 100_000  # in one file
MAX_NAME = 512  # characters of a tensor's name
MAX_AXES = 32
READABLE_DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, which `read` copies or maps."""

    shape: tuple[int, ...]
    dtype: str  # numpy's name of it
    read: Callable[[], np.ndarray]
    file: Path | None = None  # set by `weight_files.open_file`

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


def file_size(path: Path) -> int:
    """Size in bytes of a regular file, which may be the target of a link.

    Raises:
        ValueError: there is no such file, or it is a folder, a device or a loop of links.
    """
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{readable_path(path)} cannot be read: {reason(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{readable_path(path)} is not a regular file")
    return status.st_size


def readable_name(name: str) -> str:
    """A name from a file as messages show it: short, and on one line."""
    return name if len(name) <= MAX_NAME and name.isprintable() else shown(name)


def readable_path(path: Path) -> str:
    return f"{path.parent}/{readable_name(path.name)}"


def reason(error: Exception) -> str:
    """An error without the file's name, which the message has already."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    says_little = isinstance(error, LookupError | TypeError | AttributeError)
    return repr(error) if says_little or not str(error) else str(error)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: the file does not exist, is no regular file, is too large, or is malformed.
    """
    if not os.path.lexists(path):
        raise ValueError(f"{path.parent} has no {path.name}")
    size = file_size(path)
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"{path} must have at most {MAX_HEADER_BYTES} bytes, not {size}")
    try:
        with open(path, "rb") as file:
            content = file.read(size)
        values = json.loads(content.decode("utf-8-sig"))  # without a byte-order mark
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {reason(error)}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is not valid JSON: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return values


def checked_shape(shape: Any) -> tuple[int, ...]:
    """A tensor's shape, as a file states it.

    Raises:
        ValueError: it is not a sequence of whole numbers.
    """
    axes = tuple(shape) if isinstance(shape, list | tuple) else None
    if axes is None or len(axes) > MAX_AXES or not all(is_whole(n, 0, MAX_COUNT) for n in axes):
        raise ValueError(f"a shape must be at most {MAX_AXES} whole numbers, not {shown(shape)}")
    return axes


def checked_name(name: Any) -> str:
    """A tensor's name, as a file states it.

    Raises:
        ValueError: it is no text, or too long to be a name.
    """
    if not isinstance(name, str) or len(name) > MAX_NAME:
        raise ValueError(f"a name must be text of at most {MAX_NAME} characters, not {shown(name)}")
    return name


def listed(items: Sequence[str], separator: str = ", ", most: int = 8) -> str:
    """The first items, and how many more there are."""
    more = [f"and {len(items) - most} more"] if len(items) > most else []
    return separator.join([*items[:most], *more])
