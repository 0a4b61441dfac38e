"""`emsjax generate`: invalid records, sequences with errors, end tokens, outputs that pass by."""

import json
import os
import shutil
import subprocess
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from jsonl import (
    END,
    POSITIONS,
    RECORDS,
    FakeStream,
    assert_error,
    command,
    read_lines,
    write_records,
)

import emsjax
from emsjax import streaming
from emsjax.cli.main import main
from emsjax.cli.summary import mean_logprob
from emsjax.models.opt import POSITION_OFFSET

NO_TEXT = {"text": "", "tokens": [], "mean_logprob": None, "finish_reason": "refused"}
INVALID = {  # a line, the fields that name it, and a part of its error
    "too long": ('{"id": "x", "prompt": "' + "a" * 60 + '"}', {"id": "x"}, "position limit 64"),
    "empty": ('{"id": "x", "prompt": ""}', {"id": "x"}, "the prompt is empty"),
    "no prompt": ('{"id": 7, "text": "a"}', {"id": 7}, 'missing field "prompt"'),
    "not text": ('{"id": "x", "prompt": [1]}', {"id": "x"}, "must be a string, not [1]"),
    "surrogate": (r'{"id": "x", "prompt": "\ud800"}', {"id": "x"}, "surrogates"),
    "no id": ('{"prompt": "a"}', {"id": None, "line": 3}, 'missing field "id"'),
    "bad id": ('{"id": [1], "prompt": "a"}', {"id": None, "line": 3}, "not [1]"),
    "not JSON": ('{"id": 2, ', {"id": None, "line": 3}, "not JSON"),
    "not UTF-8": (b'{"id": 2, "prompt": "\xff"}', {"id": None, "line": 3}, "utf-8"),
    "no object": ("[]", {"id": None, "line": 3}, "must be a JSON object"),
    "repeated": ('{"id": "r1", "prompt": "b"}', {"id": None, "line": 3}, "first seen on line 2"),
}


def write_lines(path, bad):
    """Four valid records with an invalid one on line 3."""
    lines = [json.dumps(record).encode() for record in RECORDS[:4]]
    bad = bad if isinstance(bad, bytes) else bad.encode()
    path.write_bytes(b"\n".join([*lines[:2], bad, *lines[2:]]))


@pytest.mark.parametrize("kind", INVALID)
@pytest.mark.parametrize("num_sequences", [1, 2])
def test_an_invalid_record_is_refused_or_skipped(
    tiny_model, paths, fake, capsys, kind, num_sequences
):
    bad, named, error = INVALID[kind]
    write_lines(paths.input, bad)
    options = ["--num-sequences", num_sequences, "--temperature", 0.5]
    assert_error(capsys, main(command(tiny_model, paths, *options)), error, "line 3")
    assert not paths.output.exists()

    options.append("--skip-invalid")
    assert main(command(tiny_model, paths, *options)) == 0
    said = capsys.readouterr().err
    assert '1 of 5 records are invalid: their lines have an "error".' in said
    assert f"{num_sequences} of them errors of invalid records" in said
    lines = read_lines(paths.output)
    assert len(lines) == 5 * num_sequences
    found = [line for line in lines if "error" in line]
    for sequence, line in enumerate(found):
        assert error in line.pop("error")
        own = {"sequence": sequence} if num_sequences > 1 else {}
        assert line == named | own | NO_TEXT
    assert len(found) == num_sequences
    assert [line["id"] for line in lines if line not in found][::num_sequences] == [
        record["id"] for record in RECORDS[:4]
    ]


@pytest.mark.parametrize("finished", [0, 3, 5, 8])
def test_a_run_with_invalid_records_resumes(tiny_model, paths, monkeypatch, finished):
    bad = [bad if isinstance(bad, bytes) else bad.encode() for bad, *_ in INVALID.values()]
    good = [json.dumps(record).encode() for record in RECORDS]
    lines = [line for pair in zip(good, bad, strict=True) for line in pair]
    paths.input.write_bytes(b"\n".join(lines))
    run = command(tiny_model, paths, "--skip-invalid", "--num-sequences", "2", "--temperature", 0.5)
    monkeypatch.setattr(streaming, "stream_numbered", FakeStream())
    assert main(run) == 0
    whole = paths.output.read_bytes()
    assert len(whole.splitlines()) == 2 * len(lines)

    paths.output = paths.output.with_name("resumed.jsonl")
    run = command(tiny_model, paths, "--skip-invalid", "--num-sequences", "2", "--temperature", 0.5)
    monkeypatch.setattr(streaming, "stream_numbered", FakeStream(interrupt_after=finished))
    assert main(run) == 130
    monkeypatch.setattr(streaming, "stream_numbered", FakeStream())
    assert main(run) == 0
    assert paths.output.read_bytes() == whole
    assert main(run) == 0
    assert paths.output.read_bytes() == whole


