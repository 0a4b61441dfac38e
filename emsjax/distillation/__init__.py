"""A draft model for any target, pruned from it and trained to predict its tokens."""

from emsjax.distillation.checkpoints import Checkpoints, train
from emsjax.distillation.evaluation import evaluate
from emsjax.distillation.finite import NonFiniteError
from emsjax.distillation.generations import continuations
from emsjax.distillation.losses import LOSSES
from emsjax.distillation.pruning import prune
from emsjax.distillation.sequences import Batch, PackedSequences
from emsjax.distillation.training import Trainer, make_optimizer

__all__ = [
    "LOSSES",
    "Batch",
    "Checkpoints",
    "NonFiniteError",
    "PackedSequences",
    "Trainer",
    "continuations",
    "evaluate",
    "make_optimizer",
    "prune",
    "train",
]
