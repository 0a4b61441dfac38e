"""The options of the command line, and what their values look like. No heavy imports."""

import argparse
import dataclasses
import re
from pathlib import Path
from typing import NoReturn

from emsjax.cli.bench_arguments import (
    add_draft_length_arguments,
    add_ems_sd_arguments,
    add_peers_arguments,
    add_profile_arguments,
)
from emsjax.cli.distil_arguments import add_distil_arguments
from emsjax.cli.types import DEFAULT_DTYPE, DTYPES, positive_int

POLICIES = ("auto", "bass", "goodput")  # draft lengths beside fixed ones
OWN_POLICY = {"draft_length": "auto", "profile": None}  # of whatever drafts
DRAFTER_OPTIONS = {  # each drafter's own, and their defaults
    "none": {},
    "prompt-lookup": {
        "match_length": 2,
        "max_draft_tokens": 7,
        "search_generated": False,
        **OWN_POLICY,
    },
    "model": {
        "draft_model": None,
        "draft_revision": None,
        "max_draft_tokens": None,  # the policy's
        **OWN_POLICY,
    },
}


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Every option of `emsjax generate` that changes results: kept beside the output."""

    model: str
    revision: str | None
    dtype: str
    drafter: str
    draft_length: str | None
    max_draft_tokens: int | None
    match_length: int | None
    search_generated: bool
    draft_model: str | None
    draft_revision: str | None
    temperature: float
    top_k: int
    top_p: float
    num_sequences: int
    batch_size: int
    max_new_tokens: int
    prompt_template: str | None
    max_prompt_tokens: int | None
    keep: str
    seed: int


class OneLineErrorParser(argparse.ArgumentParser):
    """Reports a bad argument as every other error is reported: in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"emsjax: error: {message}\n")


def draft_length(text: str) -> str:
    """A policy's name, or a fixed length as it is usually written."""
    if text in POLICIES:
        return text
    if not re.fullmatch(r"\d+", text, re.ASCII):
        choices = ", ".join(POLICIES)
        raise argparse.ArgumentTypeError(
            f"must be {choices} or an integer of at least 0, not {text!r}"
        )
    return str(int(text))


def flag(name: str) -> str:
    """The option whose value is stored under this name."""
    return "--" + name.replace("_", "-")


def make_parser(version: str) -> argparse.ArgumentParser:
    parser = OneLineErrorParser(
        prog="emsjax", description="Lossless batched speculative decoding in JAX, unpadded."
    )
    parser.add_argument("--version", action="version", version=f"emsjax {version}")
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
    profile = commands.add_parser(
        "profile",
        help="measure what decoding steps take here, for better draft lengths",
        description="Measure what decoding and drafting steps of these models take on this "
        "device, and keep it for `emsjax generate`. Of the models just the configurations "
        "are read.",
    )
    add_model_arguments(profile)
    add_profile_arguments(profile)
    add_distil_arguments(
        commands.add_parser(
            "distil",
            help="train a draft model for a target",
            description="Train a small model to say what a target says, on your texts and on the "
            "target's own continuations of them, and show what it gains. A run that was stopped "
            "goes on where it was when started again, to the same result.",
        )
    )
    bench = commands.add_parser("bench", help="compare methods of decoding on this device")
    benchmarks = bench.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK")
    add_draft_length_arguments(
        benchmarks.add_parser(
            "draft-length",
            help="draft-length policies beside every fixed length and plain decoding",
            description="Speed of draft-length policies beside every fixed length and plain "
            "decoding. Exit code 1 unless all tokens are identical.",
        )
    )
    add_ems_sd_arguments(
        benchmarks.add_parser(
            "ems-sd",
            help="plain decoding, padding, its ablations and EMS-SD, as in the paper",
            description="Speed of plain decoding, of speculative decoding with padding, with "
            "either half of it, and without, by batch size. Exit code 1 unless all tokens are "
            "identical.",
        )
    )
    add_peers_arguments(
        benchmarks.add_parser(
            "peers",
            help="this library beside transformers",
            description="Speed of plain and speculative greedy decoding here and in transformers, "
            "with the same weights and prompts. Without torch the figures here stand alone. Exit "
            "code 1 unless all tokens are identical.",
        )
    )
    return parser


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="DIR_OR_ID", help="local folder or Hugging Face id")
    add("--revision", help="branch, tag or commit of a Hugging Face id")
    add("--dtype", choices=DTYPES, help=DEFAULT_DTYPE)
    add("--draft-model", metavar="DIR_OR_ID", help="local folder or Hugging Face id")
    add("--draft-revision", metavar="REVISION", help="branch, tag or commit of the draft model")


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add = parser.add_argument
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
        help="JSON Lines: id, text, tokens, mean_logprob (higher is likelier), finish_reason; "
        "truncated where the prompt was cut",
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
        "--draft-length",
        type=draft_length,
        metavar="LENGTH",
        help="tokens drafted in a step: auto, bass, goodput or a number; auto is goodput where "
        "`emsjax profile` has measured these models on this device, otherwise bass "
        "(default: auto)",
    )
    add("--profile", type=Path, metavar="FILE", help="profile to use, not the stored one")
    add(
        "--max-draft-tokens",
        type=positive_int,
        metavar="N",
        help="default: a fixed --draft-length, otherwise 7 for prompt lookup, the policy's limit "
        "for a model",
    )
    add("--match-length", type=positive_int, metavar="N", help="prompt lookup (default: 2)")
    add("--search-generated", action="store_true", help="prompt lookup also in the completion")
    add("--temperature", type=float, default=0.0, help="default: 0, greedy")
    add("--top-k", type=int, default=0, metavar="N", help="default: 0, all tokens")
    add("--top-p", type=float, default=1.0, metavar="P", help="default: 1, all tokens")
    add("--seed", type=int, default=0, help="of the random keys, one per sequence (default: 0)")
