"""Figures of measurements; matplotlib is imported where one is drawn."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

PANEL_INCHES = (4.2, 3.2)


def draft_length_figure(results: Mapping[str, Any]):
    """Speed by fixed draft length, beside plain decoding and the policies.

    Args:
        results: what `emsjax bench draft-length` writes.

    Returns:
        A matplotlib `Figure` with a panel for each workload (down) and batch size (across).

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no entries.
    """
    figure_module = _matplotlib("figure")
    entries = {(entry["workload"], entry["batch"]): entry for entry in results["entries"]}
    if not entries:
        raise ValueError("results hold no entries: nothing to draw")
    workloads = list(dict.fromkeys(workload for workload, _ in entries))
    batches = sorted({batch for _, batch in entries})
    width, height = PANEL_INCHES
    figure = figure_module.Figure(
        figsize=(width * len(batches), height * len(workloads) + 0.6), layout="constrained"
    )
    for (workload, batch), entry in entries.items():
        place = workloads.index(workload) * len(batches) + batches.index(batch) + 1
        axes = figure.add_subplot(len(workloads), len(batches), place)
        _draw(axes, entry)
        axes.set_title(f"{workload}, batch {batch}")
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=3)
    return figure


def check_format(path: Path) -> None:
    """Whether a figure can be saved under this name.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: an unknown kind of file.
    """
    known = _matplotlib("backend_bases").FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ValueError(f"--plot: {path} must end in one of .{', .'.join(sorted(known))}")


def _draw(axes, entry: Mapping[str, Any]) -> None:
    """One panel."""
    whole = entry["policies"]["fixed 0"]["tokens_per_s"] is not None
    which = "tokens_per_s" if whole else "live_tokens_per_s"
    speed = {name: of[which] for name, of in entry["policies"].items()}
    fixed = {int(name.split()[1]): of for name, of in speed.items() if name.startswith("fixed ")}
    lengths = sorted(fixed)
    axes.plot(lengths, [fixed[n] for n in lengths], color="black", marker=".", label="fixed length")
    levels = {"plain decoding": entry["plain"]["tokens_per_s"]}
    levels |= {name: of for name, of in speed.items() if not name.startswith("fixed ")}
    for i, (name, level) in enumerate(levels.items()):
        # Dashes of their own: lines may lie upon each other.
        axes.axhline(level, color=f"C{i}", linestyle=(2 * i, (4, 2 * i)), label=name)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("draft length (tokens)")
    axes.set_ylabel("speed (tokens/s)" if whole else "speed, all live (tokens/s)")
    axes.set_ylim(bottom=0)


def _matplotlib(module: str):
    try:
        import matplotlib.backend_bases
        import matplotlib.figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'emsjax[plots]'") from error
    return getattr(matplotlib, module)
