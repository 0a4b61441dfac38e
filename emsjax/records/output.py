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
from collections.abc import Container, Iterator, Mapping, Set
from io import BufferedWriter
from pathlib import Path
from time import monotonic
from typing import Any

from emsjax.records.digests import Digests, digest
from emsjax.records.writing import to_json, to_json_line, write_atomically

SYNC_SECONDS = 1.0  # least time between calls of fsync; killing the process loses no result


@dataclasses.dataclass
class Results:
    """An open output file that results are appended to.

    Attributes:
        done: the (id, sequence) pairs that had results when the file was opened.
        resolved: the choices of the run that began it.
    """

    done: Digests
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
        """Force all results to the disk."""
        os.fsync(self.file.fileno())
        self.synced = monotonic()


@contextlib.contextmanager
def open_results(
    path: Path,
    configuration: Mapping,
    ids: Container[str | int],
    num_sequences: int,
    resolved: Mapping,
) -> Iterator[Results]:
    """Open an output to append to, and cut off an unfinished last line.

    Args:
        ids: the input's ids.
        resolved: stored beside the configuration of a new run.

    Raises:
        ValueError: see `read_results`, or another process has the file open.
    """
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another run is writing {path}") from error
        done, size = read_results(path, configuration, ids, num_sequences)
        if size == 0:
            record = to_json({**configuration, "resolved": resolved}, indent=2)
            write_atomically(configuration_path(path), record + "\n")
        file.truncate(size)
        results = Results(done, read_resolved(path), file)
        try:
            yield results
        finally:
            results.sync()


def read_results(
    path: Path, configuration: Mapping, ids: Container[str | int], num_sequences: int
) -> tuple[Digests, int]:
    """The (id, sequence) pairs in an output, and the number of bytes of its finished lines.

    A last line without an end, or that is not JSON, was left by a killed run and is not counted.

    Raises:
        ValueError: the output belongs to another run, or was changed by hand.
    """
    done, size = Digests(), 0
    if path.exists() and path.stat().st_size:
        check_configuration(path, configuration)
        for _, line, key in _finished(path, ids, num_sequences):
            done.add(key)
            size += len(line)
    repeated = done.freeze()
    if repeated:
        _name_repetition(path, ids, num_sequences, repeated)
    return done, size


def _finished(path: Path, ids: Container[str | int], num_sequences: int):
    """Number, bytes and key of every finished line.

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
                key = key_of(result, ids, num_sequences)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            yield number, line, key
            line = following


def _name_repetition(path: Path, ids, num_sequences: int, repeated: Set[bytes]) -> None:
    """Raise a ValueError for the first line of a sequence that already has a line."""
    seen = set()
    for number, _, key in _finished(path, ids, num_sequences):
        if digest(key) in repeated:
            if key in seen:
                record, sequence = key
                which = "" if num_sequences == 1 else f" with sequence {sequence}"
                raise ValueError(f"{path}, line {number}: id {record!r} appears twice{which}")
            seen.add(key)


def key_of(result: Any, ids: Container[str | int], num_sequences: int) -> tuple[str | int, int]:
    """The id and the sequence of a line, whose field "sequence" is read if a record has several.

    Raises:
        ValueError: no id, or an id or sequence that this run does not have.
    """
    if not isinstance(result, dict) or not isinstance(result.get("id"), str | int):
        raise ValueError("not a result of emsjax")
    if result["id"] not in ids:
        raise ValueError(f"id {result['id']!r} is not in the input")
    sequence = result.get("sequence") if num_sequences > 1 else 0
    if sequence not in range(num_sequences):
        raise ValueError(f'field "sequence" must be in 0..{num_sequences - 1}, not {sequence!r}')
    return result["id"], sequence


def check_configuration(path: Path, configuration: Mapping) -> None:
    """Raise a ValueError unless the output belongs to a run with this configuration."""
    sidecar = configuration_path(path)
    if not sidecar.exists():
        raise ValueError(f"{path} exists without {sidecar.name}: not from a run of emsjax generate")
    before = json.loads(sidecar.read_bytes())
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
    return json.loads(configuration_path(path).read_bytes()).get("resolved", {})


def configuration_path(path: Path) -> Path:
    return path.with_name(path.name + ".run.json")
