"""The options of `emsjax eval`. This module imports nothing heavy."""

import argparse
from pathlib import Path

from emsjax.cli.generate_arguments import DRAFTER_OPTIONS
from emsjax.terminal.options import (
    add_min_confidence,
    add_model_arguments,
    add_numerics,
    add_quantize,
    count,
    names,
    positive_int,
)


def add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_quantize(parser)
    add_numerics(parser)
    add = parser.add_argument
    add("--tasks", required=True, type=names, metavar="TASK,TASK,...", help="names of tasks")
    add("--include-path", type=Path, metavar="DIR", help="a folder with tasks of your own")
    add("--num-fewshot", type=count, metavar="N", help="examples in each context")
    add("--limit", type=positive_int, metavar="N", help="only the first N documents of each task")
    add(
        "--drafter",
        choices=DRAFTER_OPTIONS,
        default="none",
        help="source of draft tokens for generated answers (default: %(default)s)",
    )
    add("--max-draft-tokens", type=positive_int, metavar="N", help="the longest draft")
    add_min_confidence(parser)
    add(
        "--batch-size",
        type=positive_int,
        metavar="N",
        help="sequences scored or generated at a time (default: up to 64)",
    )
    add("--apply-chat-template", action="store_true", help="write contexts as conversations")
    add("--output", type=Path, metavar="FILE", help="also write the results to this JSON file")
