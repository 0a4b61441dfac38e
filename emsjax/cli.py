"""The command line. Heavy imports wait until a command needs them: `--help` is quick."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from emsjax import batch_run

DRAFTER_OPTIONS = {  # each drafter's own, and their defaults
    "none": {},
    "prompt-lookup": {"match_length": 2, "max_draft_tokens": 7, "search_generated": False},
    "model": {"draft_model": None, "draft_revision": None, "max_draft_tokens": 4},
}


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


def flag(name: str) -> str:
    """The option whose value is stored under this name."""
    return "--" + name.replace("_", "-")


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
        "speculative decoding, greedily and by sampling, and compare. Exit code 1 unless the "
        "tokens are identical.",
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
    add(
        "--output",
        required=True,
        type=Path,
        help="JSON Lines: id, text, tokens, mean_logprob (higher is likelier), finish_reason",
    )
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
    add(
        "--num-sequences",
        type=positive_int,
        default=1,
        metavar="N",
        help='sequences of each record, one output line each, with "sequence" (default: 1)',
    )
    add(
        "--batch-size",
        type=positive_int,
        default=8,
        metavar="N",
        help="sequences decoded at once (default: 8)",
    )
    add("--drafter", choices=DRAFTER_OPTIONS, default="none", help="default: none")
    add(
        "--max-draft-tokens",
        type=positive_int,
        metavar="N",
        help="default: 7 for prompt lookup, 4 for a model",
    )
    add("--match-length", type=positive_int, metavar="N", help="prompt lookup (default: 2)")
    add("--search-generated", action="store_true", help="prompt lookup also in the completion")
    add("--draft-model", metavar="DIR_OR_ID", help="local folder or Hugging Face id")
    add("--draft-revision", metavar="REVISION", help="branch, tag or commit of the draft model")
    add("--temperature", type=float, default=0.0, help="default: 0, greedy")
    add("--top-k", type=int, default=0, metavar="N", help="default: 0, all tokens")
    add("--top-p", type=float, default=1.0, metavar="P", help="default: 1, all tokens")
    add("--seed", type=int, default=0, help="of the random keys, one per sequence (default: 0)")


def run_options(arguments: argparse.Namespace) -> batch_run.RunOptions:
    """The options that change results, from the parsed arguments.

    Raises:
        ValueError: options that contradict each other, sampling values out of
            range, or a path as a model that is no folder.
    """
    given = {name: getattr(arguments, name) for name in batch_run.RunOptions.__dataclass_fields__}
    complete_drafter_options(given)
    check_sampling(given)
    for name in ("model", "draft_model"):
        if given[name] is not None:
            given[name] = resolve_model(flag(name), given[name])
    return batch_run.RunOptions(**given)


def complete_drafter_options(given: dict[str, Any]) -> None:
    """Set the drafter's own options that were not given.

    Raises:
        ValueError: an option of another drafter, or no draft model.
    """
    own = DRAFTER_OPTIONS[given["drafter"]]
    for name in (name for options in DRAFTER_OPTIONS.values() for name in options):
        if given[name] and name not in own:
            owners = [drafter for drafter, options in DRAFTER_OPTIONS.items() if name in options]
            raise ValueError(f"{flag(name)} is an option of --drafter {' or '.join(owners)}")
    for name, default in own.items():
        given[name] = given[name] or default
    if given["drafter"] == "model" and given["draft_model"] is None:
        raise ValueError("--drafter model needs --draft-model")


def check_sampling(given: dict[str, Any]) -> None:
    from emsjax.sampling import Sampling

    for name in ("temperature", "top_k", "top_p"):
        try:
            Sampling(**{name: given[name]}).expand(1)
        except ValueError as error:
            raise ValueError(str(error).replace(f"sampling.{name}", flag(name))) from error
    for name, off in (("top_k", 0), ("top_p", 1)):
        if given["temperature"] == 0 and given[name] != off:
            raise ValueError(f"{flag(name)} needs a --temperature above 0: greedy has no choice")


def resolve_model(option: str, folder_or_id: str) -> str:
    """A folder as an absolute path: the same run from any working folder."""
    folder = Path(folder_or_id)
    if folder.is_dir():
        return str(folder.resolve())
    if folder.is_absolute() or folder_or_id.startswith("."):
        raise ValueError(f"{option}: {folder} is no folder")
    return folder_or_id


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
    except (ValueError, OverflowError, OSError, ImportError) as error:
        print("emsjax: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("emsjax: interrupted; start it again to go on", file=sys.stderr)
        return 130
    return 0
