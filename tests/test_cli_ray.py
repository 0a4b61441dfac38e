"""`emsjax generate --ray` without a cluster: what the driver asks and what the workers do."""

import asyncio
import contextlib
import json
import re
import types

import numpy as np
import pytest
from jsonl import RECORDS, assert_error, command, read_lines, write_records

from emsjax.cli import cluster, generate_ray
from emsjax.cli.generate_parts import PartCompleter
from emsjax.cli.main import main
from emsjax.records import folders
from emsjax.records.input import WHOLE, Part

pytestmark = pytest.mark.filterwarnings("ignore")
SIZE = 4  # records in a part


@pytest.fixture
def hosts(monkeypatch):
    """Replaces Ray: rows go to this process, to the last first. `made` has the actors."""
    state = types.SimpleNamespace(made=[], parts=[], fail_after=None)

    def mapped(rows, function, job):
        return [function(dict(row), job) for row in reversed(rows)]

    def complete(parts, arguments, workers, options):
        state.made.append(PartCompleter(**arguments))
        for count, part in enumerate(reversed(parts)):
            if count == state.fail_after:
                raise KeyboardInterrupt
            state.parts.append(part["index"])
            batch = {name: np.array([value]) for name, value in part.items()}
            row = asyncio.run(state.made[-1](batch))
            yield {name: values[0] for name, values in row.items()}
        close()

    def close():
        for one in state.made:
            if one.failure is None:
                one.slots.close()

    monkeypatch.setattr(generate_ray, "mapped", mapped)
    monkeypatch.setattr(generate_ray, "complete", complete)
    monkeypatch.setattr(generate_ray, "connected", lambda address: contextlib.nullcontext())
    monkeypatch.setattr("emsjax.ray.check_installed", lambda: None)
    monkeypatch.setattr(folders, "LEAST_RECORDS", SIZE)
    yield state
    close()


def with_ray(model, paths, *options):
    return command(model, paths, "--ray", *options)


def results(folder):
    """The lines of all parts in their order."""
    return [line for path in sorted(folder.glob("part-*")) for line in folders.read_part(path)]


def by_place(lines):
    """Lines in an order of their own, without the value that rounding may change."""
    lines = [{k: v for k, v in line.items() if k != "mean_logprob"} for line in lines]
    return sorted(lines, key=lambda line: json.dumps(line, sort_keys=True))


def plain(model, paths, *options):
    """The lines of the same run without Ray."""
    output, paths.output = paths.output, paths.output.with_name("plain.jsonl")
    assert main(command(model, paths, *options)) == 0
    lines, paths.output = read_lines(paths.output), output
    return lines


@pytest.fixture
def paths(tmp_path):
    return types.SimpleNamespace(input=tmp_path / "in.jsonl", output=tmp_path / "out")


OWN = [record | {"sampling": {"temperature": 0.5 + i % 2}} for i, record in enumerate(RECORDS)]


@pytest.mark.parametrize("records", [RECORDS, OWN], ids=["common", "own settings"])
def test_the_parts_hold_the_results_of_a_run_without_ray(tiny_model, paths, hosts, records):
    write_records(paths.input, records)
    options = ["--temperature", "0.9", "--num-sequences", "2", "--drafter", "prompt-lookup"]
    assert main(with_ray(tiny_model, paths, *options)) == 0
    assert [len(read_lines(path)) for path in sorted(paths.output.iterdir())] == [8, 8, 6]
    lines = results(paths.output)
    assert [line["id"] for line in lines] == [r["id"] for r in records for _ in range(2)]
    assert by_place(lines) == by_place(plain(tiny_model, paths, *options))


