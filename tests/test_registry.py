"""The registry of benchmarks: one parser and one writer, however a benchmark is started."""

import importlib
import json
import subprocess
import sys
from argparse import Namespace

import pytest

from emsjax.benchmarks import results as writer
from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.cli.main import main, make_parser

REQUIRED = {
    "ems-sd": ["--shape", "tiny"],
    "peers": ["--shape", "tiny"],
    "prompts": ["--data", "a.jsonl"],
    "all": ["--output", "results"],
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_both_forms_of_the_command_take_the_same_options(name):
    required = REQUIRED.get(name, [])
    as_command = vars(make_parser("").parse_args(["bench", name, *required]))
    as_module = vars(BENCHMARKS[name].make_parser().parse_args(required))
    assert as_command.items() >= as_module.items()
    assert as_command.keys() - as_module.keys() == {"command", "benchmark", "run", "resumes"}
    assert as_module.keys() >= {"output", "commit"}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_can_be_started_both_ways(name, monkeypatch):
    benchmark, started = BENCHMARKS[name], []

    def run(options, command):
        started.append((options, command))
        return 7

    module = importlib.import_module(f"emsjax.benchmarks.{benchmark.module}")
    monkeypatch.setattr(module, "run", run)
    arguments = [*REQUIRED.get(name, []), "--commit", "abc"]
    assert main(["bench", name, *arguments]) == 7
    assert benchmark.main(arguments) == 7
    (options, command), (same_options, module_command) = started
    given = " ".join(arguments)
    assert command == f"emsjax bench {name} {given}"
    assert module_command == f"python -m emsjax.benchmarks.{benchmark.module} {given}"
    assert options.commit == same_options.commit == "abc"
    assert options.resumes == same_options.resumes == benchmark.resumes


@pytest.mark.parametrize("module", sorted(benchmark.module for benchmark in BENCHMARKS.values()))
def test_a_benchmarks_module_is_a_program(module):
    """The last statement runs the benchmark that the registry has under this module's name."""
    path = importlib.import_module(f"emsjax.benchmarks.{module}").__file__
    (name,) = (name for name, benchmark in BENCHMARKS.items() if benchmark.module == module)
    with open(path) as file:
        assert file.read().endswith(f'sys.exit(BENCHMARKS["{name}"].main())\n')


@pytest.mark.commands
def test_help_imports_no_module_that_measures():
    code = (
        "import sys; before = set(sys.modules); import emsjax; own = set(sys.modules)\n"
        "from emsjax.cli.main import main\n"
        "try: main(['bench', 'ems-sd', '--help'])\n"
        "except SystemExit: print(sorted(set(sys.modules) - own), file=sys.stderr)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--methods" in found.stdout
    assert "emsjax.benchmarks.registry" in found.stderr
    for heavy in ("emsjax.benchmarks.runs", "emsjax.benchmarks.ems_sd", "matplotlib", "scipy"):
        assert f"'{heavy}'" not in found.stderr
    for heavy in ("transformers", "optax", "emsjax.distillation", "pallas_kernels.benchmark"):
        assert f"'{heavy}'" not in found.stderr


def test_errors_of_a_benchmark_are_one_line(capsys):
    assert BENCHMARKS["step"].main(["--model", "tiny", "--output", "no/such/folder/a.json"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("emsjax: error: ")
    assert shown.count("\n") == 1
    assert "no/such/folder" in shown


@pytest.mark.parametrize("name", ["peers", "step"])
@pytest.mark.parametrize("output", [[], ["--output", "a.json"]])
def test_only_a_run_that_resumes_is_told_to_be_started_again(name, output, monkeypatch, capsys):
    def interrupted(options, command):
        raise KeyboardInterrupt

    module = importlib.import_module(f"emsjax.benchmarks.{BENCHMARKS[name].module}")
    monkeypatch.setattr(module, "run", interrupted)
    for start in (BENCHMARKS[name].main, lambda given: main(["bench", name, *given])):
        assert start([*REQUIRED.get(name, []), *output]) == 130
        told = "start it again" in capsys.readouterr().err
        assert told == (name == "peers" and bool(output))


def test_results_name_command_commit_versions_hardware_and_settings(tmp_path):
    options = Namespace(output=tmp_path / "a.json", commit="abc", resumes=False)
    results = writer.begin(options, "the command", {"k": 1}, entries="runs", packages=("rich",))
    found = json.loads(options.output.read_bytes())
    assert found == results
    assert found.keys() >= {"command", "commit", "versions", "hardware"}
    assert (found["command"], found["commit"]) == ("the command", "abc")
    assert (found["settings"], found["runs"]) == ({"k": 1}, [])
    assert {"jax", "rich"} <= found["versions"].keys()
    writer.add_entry({"ms": 2.0}, results, options.output, "runs")
    found = json.loads(options.output.read_bytes())
    assert found["runs"] == [{"ms": 2.0, "commit": "abc"}]
    assert found["settings"] == {"k": 1}


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "{}", '{"settings": {"k": 1}}'])
def test_a_file_without_results_is_left_unchanged(tmp_path, text):
    options = Namespace(output=tmp_path / "a.json", commit="abc", resumes=True)
    options.output.write_text(text)
    with pytest.raises(ValueError, match=r"a\.json holds no results"):
        writer.begin(options, "", {"k": 1})
    assert options.output.read_text() == text


def test_a_device_takes_results_and_keeps_none(tmp_path):
    (tmp_path / "device").symlink_to("/dev/null")
    options = Namespace(output=tmp_path / "device", commit="abc", resumes=True)
    results = writer.begin(options, "", {"k": float("nan")})
    writer.add_entry({"ms": float("inf")}, results, options.output)
    assert [path.name for path in tmp_path.iterdir()] == ["device"]
    assert options.output.is_char_device()


def test_only_a_run_that_resumes_keeps_earlier_entries(tmp_path):
    options = Namespace(output=tmp_path / "a.json", commit="abc", resumes=True)
    writer.add_entry({"ms": 2.0}, writer.begin(options, "", {"k": 1}), options.output)
    options.commit = "def"
    assert writer.begin(options, "", {"k": 1})["entries"] == [{"ms": 2.0, "commit": "abc"}]
    with pytest.raises(ValueError, match="other settings"):
        writer.begin(options, "", {"k": 2})
    options.resumes = False
    assert writer.begin(options, "", {"k": 1})["entries"] == []
    assert json.loads(options.output.read_bytes())["entries"] == []
