"""Figures show the measurements, and name matplotlib where it is missing."""

import dataclasses
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from emsjax import plotting
from emsjax.benchmarks import draft_length
from emsjax.cli.main import main
from emsjax.decode.cache import KVCache, SharedIndexCache
from emsjax.decode.kernels import resolve_kernels
from emsjax.decode.layout import Layout
from emsjax.decode.pack import AcceptedPath, pack

WORKLOADS, BATCHES = ("llma", "poor", "mixed"), (1, 24)
# Labels in the legend, by names in the results; an unknown policy is labelled with its name.
POLICIES = {
    "bass": "BassHeuristic (bass)",
    "synergy": "BatchSizeTable (synergy)",
    "goodput": "Goodput (goodput)",
    "another": "another",
}


@pytest.fixture(autouse=True, scope="module")
def matplotlib_folder(tmp_path_factory):
    """Keep matplotlib's font cache out of the user's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
        yield


def entry_of(workload, batch):
    """Results whose figures all differ."""
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
        policies = entry["policies"].items()
        speeds = {name: figures["tokens_per_s"] for name, figures in policies}
        assert list(fixed.get_ydata()) == [speeds[f"fixed {n}"] for n in range(3)]
        levels = {name: line.get_ydata()[0] for name, line in lines.items()}
        plain = {"plain decoding": entry["plain"]["tokens_per_s"]}
        assert levels == plain | {label: speeds[name] for name, label in POLICIES.items()}
        assert axes.get_xlabel() == "draft length (tokens)"
        assert axes.get_ylabel() == "speed (tokens/s)"
        low, high = axes.get_ylim()
        assert low == 0
        assert high > max(speeds.values())


def test_entries_timed_only_while_all_samples_are_live_are_drawn_so(results):
    entry = results["entries"][0]
    for figures in entry["policies"].values():
        figures |= {"tokens_per_s": None, "live_tokens_per_s": figures["tokens_per_s"]}
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
    assert shown == ["fixed length", "plain decoding", *POLICIES.values()]


def test_an_interrupted_run_is_drawn_as_far_as_it_goes(results):
    del results["entries"][4:]
    assert len(plotting.draft_length_figure(results).axes) == 4
    with pytest.raises(ValueError, match="no entries"):
        plotting.draft_length_figure({"entries": []})


def test_the_figure_leaves_no_global_state(results):
    plotting.draft_length_figure(results)
    assert "matplotlib.pyplot" not in sys.modules


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """`emsjax bench draft-length` with fixed results and a plot."""
    measured = []

    def run(models, profile, asked, results, **options):
        measured.append(results)
        live = {"live_tokens_per_s": None, "mean_acceptance_length": 1.0}
        for entry in (entry_of("llma", 1), entry_of("poor", 1)):
            policies = entry["policies"].items()
            entry["policies"] = {name: figures | live for name, figures in policies}
            results["entries"].append(entry)

    monkeypatch.setattr(draft_length, "run", run)
    output = tmp_path / "before.json"
    costs = {"row_ms": {"1": 1.0}, "token_ms": 0.0, "reread": 0.0, "draft_ms": {"1": 0.0}}
    output.write_text(json.dumps({"settings": {"costs": costs}}))
    monkeypatch.setattr(
        "emsjax.benchmarks.results.resume", lambda s, results, o: results.update(entries=[])
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
def test_a_bad_name_is_refused_before_the_work(bench, capsys, name, part):
    measured, run = bench
    assert run(name) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("emsjax: error: --plot: ")
    assert part in shown
    assert shown.count("\n") == 1
    assert not measured


def test_in_python_the_file_is_named_without_an_option():
    with pytest.raises(ValueError, match=r"^a\.txt must end in one of \."):
        plotting.check_format(Path("a.txt"))


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


STARTS, COUNTS, KEPT = np.array([9, 16, 5, 12]), np.array([4, 1, 2, 0]), np.array([3, 1, 2, 0])
ROWS = {
    "unpadded": pack(jnp.array(STARTS), jnp.array(COUNTS), 16),
    "padded": Layout(pad_inputs=True).pack(jnp.array(STARTS), jnp.array(COUNTS), 16),
}


def cells(axes) -> dict:
    """Cells by their lower left corners."""
    return {tuple(int(x) for x in patch.get_xy()): patch for patch in axes.patches}


def is_hatched(cell) -> bool:
    return bool(cell.get_hatch())


def is_of_sample(cell, sample: int) -> bool:
    """Whether the cell has the sample's colour or a paler one."""
    missing = 1 - np.array(cell.get_facecolor()[:3])
    wanted = 1 - np.array(to_rgb(plotting.arrays.COLOURS[sample]))
    return bool(np.allclose(missing / missing.max(), wanted / wanted.max()))


