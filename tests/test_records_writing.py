"""JSON that every reader can read, and files that pass by."""

import ast
import json
import math
import os
from pathlib import Path

import pytest

from emsjax.records.writing import is_stream, to_json, to_json_line, write_atomically

ROOT = Path(__file__).parents[1]
WRITTEN = ("emsjax", "pallas_kernels", "notebooks")  # folders whose code writes JSON


def lines_of_javascript(text):
    """As readline splits: also after U+2028 and U+2029."""
    return text.replace("\u2028", "\n").replace("\u2029", "\n").split("\n")[:-1]


@pytest.mark.parametrize("split", [str.splitlines, lines_of_javascript])
def test_no_reader_cuts_a_record_in_two(split):
    text = "".join(map(chr, [*range(0x100), *range(0x2000, 0x2100), 0x1F600]))
    line = to_json_line({"text": text, text: [text]}).decode()
    assert line.endswith("\n")
    assert split(line) == [line[:-1]]
    assert json.loads(line) == {"text": text, text: [text]}
    assert "é" in line  # other characters are readable


@pytest.mark.parametrize("write", [to_json, to_json_line])
def test_numbers_that_are_not_finite_are_null(write):
    value = {"a": math.nan, "b": [math.inf, (1.5, -math.inf)], "c": {"d": math.nan}, "e": 1}
    found = json.loads(write(value), parse_constant=pytest.fail)
    assert found == {"a": None, "b": [None, [1.5, None]], "c": {"d": None}, "e": 1}


def test_no_code_writes_json_that_may_hold_nan():
    """Every call of `json.dumps` and `json.dump` has allow_nan=False."""
    for folder in WRITTEN:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Call) and "json.dump" in ast.unparse(node.func)):
                    continue
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert given.get("allow_nan") == "False", f"{path}:{node.lineno}"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("/dev/null", True),
        ("/dev/stdout", True),
        ("/dev/fd/1", True),
        ("/dev/shm/out.jsonl", False),  # a folder for files
        ("out.jsonl", False),
        (".", False),
    ],
)
def test_devices_and_standard_streams_pass_by(name, expected):
    assert is_stream(Path(name)) == expected


def test_pipes_pass_by_and_files_do_not(tmp_path):
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    streams = {path.name for path in tmp_path.iterdir() if is_stream(path)}
    assert streams == {"pipe", "link"}


def test_a_stream_is_written_and_not_replaced(tmp_path):
    path = tmp_path / "device"
    path.symlink_to("/dev/null")
    write_atomically(path, "text")
    assert path.is_char_device()
    assert list(tmp_path.iterdir()) == [path]
