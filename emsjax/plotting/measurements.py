"""Figures of measurements."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from emsjax.plotting.canvas import PANEL_INCHES, matplotlib_module, new_figure

# Names in legends, by the short names in results.
METHODS = {
    "greedy": "plain decoding (greedy)",
    "vanilla": "rows and cache padded (vanilla)",
    "unpad-kv": "rows padded (unpad-kv)",
    "unpad-inputs": "cache padded (unpad-inputs)",
    "ems": "no padding: EMS-SD (ems)",
}
POLICIES = {
    "bass": "BassHeuristic (bass)",
    "synergy": "BatchSizeTable (synergy)",
    "goodput": "Goodput (goodput)",
    "bass, cost-capped": "BassHeuristic, CostCapped",
}
DEVICES = (1, 2, 4, 8)  # for which times are estimated
ROOM = 1.3  # least ratio of two labelled batch sizes, so that labels do not overlap


def draft_length_figure(results: Mapping[str, Any]):
    """Draw speed by fixed draft length, beside plain decoding and the policies.

    Args:
        results: written by `emsjax bench draft-length`.

    Returns:
        A matplotlib `Figure` with a panel for each workload (down) and batch size (across).

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no entries.
    """
    entries = {(entry["workload"], entry["batch"]): entry for entry in results["entries"]}
    if not entries:
        raise ValueError("results hold no entries: nothing to draw")
    workloads = list(dict.fromkeys(workload for workload, _ in entries))
    batches = sorted({batch for _, batch in entries})
    width, height = PANEL_INCHES
    figure = new_figure(width * len(batches), height * len(workloads) + 0.6)
    for (workload, batch), entry in entries.items():
        place = workloads.index(workload) * len(batches) + batches.index(batch) + 1
        axes = figure.add_subplot(len(workloads), len(batches), place)
        _draw(axes, entry)
        axes.set_title(f"{workload}, batch {batch}")
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=3)
    return figure


def ems_sd_figure(results: Mapping[str, Any]):
    """Draw the speed-up of every method over plain decoding by batch size: figure 1 of EMS-SD.

    Args:
        results: written by `emsjax bench ems-sd`, with plain decoding among the methods.

    Returns:
        A matplotlib `Figure`: whole runs, and runs while all samples are live.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no entries.
    """
    if not results["entries"]:
        raise ValueError("results hold no entries: nothing to draw")
    width, height = PANEL_INCHES
    figure = new_figure(2 * width, height + 0.6)
    entries = sorted(results["entries"], key=lambda entry: entry["batch"])
    titles = {"tokens_per_s": "whole run", "live_tokens_per_s": "all samples live"}
    for place, (which, title) in enumerate(titles.items(), start=1):
        axes = figure.add_subplot(1, len(titles), place)
        for method in dict.fromkeys(name for entry in entries for name in entry["methods"]):
            of = [entry for entry in entries if method in entry["methods"]]
            speed_ups = [entry["methods"][method][which]["speed_up"] for entry in of]
            axes.plot(
                [entry["batch"] for entry in of],
                speed_ups,
                marker=".",
                label=METHODS.get(method, method),
            )
        _batch_axis(axes, [entry["batch"] for entry in entries])
        axes.set_ylabel("speed over plain decoding")
        axes.set_title(title)
        axes.set_ylim(bottom=0)
    lines = figure.axes[0].get_lines()
    figure.legend(lines, [line.get_label() for line in lines], loc="outside lower center", ncols=3)
    return figure


def prompts_figure(results: Mapping[str, Any]):
    """Draw acceptance and speed of draft sources by category.

    Args:
        results: written by `emsjax bench prompts`.

    Returns:
        A matplotlib `Figure` with two panels for each batch size (down): the mean acceptance length
        and the speed over plain decoding, with bars for each category and all together.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no entries.
    """
    if not results["entries"]:
        raise ValueError("results hold no entries: nothing to draw")
    overall = sorted(results["overall"], key=lambda entry: entry["batch"])
    width, height = PANEL_INCHES
    figure = new_figure(3 * width, height * len(overall) + 0.6)
    titles = {"tokens_per_step": "mean acceptance length", "speed": "speed over plain decoding"}
    for row, total in enumerate(overall):
        mine = [entry for entry in results["entries"] if entry["batch"] == total["batch"]]
        groups = {entry["category"]: entry for entry in mine}
        shown = [*groups, *(["overall"] if len(groups) > 1 else [])]
        entries = [*groups.values(), total][: len(shown)]
        for column, (which, label) in enumerate(titles.items()):
            axes = figure.add_subplot(len(overall), 2, 2 * row + column + 1)
            _draw_bars(axes, entries, which)
            axes.set_xticks(range(len(shown)), shown, rotation=30, ha="right", fontsize="small")
            axes.set_ylabel(label)
            axes.set_title(f"batch {total['batch']}")
    bars = figure.axes[0].containers
    names = [of.get_label() for of in bars]
    figure.legend(bars, names, loc="outside lower center", ncols=len(names))
    return figure


def devices_figure(results: Sequence[Mapping[str, Any]]):
    """Draw how long a decoding step takes by the number of devices over which a model is split.

    Args:
        results: each written by `emsjax bench step`, of any models and numbers of devices.

    Returns:
        A matplotlib `Figure` with a panel for each model: milliseconds of a step of each shape,
        samples x rows, dashed the least that the devices' rates allow, and dotted, for shapes that
        were measured on one and on two devices, what those promise for more: see `divided`.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no shapes.
    """
    models: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = {}
    for of in results:
        devices = of["settings"].get("tensor_parallel", 1)
        for entry in of["shapes"]:
            of_model = models.setdefault(of["settings"]["model"], {})
            of_model.setdefault(entry["shape"], {})[devices] = entry
    if not models:
        raise ValueError("results hold no shapes: nothing to draw")
    width, height = PANEL_INCHES
    figure = new_figure(width * len(models), height)
    for place, (model, shapes) in enumerate(models.items(), start=1):
        axes = figure.add_subplot(1, len(models), place)
        shown = {n for entries in shapes.values() for n in entries}
        for i, (shape, entries) in enumerate(shapes.items()):
            counts = sorted(entries)
            times = [entries[n]["best_ms"] for n in counts]
            floors = [entries[n]["floor_ms"]["reference"] for n in counts]
            axes.plot(counts, times, color=f"C{i}", marker=".", label=shape.replace("x", " x "))
            axes.plot(counts, floors, color=f"C{i}", linewidth=0.8, linestyle="--")
            if counts[:2] == [1, 2]:
                more = [n for n in DEVICES if n >= 2]
                promised = [divided(times[0], times[1], n) for n in more]
                axes.plot(more, promised, color=f"C{i}", linewidth=0.8, linestyle=":")
                shown |= {*more}
        _binary_axis(axes, shown, "devices")
        axes.set_ylabel("ms of a step")
        axes.set_ylim(bottom=0)
        axes.set_title(model)
        axes.legend(fontsize="small")
    return figure


def divided(one: float, two: float, devices: int) -> float:
    """The time of a step on several devices that follows from those on one and on two of them.

    A part of it is divided by their number, and the rest stays. Sums over the devices, which grow
    with their number, are in what stays as they are on two.
    """
    part = 2 * (one - two)
    return one - part + part / devices


def distillation_figure(results: Mapping[str, Any]):
    """Draw the training of a draft model.

    Args:
        results: the results in the record of `emsjax distil`.

    Returns:
        A matplotlib `Figure`: the loss by step, and the acceptance rate by draft position before
        and after training.

    Raises:
        ImportError: matplotlib is missing.
    """
    width, height = PANEL_INCHES
    figure = new_figure(2 * width, height)
    loss, acceptance = (figure.add_subplot(1, 2, place) for place in (1, 2))
    loss.plot(range(1, len(results["losses"]) + 1), results["losses"], color="black")
    loss.set_xlabel("step")
    loss.set_ylabel("training loss")
    for name in ("before", "after"):
        shares = results[name]["by_position"]
        acceptance.plot(range(1, len(shares) + 1), shares, marker=".", label=f"{name} training")
    acceptance.xaxis.get_major_locator().set_params(integer=True)
    acceptance.set_xlabel("draft position")
    acceptance.set_ylabel("acceptance rate")
    acceptance.set_ylim(0, 1)
    acceptance.legend()
    return figure


def synergy_figure(curves: Mapping[int, Float[np.ndarray, "k1"]]):
    """Draw how the best draft length follows from the batch size.

    Args:
        curves: ms per token of a sample by draft length 0..k, for each batch size, see
            `emsjax.policies.costs.synergy_ms`.

    Returns:
        A matplotlib `Figure`: speed-up over decoding without drafts by draft length, with the best
        length of each batch size marked, and that length by batch size.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no curves.

    Reference: The Synergy of Speculative Decoding and Batching, arXiv 2310.18813.
    """
    if not curves:
        raise ValueError("curves are empty: nothing to draw")
    width, height = PANEL_INCHES
    figure = new_figure(2 * width, height)
    speed, best = (figure.add_subplot(1, 2, place) for place in (1, 2))
    sizes = sorted(curves)
    lengths = {batch: int(np.argmin(curves[batch])) for batch in sizes}
    # Up to orange: lighter colours cannot be seen on white.
    colours = matplotlib_module("colormaps")["plasma"](np.linspace(0, 0.7, len(sizes)))
    for batch, colour in zip(sizes, colours, strict=True):
        gains = curves[batch][0] / np.asarray(curves[batch])
        speed.plot(np.arange(len(gains)), gains, color=colour, label=f"batch {batch}")
        speed.plot(lengths[batch], gains[lengths[batch]], "o", color=colour)
    speed.axhline(1, color="grey", linewidth=0.8, linestyle="--")
    speed.set_xlabel("draft length (tokens)")
    speed.set_ylabel("speed over no drafts")
    speed.set_ylim(bottom=0)
    speed.legend(fontsize="small", ncols=-(-len(sizes) // 4), loc="lower right")
    best.plot(sizes, [lengths[batch] for batch in sizes], color="black", zorder=1)
    best.scatter(sizes, [lengths[batch] for batch in sizes], color=colours, zorder=2)
    _batch_axis(best, sizes)
    best.set_ylabel("best draft length (tokens)")
    best.set_ylim(bottom=0)
    for axis in (speed.xaxis, best.yaxis):
        axis.get_major_locator().set_params(integer=True)
    return figure


def _draw_bars(axes, entries: Sequence[Mapping[str, Any]], which: str) -> None:
    """Draw a group of bars for each entry, one for each of its drafters but plain decoding."""
    names = [name for name in entries[0]["drafters"] if name != "plain"]
    width = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        places = np.arange(len(entries)) + (i - (len(names) - 1) / 2) * width
        heights = [entry["drafters"][name][which] for entry in entries]
        axes.bar(places, heights, width, label=name)
    axes.axhline(1, color="grey", linewidth=0.8, linestyle="--")  # plain decoding


def _batch_axis(axes, sizes) -> None:
    _binary_axis(axes, sizes, "batch size")


def _binary_axis(axes, sizes, label: str) -> None:
    """Set a logarithmic axis of these sizes, labelled where there is room."""
    sizes, named = sorted(sizes), []
    for size in sizes:
        if not named or size >= ROOM * named[-1]:
            named.append(size)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size}" if size in named else "" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel(label)


def _draw(axes, entry: Mapping[str, Any]) -> None:
    """Draw the panel of one entry."""
    whole = entry["policies"]["fixed 0"]["tokens_per_s"] is not None
    which = "tokens_per_s" if whole else "live_tokens_per_s"
    speed = {name: of[which] for name, of in entry["policies"].items()}
    fixed = {int(name.split()[1]): of for name, of in speed.items() if name.startswith("fixed ")}
    lengths = sorted(fixed)
    axes.plot(lengths, [fixed[n] for n in lengths], color="black", marker=".", label="fixed length")
    levels = {"plain decoding": entry["plain"]["tokens_per_s"]}
    policies = (name for name in speed if not name.startswith("fixed "))
    levels |= {POLICIES.get(name, name): speed[name] for name in policies}
    for i, (name, level) in enumerate(levels.items()):
        # Each line has its own dashes, as lines may coincide.
        axes.axhline(level, color=f"C{i}", linestyle=(2 * i, (4, 2 * i)), label=name)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("draft length (tokens)")
    axes.set_ylabel("speed (tokens/s)" if whole else "speed, all live (tokens/s)")
    axes.set_ylim(bottom=0)