def test_a_folder_is_one_input_in_the_order_of_its_names(tiny_model, paths, hosts):
    write_records(paths.input)
    expected = plain(tiny_model, paths, "--temperature", "0.9")
    paths.input = paths.input.with_name("folder")
    paths.input.mkdir()
    write_records(paths.input / "b.jsonl", RECORDS[5:])
    # Blank lines are no records, within a part and between two.
    lines = list(map(json.dumps, RECORDS[:5]))
    (paths.input / "a.jsonl").write_text("\n".join([*lines[:2], "", *lines[2:4], "", lines[4]]))
    (paths.input / "notes.txt").write_text("no input")
    assert main(with_ray(tiny_model, paths, "--temperature", "0.9")) == 0
    assert by_place(results(paths.output)) == by_place(expected)
    names = [path.name for path in sorted(paths.output.iterdir())]
    assert names == [f"part-{i:012d}.jsonl" for i in (0, 4, 5, 9)]


def test_parquet_files_make_parquet_parts(tiny_model, paths, hosts):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    own = [{"temperature": 0.5} if i % 3 else None for i in range(len(RECORDS))]
    records = [
        {"id": f"r{i}", "prompt": record["prompt"], **({"sampling": own[i]} if own[i] else {})}
        for i, record in enumerate(RECORDS)
    ]
    write_records(paths.input, records)
    expected = plain(tiny_model, paths, "--temperature", "0.9")
    paths.input = paths.input.with_suffix(".parquet")
    schema = pa.schema(
        {
            "id": pa.string(),
            "prompt": pa.string(),
            "messages": pa.null(),
            "sampling": pa.struct({"temperature": pa.float64(), "top_k": pa.int64()}),
        }
    )
    parquet.write_table(pa.Table.from_pylist(records, schema), paths.input, row_group_size=3)
    assert main(with_ray(tiny_model, paths, "--temperature", "0.9")) == 0
    table = parquet.read_table(paths.output)  # all parts have the same columns
    given = set(expected[0])
    lines = [{k: v for k, v in line.items() if k in given} for line in table.to_pylist()]
    assert by_place(lines) == by_place(expected)
    assert table["error"].null_count == len(RECORDS)


