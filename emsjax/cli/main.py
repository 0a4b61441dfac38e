"""The command line. Heavy imports wait until a command needs them: `--help` is quick."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from emsjax.cli import generate as batch_run
from emsjax.cli.arguments import DRAFTER_OPTIONS, RunOptions, flag, make_parser


def own_version() -> str:
    try:
        return version("emsjax")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "(not installed)"


def run_options(arguments: argparse.Namespace) -> RunOptions:
    """The options that change results, from the parsed arguments.

    Raises:
        ValueError: options that contradict each other, sampling values out of
            range, or a path as a model that is no folder.
    """
    given = dict(vars(arguments))
    complete_drafter_options(given)
    check_sampling(given)
    if given["keep"] != "first" and given["max_prompt_tokens"] is None:
        raise ValueError("--keep needs --max-prompt-tokens: without it no prompt is cut")
    resolve_models(given)
    from emsjax.device import dtype_name

    given["dtype"] = dtype_name(given["dtype"])
    return RunOptions(**{name: given[name] for name in RunOptions.__dataclass_fields__})


def complete_drafter_options(given: dict[str, Any]) -> None:
    """Set the drafter's own options that were not given.

    Raises:
        ValueError: an option of another drafter, no draft model, or a profile for a policy that
            reads none.
    """
    own = DRAFTER_OPTIONS[given["drafter"]]
    for name in (name for options in DRAFTER_OPTIONS.values() for name in options):
        if given[name] and name not in own:
            owners = [drafter for drafter, options in DRAFTER_OPTIONS.items() if name in options]
            raise ValueError(f"{flag(name)} is an option of --drafter {' or '.join(owners)}")
    if (given["draft_length"] or "").isdecimal():  # room for just these
        given["max_draft_tokens"] = given["max_draft_tokens"] or max(1, int(given["draft_length"]))
    for name, default in own.items():
        given[name] = given[name] or default
    if given["drafter"] == "model" and given["draft_model"] is None:
        raise ValueError("--drafter model needs --draft-model")
    if given["profile"] is not None and given["draft_length"] not in ("auto", "goodput"):
        raise ValueError("--profile is an option of --draft-length auto or goodput")


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


def resolve_models(given: dict[str, Any]) -> None:
    """Folders as absolute paths: the same models from any working folder.

    Raises:
        ValueError: a path that is no folder.
    """
    for name in ("model", "draft_model", "target"):
        if given.get(name) is None:
            continue
        folder = Path(given[name])
        if folder.is_dir():
            given[name] = str(folder.resolve())
        elif folder.is_absolute() or given[name].startswith("."):
            raise ValueError(f"{flag(name)}: {folder} is no folder")


def run(parsed: argparse.Namespace, command: str) -> int:
    """Run one command; its exit code."""
    if parsed.command == "demo":
        from emsjax.demo import demo

        return demo.run(Console())
    if parsed.command == "generate":
        options = run_options(parsed)
        console = Console(stderr=True)
        batch_run.run(options, parsed.input, parsed.output, parsed.profile, console)
        return 0
    if parsed.command == "profile":
        if parsed.draft_revision is not None and parsed.draft_model is None:
            raise ValueError("--draft-revision needs --draft-model")
        resolve_models(vars(parsed))
        from emsjax.cli.profile import profile

        profile(parsed, command)
        return 0
    if parsed.command == "distil":
        resolve_models(vars(parsed))
        from emsjax.cli.distil import distil

        return distil(parsed, command)
    if parsed.benchmark == "ems-sd":
        from emsjax.cli.ems_sd import bench_ems_sd

        return bench_ems_sd(parsed, command)
    if parsed.benchmark == "peers":
        from emsjax.cli.peers import bench_peers

        return bench_peers(parsed, command)
    from emsjax.cli.draft_length import bench_draft_length

    return bench_draft_length(parsed, command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    The exit code is 0, 1 (demo, bench: tokens not identical), 2 (bad input) or 130 (interrupted).
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parsed = make_parser(own_version()).parse_args(arguments)
    # Torch is not needed here; transformers would advise to install it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        return run(parsed, shlex.join(["emsjax", *arguments]))
    except (ValueError, OverflowError, OSError, ImportError) as error:
        print("emsjax: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        goes_on = parsed.command in ("generate", "distil") or getattr(parsed, "benchmark", None)
        hint = "; start it again to go on" if goes_on and parsed.output else ""
        print(f"emsjax: interrupted{hint}", file=sys.stderr)
        return 130
