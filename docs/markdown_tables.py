"""Tables in Markdown, and the cells in them."""

from collections.abc import Mapping, Sequence
from typing import Any

Results = Mapping[str, Any]


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; None is an empty cell."""
    cells = [head, ["---:"] * len(head), *rows]
    shown = lambda cell: "" if cell is None else str(cell).replace("|", r"\|")
    return "\n".join("| " + " | ".join(map(shown, row)) + " |" for row in cells)


def number(value: float | None, digits: int = 2) -> str | None:
    return None if value is None else f"{value:.{digits}f}"
