"""The command line. Heavy imports wait until a command needs them: `--help` is quick."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from emsjax import batch_run


class OneLineErrorParser(argparse.ArgumentParser):
    """Reports a bad argument as every other error is reported: in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"emsjax: error: {message}\n")


def positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


positive_int.__name__ = "integer"  # argparse: "invalid integer value"


def own_version() -> str:
    try:
        return version("emsjax")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "(not installed)"


def make_parser() -> argparse.ArgumentParser:
    parser = OneLineErrorParser(
        prog="emsjax", description="Lossless batched speculative decoding in JAX, unpadded."
    )
    parser.add_argument("--version", action="version", version=f"emsjax {own_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "demo",
        help="complete 8 prompts with the embedded model, plainly and speculatively",
        description="Complete 8 ragged prompts with the embedded model by plain decoding and by "
        "speculative decoding, and compare. Exit code 1 unless the tokens are identical.",
    )
    add_generate_arguments(
        commands.add_parser(
            "generate",
            help="complete the prompts of a JSONL file",
            description="Complete the prompts of a JSONL file. Results are appended as they "
            "finish; a run that was stopped goes on where it was when started again.",
        )
    )
    return parser


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="DIR_OR_ID", help="local folder or Hugging Face id")
    add("--revision", help="branch, tag or commit of a Hugging Face id")
    add("--dtype", choices=batch_run.DTYPES, default="bfloat16", help="default: %(default)s")
    add(
        "--input",
        required=True,
        type=Path,
        help='JSON Lines: objects with a unique "id" (string or integer) and "prompt"',
    )
    add("--output", required=True, type=Path, help="JSON Lines: id, text, tokens, finish_reason")
    add(
        "--prompt-template",
        metavar="TEMPLATE",
        help="makes the prompt from fields of the input, as in '{article} TL;DR: '",
    )
    add(
        "--max-prompt-tokens",
        type=positive_int,
        metavar="N",
        help="cut longer prompts to N tokens, special tokens such as a start token included",
    )
    add(
        "--keep",
        choices=("first", "last"),
        default="first",
        help="which end of a cut prompt stays (default: %(default)s)",
    )
    add("--max-new-tokens", type=positive_int, default=128, metavar="N", help="default: 128")
    add("--batch-size", type=positive_int, default=8, metavar="N", help="default: 8")
    add("--drafter", choices=("none", "prompt-lookup"), default="none", help="default: none")
    add("--match-length", type=positive_int, metavar="N", help="prompt lookup (default: 2)")
    add("--max-draft-tokens", type=positive_int, metavar="N", help="prompt lookup (default: 7)")
    add("--search-generated", action="store_true", help="prompt lookup also in the completion")
    add("--seed", type=int, default=0, help="of the random keys, one per record (default: 0)")


def run_options(arguments: argparse.Namespace) -> batch_run.RunOptions:
    """The options that change results, from the parsed arguments.

    Raises:
        ValueError: an option of prompt lookup without prompt lookup, or a path
            as the model that is no folder.
    """
    given = {name: getattr(arguments, name) for name in batch_run.RunOptions.__dataclass_fields__}
    if given["drafter"] == "none":
        for name in ("match_length", "max_draft_tokens", "search_generated"):
            if given[name]:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} is an option of --drafter prompt-lookup")
    else:
        given["match_length"] = given["match_length"] or 2
        given["max_draft_tokens"] = given["max_draft_tokens"] or 7
    folder = Path(given["model"])
    if folder.is_dir():
        given["model"] = str(folder.resolve())  # the same run from any working folder
    elif folder.is_absolute() or given["model"].startswith("."):
        raise ValueError(f"--model: {folder} is no folder")
    return batch_run.RunOptions(**given)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, 1 (demo: not identical), 2 (bad input) or 130."""
    parsed = make_parser().parse_args(arguments)
    # Torch is not needed here; transformers would advise to install it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        if parsed.command == "demo":
            from emsjax.demo import demo

            return demo.run(Console())
        batch_run.run(run_options(parsed), parsed.input, parsed.output, Console(stderr=True))
    except (ValueError, OSError, ImportError) as error:
        print("emsjax: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("emsjax: interrupted; start it again to go on", file=sys.stderr)
        return 130
    return 0
