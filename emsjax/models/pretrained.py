"""Models of published checkpoints."""

from os import PathLike

import jax.numpy as jnp
from jax.typing import DTypeLike

from emsjax.device import best_dtype
from emsjax.models import checkpoint
from emsjax.models.decoder import Decoder
from emsjax.models.families import FAMILIES


def from_pretrained(
    path_or_repo_id: str | PathLike,
    *,
    dtype: DTypeLike | None = None,
    revision: str | None = None,
) -> Decoder:
    """Loads a checkpoint of any supported family: see `emsjax.models.checkpoint.load`.

    Args:
        path_or_repo_id: a folder, or an id on the Hugging Face hub such as "Qwen/Qwen3-0.6B".
        dtype: bfloat16, float16 or float32; None: what suits the device, bfloat16 on newer GPUs
            and TPUs, float16 on older GPUs, float32 on CPUs.
        revision: a branch, tag or commit of the repository.
    """
    dtype = best_dtype() if dtype is None else dtype
    return checkpoint.load(path_or_repo_id, dtype=dtype, revision=revision)


class OPT(Decoder):
    """An OPT model: see `Decoder`."""

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo_id: str | PathLike,
        *,
        dtype: DTypeLike = jnp.bfloat16,
        revision: str | None = None,
    ) -> Decoder:
        """Loads a checkpoint of this family only: see `emsjax.from_pretrained`."""
        families = {"opt": FAMILIES["opt"]}
        return checkpoint.load(path_or_repo_id, dtype=dtype, revision=revision, families=families)
