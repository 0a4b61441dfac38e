"""All benchmarks by name: `emsjax bench NAME`, and most as `python -m emsjax.benchmarks.NAME`.

A benchmark's module is imported when it runs, and has `run(options, command)`, which measures,
writes the results (see `emsjax.benchmarks.results`) and returns the exit code.
"""

import argparse
import dataclasses
import importlib
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from emsjax.benchmarks import options as of
from emsjax.benchmarks import subject_options as of_subject
from emsjax.terminal.options import OneLineErrorParser, names
from emsjax.terminal.reporting import exit_code, is_kept


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A benchmark.

    Attributes:
        module: the module below `emsjax.benchmarks` that runs it.
        help: its line in the list of benchmarks.
        description: the beginning of its own help text.
        add_options: adds its options to a parser.
        resumes: an interrupted run continues when it is started again.
    """

    module: str
    help: str
    description: str
    add_options: Callable[[argparse.ArgumentParser], None]
    resumes: bool = False

    def run(self, options: argparse.Namespace, command: str) -> int:
        """Measure; returns the exit code.

        Args:
            command: the command line, for the results.
        """
        from pallas_kernels.common.numerics import numerics  # imports JAX

        module = importlib.import_module(f"emsjax.benchmarks.{self.module}")
        with numerics(getattr(options, "numerics", None)):
            return module.run(argparse.Namespace(**vars(options), resumes=self.resumes), command)

    @property
    def program(self) -> list[str]:
        return ["python", "-m", f"emsjax.benchmarks.{self.module}"]

    def make_parser(self) -> argparse.ArgumentParser:
        """The parser of `python -m emsjax.benchmarks.NAME`."""
        parser = OneLineErrorParser(prog=" ".join(self.program), description=self.description)
        self.add_options(parser)
        return parser

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run `python -m emsjax.benchmarks.NAME`."""
        arguments = sys.argv[1:] if arguments is None else list(arguments)
        options = self.make_parser().parse_args(arguments)
        command = shlex.join([*self.program, *arguments])
        return exit_code(
            lambda: self.run(options, command),
            resumes=self.resumes and is_kept(options.output),
        )


def add_all_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--output", type=Path, metavar="DIR", required=True, help="folder, continued if it exists")
    add("--only", type=names, metavar="NAME,NAME,...", help="default: all")
    add("--commit", help="commit of the measured code (default: the checkout's)")


BENCHMARKS = {
    "all": Benchmark(
        "every",
        "every benchmark whose results are committed, at one commit on one machine",
        "Runs every benchmark whose results are committed, each in a process of its own, into one "
        "folder; on several GPUs as many at once as there are GPUs for. Exit code 0 if all of them "
        "end with it.",
        add_all_options,
        resumes=True,
    ),
    "draft-length": Benchmark(
        "draft_length_command",
        "draft-length policies beside every fixed length and plain decoding",
        "Speed of draft-length policies beside every fixed length and plain decoding. Exit code 1 "
        "unless all tokens are identical.",
        of.add_draft_length_options,
        resumes=True,
    ),
    "ems-sd": Benchmark(
        "ems_sd_command",
        "plain decoding, padding, its ablations and EMS-SD, as in the paper",
        "Speed by batch size of plain decoding, and of speculative decoding with padding, with "
        "either half of it, and without. Exit code 1 unless all tokens are identical.",
        of_subject.add_ems_sd_options,
        resumes=True,
    ),
    "drafters": Benchmark(
        "drafters",
        "draft sources, alone and mixed, on the same prompts",
        "Speed and acceptance by batch size of prompt lookup, suffix drafts and a draft model, "
        "alone and mixed. Exit code 1 unless all tokens are identical.",
        of_subject.add_drafters_options,
        resumes=True,
    ),
    "prompts": Benchmark(
        "prompts_command",
        "draft sources on the prompt files of Spec-Bench, SPEED-Bench and DeepSpec, by category",
        "Acceptance, latency and speed of draft sources by category and batch size, on a file of "
        "prompts with one or several turns. Exit code 1 unless all tokens are identical.",
        of_subject.add_prompts_options,
        resumes=True,
    ),
    "peers": Benchmark(
        "peers_command",
        "this library beside transformers, vLLM and SGLang",
        "Speed of plain and speculative greedy decoding here and in transformers, vLLM and SGLang, "
        "where they are installed, with the same weights and prompts. Exit code 1 unless all of "
        "them ran and all tokens are identical.",
        of_subject.add_peers_options,
        resumes=True,
    ),
    "step": Benchmark(
        "step",
        "a decoding step beside the least time that the device allows",
        "Time of a decoding step with random weights, beside its floor.",
        of.add_step_options,
    ),
    "refill": Benchmark(
        "refill",
        "slots that refill beside static batches",
        "Speed of slots that refill beside static batches, with a scripted model. Exit code 1 "
        "unless all tokens are those of the script.",
        of.add_refill_options,
    ),
    "groups": Benchmark(
        "groups",
        "all devices as groups of different sizes, each with a replica of the model",
        "Speed of all devices together at one batch size, as groups over each of which a replica "
        "of a scripted model is split. Exit code 1 unless all tokens are those of the script.",
        of.add_groups_options,
        resumes=True,
    ),
    "buckets": Benchmark(
        "buckets",
        "cost of rounding row counts up to compiled ones",
        "Cost of rounding row counts up to compiled ones, with random weights.",
        of.add_buckets_options,
    ),
    "overheads": Benchmark(
        "overheads",
        "cost of sampling, of drafting and of the loop itself",
        "Cost of sampling, of drafting and of the loop itself, with random weights.",
        of.add_overheads_options,
    ),
    "drafting": Benchmark(
        "drafting",
        "what each drafter adds to a decoding step",
        "Time of a decoding step with each drafter's work beside one whose drafts cost nothing, "
        "and of a tree beside a chain, with random weights.",
        of.add_drafting_options,
        resumes=True,
    ),
    "first-call": Benchmark(
        "first_call",
        "time of a process's first call, with and without a compilation cache",
        "Seconds of a process's first call, without and with a compilation cache.",
        of.add_first_call_options,
    ),
    "divergences": Benchmark(
        "divergences",
        "where speculative decoding in 16 bits differs from plain decoding",
        "Greedy decoding in bfloat16, speculative beside plain: every first difference, with the "
        "margin between the two tokens in float32. Exit code 1 if one is more than a near-tie.",
        of.add_divergences_options,
        resumes=True,
    ),
    "invariance": Benchmark(
        "invariance",
        "whether a row has the same bits whatever is computed beside it",
        "Computes the rows of one sequence in calls of every number of rows and in random batches, "
        "and compares bits in all layers. Exit code 1 if any differ with invariant numerics.",
        of.add_invariance_options,
        resumes=True,
    ),
    "quality": Benchmark(
        "quality",
        "what narrow weights and caches cost the embedded target, and what its copies draft",
        "Bits per byte of the embedded target on texts that it was not trained on, by the format "
        "of its weights and caches, and how many draft tokens of its narrow copies are accepted.",
        of.add_quality_options,
    ),
    "training": Benchmark(
        "training",
        "a training step beside a large matrix product",
        "Speed of a training step beside the rate of a large matrix product, with random weights.",
        of.add_training_options,
    ),
}
