"""The options of `emsjax distil`. This module imports nothing heavy.

Options of single kinds of drafters have no default here: see `emsjax.cli.distil_kinds`.
"""

import argparse
from pathlib import Path

from emsjax.terminal.options import (
    DISTILLATION_LOSSES,
    DTYPES,
    count,
    loss_weights,
    positive_int,
    seed,
    token_ids,
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
        help="folder for the drafter: a new one, or that of an interrupted run",
    )
    add(
        "--kind",
        choices=("draft-model", "eagle3", "block"),
        default="draft-model",
        help="a small model, or a network that reads the target's hidden states and drafts tokens "
        "one by one (EAGLE-3) or as a block (DFlash, DSpark) (default: %(default)s)",
    )
    _add_model_options(parser)
    _add_feature_options(parser)
    add(
        "--compare-with",
        metavar="DIR_OR_ID",
        help="a draft model that is evaluated beside the result",
    )
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


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of draft models."""
    add = parser.add_argument
    number = {"type": positive_int, "metavar": "N"}
    add(
        "--layers",
        **number,
        help="number of layers: of a draft model, those cut out of the target; of a block drafter "
        "(default: 2)",
    )
    add(
        "--width",
        **number,
        help="hidden size of a draft model: a multiple of the target's width for each K/V head",
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
        help="weights cut out of the target, which are better in short runs, or random ones of the "
        "same sizes, which may be better in long runs (default: pruned)",
    )
    add(
        "--draft-model",
        metavar="DIR_OR_ID",
        help="train this model, not a part of the target",
    )
    add("--draft-revision", metavar="REVISION", help="branch, tag or commit of the draft model")


def _add_feature_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of drafters that read the target's hidden states."""
    add = parser.add_argument
    number = {"type": positive_int, "metavar": "N"}
    add(
        "--taps",
        type=token_ids,
        metavar="N,...",
        help="eagle3, block: layers of the target whose hidden states are read; 0: the embeddings "
        "(default: three, or five, from low to high)",
    )
    add(
        "--draft-vocab-size",
        **number,
        help="eagle3, block: tokens that can be drafted, the most frequent ones (default: 32000 "
        "for eagle3, all for block)",
    )
    add(
        "--decay",
        type=float,
        metavar="SHARE",
        help="eagle3, block: weight of each draft position relative to the one before "
        "(default: 0.8)",
    )
    add(
        "--share-head",
        action="store_const",
        const=True,
        help="eagle3: use the target's head, which is not trained, for all tokens: the folder of a "
        "small target's drafter stays small",
    )
    add("--unroll", **number, help="eagle3: steps that training unrolls (default: 7)")
    add("--block-size", **number, help="block: tokens of a block (default: 8)")
    add(
        "--anchors",
        **number,
        help="block: blocks per sequence and step (default: as many as its tokens fill)",
    )
    add(
        "--markov-rank",
        **number,
        help="block: numbers per token of a sequential head, as in DSpark (default: no such head)",
    )
    add(
        "--markov-head",
        choices=("vanilla", "gated", "rnn"),
        help="block: type of that head (default: vanilla)",
    )
    add(
        "--confidence-head",
        action="store_const",
        const=True,
        help="block: train a head that predicts which drafts are accepted",
    )
