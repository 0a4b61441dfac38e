"""Figures in the README and in pages, written by `python docs/measured.py`.

A figure lies between two comments, `<!-- measured: NAME -->` and `<!-- end -->`, and is made of
results of `emsjax bench all` alone. All results of one figure are of one commit and one kind of
device: they come from the first folder that has them all. Figures of several devices have a folder
of their own; the files of the last one are of earlier commits.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from figures import FIGURES
from read_results import Read

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks"
SOURCES = (
    (RESULTS / "h200", ""),
    (RESULTS / "h200-two-devices", ""),
    (RESULTS, "h200-"),
)
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"(<!-- measured: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
WIDTH = 110


def wrapped(part: str) -> str:
    """A paragraph in lines; tables and code stay as they are."""
    if part.startswith(("|", "```")):
        return part
    lines, indent = [""], "  " * part.startswith("- ")
    for word in part.split(" "):
        if len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append(indent)
        lines[-1] += f" {word}" if lines[-1].strip() else word
    return "\n".join(lines)


def measured(page: str, sources: Sequence[tuple[Path, str]] = SOURCES) -> str:
    """A page with its figures made of results.

    Args:
        sources: the arguments of `Read`.

    Raises:
        FileNotFoundError: no source has all results of a figure.
        ValueError: results of a figure do not belong together.
    """

    def figure(block: re.Match) -> str:
        begin, name, end = block.groups()
        return f"{begin}\n" + "\n\n".join(map(wrapped, parts(name, sources))) + f"\n\n{end}"

    return BLOCK.sub(figure, page)


def parts(name: str, sources: Sequence[tuple[Path, str]]) -> list[str]:
    """What a figure consists of, made of the first source that has all its results."""
    missing = []
    for source in sources:
        try:
            return FIGURES[name](Read(*source))
        except FileNotFoundError as error:
            missing.append(error.filename)
    raise FileNotFoundError(f"the figure {name!r} needs one of {', '.join(map(str, missing))}")


if __name__ == "__main__":
    for path in PAGES:
        before = path.read_text()
        after = measured(before)
        if after != before:
            path.write_text(after)
            print(path.relative_to(ROOT))
