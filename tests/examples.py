"""Examples of the documentation: Python code to be run and commands to be parsed."""

import doctest
import importlib
import re
import shlex
import tomllib
from pathlib import Path
from types import CodeType
from typing import Any

from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.cli.generate_arguments import run_options
from emsjax.cli.main import make_parser

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
UNPARSED = {"pytest", "ray", "ruff", "sphinx-build"}  # other projects' programs


def blocks(path: Path, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of this language in a Markdown file, each with its first line's number."""
    text = path.read_text()
    found = re.finditer(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


def python_examples(path: Path) -> list[CodeType | doctest.DocTest]:
    """The Python blocks of a Markdown file: sessions where they show a prompt, otherwise code."""
    examples: list[CodeType | doctest.DocTest] = []
    for line, source in blocks(path, "python"):
        if source.startswith(">>>"):
            parsed = doctest.DocTestParser().get_doctest(source, {}, path.name, str(path), line - 1)
            examples.append(parsed)
        else:  # with the line numbers of the file
            examples.append(compile("\n" * (line - 1) + source, path, "exec"))
    return examples


def run(example: CodeType | doctest.DocTest, names: dict[str, Any]) -> None:
    """Run one example in a namespace shared by the examples of a page.

    Raises:
        AssertionError: a session's output differs. Errors of the example are passed on.
    """
    if isinstance(example, CodeType):
        exec(example, names)
        return
    report: list[str] = []
    example.globs = names
    doctest.DocTestRunner(verbose=False).run(example, out=report.append, clear_globs=False)
    assert not report, "".join(report)


def commands(path: Path) -> list[str]:
    """The commands of a file's shell blocks, except those with an ellipsis (`...`)."""
    source = "\n".join(text for _, text in blocks(path, "bash")).replace("\\\n", " ")
    lines = [" ".join(line.split(" #")[0].split()) for line in source.splitlines()]
    found = [command for line in lines for command in line.split(" && ") if command]
    return [command for command in found if not command.endswith("...")]


def check_command(command: str) -> None:
    """Check that the program's own parser accepts the command.

    Raises:
        SystemExit: the parser rejects the command.
        ValueError: the options are incompatible.
        AssertionError: the extra, the file or the program is unknown.
    """
    program, *arguments = shlex.split(command)
    if program == "emsjax":
        parsed = make_parser("").parse_args(arguments)
        if parsed.command == "generate":
            run_options(parsed)
    elif [program, *arguments[:1]] == ["python", "-m"]:
        importlib.import_module(arguments[1])
        for benchmark in BENCHMARKS.values():
            if arguments[1] == f"emsjax.benchmarks.{benchmark.module}":
                benchmark.make_parser().parse_args(arguments[2:])
    elif program == "python" and arguments[0].endswith(".py"):
        assert (ROOT / arguments[0]).is_file(), f"no such file: {command}"
    elif [program, *arguments[:1]] == ["pip", "install"]:
        extras = re.findall(r"\[(.*)\]", command)
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert set(extras) <= known["optional-dependencies"].keys(), f"no such extra: {command}"
    else:
        assert program in UNPARSED, f"unknown program: {command}"
