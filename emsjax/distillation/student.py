"""What training needs to know about the drafter that it trains."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Key

from emsjax.decode.base import Drafter
from emsjax.distillation.sequences import Batch
from emsjax.models.decoder import Decoder


class Student:
    """A drafter in training: its parameters, the loss of a batch, and the drafter that results.

    The loop, checkpoints and the evaluation are the same for all students.

    Attributes:
        module: the parameters before training, in any dtype.
    """

    module: nnx.Module

    def check(self, weights: Mapping[str, float], target: Decoder | None) -> Decoder | None:
        """Returns the target, or None if these losses need nothing of it.

        Raises:
            ValueError: a loss is unknown, or the target is needed and is missing or unsuitable.
        """
        raise NotImplementedError

    def loss(
        self,
        weights: Mapping[str, float],
        module: nnx.Module,
        target: Decoder | None,
        batch: Batch,
        key: Key[Array, ""],
    ) -> Float[Array, ""]:
        """The loss of a batch; it has no gradient with respect to the target.

        Args:
            weights: weight of each loss by its name in `LOSSES`.
            module: the parameters, in the dtype of the computation.
            target: the model that drafts are for, in that dtype; None if no loss needs it.
            batch: the sequences.
            key: for what is drawn at random in a step; each step has its own.
        """
        raise NotImplementedError

    def drafter(
        self, module: nnx.Module, target: Decoder, max_draft_tokens: int | None = None
    ) -> Drafter:
        """The drafter with these parameters, in the target's dtype."""
        raise NotImplementedError

    def save(self, drafter: Drafter, path: str | PathLike) -> None:
        """Writes a drafter from `drafter` as a folder that `from_pretrained` loads."""
        raise NotImplementedError

    def describe(self, drafter: Drafter) -> dict[str, Any]:
        """The drafter's entries in the record of a training.

        Returns:
            `config`, the contents of its config.json; `title`, a noun; `what`, a longer noun
            phrase; `loading`, Python after which `drafter` is the drafter for the model `target`.
        """
        raise NotImplementedError
