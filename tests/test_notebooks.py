"""The committed notebooks are complete; `notebooks/run.py` executes them."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import emsjax
import pallas_kernels
from emsjax import plotting, verification

FOLDER = Path(__file__).parents[1] / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
MACHINE = re.compile(r"(?<![\w:/.])/(?:work|home|root|usr|tmp|opt|mnt|var|Users|content)/|[A-Z]:\\")
MAX_BYTES = 300_000


def load_runner():
    spec = importlib.util.spec_from_file_location("run_notebooks", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run = load_runner()


def source_of(cell) -> str:
    return "".join(cell["source"])


def tree_of(cell) -> ast.Module:
    """Syntax tree of a cell's Python, without IPython magics."""
    lines = source_of(cell).splitlines()
    return ast.parse("\n".join(re.sub(r"^(\s*)%.*", r"\1pass", line) for line in lines))


def code_cells(notebook) -> list:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def shows_something(cell) -> bool:
    """Whether a cell prints, or ends in a value."""
    body = tree_of(cell).body
    calls = [node.func for node in ast.walk(tree_of(cell)) if isinstance(node, ast.Call)]
    prints = any(isinstance(f, ast.Name) and f.id in ("print", "show") for f in calls)
    return prints or (isinstance(body[-1], ast.Expr) and "update" not in ast.dump(body[-1]))


def defined_names(cell) -> set[str]:
    """Names that a cell assigns or defines."""
    names = set()
    for node in ast.walk(tree_of(cell)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def problems(notebook, path) -> list[str]:
    """Problems that a committed notebook must not have."""
    found = []
    cells = code_cells(notebook)
    if notebook != run.stamp(notebook, path):
        found.append("badge or install cell: run `python notebooks/run.py --stamp`")
    if notebook != run.normalise(notebook):
        found.append("traces of a machine or a run: run `python notebooks/run.py --write`")
    if [cell["execution_count"] for cell in cells] != list(range(1, len(cells) + 1)):
        found.append("not executed from top to bottom")
    exported = {*emsjax.__all__, *pallas_kernels.__all__, *plotting.__all__}
    exported |= {name for name, value in vars(verification).items() if callable(value)}
    for number, cell in enumerate(cells, start=1):
        if shows_something(cell) != bool(cell["outputs"]) and number > 1:
            found.append(f"cell {number}: its outputs do not match what it shows")
        if taken := defined_names(cell) & exported:
            found.append(f"cell {number} defines {taken}, which the library exports")
        for output in cell["outputs"]:
            if output["output_type"] == "error" or output.get("name") == "stderr":
                found.append(f"cell {number}: an error or a warning")
    # Pictures are base64, not text.
    shown = [{**cell, "outputs": [texts_of(o) for o in cell.get("outputs", ())]} for cell in cells]
    texts = [source_of(cell) for cell in notebook["cells"]] + [
        str(cell["outputs"]) for cell in shown
    ]
    if any(MACHINE.search(text) for text in texts):
        found.append("a path of a machine")
    if not 10 <= len(notebook["cells"]) <= 24:
        found.append(f"{len(notebook['cells'])} cells")
    return found


def texts_of(output) -> str:
    data = output.get("data", {})
    return "".join([*output.get("text", ()), *data.get("text/plain", ())])


def test_all_notebooks_are_found():
    assert [path.name[:3] for path in PATHS] == [f"0{n}_" for n in range(1, 7)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_is_complete(path):
    assert problems(run.load(path), path) == []
    assert path.stat().st_size < MAX_BYTES


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_badge_opens_the_notebook_itself(path):
    first = source_of(run.load(path)["cells"][0]).splitlines()[0]
    assert f"/{run.REPOSITORY}/blob/{run.BRANCH}/notebooks/{path.name})" in first


def test_the_repository_is_defined_in_one_place(monkeypatch):
    monkeypatch.setattr(run, "REPOSITORY", "some/where")
    monkeypatch.setattr(run, "INSTALL", run.INSTALL.replace("emsjax/emsjax", "some/where"))
    for path in PATHS:
        text = json.dumps(run.stamp(run.load(path), path))
        assert text.count("some/where") == 2
        assert "emsjax/emsjax" not in text


@pytest.mark.parametrize("checkout", [True, False])
def test_a_checkout_installs_itself_and_other_folders_the_repository(
    checkout, tmp_path, monkeypatch
):
    (tmp_path / "notebooks").mkdir()
    if checkout:
        (tmp_path / "emsjax").mkdir()
        (tmp_path / "emsjax" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "getoutput", lambda command: "no such command")
    installed = []
    lines = re.sub(r"^(\s*)%(.*)", r"\1magic(f'\2')", run.INSTALL, flags=re.MULTILINE)
    exec(lines, {"magic": installed.append})
    (command,) = installed
    assert ('"..[plots,plots]"' in command) == checkout
    assert (run.REPOSITORY in command) != checkout
    assert (str(tmp_path) in sys.path) == checkout


def test_the_costs_of_the_synergy_curve_are_the_measured_ones():
    (cell,) = (c for c in code_cells(run.load(PATHS[4])) if "COSTS = " in source_of(c))
    names = {"emsjax": emsjax}
    exec(ast.unparse(tree_of(cell).body[0]), names)
    measured = json.loads((FOLDER.parent / "benchmarks" / "h200-profile.json").read_text())["costs"]
    costs = names["COSTS"]
    for at, values, known in (
        (costs.rows, costs.row_ms, measured["row_ms"]),
        (costs.batches, costs.draft_ms, measured["draft_ms"]),
    ):
        assert len(at) > 3
        for x, ms in zip(at, values, strict=True):
            assert ms == pytest.approx(known[str(int(x))], abs=0.005)
    assert costs.token_ms == pytest.approx(measured["token_ms"], rel=0.01)
    assert costs.reread == pytest.approx(measured["reread"], abs=0.005)


def test_the_comparison_with_the_paper_has_the_measured_figures():
    measured = json.loads((FOLDER.parent / "benchmarks" / "h200-ems-sd.json").read_text())
    methods = {entry["batch"]: entry["methods"] for entry in measured["entries"]}
    texts = [source_of(cell) for cell in run.load(PATHS[3])["cells"]]
    (text,) = (text for text in texts if "| the paper, " in text)
    names = ("vanilla", "unpad-kv", "unpad-inputs", "ems")
    speeds = [f"{methods[24][name]['tokens_per_s']['speed_up']:.2f}" for name in names]
    assert f"| this library, the run above | {' | '.join(speeds)} |" in text
    times = lambda batch, name: (
        f"{methods[batch][name]['step_ms'] / methods[batch]['greedy']['step_ms']:.2f}"
    )
    length = f"{methods[24]['ems']['mean_acceptance_length']:.2f}"
    padded, unpadded = (f"{length} / {times(24, name)}" for name in ("vanilla", "ems"))
    assert f"{padded} with padding and {unpadded} without" in text
    assert f"{times(64, 'vanilla')} times a plain one with" in text
    assert f"{times(64, 'ems')} times without" in text


def changed(one, other, source="print(x)"):
    cells = [
        {"source": [source], "outputs": [{"output_type": "stream", "name": "stdout", "text": [t]}]}
        for t in (one, other)
    ]
    return run.stale(*({"cells": [cell]} for cell in cells))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1.0 in it", "1.2 in it"),
        ("3 of 4", "4 of 4"),
        ("665 rows", "670 rows"),
        ("[1 2]", "[1 2 3]"),
        ("x", "y"),
        ("", "x"),
    ],
)
def test_stale_outputs_are_detected(one, other):
    (found,) = changed(one, other)
    assert repr(one) in found
    assert repr(other) in found


