"""What the figures share: a matplotlib that may be missing, and the formats it saves."""

from pathlib import Path

PANEL_INCHES = (4.2, 3.2)


def matplotlib_module(name: str):
    """matplotlib's module of this name.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        import matplotlib.backend_bases
        import matplotlib.figure
        import matplotlib.lines
        import matplotlib.patches
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'emsjax[plots]'") from error
    return getattr(matplotlib, name)


def new_figure(width: float, height: float):
    """An empty figure of so many inches, which leaves no global state."""
    return matplotlib_module("figure").Figure(figsize=(width, height), layout="constrained")


def check_format(path: Path) -> None:
    """Whether a figure can be saved under this name.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: an unknown kind of file.
    """
    known = matplotlib_module("backend_bases").FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ValueError(f"--plot: {path} must end in one of .{', .'.join(sorted(known))}")
