"""Tables in Markdown, and the cells in them."""

from collections.abc import Mapping, Sequence
from typing import Any

Results = Mapping[str, Any]


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; None is an empty cell."""
    cells = [head, ["---:"] * len(head), *rows]
    shown = lambda cell: "" if cell is None else str(cell).replace("|", r"\|")
    return "\n".join("| " + " | ".join(map(shown, row)) + " |" for row in cells)


def numbers_of(settings: Results) -> str:
    """The formats of a model's numbers, and its devices if there are several."""
    parts = [settings["dtype"]]
    if "quantize" in settings:
        parts.append(f"weights in {settings['quantize']}")
    if "kv_dtype" in settings:
        parts.append(f"keys and values in {settings['kv_dtype']}")
    if settings.get("numerics") == "invariant":
        parts.append("invariant numerics")
    if "tensor_parallel" in settings:
        parts.append(f"split over {settings['tensor_parallel']} devices")
    return ", ".join(parts)


def number(value: float | None, digits: int = 2) -> str | None:
    return None if value is None else f"{value:.{digits}f}"