def test_only_the_rows_of_a_part_of_a_parquet_file_are_converted(paths, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(folders, "ROWS_AT_ONCE", 10)
    path, converted = paths.input.with_suffix(".parquet"), []
    table = pa.table({"id": range(130), "prompt": [f"p{i}" for i in range(130)]})
    parquet.write_table(table, path, row_group_size=45)
    rows_of = folders._rows
    monkeypatch.setattr(
        folders, "_rows", lambda batch: converted.append(batch.num_rows) or rows_of(batch)
    )

    def read(part):
        converted.clear()
        records = list(folders.open_records(path, None, part, name=False))
        assert [record.line for record in records] == [record.id + 1 for record in records]
        assert sum(converted) == len(records)
        return [record.id for record in records]

    assert read(WHOLE) == list(range(130))
    for start, count in [
        (0, 7),
        (10, 10),
        (17, 4),
        (38, 60),
        (44, 2),
        (45, 45),
        (95, 35),
        (129, 1),
    ]:
        assert read(Part(0, start + 1, count, 0)) == list(range(start, start + count))
    assert read(Part(0, 131, None, 0)) == []
    # What is after a part is not read.
    asked = []
    open_file = parquet.ParquetFile
    monkeypatch.setattr(parquet, "ParquetFile", lambda path: Counted(open_file(path), asked))
    assert read(Part(0, 5, 10, 0)) == list(range(4, 14))
    assert asked == [10, 10]


class Counted:
    """A Parquet file that counts the rows of the batches it is asked for."""

    def __init__(self, file, asked):
        self.file, self.asked = file, asked
        self.metadata, self.num_row_groups = file.metadata, file.num_row_groups

    def iter_batches(self, *arguments, **options):
        for batch in self.file.iter_batches(*arguments, **options):
            self.asked.append(batch.num_rows)
            yield batch


def test_a_parquet_file_with_broken_pages_is_an_error_of_one_line(paths):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = paths.input.with_suffix(".parquet")
    parquet.write_table(pa.table({"id": range(50), "prompt": ["a"] * 50}), path)
    broken = bytearray(path.read_bytes())
    broken[4:100] = b"\xff" * 96
    path.write_bytes(broken)
    with pytest.raises(ValueError, match=f"{path} cannot be read: OSError: [^\n]*$"):
        list(folders.open_records(path, None, WHOLE, name=False))


def test_a_second_call_does_only_what_is_missing(tiny_model, paths, hosts, capsys):
    write_records(paths.input)
    options = with_ray(tiny_model, paths, "--temperature", "0.9")
    hosts.fail_after = 1
    assert main(options) == 130
    assert hosts.parts == [8]
    (paths.output / ".part-000000000000.jsonl.dead").write_text("half a li")
    kept = {path: path.stat().st_mtime_ns for path in paths.output.glob("part-*")}
    assert len(kept) == 1
    hosts.fail_after = None
    capsys.readouterr()
    assert main(options) == 0
    assert "Going on after 3 results." in capsys.readouterr().err
    assert hosts.parts == [8, 4, 0]
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert len(list(paths.output.iterdir())) == 3
    assert by_place(results(paths.output)) == by_place(plain(tiny_model, paths, *options[-2:]))
    # A complete output is left as it is, and no model is loaded.
    made, after = len(hosts.made), {p: p.stat().st_mtime_ns for p in paths.output.iterdir()}
    assert main(options) == 0
    assert "complete: 11 results" in capsys.readouterr().err
    assert len(hosts.made) == made
    assert {p: p.stat().st_mtime_ns for p in paths.output.iterdir()} == after


def test_a_part_whose_worker_was_lost_before_it_could_tell_is_not_written_again(
    tiny_model, paths, hosts
):
    write_records(paths.input)
    hosts.fail_after = 0
    assert main(with_ray(tiny_model, paths)) == 130
    completer = hosts.made[0]
    batch = {"path": [str(paths.input)], "offset": [0], "line": [1], "lines": [4], "index": [0]}
    first, before = asyncio.run(completer(batch)), (paths.output / "part-000000000000.jsonl").stat()
    second = asyncio.run(completer(batch))
    assert (paths.output / "part-000000000000.jsonl").stat() == before
    assert first["results"] == second["results"] == [4]
    tallies = [json.loads(row["tally"][0]) for row in (first, second)]
    assert tallies[0]["emitted"] == tallies[1]["emitted"] > 0


def test_an_output_of_another_run_is_refused(tiny_model, paths, hosts, capsys):
    write_records(paths.input)
    assert main(with_ray(tiny_model, paths)) == 0
    capsys.readouterr()
    code = main(with_ray(tiny_model, paths, "--seed", "3"))
    assert_error(capsys, code, "seed was 0, is now 3")
    write_records(paths.input, RECORDS[:-1])
    assert_error(capsys, main(with_ray(tiny_model, paths)), "input_sha256")
    paths.output = paths.output.with_name("other")
    paths.output.mkdir()
    (paths.output / "mine.txt").touch()
    assert_error(capsys, main(with_ray(tiny_model, paths)), "something else")
    paths.output = paths.output / "mine.txt"
    assert_error(capsys, main(with_ray(tiny_model, paths)), "not a folder")


def test_invalid_and_repeated_records_are_refused_or_have_errors(tiny_model, paths, hosts, capsys):
    paths.input = paths.input.with_name("folder")
    paths.input.mkdir()
    write_records(paths.input / "a.jsonl", RECORDS[:3])
    write_records(paths.input / "b.jsonl", [RECORDS[3], RECORDS[1], {"id": "x"}, RECORDS[3]])
    code = main(with_ray(tiny_model, paths))
    assert_error(capsys, code, "3 of 7 records", "line 2", "duplicate id 'r1'", "line 2 of a.jsonl")
    assert not list(paths.output.iterdir())
    assert main(with_ray(tiny_model, paths, "--skip-invalid")) == 0
    assert "7 results, 3 of them errors" in capsys.readouterr().err
    lines = results(paths.output)
    assert [line["id"] for line in lines] == [0, "r1", 2, "r3", None, "x", None]
    wrong = [line for line in lines if line["finish_reason"] == "refused"]
    places = [(line.get("line"), line.get("file")) for line in wrong]
    assert places == [(2, "b.jsonl"), (None, None), (4, "b.jsonl")]
    assert ["first seen on line 1 of b.jsonl" in line["error"] for line in wrong][2]


def test_a_failure_of_a_worker_is_one_line(tiny_model, paths, hosts, capsys, monkeypatch):
    write_records(paths.input)

    def full(path, lines):
        raise OSError("no space left")

    monkeypatch.setattr(folders, "write_part", full)
    assert main(with_ray(tiny_model, paths)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "emsjax: error: OSError('no space left')"


def test_an_actor_that_cannot_start_is_one_line(tiny_model, paths, hosts, capsys, monkeypatch):
    write_records(paths.input)

    def load(*arguments, **options):
        raise ValueError("the largest batch_size that fits is 3")

    monkeypatch.setattr("emsjax.cli.generate_parts.load_models", load)
    assert main(with_ray(tiny_model, paths)) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "emsjax: error: the largest batch_size that fits is 3"
    assert len(hosts.made) == 1  # Ray saw no error, on which it would try again


def test_errors_that_ray_has_wrapped_are_told_in_one_line():
    exceptions = pytest.importorskip("ray.exceptions")
    wrapped = lambda cause: exceptions.RayTaskError(
        "on_cpu", "Traceback ...", cause, proctitle="worker", pid=1, ip="10.0.0.1"
    ).as_instanceof_cause()
    died = exceptions.RayActorError()
    errors = {
        wrapped(ValueError("a.parquet cannot be read")): "a.parquet cannot be read",
        wrapped(OSError(28, "No space\n  left")): "OSError: [Errno 28] No space left",
        wrapped(exceptions.RayError("Traceback\n  File\nKeyError: 3\n")): "KeyError: 3",
        died: str(died).splitlines()[-1].strip(),
    }
    for error, reason in errors.items():
        with (
            pytest.raises(ValueError, match=f"^{re.escape(reason)}$"),
            cluster.failures_in_one_line(),
        ):
            raise error


def test_parts_that_are_lost_are_an_error(tiny_model, paths, hosts, capsys, monkeypatch):
    write_records(paths.input)
    monkeypatch.setattr(folders, "write_part", lambda path, lines: None)
    assert main(with_ray(tiny_model, paths)) == 2
    assert "3 of 3 parts were lost" in capsys.readouterr().err


@pytest.mark.parametrize("broken", [{"input": "in.csv"}, {"options": ["--workers", "0"]}])
def test_wrong_arguments_are_errors(tiny_model, paths, hosts, capsys, broken):
    write_records(paths.input)
    paths.input = paths.input.with_name(broken.get("input", "in.jsonl"))
    paths.input.touch()
    try:
        code = main(with_ray(tiny_model, paths, *broken.get("options", [])))
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert main(command(tiny_model, paths, "--workers", "2")) == 2
    assert "--workers needs --ray" in capsys.readouterr().err


def test_actors_are_no_more_than_the_hosts_have_gpus_for():
    host = lambda alive=True, **resources: {"Alive": alive, "Resources": {"CPU": 8.0, **resources}}
    count = cluster.count_actors
    cpus, uneven = [host(), host(), host(False)], [host(GPU=6.0), host(GPU=3.0), host()]
    assert count(cpus, None, 1) == count(cpus, None, 4) == (2, False)
    assert count(cpus, 5, 1) == (5, False)
    assert [count(uneven, None, own)[0] for own in (1, 2, 4)] == [9, 4, 1]
    assert [count(uneven, workers, 2) for workers in (3, 8)] == [(3, True), (4, True)]
    assert count([*uneven, host(False, GPU=8.0)], None, 1) == (9, True)
    with pytest.raises(ValueError, match="--tensor-parallel 8: no host has 8 GPUs"):
        count([host(GPU=4.0), host(GPU=4.0), host(False, GPU=8.0)], 1, 8)


def test_the_help_tells_how_many_workers_there_are(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "one for each GPU, or each --tensor-parallel GPUs of a host" in told


def test_parts_are_larger_where_an_input_would_have_too_many(monkeypatch):
    assert folders.records_per_part(1) == folders.records_per_part(6_400_000) == 64
    assert folders.records_per_part(10**9) == 10_000