@pytest.mark.parametrize("valid", [0, 3])
def test_a_model_completes_what_is_valid(tiny_model, paths, valid):
    write_records(paths.input, [*RECORDS[:valid], {"id": "x", "prompt": "a" * 99}, {"id": "y"}])
    assert main(command(tiny_model, paths, "--skip-invalid")) == 0
    lines = {line["id"]: line for line in read_lines(paths.output)}
    assert lines.keys() == {*(record["id"] for record in RECORDS[:valid]), "x", "y"}
    assert {name for name, line in lines.items() if "error" in line} == {"x", "y"}


# Errors


@pytest.fixture(scope="module")
def poisoned(tiny_model, tmp_path_factory):
    """The tiny model, whose positions from 12 on overflow in its first norm."""
    folder = shutil.copytree(tiny_model, tmp_path_factory.mktemp("poisoned") / "model")
    model = emsjax.OPT.from_pretrained(folder, dtype=jnp.float32)
    table = model.embed_positions.embedding
    table[...] = table[...].at[12 + POSITION_OFFSET :].set(3e38)
    model.save_pretrained(folder)
    return folder


def test_sequences_that_end_with_an_error_are_named(poisoned, paths, capsys):
    sizes = {"short": 2, "middle": 9, "long": 30}
    write_records(paths.input, [{"id": n, "prompt": "a" * size} for n, size in sizes.items()])
    run = command(poisoned, paths, "--ignore-eos")
    assert main(run) == 1
    warning = "Warning: 2 sequences ended early, because the model's logits were not finite"
    said = capsys.readouterr().err
    assert f"{warning}, such as record" in said
    assert "'middle' (line 2)" in said
    assert "'long' (line 3)" in said
    text = paths.output.read_text()
    lines = {line["id"]: line for line in map(json.loads, text.splitlines())}
    reasons = {name: line["finish_reason"] for name, line in lines.items()}
    assert reasons == {"short": "length", "middle": "error", "long": "error"}
    assert (len(lines["middle"]["tokens"]), lines["long"]["tokens"]) == (3, [])
    assert lines["middle"]["mean_logprob"] < 0
    assert lines["long"]["mean_logprob"] is None
    assert "NaN" not in text

    assert main(run) == 1  # a complete output still has them
    assert f"{warning}: their finish_reason" in capsys.readouterr().err
    assert paths.output.read_text() == text


def test_dropped_draft_tokens_are_counted_and_named(tiny_model, paths, monkeypatch, capsys):
    class Dropping(FakeStream):
        def __call__(self, *args, **options):
            for completion in super().__call__(*args, **options):
                dropped = 4 if completion.prompt in (1, 2) else 0
                yield streaming.dataclasses.replace(completion, num_invalid=dropped)

    monkeypatch.setattr(streaming, "stream_numbered", Dropping())
    write_records(paths.input)
    assert main(command(tiny_model, paths)) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "Warning: 8 draft tokens of 2 sequences were dropped" in said
    assert said.endswith("record 'r1' (line 2), record 2 (line 3)")


@pytest.mark.parametrize(
    ("logprobs", "mean"),
    [
        ([], None),
        ([-1.0, np.nan], None),
        ([-np.inf, -1.0], None),
        ([-1.0, -2.0], -1.5),
        ([-0.0001], 0.0),
        ([-1.2344, -1.2344], -1.234),
    ],
)
def test_a_mean_has_three_decimals_or_does_not_exist(logprobs, mean):
    found = mean_logprob(np.array(logprobs, np.float32))
    assert str(found) == str(mean)


def test_means_do_not_follow_rounding_between_batches():
    """Values of float32 that differ by its rounding have the same mean, apart from few."""
    rng = np.random.default_rng(0)
    different = 0
    for _ in range(2000):
        logprobs = -rng.exponential(size=24).astype(np.float32)
        other = logprobs + rng.normal(scale=2e-6, size=24).astype(np.float32)
        different += mean_logprob(logprobs) != mean_logprob(other)
    assert different <= 4


# End tokens


def test_end_tokens_are_those_of_the_options(tiny_model, paths, fake):
    write_records(paths.input)
    for number, (options, expected) in enumerate(
        [
            ([], None),
            (["--eos-token-ids", "5"], (5,)),
            (["--eos-token-ids", "7,0,7"], (0, 7)),
            (["--ignore-eos"], ()),
        ]
    ):
        paths.output = paths.output.with_name(f"{number}.jsonl")
        assert main(command(tiny_model, paths, *options)) == 0
        assert fake.calls[-1].eos_token_ids == expected
        assert main(command(tiny_model, paths, *options)) == 0  # the same run


