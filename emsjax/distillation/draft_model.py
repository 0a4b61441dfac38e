"""Draft models in training."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from emsjax.distillation.losses import check_losses, combined, needs_target
from emsjax.distillation.passes import forward, sum_of_losses
from emsjax.distillation.sequences import Batch
from emsjax.distillation.student import Student
from emsjax.drafters import DraftModel
from emsjax.models.decoder import Decoder
from emsjax.models.families import family_of


def mean_loss(
    weights: Mapping[str, float], model: Decoder, target: Decoder | None, batch: Batch
) -> Float[Array, ""]:
    """The weighted losses, averaged over the predictions within segments.

    Logits are computed for a part of the sequences' tokens at a time.
    """
    tokens, segment_ids, _ = batch
    same = segment_ids[:, 1:] == segment_ids[:, :-1]
    predicts = jnp.pad(same, ((0, 0), (0, 1)))
    labels = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    hidden = forward(model, batch)
    of_target = None if target is None else forward(target, batch)

    def loss_of_part(model, hidden, target, of_target, labels, predicts):
        flat = lambda x: None if x is None else x.reshape(-1, x.shape[-1])
        losses = combined(
            weights,
            model.logits(flat(hidden)),
            labels.reshape(-1),
            None if target is None else target.logits(flat(of_target)),
        )
        return jnp.sum(jnp.where(predicts.reshape(-1), losses, 0))

    rows = (hidden, of_target, labels, predicts)
    total = sum_of_losses(model, loss_of_part, rows, target, model.config.vocab_size)
    return total / jnp.sum(predicts).astype(jnp.float32)


class DraftModelStudent(Student):
    """A draft model in training.

    Args:
        module: the model before training, in any dtype.
    """

    def __init__(self, module: Decoder):
        self.module = module

    def check(self, weights: Mapping[str, float], target: Decoder | None) -> Decoder | None:
        check_losses(weights)
        if not needs_target(weights):
            return None
        if target is None:
            raise ValueError(f"losses {', '.join(weights)} need a target")
        if target.config.vocab_size != self.module.config.vocab_size:
            raise ValueError(
                f"the target's vocabulary has {target.config.vocab_size} tokens, the draft's "
                f"{self.module.config.vocab_size}: they must be the same"
            )
        return target

    def loss(self, weights, module, target, batch, key) -> Float[Array, ""]:
        return mean_loss(weights, module, target, batch)

    def drafter(
        self, module: Decoder, target: Decoder, max_draft_tokens: int | None = None
    ) -> DraftModel:
        return DraftModel(module.astype(target.dtype), max_draft_tokens)

    def save(self, drafter: DraftModel, path: str | PathLike) -> None:
        drafter.draft_model.save_pretrained(path)

    def describe(self, drafter: DraftModel) -> dict[str, Any]:
        model = drafter.draft_model
        family, a = family_of(model.config).model_type, model.architecture
        return {
            "config": model.config.to_json(),
            "title": "draft model",
            "what": f"A model of type {family} with {len(a.layers)} layers of width {a.width}",
            "loading": [
                'draft = emsjax.from_pretrained("path/of/this/folder")',
                "drafter = emsjax.DraftModel(draft)",
            ],
        }