@pytest.mark.parametrize("name", ROWS)
def test_a_step_has_a_cell_for_each_row_in_its_samples_colour(name):
    (axes,) = plotting.packed_rows_figure({name: ROWS[name]}).axes
    drawn = cells(axes)
    assert len(axes.patches) == len(drawn) == len(ROWS[name].segment_ids)
    width = 16 // len(STARTS)
    first = np.cumsum(COUNTS) - COUNTS if name == "unpadded" else width * np.arange(len(STARTS))
    real = {
        first[sample] + within: (sample, start + within)
        for sample, start in enumerate(STARTS)
        for within in range(COUNTS[sample])
    }
    positions = {int(text.get_position()[0]): text.get_text() for text in axes.texts}
    assert positions == {row: str(position) for row, (_, position) in real.items()}
    for (row, _), cell in drawn.items():
        assert is_hatched(cell) == (row not in real)
        assert row not in real or is_of_sample(cell, real[row][0])
    assert axes.get_title(loc="left") == f"{name}: 7 rows and 9 of padding"


def test_tokens_are_above_their_rows_and_rejected_rows_have_a_mark():
    texts = [["a", "b", "c", "d"], ["e"], ["f", "g"], []]
    figure = plotting.packed_rows_figure(ROWS, texts=texts, num_kept=KEPT)
    for axes, places in zip(
        figure.axes, ([0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 8, 9]), strict=True
    ):
        above = {
            t.get_text(): int(t.get_position()[0]) for t in axes.texts if t.get_text().isalpha()
        }
        assert above == dict(zip("abcdefg", places, strict=True))
        ((mark,),) = (line.get_xydata().tolist() for line in axes.get_lines())
        assert np.all(mark > np.array([3.7, 0.7]))
        assert np.all(mark < np.array([4, 1]))
        strength = {
            row: 1 - min(cell.get_facecolor()[:3]) for (row, _), cell in cells(axes).items()
        }
        assert strength[3] < 0.4 < strength[2]
    assert [text.get_text() for text in figure.legends[0].get_texts()][-1] == "rejected"


@pytest.fixture
def caches():
    """Caches of both methods, before and after a step."""
    cache = KVCache.init(4, 64, num_layers=1, kv_heads=1, head_dim=1, dtype=jnp.float32)
    cache = dataclasses.replace(cache, lengths=jnp.array(STARTS))
    layouts = {"unpadded": Layout(), "padded": Layout(pad_inputs=True, pad_kv_cache=True)}
    before = {name: layout.arrange(cache) for name, layout in layouts.items()}
    assert isinstance(before["padded"], SharedIndexCache)
    fresh = (jnp.ones((16, 3, 1)),)
    after = {}
    for name, held in before.items():
        path = AcceptedPath.prefix(ROWS[name], jnp.array(KEPT))
        after[name] = held.commit(fresh, ROWS[name], path, resolve_kernels(None).update)
    return before, after


def test_the_cache_shows_the_places_that_a_step_wrote_and_skipped(caches):
    before, after = caches
    unpadded, padded = plotting.cache_figure(after, before=before).axes
    index, end = STARTS.max(), STARTS.max() + KEPT.max()
    for axes, first in ((unpadded, STARTS), (padded, [index] * len(STARTS))):
        drawn = cells(axes)
        assert len(axes.patches) == len(drawn) == len(STARTS) * (end + 1)
        for (place, sample), cell in drawn.items():
            held = place < STARTS[sample]
            new = first[sample] <= place < first[sample] + KEPT[sample]
            masked = axes is padded and place < end and not (held or new)
            assert is_hatched(cell) == masked
            if held or new:
                assert is_of_sample(cell, sample)
                strength = 1 - min(cell.get_facecolor()[:3])
                assert (strength > 0.4) == new
            elif not masked:
                assert cell.get_facecolor()[:3] == (1, 1, 1)
    assert unpadded.get_title(loc="left") == "unpadded: 6 tokens written, 0 places masked"
    left_open = len(STARTS) * end - STARTS.sum() - KEPT.sum()
    decoding = len(STARTS) * KEPT.max() - KEPT.sum()
    masked = f"{left_open} places masked, {decoding} of them by decoding"
    assert padded.get_title(loc="left") == f"padded: 6 tokens written, {masked}"
    assert padded.get_yticklabels()[3].get_text() == "sample 3"


