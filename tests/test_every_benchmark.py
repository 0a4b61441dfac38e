"""`emsjax bench all`: one folder for one commit, resumed, with a manifest."""

import json
import os
import shlex
import signal

import pytest
from examples import ROOT
from jsonl import assert_error
from test_plotting import step

from emsjax import plotting
from emsjax.benchmarks import every, figures
from emsjax.benchmarks.every import Run
from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.cli.main import main, make_parser

FOUND = {"devices": 1, "hardware": {"device": "cpu"}, "versions": {"jax": "1"}, "commit": "abc"}
RUNS = {
    "first": Run("written first"),
    "second": Run("written second --fail"),
    "third": Run("written third", devices=2),
}
PROGRAM = """
import json, os, pathlib, sys
_, name, *rest = sys.argv
output = pathlib.Path(rest[rest.index("--output") + 1])
print("begin", name)
output.write_text(json.dumps({"argv": rest}))
sys.exit(3 if "--fail" in rest and "FIXED" not in os.environ else 0)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder for results; three runs, of which one fails and one needs two devices."""
    (tmp_path / "written.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(every, "RUNS", RUNS)
    monkeypatch.setattr(every, "ASK", f"print({json.dumps(FOUND)!r})")
    monkeypatch.setattr(every, "device_state", lambda: ["cool"])
    return tmp_path / "results"


TOGETHER = """
import json, os, pathlib, sys, time
_, name, others, *rest = sys.argv
output = pathlib.Path(rest[rest.index("--output") + 1])
here = output.with_suffix(".here")
here.write_text(os.environ["CUDA_VISIBLE_DEVICES"])
latest = time.monotonic() + 60
while not all((output.parent / f"{other}.here").exists() for other in others.split("+") if other):
    assert time.monotonic() < latest
    time.sleep(0.01)
alone = not list(output.parent.glob("*.json"))
share = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
output.write_text(json.dumps({"seen": here.read_text(), "first": alone, "memory": share}))
"""
NVIDIA_SMI = """#!/bin/sh
for argument; do
    case $argument in
        --id=*) for id in $(echo "${argument#--id=}" | tr , " "); do echo "uuid of $id"; done ;;
    esac
done
"""


def manifest_of(folder):
    return json.loads((folder / every.MANIFEST).read_bytes())


def bench(folder, *options):
    return main(["bench", "all", "--output", str(folder), *options])


def test_every_run_is_recorded_and_those_that_failed_run_again(folder, capsys, monkeypatch):
    assert bench(folder) == 3
    manifest = manifest_of(folder)
    assert {name: manifest[name] for name in ("hardware", "versions", "commit")} == {
        name: FOUND[name] for name in ("hardware", "versions", "commit")
    }
    assert manifest["device_states"] == [["cool"], ["cool"]]
    codes = {name: run.get("exit_code") for name, run in manifest["runs"].items()}
    assert codes == {"first": 0, "second": 3, "third": None}
    assert "2 devices are needed" in manifest["runs"]["third"][every.LEFT_OUT]
    written = json.loads((folder / "first.json").read_bytes())["argv"]
    assert written[-2:] == ["--commit", "abc"]
    assert shlex.split(manifest["runs"]["first"]["command"])[2:] == written
    assert (folder / "first.log").read_text() == "begin first\n"
    assert "second: exit code 3" in capsys.readouterr().out

    monkeypatch.setenv("FIXED", "1")
    (folder / "first.json").unlink()
    assert bench(folder) == 0
    assert not (folder / "first.json").exists()  # it had ended
    assert manifest_of(folder)["runs"]["second"]["exit_code"] == 0
    assert len(manifest_of(folder)["device_states"]) == 4


def test_runs_of_one_device_go_on_at_once_after_those_of_several(folder, monkeypatch):
    """Each waits for the others of its time, so that they would not end one after the other."""
    (folder.parent / "together.py").write_text(TOGETHER)
    asked = folder.parent / "nvidia-smi"
    asked.write_text(NVIDIA_SMI)
    asked.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    monkeypatch.setattr(every, "ASK", f"print({json.dumps(FOUND | {'devices': 3})!r})")
    others = {"a": ("b+c", 1), "b": ("a+c", 1), "c": ("a+b", 1), "all": ("+", 3)}
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    runs = {name: Run(f"together {name} {rest}", count) for name, (rest, count) in others.items()}
    runs["b"] = runs["b"]._replace(memory=0.9)
    monkeypatch.setattr(every, "RUNS", runs)
    assert bench(folder) == 0
    written = {name: json.loads((folder / f"{name}.json").read_bytes()) for name in runs}
    assert written["all"] == {"seen": "4,5,7", "first": True, "memory": None}
    assert [written[name]["memory"] for name in "abc"] == [None, "0.9", None]
    assert sorted(written[name]["seen"] for name in "abc") == ["4", "5", "7"]
    records = manifest_of(folder)["runs"]
    assert records["all"]["environment"] == {}
    assert records["a"]["environment"] == {every.VISIBLE: written["a"]["seen"]}
    assert records["b"]["environment"] == {every.VISIBLE: written["b"]["seen"], every.MEMORY: "0.9"}
    assert records["all"]["gpus"] == ["uuid of 4", "uuid of 5", "uuid of 7"]
    assert records["a"]["gpus"] == [f"uuid of {written['a']['seen']}"]


INTERRUPTED = """
import os, pathlib, signal, sys, time
_, name, *rest = sys.argv
output = pathlib.Path(rest[rest.index("--output") + 1])
if output.exists():
    sys.exit()
output.write_text("{}")
os.kill(os.getppid(), signal.SIGINT)
time.sleep(0.5)
sys.exit(7)
"""


@pytest.fixture
def interruptible():
    """Interrupts reach this process, which may have begun in the background and ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_run_is_recorded_and_goes_on(folder, capsys):
    (folder.parent / "written.py").write_text(INTERRUPTED)
    ended = {}
    for name in ("first", "second"):  # each interrupts the command when it begins first
        assert bench(folder, "--only", "first,second") == 130
        assert "interrupted" in capsys.readouterr().err
        codes = {of: record["exit_code"] for of, record in manifest_of(folder)["runs"].items()}
        assert codes == ended | {name: 7}
        ended[name] = 0
    assert bench(folder, "--only", "first,second") == 0
    for name, record in manifest_of(folder)["runs"].items():
        (attempt,) = record[every.EARLIER]
        assert (attempt["exit_code"], record["exit_code"]) == (7, 0), name
        assert attempt["seconds"] >= 0.5


def test_a_folder_has_one_commit_and_one_kind_of_device(folder, monkeypatch, capsys):
    assert bench(folder, "--only", "first") == 0
    assert list(manifest_of(folder)["runs"]) == ["first"]
    capsys.readouterr()
    assert_error(capsys, bench(folder, "--commit", "def"), "results with commit abc")
    other = {**FOUND, "hardware": {"device": "gpu"}}
    monkeypatch.setattr(every, "ASK", f"print({json.dumps(other)!r})")
    assert_error(capsys, bench(folder), "results with hardware")
    assert_error(capsys, bench(folder, "--only", "first,forth"), "unknown forth")


def write_folder(folder, files, commit="abc"):
    """A folder as `bench all` leaves it, with these results beside the manifest."""
    folder.mkdir()
    for name, results in {every.MANIFEST: {"commit": commit, "runs": {}}, **files}.items():
        (folder / name).write_text(json.dumps(results))


def test_results_of_one_commit_go_together(tmp_path):
    of_entries = {"commit": "abc", "entries": [{"batch": 1, "commit": "abc"}]}
    profiled = {"commit": "abc", "profile": {"classes": {"commit": {"launches": 1, "ms": 0.1}}}}
    write_folder(tmp_path / "one", {"step.json": profiled, "peers.json": of_entries})
    (tmp_path / "one" / "step.log").write_text("commit def")
    every.check_one_commit(tmp_path / "one")


@pytest.mark.parametrize(
    ("results", "shown"),
    [
        ({"commit": "def", "entries": []}, "def"),
        ({"commit": "abc", "entries": [{"commit": "abc"}, {"commit": "def"}]}, "abc, def"),
        ({"commit": "abc", "rounds": {"first": [{"commit": "def"}]}}, "abc, def"),
        ({"commit": None}, "None"),
        ({"entries": []}, "none"),
    ],
)
def test_results_of_other_commits_are_named(tmp_path, results, shown):
    files = {"good.json": {"commit": "abc"}, "other.json": results, "late.json": {"commit": "fed"}}
    write_folder(tmp_path / "mixed", files)
    with pytest.raises(ValueError, match="not of commit abc") as caught:
        every.check_one_commit(tmp_path / "mixed")
    assert str(caught.value).endswith(f": late.json: fed; other.json: {shown}")


def test_a_manifest_without_a_commit_is_refused(tmp_path):
    write_folder(tmp_path / "none", {"step.json": {"commit": None}}, commit=None)
    with pytest.raises(ValueError, match="names no commit"):
        every.check_one_commit(tmp_path / "none")


def test_what_a_run_writes_passes_the_check(folder, monkeypatch):
    written = PROGRAM.replace('{"argv": rest}', '{"commit": rest[rest.index("--commit") + 1]}')
    (folder.parent / "written.py").write_text(written)
    monkeypatch.setenv("FIXED", "1")
    assert bench(folder) == 0
    every.check_one_commit(folder)
    (folder / "first.json").write_text('{"commit": "def"}')
    with pytest.raises(ValueError, match=r"first\.json: def$"):
        every.check_one_commit(folder)


def test_committed_results_are_of_one_commit_where_they_lie_together():
    folders = [path.parent for path in (ROOT / "benchmarks").rglob(every.MANIFEST)]
    assert folders
    for folder in folders:
        every.check_one_commit(folder)


@pytest.mark.parametrize("name", every.RUNS)
def test_each_run_is_a_command_with_options_that_exist(name):
    program, *words = every.RUNS[name].arguments.split()
    words += ["--output", "out.json", "--commit", "abc"]
    if program == "emsjax":
        options = make_parser("").parse_args(words)
        assert options.commit == "abc"
        devices = max(getattr(options, "sizes", (getattr(options, "tensor_parallel", None) or 1,)))
        assert devices == every.RUNS[name].devices
    else:
        assert (program, words[0]) == ("pallas_kernels.benchmark", "--output")


def test_every_benchmark_is_run():
    commands = [of.arguments.split() for of in every.RUNS.values()]
    run = {words[2] for words in commands if words[:2] == ["emsjax", "bench"]}
    need_files = {"prompts"}
    assert run == BENCHMARKS.keys() - need_files - {"all"}


def test_figures_are_drawn_of_the_results_that_are_there(tmp_path, monkeypatch):
    shown, devices_figure = [], plotting.devices_figure
    spied = lambda results: shown.append(results) or devices_figure(results)
    monkeypatch.setattr(plotting, "devices_figure", spied)

    def draw(**results):
        for name, of in results.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(of))
        return [path.relative_to(tmp_path).as_posix() for path in figures.draw(tmp_path)]

    one, narrow = step("opt-13b", 13.0), step("opt-13b", 8.0, tensor_parallel=2, quantize="int8")
    assert draw(a=one, b=narrow, manifest={"runs": {}}) == []
    two, other = step("opt-13b", 9.0, tensor_parallel=2), step("opt-66b", 40.0)
    assert draw(c=two, d=other) == ["step-over-devices.png"]
    assert shown == [[one, two]]
    assert (tmp_path / "step-over-devices.png").read_bytes().startswith(b"\x89PNG")


def test_figures_end_the_run(folder, monkeypatch, capsys):
    monkeypatch.setattr(figures, "draw", lambda drawn: [drawn / "a.png"])
    assert bench(folder, "--only", "first") == 0
    assert capsys.readouterr().out.endswith(f"{folder / 'a.png'}\n")

    def missing(drawn):
        raise ImportError("plots need matplotlib")

    monkeypatch.setattr(figures, "draw", missing)
    assert bench(folder, "--only", "first") == 0
    assert "no figures: plots need matplotlib" in capsys.readouterr().out
