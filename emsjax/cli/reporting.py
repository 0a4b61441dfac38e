"""What the commands share: what they print, and where they may write."""

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

WIDE = 200  # columns


def check_writable(name: str, path: Path | None) -> None:
    """Raises a ValueError, before the work, if this file could not be written after it."""
    if path is None:
        return
    new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"{name}: {path} cannot be written: {error.strerror}") from error
    if new:
        path.unlink()


def make_console() -> Console:
    """For results; where no screen limits it, tables are as wide as their cells."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDE)


def progress() -> Callable[[str], None]:
    """Prints lines beside the results, not among them."""
    console = Console(stderr=True)
    return lambda text: line(console, text)


def line(console: Console, text: str) -> None:
    """As it is: a path may hold brackets, and is not to be broken."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def make_table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, show_edge=False)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
