"""The options of `emsjax profile`. This module imports nothing heavy."""

import argparse
from pathlib import Path

from emsjax.benchmarks.options import (
    ACCEPTANCE_RATE,
    PROFILED_BATCH_SIZES,
    PROFILED_CONTEXT,
    PROFILED_DRAFT_TOKENS,
)
from emsjax.terminal.options import (
    add_model_arguments,
    add_number_formats,
    positive_int,
    positive_ints,
)


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, hidden_states=False)
    add_number_formats(parser)
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
        help=f"mean cached tokens per sample (default: {PROFILED_CONTEXT}, or as many as the "
        "models have positions for)",
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
        help="probability that a draft token is accepted, for the table of draft lengths by batch "
        "size (default: %(default)s)",
    )
    add("--output", type=Path, metavar="FILE", help="also write the profile to this JSON file")
    add("--commit", help="commit of the measured code (default: the checkout's)")
