"""The command line. Heavy imports wait until a command needs them: `--help` is quick."""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Callable, Sequence

from rich.console import Console

from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.cli.distil_arguments import add_distil_arguments
from emsjax.cli.evaluate_arguments import add_evaluate_arguments
from emsjax.cli.generate_arguments import add_generate_arguments, run_options
from emsjax.cli.profile_arguments import add_profile_arguments
from emsjax.terminal.options import OneLineErrorParser
from emsjax.terminal.reporting import exit_code, is_kept, own_version


@dataclasses.dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
        help: its line in the list of commands.
        description: the beginning of its own help text.
        run: runs it, given the parsed options and the command line; returns the exit code.
        add_options: adds its options to a parser.
        resumes: an interrupted run continues when it is started again.
    """

    help: str
    description: str
    run: Callable[[argparse.Namespace, str], int]
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    resumes: bool = False


def run_demo(options: argparse.Namespace, command: str) -> int:
    from emsjax.demo import demo

    return demo.run(Console())


def run_generate(options: argparse.Namespace, command: str) -> int:
    checked = run_options(options)
    from emsjax.cli import generate, generate_ray
    from emsjax.cli.cluster import Cluster

    console = Console(stderr=True)
    files = generate.Files(options.input, options.output, options.profile, options.memory)
    if options.ray is None:
        return generate.run(checked, files, console)
    return generate_ray.run(checked, files, console, Cluster(options.ray, options.workers))


def run_profile(options: argparse.Namespace, command: str) -> int:
    if options.draft_revision is not None and options.draft_model is None:
        raise ValueError("--draft-revision needs --draft-model")
    from emsjax.cli import profile
    from emsjax.terminal.models import resolve_models

    resolve_models(vars(options))
    profile.run(options, command)
    return 0


def run_distil(options: argparse.Namespace, command: str) -> int:
    from emsjax.cli import distil
    from emsjax.terminal.models import resolve_models

    resolve_models(vars(options))
    return distil.distil(options, command)


def run_evaluate(options: argparse.Namespace, command: str) -> int:
    if options.draft_revision is not None and options.draft_model is None:
        raise ValueError("--draft-revision needs --draft-model")
    from emsjax.cli import evaluate
    from emsjax.terminal.models import resolve_models

    resolve_models(vars(options))
    evaluate.run(options, command)
    return 0


COMMANDS = {
    "demo": Command(
        help="complete 8 prompts with the embedded model, plainly and speculatively",
        description="Complete 8 prompts of different lengths with the embedded model by plain and "
        "by speculative decoding, greedily and by sampling, and compare. Exit code 1 unless the "
        "tokens are identical.",
        run=run_demo,
    ),
    "generate": Command(
        help="complete the prompts of a JSONL file",
        description="Complete the prompts of a JSONL file. Results are appended as they finish; "
        "an interrupted run continues when it is started again.",
        run=run_generate,
        add_options=add_generate_arguments,
        resumes=True,
    ),
    "eval": Command(
        help="evaluate a model on tasks of the lm-evaluation-harness",
        description="Evaluate a model on tasks of the lm-evaluation-harness, which the extra "
        "`eval` installs. Texts become tokens as in its backend for transformers.",
        run=run_evaluate,
        add_options=add_evaluate_arguments,
    ),
    "profile": Command(
        help="measure decoding steps on this device, for better draft lengths",
        description="Measure how long decoding and drafting steps of these models take on this "
        "device, and store the result for `emsjax generate`. Only the models' configurations are "
        "read; the shapes of `emsjax bench` have names, such as opt-6.7b, and need no files.",
        run=run_profile,
        add_options=add_profile_arguments,
    ),
    "distil": Command(
        help="train a drafter for a target: a draft model, EAGLE-3 or a block drafter",
        description="Train a drafter to predict a target's tokens, on your texts and on the "
        "target's own continuations of them, and measure the speed-up. An interrupted run "
        "continues when it is started again, and ends with the same result.",
        run=run_distil,
        add_options=add_distil_arguments,
        resumes=True,
    ),
}


def make_parser(version: str) -> argparse.ArgumentParser:
    parser = OneLineErrorParser(
        prog="emsjax", description="Lossless batched speculative decoding in JAX, unpadded."
    )
    parser.add_argument("--version", action="version", version=f"emsjax {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.help, description=command.description)
        command.add_options(added)
        added.set_defaults(run=command.run, resumes=command.resumes)
    bench = commands.add_parser("bench", help="run a benchmark on this device")
    benchmarks = bench.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    for name, benchmark in BENCHMARKS.items():
        added = benchmarks.add_parser(name, help=benchmark.help, description=benchmark.description)
        benchmark.add_options(added)
        added.set_defaults(run=benchmark.run, resumes=benchmark.resumes)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    The exit code is 0, 1 (it ran, and its results are not as they should be), 2 (bad input),
    130 (interrupted) or 143 (terminated).
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = make_parser(own_version()).parse_args(arguments)
    # These two are not options, and must not be stored among them.
    values = vars(options)
    run, resumes = values.pop("run"), values.pop("resumes") and is_kept(values.get("output"))
    command = shlex.join(["emsjax", *arguments])
    return exit_code(lambda: run(options, command), resumes=resumes)