def test_without_an_earlier_time_the_title_counts_all_tokens(caches):
    _, after = caches
    held = (STARTS + KEPT).sum()
    unpadded, padded = (axes.get_title(loc="left") for axes in plotting.cache_figure(after).axes)
    assert unpadded == f"unpadded: {held} tokens held, 0 places masked"
    assert padded.startswith(f"padded: {held} tokens held, ")


def test_a_part_of_the_cache_can_be_drawn_alone(caches):
    _, after = caches
    whole, part = (plotting.cache_figure(after, start=start).axes[1] for start in (0, 10))
    seen = {at: is_hatched(cell) for at, cell in cells(whole).items() if at[0] >= 10}
    assert {at: is_hatched(cell) for at, cell in cells(part).items()} == seen
    assert whole.get_title(loc="left") == part.get_title(loc="left")


def test_the_synergy_figure_marks_each_batch_sizes_best_length():
    curves = {8: np.array([4.0, 2.0, 2.5]), 1: np.array([3.0, 2.0, 1.0])}
    speed, best = plotting.synergy_figure(curves).axes
    lines = {line.get_label(): line for line in speed.get_lines() if "batch" in line.get_label()}
    assert list(lines) == ["batch 1", "batch 8"]
    assert lines["batch 8"].get_ydata().tolist() == [1, 2, 1.6]
    marks = [
        line.get_xydata()[0].tolist() for line in speed.get_lines() if line.get_marker() == "o"
    ]
    assert marks == [[2, 3], [1, 2]]
    (line,) = best.get_lines()
    assert line.get_xydata().tolist() == [[1, 2], [8, 1]]
    assert [text.get_text() for text in best.get_xticklabels()] == ["1", "8"]


def step(model: str, ms: float, **settings) -> dict:
    """Results of `emsjax bench step` for one shape."""
    entry = {"shape": "24x8", "best_ms": ms, "floor_ms": {"reference": ms / 2}}
    return {"settings": {"model": model, **settings}, "shapes": [entry]}


def test_steps_are_drawn_by_devices_beside_their_floors():
    two = step("opt-13b", 9.0, tensor_parallel=2)
    figure = plotting.devices_figure([two, step("opt-13b", 13.0), step("opt-66b", 40.0)])
    one, other = figure.axes
    assert (one.get_title(), other.get_title()) == ("opt-13b", "opt-66b")
    times, floors, promised = one.get_lines()
    assert times.get_label() == "24 x 8"
    assert times.get_xydata().tolist() == [[1, 13], [2, 9]]
    assert floors.get_xydata().tolist() == [[1, 6.5], [2, 4.5]]
    # Of the 13 ms a part of 8 is divided.
    assert promised.get_xydata().tolist() == [[2, 9], [4, 7], [8, 6]]
    assert [text.get_text() for text in one.get_xticklabels()] == ["1", "2", "4", "8"]
    assert len(other.get_lines()) == 2


def test_every_line_of_the_synergy_figure_is_dark_enough_for_white():
    curves = {2**n: np.array([2.0, 1.0]) for n in range(7)}
    speed, _ = plotting.synergy_figure(curves).axes
    for line in speed.get_lines():
        # Relative luminance, by WCAG's formula; 2.5 : 1 beside white.
        rgb = np.array(to_rgb(line.get_color()))
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        assert 1.05 / (linear @ [0.2126, 0.7152, 0.0722] + 0.05) > 2.5


@pytest.mark.parametrize(
    "draw",
    [
        plotting.packed_rows_figure,
        plotting.cache_figure,
        plotting.synergy_figure,
        plotting.devices_figure,
    ],
)
def test_nothing_to_draw_is_refused(draw):
    with pytest.raises(ValueError, match="nothing to draw"):
        draw({})
