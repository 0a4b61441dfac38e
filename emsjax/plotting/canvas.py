"""Access to matplotlib, which may be missing, and to the file formats that it can write."""

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
    """An empty figure of this size in inches, without global state."""
    return matplotlib_module("figure").Figure(figsize=(width, height), layout="constrained")


def check_format(path: Path) -> None:
    """Check that a figure can be saved under this name.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: an unknown file format.
    """
    known = matplotlib_module("backend_bases").FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ValueError(f"{path} must end in one of .{', .'.join(sorted(known))}")
