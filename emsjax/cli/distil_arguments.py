"""The options of `emsjax distil`. This module imports nothing heavy."""

import argparse
from pathlib import Path

from emsjax.terminal.options import (
    DISTILLATION_LOSSES,
    DTYPES,
    count,
    loss_weights,
    positive_int,
    seed,
)


def add_distil_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    number = {"type": positive_int, "metavar": "N"}
    shown = "default: %(default)s"
    add("--target", required=True, metavar="DIR_OR_ID", help="local folder or Hugging Face id")
    add("--revision", help="branch, tag or commit of a Hugging Face id")
    add(
        "--data",
        required=True,
        type=Path,
        metavar="FILE",
        help='JSON Lines: objects with "text", or the fields of --text-template',
    )
    add("--text-template", default="{text}", metavar="TEXT", help=shown)
    add(
        "--output",
        required=True,
        type=Path,
        metavar="DIR",
        help="folder for the draft model: a new one, or that of an interrupted run",
    )
    add("--layers", **number, help="number of layers of the draft model, cut out of the target")
    add(
        "--width",
        **number,
        help="its hidden size: a multiple of the target's head size",
    )
    add(
        "--embeddings",
        choices=("projected", "shared"),
        help="tables as narrow as the draft model, or the target's own with projections "
        "(default: projected)",
    )
    add(
        "--start",
        choices=("pruned", "random"),
        default="pruned",
        help="weights cut out of the target, which are better in short runs, or random ones of the "
        "same sizes, which may be better in long runs (default: %(default)s)",
    )
    add(
        "--draft-model",
        metavar="DIR_OR_ID",
        help="train this model, not a part of the target",
    )
    add("--draft-revision", metavar="REVISION", help="branch, tag or commit of the draft model")
    add("--steps", **number, default=5000, help=shown)
    add("--batch-size", **number, default=32, help="sequences per step (default: %(default)s)")
    add("--sequence-length", **number, default=1024, help="tokens (default: %(default)s)")
    add(
        "--losses",
        type=loss_weights,
        default=DISTILLATION_LOSSES,
        metavar="NAME=WEIGHT,...",
        help="weights of cross-entropy, forward-kl, reverse-kl, total-variation "
        "(default: forward-kl=0.9,cross-entropy=0.1)",
    )
    add("--learning-rate", type=float, default=1e-3, metavar="RATE", help="peak; " + shown)
    add("--warm-up-steps", **number, default=300, help=shown)
    add("--weight-decay", type=float, default=0.1, metavar="RATE", help=shown)
    add(
        "--dtype",
        choices=DTYPES,
        help="type to compute in; default: float32 on a CPU, bfloat16 on other devices",
    )
    add(
        "--generations",
        type=count,
        default=512,
        metavar="N",
        help="continuations of texts by the target, to train on as well (default: %(default)s)",
    )
    add(
        "--temperature",
        type=float,
        default=1.0,
        help="temperature of the continuations: choose the one that you will decode with; "
        "0: greedy (default: %(default)s)",
    )
    add(
        "--held-out",
        **number,
        default=16,
        help="texts to evaluate on, not trained on (default: %(default)s)",
    )
    add(
        "--held-out-data",
        type=Path,
        metavar="FILE",
        help="evaluate on the first texts of this file, and train on all of --data",
    )
    add("--max-new-tokens", **number, default=128, help="new tokens of each continuation; " + shown)
    add("--draft-tokens", **number, default=4, help="draft tokens per step in evaluation; " + shown)
    add("--checkpoint-every", **number, default=500, help="steps; " + shown)
    add("--seed", type=seed, default=0, help=shown)
