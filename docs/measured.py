"""Figures in the README and in pages, written by `python docs/measured.py`.

A figure lies between two comments, `<!-- measured: NAME -->` and `<!-- end -->`, and is made of
results of `emsjax bench all` alone. All results of one figure are of one commit and one kind of
device.
"""

import re
from pathlib import Path

from figures import FIGURES
from read_results import Read

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "h200"
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


def measured(page: str, folder: Path = FOLDER) -> str:
    """A page with its figures made of the results in a folder."""

    def figure(block: re.Match) -> str:
        begin, name, end = block.groups()
        return f"{begin}\n" + "\n\n".join(map(wrapped, FIGURES[name](Read(folder)))) + f"\n\n{end}"

    return BLOCK.sub(figure, page)


if __name__ == "__main__":
    for path in PAGES:
        before = path.read_text()
        after = measured(before)
        if after != before:
            path.write_text(after)
            print(path.relative_to(ROOT))
