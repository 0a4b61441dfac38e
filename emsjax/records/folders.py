"""Inputs and outputs of many files: JSON Lines or Parquet, read and written in parts."""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from emsjax.records.input import Part, Record, Records
from emsjax.records.reading import in_one_line
from emsjax.records.writing import replacing, to_json_line

FORMATS = (".jsonl", ".parquet")
LEAST_RECORDS = 64  # in a part
MOST_PARTS = 100_000  # parts of larger inputs have more records
ROWS_AT_ONCE = 1024  # of a Parquet file


def input_files(path: Path) -> list[Path]:
    """The files of an input in the order of their names: the file itself, or those in a folder.

    Raises:
        ValueError: there are none, or they have an unknown format or several.
    """
    files = [path]
    if path.is_dir():
        files = sorted(one for one in path.iterdir() if one.suffix in FORMATS and one.is_file())
    formats = {one.suffix for one in files}
    if len(formats) != 1 or not formats <= set(FORMATS):
        raise ValueError(f"{path} must be or hold files of one format: .jsonl or .parquet")
    return files


def open_records(path: Path, template: str | None, part: Part, *, name: bool) -> Records:
    """The records of a part of a file; invalid ones are kept.

    Args:
        name: whether messages about places in the file name it.
    """
    kind = ParquetRecords if path.suffix == ".parquet" else Records
    records = kind(path, template, keep_invalid=True, part=part)
    records.of_file = f" of {path.name}" if name else ""
    return records


class ParquetRecords(Records):
    """The records of a Parquet file, whose rows take the place of lines."""

    def lines(self) -> Iterator[tuple[bytes, Record | None]]:
        """Every row's record, without bytes of its own."""
        from pyarrow import parquet

        with in_one_line(f"{self.path} cannot be read"):
            file = parquet.ParquetFile(self.path)
        first, seen = self.part.line - 1, 0
        end = file.metadata.num_rows if self.part.lines is None else first + self.part.lines
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if first < seen + rows and seen < end:
                yield from self._group(file, group, seen, range(first, end))
            seen += rows

    def _group(
        self, file: Any, group: int, seen: int, asked: range
    ) -> Iterator[tuple[bytes, Record | None]]:
        """The records of those rows of a row group that are asked for; others are not converted.

        Args:
            seen: number of rows in the groups before it.
            asked: numbers of rows in the file, from 0.
        """
        batches = file.iter_batches(ROWS_AT_ONCE, row_groups=[group])
        while seen < asked.stop:
            with in_one_line(f"{self.path} cannot be read"):
                batch = next(batches, None)
            if batch is None:
                break
            skipped = max(asked.start - seen, 0)
            if skipped < batch.num_rows:
                rows = _rows(batch.slice(skipped, asked.stop - seen - skipped))
                for number, value in enumerate(rows, start=seen + skipped + 1):
                    yield b"", self.record(lambda value=value: value, number)
            seen += batch.num_rows


def _rows(batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of a batch; a column of objects holds null for what an object does not have."""
    for row in batch.to_pylist():
        if isinstance(row.get("sampling"), dict):
            row["sampling"] = {k: x for k, x in row["sampling"].items() if x is not None}
        yield row


def records_per_part(count: int) -> int:
    """How many records a part of an input of `count` records has."""
    return max(LEAST_RECORDS, -(-count // MOST_PARTS))


def parts_of(records: Records, size: int, index: int) -> Iterator[Part]:
    """Yields the parts of a file, each of `size` records but the last.

    Args:
        index: number of records in the files before it.
    """
    offset = start = count = 0
    first = line = 1
    for line, (text, record) in enumerate(records.lines(), start=1):
        offset += len(text)
        count += record is not None
        if count == size:
            yield Part(start, first, line + 1 - first, index)
            start, first, count, index = offset, line + 1, 0, index + size
    if count:
        yield Part(start, first, line + 1 - first, index)


def part_path(folder: Path, index: int, suffix: str) -> Path:
    """The output file of the part before which the input has `index` records."""
    return folder / f"part-{index:012d}{suffix}"


def write_part(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Writes the results of a part. At any time there is the whole file or none.

    Two workers may write the same part, if one was taken for dead.
    """
    with replacing(path, path.with_name(f".{path.name}.{uuid.uuid4().hex}")) as unfinished:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            parquet.write_table(_table(lines), unfinished)
        else:
            unfinished.write_bytes(b"".join(map(to_json_line, lines)))


def read_part(path: Path) -> list[dict[str, Any]]:
    """The results of a part.

    Raises:
        ValueError: it cannot be read.
    """
    with in_one_line(f"{path} is not a part of emsjax generate"):
        if path.suffix == ".parquet":
            from pyarrow import parquet

            return parquet.read_table(path).to_pylist()
        return [json.loads(line) for line in path.read_bytes().splitlines()]


def remove_unfinished(folder: Path) -> None:
    """Removes what killed workers left behind."""
    for path in folder.glob(".part-*"):
        path.unlink(missing_ok=True)


def _table(lines: Sequence[Mapping[str, Any]]) -> Any:
    """The results as a table whose columns have the same types in every part."""
    import pyarrow as pa

    numbers, texts = pa.list_(pa.float64()), pa.string()
    types = {
        "id": texts,
        "line": pa.int64(),
        "file": texts,
        "sequence": pa.int32(),
        "text": texts,
        "tokens": pa.list_(pa.int32()),
        "mean_logprob": pa.float64(),
        "logprobs": numbers,
        "top_tokens": pa.list_(pa.list_(pa.int32())),
        "top_logprobs": pa.list_(numbers),
        "finish_reason": texts,
        "truncated": pa.bool_(),
        "error": texts,
    }
    if any(isinstance(line["id"], int) for line in lines):  # a column of the input has one type
        types["id"] = pa.int64()
    return pa.Table.from_pylist(list(lines), pa.schema(types))