def test_end_tokens_end_sequences(tiny_model, paths):
    write_records(paths.input, RECORDS[:4])
    assert main(command(tiny_model, paths, "--ignore-eos")) == 0
    whole = {line["id"]: line for line in read_lines(paths.output)}
    assert {line["finish_reason"] for line in whole.values()} == {"length"}
    chosen = whole[0]["tokens"][2]
    paths.output = paths.output.with_name("ended.jsonl")
    assert main(command(tiny_model, paths, "--eos-token-ids", f"{END},{chosen}")) == 0
    for line in read_lines(paths.output):
        tokens = whole[line["id"]]["tokens"]
        ends = [i for i, token in enumerate(tokens) if token in (END, chosen)]
        assert line["tokens"] == (tokens[: ends[0] + 1] if ends else tokens)
        assert line["finish_reason"] == ("eos" if ends else "length")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--eos-token-ids", "1,"], ["--eos-token-ids", "must be like 0,2"]),
        (["--eos-token-ids", "-1"], ["--eos-token-ids"]),
        (["--eos-token-ids", "300"], ["--eos-token-ids", "300, outside 0..299"]),
        (["--eos-token-ids", "1", "--ignore-eos"], ["--ignore-eos", "--eos-token-ids"]),
    ],
)
def test_bad_end_tokens_are_named(tiny_model, paths, fake, capsys, options, parts):
    write_records(paths.input)
    try:
        code = main(command(tiny_model, paths, *options))
    except SystemExit as stop:  # argparse's way out
        code = stop.code
    assert_error(capsys, code, *parts)
    assert not paths.output.exists()


# Outputs that pass by


def only(paths):
    """The names of the files in the test's folder."""
    return sorted(path.name for path in paths.input.parent.iterdir() if path.is_file())


def test_a_device_is_written_and_nothing_beside_it(tiny_model, paths, fake):
    write_records(paths.input)
    paths.output.symlink_to("/dev/null")
    for _ in range(2):  # the second run starts anew
        assert main(command(tiny_model, paths)) == 0
    assert len(fake.calls) == 2
    assert len(fake.calls[1].prompts) == len(RECORDS)
    assert only(paths) == ["in.jsonl"]
    assert not os.path.exists("/dev/null.run.json")


def test_a_pipe_gets_every_line(tiny_model, paths, fake):
    write_records(paths.input)
    os.mkfifo(paths.output)
    read = []
    reader = threading.Thread(target=lambda: read.extend(read_lines(paths.output)))
    reader.start()
    assert main(command(tiny_model, paths)) == 0
    reader.join()
    assert [line["id"] for line in read] == [record["id"] for record in RECORDS]
    assert only(paths) == ["in.jsonl"]


def test_an_interrupted_run_without_a_file_has_nothing_to_go_on_with(
    tiny_model, paths, monkeypatch, capsys
):
    write_records(paths.input)
    paths.output.symlink_to("/dev/null")
    monkeypatch.setattr(streaming, "stream_numbered", FakeStream(interrupt_after=3))
    assert main(command(tiny_model, paths)) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "emsjax: interrupted"


@pytest.mark.parametrize("redirected", [False, True])
def test_standard_output_is_written_even_if_it_is_a_file(tiny_model, paths, redirected):
    write_records(paths.input, RECORDS[:2])
    target, paths.output = paths.output, "/dev/stdout"
    run = [sys.executable, "-m", "emsjax", *command(tiny_model, paths)]
    target.write_text('{"earlier": 1}\n')
    with target.open("a") as file:
        stdout = file if redirected else subprocess.PIPE
        done = subprocess.run(run, stdout=stdout, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr
    lines = target.read_text().splitlines()
    assert json.loads(lines[0]) == {"earlier": 1}
    written = lines[1:] if redirected else done.stdout.splitlines()
    assert {json.loads(line)["id"] for line in written} == {0, "r1"}
    assert only(paths) == ["in.jsonl", "out.jsonl"]


def test_a_folder_is_no_output(tiny_model, paths, fake, capsys):
    write_records(paths.input)
    paths.output.mkdir()
    code = main(command(tiny_model, paths))
    assert_error(capsys, code, f"--output: {paths.output} is a folder")


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "\xff"])
def test_a_spoilt_configuration_is_named(tiny_model, paths, fake, capsys, text):
    write_records(paths.input)
    assert main(command(tiny_model, paths)) == 0
    capsys.readouterr()
    paths.output.with_name("out.jsonl.run.json").write_text(text, encoding="latin-1")
    assert_error(capsys, main(command(tiny_model, paths)), "out.jsonl.run.json")


def test_every_position_of_the_model_may_be_used(tiny_model, paths, fake):
    """A prompt at the limit is valid, and one token more is not."""
    fits = POSITIONS - 6 + 1 - 1  # the start token
    write_records(paths.input, [{"id": n, "prompt": "a" * (fits + n)} for n in range(2)])
    assert main(command(tiny_model, paths, "--skip-invalid")) == 0
    assert [line.get("error") is None for line in read_lines(paths.output)] == [True, False]
