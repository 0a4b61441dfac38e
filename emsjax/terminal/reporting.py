"""What commands print, where they may write, and how they end."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.box import SIMPLE_HEAD, Box
from rich.console import Console
from rich.table import Table

from emsjax.configured import own_settings
from emsjax.interrupts import SIGNALS, Interruptible
from emsjax.records.writing import is_stream

WIDE = 200  # columns


def own_version() -> str:
    try:
        return version("emsjax")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "(not installed)"


def exit_code(work: Callable[[], int], *, resumes: bool) -> int:
    """Run a command; errors and interruptions become one line on stderr.

    Args:
        work: returns the exit code.
        resumes: an interrupted run continues when it is started again.

    Returns:
        What `work` returns, 1 (numbers that are not finite), 2 (bad input) or 130 (interrupted).
        After a signal a process that is a command ends here, with 130 or 143 (terminated).
    """
    # Torch is not needed here; transformers would advise to install it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    hint = "; start it again to go on" if resumes else ""
    with Interruptible(hint) as interruptible:
        try:
            with own_settings():
                return work()
        except (FloatingPointError, ValueError, OverflowError, OSError, ImportError) as error:
            if interruptible.received is None:
                print("emsjax: error:", " ".join(str(error).split()), file=sys.stderr)
                return 1 if isinstance(error, FloatingPointError) else 2
        except KeyboardInterrupt:
            pass
        finally:  # also if the exception was swallowed, or made into another one
            if interruptible.received is not None:
                interruptible.end()
    number = interruptible.received or signal.SIGINT
    print(f"emsjax: {SIGNALS[number]}{hint}", file=sys.stderr)
    return 128 + number


def is_kept(output: Path | None) -> bool:
    """Whether an interrupted run finds its results there when it is started again."""
    return output is not None and not is_stream(output)


def check_writable(name: str, path: Path | None) -> None:
    """Raise a ValueError if this file could not be written; called before the work starts."""
    if path is None:
        return
    new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"{name}: {path} cannot be written: {error.strerror}") from error
    if new:
        path.unlink()


def check_plot(path: Path | None) -> None:
    """Check that `--plot` can be written; called before the work starts.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: an unknown file format, or a file that cannot be written.
    """
    if path is None:
        return
    from emsjax.plotting import check_format

    try:
        check_format(path)
    except ValueError as error:
        raise ValueError(f"--plot: {error}") from error
    check_writable("--plot", path)


def make_console() -> Console:
    """A console for results; unless it is a terminal, tables are as wide as their cells."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDE)


def progress() -> Callable[[str], None]:
    """A function that prints lines to stderr, apart from the results."""
    console = Console(stderr=True)
    return lambda text: line(console, text)


def line(console: Console, text: str) -> None:
    """Print the text unchanged: a path may contain brackets and must not be wrapped."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def make_table(title: str | None, columns: Sequence[str], box: Box = SIMPLE_HEAD) -> Table:
    table = Table(title=title, box=box, show_edge=box is not SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
