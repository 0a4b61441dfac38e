"""Drafters for any target, trained to predict its tokens.

A draft model is pruned from the target; EAGLE-3 and block drafters read its hidden states.
"""

from emsjax.distillation.block import BlockStudent
from emsjax.distillation.checkpoints import Checkpoints, train
from emsjax.distillation.eagle3 import Eagle3Student
from emsjax.distillation.evaluation import evaluate
from emsjax.distillation.finite import NonFiniteError
from emsjax.distillation.generations import continuations
from emsjax.distillation.losses import LOSSES
from emsjax.distillation.pruning import prune
from emsjax.distillation.sequences import Batch, PackedSequences
from emsjax.distillation.student import Student
from emsjax.distillation.training import Trainer, make_optimizer

__all__ = [
    "LOSSES",
    "Batch",
    "BlockStudent",
    "Checkpoints",
    "Eagle3Student",
    "NonFiniteError",
    "PackedSequences",
    "Student",
    "Trainer",
    "continuations",
    "evaluate",
    "make_optimizer",
    "prune",
    "train",
]
