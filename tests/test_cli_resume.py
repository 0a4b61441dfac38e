"""`emsjax generate` goes on where it was, and never into the results of another run."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from jsonl import (
    RECORDS,
    TEXTS,
    FakeStream,
    assert_error,
    command,
    read_lines,
    write_records,
)

from emsjax import streaming
from emsjax.cli.main import main
from emsjax.records import output as batch_output


@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize("finished", [0, 3, 4, 10])
@pytest.mark.parametrize("cut_bytes", [0, 1, 25, 200], ids=lambda n: f"minus{n}bytes")
def test_an_interrupted_run_ends_with_the_results_of_an_uninterrupted_one(
    tiny_model, paths, monkeypatch, num_sequences, finished, cut_bytes
):
    write_records(paths.input)
    options = ["--temperature", "1", "--num-sequences", num_sequences]
    monkeypatch.setattr(streaming, "stream_numbered", FakeStream())
    assert main(command(tiny_model, paths, *options)) == 0
    whole = paths.output.read_bytes()

    paths.output = paths.output.with_name("resumed.jsonl")
    monkeypatch.setattr(streaming, "stream_numbered", FakeStream(interrupt_after=finished))
    assert main(command(tiny_model, paths, *options)) == 130
    size = paths.output.stat().st_size
    os.truncate(paths.output, max(size - cut_bytes, 0))

    kept = paths.output.read_bytes().count(b"\n")
    stream = FakeStream()
    monkeypatch.setattr(streaming, "stream_numbered", stream)
    assert main(command(tiny_model, paths, *options)) == 0
    assert paths.output.read_bytes() == whole
    # Records with all their sequences are skipped.
    assert list(stream.calls[0].prompts) == list(range(kept // num_sequences, len(RECORDS)))
    ids = [record["id"] for record in RECORDS for _ in range(num_sequences)]
    assert [line["id"] for line in read_lines(paths.output)] == ids


@pytest.mark.parametrize("missing", [1, 5, 17, 32])
def test_only_the_missing_sequences_of_a_record_are_appended(tiny_model, paths, fake, missing):
    write_records(paths.input)
    options = ["--temperature", "1", "--num-sequences", "3", "--batch-size", "6"]
    assert main(command(tiny_model, paths, *options)) == 0
    whole = paths.output.read_bytes().splitlines(keepends=True)
    chosen = np.random.default_rng(0).permutation(len(whole))[missing:]
    kept = b"".join(whole[line] for line in chosen)
    paths.output.write_bytes(kept + whole[0][:-5])
    assert main(command(tiny_model, paths, *options)) == 0
    resumed = paths.output.read_bytes()
    assert resumed.startswith(kept)
    assert sorted(resumed.splitlines(keepends=True)) == sorted(whole)


def test_an_unfinished_last_line_with_an_end_is_cut_off_too(tiny_model, paths, fake):
    write_records(paths.input)
    assert main(command(tiny_model, paths)) == 0
    whole = paths.output.read_bytes()
    paths.output.write_bytes(whole[:-20] + b"\n")
    assert main(command(tiny_model, paths)) == 0
    assert paths.output.read_bytes() == whole


def test_a_killed_run_resumes_and_ends_with_the_plain_results(tiny_model, paths):
    records = [{"id": i, "prompt": TEXTS[i % 5]} for i in range(32)]
    write_records(paths.input, records)
    sampling = ["--temperature", "0.9", "--num-sequences", "3"]
    options = ["--drafter", "prompt-lookup", "--batch-size", "2"]
    arguments = command(tiny_model, paths, *sampling, *options)
    process = subprocess.Popen(
        [sys.executable, "-m", "emsjax", *arguments], stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not (paths.output.exists() and paths.output.stat().st_size):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = paths.output.read_bytes()
    assert before
    assert main(arguments) == 0
    assert paths.output.read_bytes().startswith(before[: before.rfind(b"\n") + 1])
    resumed = read_lines(paths.output)

    place = lambda line: (line["id"], line["sequence"])
    assert sorted(map(place, resumed)) == [(i, n) for i in range(32) for n in range(3)]
    paths.output = paths.output.with_name("plain.jsonl")
    assert main(command(tiny_model, paths, *sampling, "--batch-size", "24")) == 0
    expected = sorted(read_lines(paths.output), key=place)
    # Log-probabilities differ by rounding, which may move a mean across the border of two values.
    near = [line | {"mean_logprob": 0} for line in expected]
    resumed = sorted(resumed, key=place)
    assert [line | {"mean_logprob": 0} for line in resumed] == near
    assert sum(line != plain for line, plain in zip(resumed, expected, strict=True)) <= 1


def test_a_complete_output_is_left_unchanged_and_no_model_is_loaded(
    tiny_model, paths, fake, capsys
):
    write_records(paths.input)
    assert main(command(tiny_model, paths)) == 0
    before = paths.output.read_bytes()
    capsys.readouterr()
    fake.calls.clear()
    assert main(command(tiny_model, paths)) == 0
    assert "complete" in capsys.readouterr().err
    assert not fake.calls
    assert paths.output.read_bytes() == before


CHANGES = {
    "seed": ["--seed", "1"],
    "batch_size": ["--batch-size", "4"],
    "drafter": ["--drafter", "prompt-lookup"],
    "max_prompt_tokens": ["--max-prompt-tokens", "9"],
    "temperature": ["--temperature", "0.5"],
    "num_sequences": ["--temperature", "1", "--num-sequences", "2"],
}


@pytest.mark.parametrize(("name", "options"), CHANGES.items(), ids=CHANGES)
def test_results_of_another_configuration_are_left_unchanged(
    tiny_model, paths, fake, capsys, monkeypatch, name, options
):
    write_records(paths.input)
    monkeypatch.setattr(streaming, "stream_numbered", FakeStream(interrupt_after=3))
    assert main(command(tiny_model, paths)) == 130
    before = paths.output.read_bytes()
    capsys.readouterr()
    assert_error(capsys, main(command(tiny_model, paths, *options)), name, "is now")
    assert paths.output.read_bytes() == before


def test_results_of_another_input_are_left_unchanged(tiny_model, paths, fake, capsys):
    write_records(paths.input)
    assert main(command(tiny_model, paths)) == 0
    before = paths.output.read_bytes()
    write_records(paths.input, RECORDS[:-1])
    capsys.readouterr()
    assert_error(capsys, main(command(tiny_model, paths)), "input_sha256")
    assert paths.output.read_bytes() == before


@pytest.mark.parametrize(
    ("tamper", "part"),
    [
        (lambda lines: ["{}\n", *lines], "line 1"),
        (lambda lines: [*lines, "{}\n"], "line 5"),
        (lambda lines: [*lines, lines[0]], "twice"),
        (lambda lines: ['{"id": "stranger"}\n', *lines], "'stranger'"),
        (lambda lines: ["notes\n", *lines], "line 1"),
    ],
    ids=["no id", "no id at the end", "repeated id", "unknown id", "not JSON"],
)
def test_an_output_edited_by_hand_is_left_unchanged(tiny_model, paths, fake, capsys, tamper, part):
    write_records(paths.input)
    assert main(command(tiny_model, paths)) == 0
    lines = paths.output.read_text().splitlines(keepends=True)[:4]
    paths.output.write_text("".join(tamper(lines)))
    before = paths.output.read_bytes()
    capsys.readouterr()
    assert_error(capsys, main(command(tiny_model, paths)), part)
    assert paths.output.read_bytes() == before


@pytest.mark.parametrize("place", [0, 4, -1], ids=["first", "fifth", "last"])
@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({}, "not None"),
        ({"sequence": 3}, "not 3"),
        ({"sequence": -1}, "not -1"),
        ({"sequence": "0"}, "not '0'"),
        ({"sequence": [0]}, "not [0]"),
    ],
    ids=str,
)
def test_a_line_without_a_valid_sequence_is_named(
    tiny_model, paths, fake, capsys, place, wrong, part
):
    write_records(paths.input)
    options = ["--temperature", "1", "--num-sequences", "3"]
    assert main(command(tiny_model, paths, *options)) == 0
    lines = read_lines(paths.output)[:8]
    del lines[place]["sequence"]
    lines[place] |= wrong
    write_records(paths.output, lines)
    before = paths.output.read_bytes()
    capsys.readouterr()
    named = f"out.jsonl, line {place % len(lines) + 1}:"
    code = main(command(tiny_model, paths, *options))
    assert_error(capsys, code, named, '"sequence" must be in 0..2', part)
    assert paths.output.read_bytes() == before


def test_a_sequence_that_appears_twice_is_named(tiny_model, paths, fake, capsys):
    write_records(paths.input)
    options = ["--temperature", "1", "--num-sequences", "3"]
    assert main(command(tiny_model, paths, *options)) == 0
    lines = read_lines(paths.output)[:5]
    write_records(paths.output, [*lines, lines[1]])
    capsys.readouterr()
    code = main(command(tiny_model, paths, *options))
    assert_error(capsys, code, "line 6", "id 0 appears twice with sequence 1")


def test_an_output_without_its_configuration_is_left_unchanged(tiny_model, paths, fake, capsys):
    write_records(paths.input)
    paths.output.write_text("precious\n")
    assert_error(capsys, main(command(tiny_model, paths)), "out.jsonl.run.json")
    assert paths.output.read_text() == "precious\n"


def test_two_runs_never_write_the_same_output(tmp_path):
    path = tmp_path / "out.jsonl"
    with (
        batch_output.open_results(path, {}, set(), 1, {}),
        pytest.raises(ValueError, match="another run"),
        batch_output.open_results(path, {}, set(), 1, {}),
    ):
        pass
