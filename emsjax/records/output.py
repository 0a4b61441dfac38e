"""The output of `emsjax generate`: append-only JSON Lines beside the run's configuration.

`OUT.run.json` identifies the run that the results in `OUT` belong to. It is written before the
first result, so results without it, or with another one, belong to another run. Its field
"resolved" holds choices that depended on the machine when the run began; a resumed run keeps them.
"""

import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import stat
from collections.abc import Container, Iterator, Mapping, Set
from io import BufferedWriter
from pathlib import Path
from time import monotonic
from typing import Any

from emsjax.records.digests import Digests, digest
from emsjax.records.input import Key
from emsjax.records.writing import is_stream, to_json, to_json_line, write_atomically

SYNC_SECONDS = 1.0  # least time between calls of fsync; killing the process loses no result


@dataclasses.dataclass
class Results:
    """An open output that results are appended to.

    Attributes:
        earlier: the results that it had when it was opened.
        resolved: the choices of the run that began it.
    """

    earlier: "Earlier"
    resolved: Mapping
    file: BufferedWriter
    synced: float = 0.0

    def append(self, result: Mapping) -> None:
        """Write a result; if the process is killed, at most the last line is unfinished."""
        self.file.write(to_json_line(result))
        self.file.flush()
        if monotonic() - self.synced > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Force all results to the disk, if that is where they go."""
        if stat.S_ISREG(os.fstat(self.file.fileno()).st_mode):
            os.fsync(self.file.fileno())
        self.synced = monotonic()


@dataclasses.dataclass(frozen=True)
class Earlier:
    """The results that an output holds.

    Attributes:
        done: their (key, sequence) pairs; the key is the record's.
        size: bytes of their lines.
        errors: how many of their sequences ended with an error.
    """

    done: Digests
    size: int = 0
    errors: int = 0


@contextlib.contextmanager
def open_results(
    path: Path,
    configuration: Mapping,
    keys: Container[Key],
    num_sequences: int,
    resolved: Mapping,
) -> Iterator[Results]:
    """Open an output to append to, and cut off an unfinished last line.

    A stream is only written: it holds no earlier results, and nothing is stored beside it.

    Args:
        keys: the keys of the input's records.
        resolved: stored beside the configuration of a new run.

    Raises:
        ValueError: see `read_results`, or another process has the file open.
    """
    with path.open("ab") as file:
        if is_stream(path):
            yield Results(Earlier(Digests()), resolved, file)
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another run is writing {path}") from error
        earlier = read_results(path, configuration, keys, num_sequences)
        if earlier.size == 0:
            record = to_json({**configuration, "resolved": resolved}, indent=2)
            write_atomically(configuration_path(path), record + "\n")
        file.truncate(earlier.size)
        results = Results(earlier, read_resolved(path), file)
        try:
            yield results
        finally:
            results.sync()


def read_results(
    path: Path, configuration: Mapping, keys: Container[Key], num_sequences: int
) -> Earlier:
    """The results in an output.

    A last line without an end, or that is not JSON, was left by a killed run and is not counted.

    Raises:
        ValueError: the output belongs to another run, or was changed by hand.
    """
    done, size, errors = Digests(), 0, 0
    if path.exists() and not is_stream(path) and path.stat().st_size:
        check_configuration(path, configuration)
        for _, line, key, result in _finished(path, keys, num_sequences):
            done.add(key)
            size += len(line)
            errors += result.get("finish_reason") == "error"
    repeated = done.freeze()
    if repeated:
        _name_repetition(path, keys, num_sequences, repeated)
    return Earlier(done, size, errors)


def _finished(path: Path, keys: Container[Key], num_sequences: int):
    """Number, bytes, key and value of every finished line.

    Raises:
        ValueError: a line that does not belong to this run.
    """
    with path.open("rb") as file:
        line = file.readline()
        for number in itertools.count(1):
            if not line.endswith(b"\n"):
                return
            following = file.readline()
            try:
                result = json.loads(line)
            except ValueError as error:
                if not following:
                    return
                raise ValueError(f"{path}, line {number}: not a result of emsjax") from error
            try:
                key = key_of(result, keys, num_sequences)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            yield number, line, key, result
            line = following


def _name_repetition(path: Path, keys, num_sequences: int, repeated: Set[bytes]) -> None:
    """Raise a ValueError for the first line of a sequence that already has a line."""
    seen = set()
    for number, _, key, _ in _finished(path, keys, num_sequences):
        if digest(key) in repeated:
            if key in seen:
                record, sequence = key
                which = "" if num_sequences == 1 else f" with sequence {sequence}"
                raise ValueError(f"{path}, line {number}: id {record!r} appears twice{which}")
            seen.add(key)


def key_of(result: Any, keys: Container[Key], num_sequences: int) -> tuple[Key, int]:
    """The record's key and the sequence of a line.

    The field "sequence" is read if a record has several, "line" if it has no id.

    Raises:
        ValueError: no id, or an id or sequence that this run does not have.
    """
    found = result.get("id") if isinstance(result, dict) else None
    if found is None and isinstance(result, dict) and isinstance(result.get("line"), int):
        found = ("line", result["line"])
    if not isinstance(found, str | int | tuple):
        raise ValueError("not a result of emsjax")
    if found not in keys:
        raise ValueError(f"id {result.get('id')!r} is not in the input")
    sequence = result.get("sequence") if num_sequences > 1 else 0
    if sequence not in range(num_sequences):
        raise ValueError(f'field "sequence" must be in 0..{num_sequences - 1}, not {sequence!r}')
    return found, sequence


def check_configuration(path: Path, configuration: Mapping) -> None:
    """Raise a ValueError unless the output belongs to a run with this configuration."""
    sidecar = configuration_path(path)
    if not sidecar.exists():
        raise ValueError(f"{path} exists without {sidecar.name}: not from a run of emsjax generate")
    before = {**_read_configuration(sidecar)}
    before.pop("resolved", None)
    names = [*configuration, *(name for name in before if name not in configuration)]
    differences = [
        f"{name} was {before.get(name)!r}, is now {configuration.get(name)!r}"
        for name in names
        if before.get(name) != configuration.get(name)
    ]
    if differences:
        raise ValueError(
            f"{path} is from another run: {'; '.join(differences)}. Use that run's options, "
            "or choose another --output"
        )


def read_resolved(path: Path) -> Mapping:
    """The stored choices of the run that the output belongs to."""
    return _read_configuration(configuration_path(path)).get("resolved", {})


def _read_configuration(sidecar: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(sidecar.read_bytes())
    except ValueError as error:  # bad UTF-8 included
        raise ValueError(f"{sidecar} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{sidecar} must hold a JSON object, not {type(found).__name__}")
    return found


def configuration_path(path: Path) -> Path:
    return path.with_name(path.name + ".run.json")
