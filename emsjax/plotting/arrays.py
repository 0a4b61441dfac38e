"""Figures of a step: its packed rows and its cache, drawn cell by cell from the arrays.

Each sample has a colour. The axes are those of `emsjax.decode.pack`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int32

from emsjax.decode.cache import Cache, SharedIndexCache
from emsjax.decode.pack import PackedRows
from emsjax.plotting.canvas import matplotlib_module, new_figure

CELL_INCHES = 0.3
COLOURS = ("#4477aa", "#ee7733", "#228833", "#cc6677", "#66ccee", "#aa8800", "#aa3377", "#777777")
PADDING, FREE, LINE = "#e4e4e4", "#ffffff", "#999999"


def packed_rows_figure(
    layouts: Mapping[str, PackedRows],
    *,
    texts: Sequence[Sequence[str]] | None = None,
    num_kept: Int32[np.ndarray, "b"] | None = None,
):
    """Draw the rows that one step feeds to the model, in each of several layouts.

    A cell is a row; the number in it is its position, the colour its sample. Padding is hatched:
    rows without a sample, and rows that a padded layout adds to a sample's own.

    Args:
        layouts: packed rows by the layout's name.
        texts: texts[s][i] is written above row i of sample s, for example the token that it feeds.
        num_kept: rows of each sample that were committed; the others are pale, with a small cross
            in a corner. None: committed rows are not distinguished.

    Returns:
        A matplotlib `Figure` with a panel for each layout, one above the other.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no layouts.
    """
    if not layouts:
        raise ValueError("layouts are empty: nothing to draw")
    longest = max(map(len, (text for row in texts or () for text in row)), default=0)
    above = 0.3 + 0.23 * longest  # cells
    width = max(len(rows.segment_ids) for rows in layouts.values())
    height = len(layouts) * (1.9 + above)
    figure = new_figure(CELL_INCHES * (width + 2), CELL_INCHES * height)
    for place, (name, rows) in enumerate(layouts.items(), start=1):
        axes = figure.add_subplot(len(layouts), 1, place)
        counts, offsets = np.asarray(rows.counts), np.asarray(rows.offsets)
        num_real = 0
        for row, (sample, position) in enumerate(
            zip(np.asarray(rows.segment_ids), np.asarray(rows.positions), strict=True)
        ):
            within = row - offsets[sample] if sample < len(counts) else None
            if within is None or within >= counts[sample]:
                _cell(axes, row, 0, PADDING, hatch="////")
                continue
            num_real += 1
            kept = num_kept is None or within < num_kept[sample]
            _cell(axes, row, 0, _colour(sample), faint=not kept)
            axes.text(row + 0.5, 0.5, str(position), ha="center", va="center", fontsize="small")
            if not kept:
                # In a corner, so that the number stays readable.
                axes.plot(row + 0.86, 0.86, "x", color="black", markersize=3, markeredgewidth=0.8)
            if texts is not None:
                axes.text(
                    row + 0.5,
                    1.15,
                    texts[sample][within],
                    ha="center",
                    va="bottom",
                    rotation="vertical",
                    fontsize="small",
                    family="monospace",
                )
        padding = len(rows.segment_ids) - num_real
        _frame(axes, width, -0.1, 1 + above, f"{name}: {num_real} rows and {padding} of padding")
    marks = {} if num_kept is None else {"rejected": "x"}
    _legend(figure, len(counts), {"padding": (PADDING, "////")}, marks)
    return figure


def cache_figure(
    caches: Mapping[str, Cache], *, before: Mapping[str, Cache] | None = None, start: int = 0
):
    """Draw the places of the KV cache that hold tokens of each sample, before and after a step.

    A cell is a place. Cells written since `before` have the full colour, and earlier ones a pale
    colour; gaps that stay masked, which only the padded cache has, are hatched; free places are
    white. Titles count the tokens that are held, or that were written since `before`, and the
    masked places: gaps between the prompts' ends, which exist from the start, and those that
    decoding has left.

    Args:
        caches: caches by the panel's name.
        before: the caches of the same names at an earlier time; None: all cells have the full
            colour.
        start: the first place to draw. Free places are drawn up to the longest sample's end.

    Returns:
        A matplotlib `Figure` with a panel for each cache, one above the other.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no caches.
    """
    if not caches:
        raise ValueError("caches are empty: nothing to draw")
    held = {name: _held(cache) for name, cache in caches.items()}
    stop = max(map(_end, caches.values())) + 1
    batch = max(len(of) for of in held.values())
    # Samples are drawn downwards; each panel has room for its title and its axis.
    height = len(caches) * (batch + 2.4)
    figure = new_figure(CELL_INCHES * (stop - start + 3), CELL_INCHES * (height + 1))
    for place, (name, of) in enumerate(held.items(), start=1):
        axes = figure.add_subplot(len(caches), 1, place)
        old = np.zeros_like(of) if before is None else _held(before[name])
        masked = _masked(caches[name])
        for sample, places in enumerate(of[:, start:stop]):
            for at, holds in enumerate(places, start=start):
                if holds:
                    _cell(axes, at, sample, _colour(sample), faint=bool(old[sample, at]))
                elif masked[sample, at]:
                    _cell(axes, at, sample, PADDING, hatch="////")
                else:
                    _cell(axes, at, sample, FREE)
        verb = "held" if before is None else "written"
        title = f"{name}: {(of & ~old).sum()} tokens {verb}, {masked.sum()} places masked"
        if masked.any():
            title += f", {int(caches[name].num_masked)} of them by decoding"
        _frame(axes, stop, batch, 0, title, start=start)
        axes.set_yticks(np.arange(batch) + 0.5, labels=[f"sample {s}" for s in range(batch)])
        axes.set_xticks(np.arange(start, stop, 4) + 0.5, labels=np.arange(start, stop, 4))
        axes.set_xlabel("place in the cache")
    return figure


def _held(cache: Cache) -> np.ndarray:
    """Places that hold a token, bool [b, l]."""
    if isinstance(cache, SharedIndexCache):
        return np.asarray(cache.mask)
    places = np.arange(cache.max_len)
    return places < np.asarray(cache.lengths)[:, None]


def _masked(cache: Cache) -> np.ndarray:
    """Places before the samples' common index that hold no token, bool [b, l]."""
    held = _held(cache)
    if not isinstance(cache, SharedIndexCache):
        return np.zeros_like(held)
    return ~held & (np.arange(held.shape[1]) < int(cache.index))