def test_last_digits_and_times_are_not_compared():
    assert not changed("3 of 4", "3 of 4")
    assert not changed("error 2.4e-07, 0.1543", "error 3.6e-07, 0.1544")
    assert not changed("took 9 ms", "took 12 ms", source="print(1e3 * seconds)")
    picture = {"data": {"image/png": "", "text/plain": ["<Figure>"]}}
    assert run.printed({"outputs": [picture]}) == ""


def no_badge(notebook, cells):
    notebook["cells"][0]["source"] = ["# A title\n"]


def other_install(notebook, cells):
    cells[0]["source"].append("\nimport os")


def not_executed(notebook, cells):
    cells[1]["execution_count"] = None


def another_kernel(notebook, cells):
    notebook["metadata"] = {"kernelspec": {"name": "mine"}}


def a_timestamp(notebook, cells):
    cells[1]["metadata"] = {"execution": {"iopub.execute_input": "2030-01-01"}}


def lost_output(notebook, cells):
    next(cell for cell in cells[1:] if cell["outputs"])["outputs"] = []


def copied_code(notebook, cells):
    cells[1]["source"].append("\ndef generate():\n    pass")


def a_path(notebook, cells):
    next(cell for cell in cells[1:] if cell["outputs"])["outputs"].append(
        {"output_type": "stream", "name": "stdout", "text": ["in /home/someone/emsjax\n"]}
    )


def a_warning(notebook, cells):
    cells[1]["outputs"].append({"output_type": "stream", "name": "stderr", "text": ["Beware"]})


def an_error(notebook, cells):
    cells[1]["outputs"].append(
        {"output_type": "error", "ename": "E", "evalue": "", "traceback": []}
    )


FAULTS = [no_badge, other_install, not_executed, another_kernel, a_timestamp, lost_output]
FAULTS += [copied_code, a_path, a_warning, an_error]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_detected(plant):
    notebook = run.load(PATHS[0])
    plant(notebook, code_cells(notebook))
    assert problems(notebook, PATHS[0])
