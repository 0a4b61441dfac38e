"""The options of benchmarks that decode prompts with models that options name."""

import argparse
from pathlib import Path

from emsjax.benchmarks.acceptance import PROFILES
from emsjax.benchmarks.options import (
    DRAFT_SHAPE,
    SHAPES,
    SHOWN,
    add_batch_sizes,
    add_number,
    add_result_options,
)
from emsjax.terminal.options import (
    DEFAULT_DTYPE,
    DTYPES,
    add_number_formats,
    add_numerics,
    names,
    positive_float,
    positive_int,
    seed,
)


def add_subject_options(parser: argparse.ArgumentParser) -> None:
    """The models and prompts to decode, and how often."""
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--shape",
        help=f"{SHAPES}: random weights, scripted to output a known text",
    )
    what.add_argument(
        "--model", metavar="DIR_OR_ID", help="local folder or Hugging Face id; needs --data"
    )
    add_trained_options(parser)
    add("--draft-shape", help=f"draft model beside --shape (default: {DRAFT_SHAPE})")
    add("--max-new-tokens", type=positive_int, default=128, metavar="N", help="default: 128")
    add(
        "--repeats",
        type=positive_int,
        default=3,
        metavar="N",
        help=f"runs of each method ({SHOWN})",
    )


def add_trained_options(parser: argparse.ArgumentParser) -> None:
    """The prompts beside a trained `--model`, and its draft model."""
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        metavar="FILE",
        help='JSON Lines: objects with "id" and the fields of the template',
    )
    add(
        "--prompt-template",
        default="{article} TL;DR: ",
        metavar="TEXT",
        help="builds the prompt from a record's fields (default: %(default)r)",
    )
    add(
        "--max-prompt-tokens",
        type=positive_int,
        default=1919,
        metavar="N",
        help=f"longer prompts keep their last N tokens ({SHOWN})",
    )
    add_trained_models(parser)


def add_trained_models(parser: argparse.ArgumentParser) -> None:
    """What is beside a trained `--model`: its draft model, versions and dtype."""
    add = parser.add_argument
    add("--revision", help="branch, tag or commit of --model")
    add("--draft-model", metavar="DIR_OR_ID", help="draft model beside --model")
    add("--draft-revision", metavar="REVISION", help="branch, tag or commit of --draft-model")
    add("--dtype", choices=DTYPES, help=f"type of --model's weights; {DEFAULT_DTYPE}")


def add_drafters_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    what = "local folder or Hugging Face id; needs --data (default: the embedded pair)"
    add("--model", metavar="DIR_OR_ID", help=what)
    add_trained_options(parser)
    add_number_formats(parser)
    add_number(parser, "--max-prompts", 24)
    add_number(parser, "--max-new-tokens", 256)
    add_sources(parser)
    add_batch_sizes(parser, (1, 8, 24))
    add_number(parser, "--repeats", 5)
    add_result_options(parser, resumes=True)


def add_sources(parser: argparse.ArgumentParser) -> None:
    """The settings of draft sources: see `emsjax.benchmarks.drafters.sources`."""
    add = parser.add_argument
    add_number(parser, "--draft-tokens", 4, "limit of the draft model")
    shown = "time of a draft step relative to one of the target, for `mixed` (default: 0.1)"
    add("--draft-cost", type=positive_float, metavar="X", help=shown)
    shown = "written by `emsjax profile`: the costs for `mixed` instead"
    add("--profile", type=Path, metavar="FILE", help=shown)


def add_prompts_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    shown = 'JSON Lines: objects with "turns", a list of texts, as in Spec-Bench and SPEED-Bench'
    add("--data", type=Path, required=True, metavar="FILE", help=shown)
    shown = f"field whose values are the categories of the report ({SHOWN})"
    add("--group-by", default="category", metavar="FIELD", help=shown)
    shown = "only the first N questions of each category (default: all)"
    add("--per-category", type=positive_int, metavar="N", help=shown)
    shown = "local folder or Hugging Face id (default: the embedded pair)"
    add("--model", metavar="DIR_OR_ID", help=shown)
    add_trained_models(parser)
    shown = "longer prompts keep their last N tokens (default: as many as the model has room for)"
    add("--max-prompt-tokens", type=positive_int, metavar="N", help=shown)
    add_number_formats(parser)
    add_numerics(parser)
    add_number(parser, "--max-new-tokens", 256, "of each turn")
    shown = "of prompt-lookup, suffix, model and mixed (default: all that the models allow)"
    add("--drafters", type=names, metavar="NAME,NAME,...", help=shown)
    add_sources(parser)
    add("--temperature", type=float, default=0.0, metavar="X", help="default: 0, greedy")
    add("--seed", type=seed, default=0, metavar="N", help=f"of sampled tokens ({SHOWN})")
    add_batch_sizes(parser, (1, 8))
    add_number(parser, "--repeats", 3)
    add_result_options(parser, resumes=True, plot=True)


def add_ems_sd_options(parser: argparse.ArgumentParser) -> None:
    add_subject_options(parser)
    add = parser.add_argument
    add("--max-prompts", type=positive_int, default=480, metavar="N", help="default: %(default)s")
    add(
        "--draft",
        choices=("llma", "draft-model", "self"),
        default="llma",
        help="drafts and how often they are accepted: as copies from the prompt, as a draft "
        f"model's, or as those of the model's own copy in int4 ({SHOWN})",
    )
    limits = ", ".join(f"{one.max_draft_tokens} for {name}" for name, one in PROFILES.items())
    add("--draft-tokens", type=positive_int, metavar="N", help=f"default: {limits}")
    add(
        "--miss",
        type=float,
        metavar="P",
        help="llma: probability that nothing is drafted (default: 0.3)",
    )
    add(
        "--whole",
        type=float,
        metavar="P",
        help="llma: probability that all draft tokens are right (default: 0.5)",
    )
    add(
        "--decay",
        type=float,
        metavar="W",
        help="llma: otherwise the first a = 0, 1, ... are right, with weights W^a (default: 0.6)",
    )
    add(
        "--rate",
        type=float,
        metavar="P",
        help="draft-model, self: probability that a draft token is right (default: 0.8 and 0.98)",
    )
    add_batch_sizes(parser, shown="1 to 64")
    add_number_formats(parser)
    add_numerics(parser)
    add("--methods", type=names, metavar="NAME,NAME,...", help="default: all")
    add(
        "--read-rate",
        type=positive_float,
        metavar="R",
        help="TB/s that the device can read, for the least time of a step (default: known for an "
        "H200 only)",
    )
    add(
        "--matmul-rate",
        type=positive_float,
        metavar="R",
        help="TFLOP/s of large matrix products, with --read-rate",
    )
    add_result_options(parser, resumes=True, plot=True)


def add_peers_options(parser: argparse.ArgumentParser) -> None:
    add_subject_options(parser)
    shown = "of transformers, vllm and sglang (default: those that are installed)"
    parser.add_argument("--libraries", type=names, metavar="NAME,NAME,...", help=shown)
    add_batch_sizes(parser, shown="1,8,24")
    add_result_options(parser, resumes=True)