def _end(cache: Cache) -> int:
    """The first place that all samples have left free."""
    return int(cache.index if isinstance(cache, SharedIndexCache) else np.max(cache.lengths))


def _colour(sample: int) -> str:
    return COLOURS[sample % len(COLOURS)]


def _cell(axes, x: int, y: int, colour: str, *, hatch: str = "", faint: bool = False) -> None:
    """Draw a square; a faint one has a pale colour of the same hue."""
    patches, colors = matplotlib_module("patches"), matplotlib_module("colors")
    face = np.array(colors.to_rgb(colour))
    face = 1 - (1 - face) * (0.3 if faint else 0.75)
    square = patches.Rectangle(
        (x + 0.04, y + 0.04), 0.92, 0.92, facecolor=face, edgecolor=LINE, linewidth=0.5, hatch=hatch
    )
    axes.add_patch(square)


def _frame(axes, stop: float, bottom: float, top: float, title: str, start: float = 0) -> None:
    axes.set_xlim(start - 0.1, stop + 0.1)
    axes.set_ylim(bottom, top)
    axes.set_aspect("equal")
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _legend(
    figure, batch: int, others: Mapping[str, tuple[str, str]], marks: Mapping[str, str]
) -> None:
    """Draw the legend at the bottom: the samples' colours, other cells, and marks."""
    line = matplotlib_module("lines").Line2D
    patch = matplotlib_module("patches").Patch
    handles = [patch(facecolor=_colour(s), alpha=0.75, label=f"sample {s}") for s in range(batch)]
    handles += [
        patch(facecolor=face, hatch=hatch, edgecolor=LINE, label=label)
        for label, (face, hatch) in others.items()
    ]
    handles += [
        line([], [], linestyle="", marker=marker, color="black", markersize=3.5, label=label)
        for label, marker in marks.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize="small")
