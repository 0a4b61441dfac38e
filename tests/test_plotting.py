"""Figures show what was measured, and matplotlib is asked for where it is missing."""

import json
import sys

import pytest

from emsjax import plotting
from emsjax.benchmarks import draft_length
from emsjax.cli import main

WORKLOADS, BATCHES = ("llma", "poor", "mixed"), (1, 24)
POLICIES = ("bass", "synergy", "goodput")


@pytest.fixture(autouse=True, scope="module")
def matplotlib_folder(tmp_path_factory):
    """Its cache of fonts does not go into the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
        yield


def entry_of(workload, batch):
    """Figures of its own for everything that is drawn."""
    start = 1000.0 * (WORKLOADS.index(workload) + 1) + 100 * batch
    speed = lambda n: {"tokens_per_s": start + n, "identical": True}
    names = [*(f"fixed {n}" for n in (1, 0, 2)), *POLICIES]
    return {
        "workload": workload,
        "batch": batch,
        "plain": speed(-1),
        "policies": {name: speed(n) for n, name in enumerate(names)},
    }


@pytest.fixture
def results():
    return {"entries": [entry_of(workload, batch) for batch in BATCHES for workload in WORKLOADS]}


def test_every_workload_and_batch_has_a_panel_with_all_its_figures(results):
    figure = plotting.draft_length_figure(results)
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert len(panels) == len(figure.axes) == 6
    for entry in results["entries"]:
        axes = panels[f"{entry['workload']}, batch {entry['batch']}"]
        lines = {line.get_label(): line for line in axes.get_lines()}
        fixed = lines.pop("fixed length")
        assert list(fixed.get_xdata()) == [0, 1, 2]
        of = {name: of["tokens_per_s"] for name, of in entry["policies"].items()}
        assert list(fixed.get_ydata()) == [of[f"fixed {n}"] for n in range(3)]
        levels = {name: line.get_ydata()[0] for name, line in lines.items()}
        plain = {"plain decoding": entry["plain"]["tokens_per_s"]}
        assert levels == plain | {name: of[name] for name in POLICIES}
        assert axes.get_xlabel() == "draft length (tokens)"
        assert axes.get_ylabel() == "speed (tokens/s)"
        low, high = axes.get_ylim()
        assert low == 0
        assert high > max(of.values())


def test_what_was_timed_with_all_samples_live_alone_is_drawn_so(results):
    entry = results["entries"][0]
    for of in entry["policies"].values():
        of |= {"tokens_per_s": None, "live_tokens_per_s": of["tokens_per_s"]}
    first, *others = plotting.draft_length_figure(results).axes
    assert first.get_ylabel() == "speed, all live (tokens/s)"
    assert list(first.get_lines()[0].get_ydata()) == [1101, 1100, 1102]
    assert {axes.get_ylabel() for axes in others} == {"speed (tokens/s)"}


def test_workloads_go_down_and_batches_across(results):
    figure = plotting.draft_length_figure(results)
    places = {}
    for axes in figure.axes:
        rows, columns = axes.get_subplotspec().rowspan, axes.get_subplotspec().colspan
        places[axes.get_title()] = (rows.start, columns.start)
    assert places == {
        f"{workload}, batch {batch}": (row, column)
        for row, workload in enumerate(WORKLOADS)
        for column, batch in enumerate(BATCHES)
    }


def test_there_is_one_legend_that_names_every_line(results):
    figure = plotting.draft_length_figure(results)
    assert not any(axes.get_legend() for axes in figure.axes)
    (legend,) = figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert shown == ["fixed length", "plain decoding", *POLICIES]


def test_a_run_that_was_broken_off_is_drawn_as_far_as_it_goes(results):
    del results["entries"][4:]
    assert len(plotting.draft_length_figure(results).axes) == 4
    with pytest.raises(ValueError, match="no entries"):
        plotting.draft_length_figure({"entries": []})


def test_the_figure_leaves_no_global_state(results):
    plotting.draft_length_figure(results)
    assert "matplotlib.pyplot" not in sys.modules


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """`emsjax bench draft-length` of a measured figure's results, with a plot."""
    measured = []

    def run(models, profile, results, **options):
        measured.append(results)
        live = {"live_tokens_per_s": None, "mean_acceptance_length": 1.0}
        for entry in (entry_of("llma", 1), entry_of("poor", 1)):
            entry["policies"] = {name: of | live for name, of in entry["policies"].items()}
            results["entries"].append(entry)

    monkeypatch.setattr(draft_length, "run", run)
    output = tmp_path / "before.json"
    costs = {"row_ms": {"1": 1.0}, "token_ms": 0.0, "draft_ms": {"1": 0.0}}
    output.write_text(json.dumps({"settings": {"costs": costs}}))
    monkeypatch.setattr(
        "emsjax.commands.draft_length.resume", lambda s, results, o: results.update(entries=[])
    )
    arguments = ["bench", "draft-length", "--shape", "tiny", "--draft-shape", "tiny"]
    arguments += ["--output", str(output)]
    return measured, lambda name: main([*arguments, "--plot", str(tmp_path / name)])


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.PDF", b"%PDF")])
def test_the_bench_saves_its_figure(bench, tmp_path, name, start):
    _, run = bench
    assert run(name) == 0
    assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("name", "part"),
    [("a.txt", "must end in one of"), ("a", "must end in"), ("none/a.png", "cannot be written")],
)
def test_a_bad_name_is_refused_before_the_work(bench, tmp_path, capsys, name, part):
    measured, run = bench
    assert run(name) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("emsjax: error: --plot: ")
    assert part in shown
    assert shown.count("\n") == 1
    assert not measured


def test_without_matplotlib_its_extra_is_named(bench, results, monkeypatch, capsys):
    measured, run = bench
    for module in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'emsjax\[plots\]'"):
        plotting.draft_length_figure(results)
    assert run("a.png") == 2
    assert "pip install 'emsjax[plots]'" in capsys.readouterr().err
    assert not measured
