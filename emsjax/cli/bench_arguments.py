"""The options of `emsjax profile` and `emsjax bench`. No heavy imports."""

import argparse
from pathlib import Path

from emsjax.cli.types import (
    DEFAULT_DTYPE,
    DTYPES,
    names,
    positive_float,
    positive_int,
    positive_ints,
)

# What `emsjax profile` measures if nothing else is asked for.
PROFILED_BATCH_SIZES, PROFILED_DRAFT_TOKENS, ACCEPTANCE_RATE = (1, 8, 64), 16, 0.8
PROFILED_CONTEXT = 900  # or as much as the models have room for
SHAPES = "opt-125m, opt-1.3b, opt-2.7b, opt-6.7b, opt-13b or opt-30b"  # for help texts


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--batch-sizes",
        type=positive_ints,
        default=PROFILED_BATCH_SIZES,
        metavar="N,N,...",
        help="default: 1,8,64",
    )
    add(
        "--context",
        type=positive_int,
        metavar="N",
        help=f"mean cached tokens of a sample (default: {PROFILED_CONTEXT}, or what the models "
        "have room for)",
    )
    add(
        "--max-draft-tokens",
        type=positive_int,
        default=PROFILED_DRAFT_TOKENS,
        metavar="N",
        help="longest draft to measure (default: %(default)s)",
    )
    add(
        "--acceptance-rate",
        type=float,
        default=ACCEPTANCE_RATE,
        metavar="RATE",
        help="probability that a draft token stands, for the table of lengths by batch size "
        "(default: %(default)s)",
    )
    add("--output", type=Path, metavar="FILE", help="also write the profile to this JSON file")


def add_draft_length_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--shape",
        default="embedded",
        help="what is decoded: embedded, the models that come with the library, or a model shape "
        f"({SHAPES}) with random weights and scripted drafts (default: %(default)s)",
    )
    add("--draft-shape", help="of the draft model beside a model shape (default: opt-125m)")
    add("--batch-sizes", type=positive_ints, metavar="N,N,...", help="default: the shape's own")
    add("--workloads", type=names, metavar="NAME,NAME,...", help="default: all of the shape's")
    add(
        "--max-draft-tokens",
        type=positive_int,
        default=PROFILED_DRAFT_TOKENS,
        metavar="N",
        help="longest fixed length (default: %(default)s)",
    )
    add("--max-new-tokens", type=positive_int, metavar="N", help="default: the workload's own")
    add(
        "--draws",
        type=positive_int,
        metavar="N",
        help="batches with acceptance of their own behind each figure (default: enough for 64 "
        "sequences, 2 to 16)",
    )
    add(
        "--profile",
        type=Path,
        metavar="FILE",
        help="from `emsjax profile` (default: the stored one; without one it is measured first)",
    )
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="JSON file that grows with each result; a stopped run goes on where it was",
    )
    add_result_arguments(parser)


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--plot", type=Path, metavar="FILE", help="figure, as PNG, PDF or SVG; needs matplotlib")
    add_commit_argument(parser)


def add_commit_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--commit", help="of the measured code (default: the checkout's)")


def add_subject_arguments(parser: argparse.ArgumentParser) -> None:
    """What is decoded, how often, and where the results go."""
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--shape",
        help=f"{SHAPES}: a model of random weights that says a known text",
    )
    what.add_argument(
        "--model", metavar="DIR_OR_ID", help="local folder or Hugging Face id; needs --data"
    )
    add(
        "--data",
        type=Path,
        metavar="FILE",
        help='JSON Lines: objects with "id" and the template\'s',
    )
    add(
        "--prompt-template",
        default="{article} TL;DR: ",
        metavar="TEXT",
        help="a prompt, of a record's fields (default: %(default)r)",
    )
    add(
        "--max-prompt-tokens",
        type=positive_int,
        default=1919,
        metavar="N",
        help="longer prompts keep their last N tokens (default: %(default)s)",
    )
    add("--revision", help="branch, tag or commit of --model")
    add("--draft-model", metavar="DIR_OR_ID", help="beside --model")
    add("--draft-revision", metavar="REVISION", help="branch, tag or commit of --draft-model")
    add("--dtype", choices=DTYPES, help=f"of --model; {DEFAULT_DTYPE}")
    add("--draft-shape", help="of the draft model beside --shape (default: opt-125m)")
    add("--max-new-tokens", type=positive_int, default=128, metavar="N", help="default: 128")
    add(
        "--repeats",
        type=positive_int,
        default=3,
        metavar="N",
        help="runs of each method (default: %(default)s)",
    )
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="JSON file that grows with each batch size; a stopped run goes on where it was",
    )


def add_peers_arguments(parser: argparse.ArgumentParser) -> None:
    add_subject_arguments(parser)
    parser.add_argument(
        "--batch-sizes", type=positive_ints, metavar="N,N,...", help="default: 1,8,24"
    )
    add_commit_argument(parser)


def add_ems_sd_arguments(parser: argparse.ArgumentParser) -> None:
    add_subject_arguments(parser)
    add = parser.add_argument
    add("--max-prompts", type=positive_int, default=480, metavar="N", help="default: %(default)s")
    add(
        "--draft",
        choices=("llma", "draft-model"),
        default="llma",
        help="what drafts and how often it stands: copies from the prompt, or a draft model "
        "(default: %(default)s)",
    )
    add("--draft-tokens", type=positive_int, metavar="N", help="default: 7 for llma, otherwise 4")
    add("--miss", type=float, metavar="P", help="llma: no copy is found (default: 0.3)")
    add("--whole", type=float, metavar="P", help="llma: a whole copy is right (default: 0.5)")
    add(
        "--decay",
        type=float,
        metavar="W",
        help="llma: otherwise a = 0, 1, ... of its tokens, with weights W^a (default: 0.6)",
    )
    add("--rate", type=float, metavar="P", help="draft-model: a token is right (default: 0.8)")
    add("--batch-sizes", type=positive_ints, metavar="N,N,...", help="default: 1 to 64")
    add("--methods", type=names, metavar="NAME,NAME,...", help="default: all")
    add(
        "--read-rate",
        type=positive_float,
        metavar="R",
        help="TB/s that the device can read, for the least time of a step; known of an H200",
    )
    add(
        "--matmul-rate",
        type=positive_float,
        metavar="R",
        help="TFLOP/s of its large products, with --read-rate",
    )
    add_result_arguments(parser)
