"""Models of published checkpoints."""

from os import PathLike

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from emsjax.device import best_dtype
from emsjax.models import checkpoint
from emsjax.models.config import DecoderConfig
from emsjax.models.decoder import Decoder
from emsjax.models.opt import FAMILY, OPTConfig


def from_pretrained(
    path_or_repo_id: str | PathLike,
    *,
    dtype: DTypeLike | None = None,
    revision: str | None = None,
    quantize: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    allow_nonfinite: bool = False,
) -> Decoder:
    """Loads a checkpoint of any supported family: see `emsjax.models.checkpoint.load`.

    Args:
        path_or_repo_id: a folder, or an id on the Hugging Face hub such as "Qwen/Qwen3-0.6B".
        dtype: bfloat16, float16 or float32; None: what suits the device, bfloat16 on newer GPUs
            and TPUs, float16 on older GPUs, float32 on CPUs.
        revision: a branch, tag or commit of the repository.
        quantize: the format of the weights of linear layers within decoder layers, which are
            rounded as they are read:

            - "int8", and "fp8" (e4m3): a scale per output; the rows that are multiplied are
              rounded to the same type, each with its own scale and a second term for large numbers
            - "int8-weights": a scale per output; the rows are not rounded
            - "int4": a scale for each 128 inputs of an output; the rows are not rounded

            None: they have the dtype.
        mesh: the devices over which each layer is split, such as `jax.make_mesh((2,), ("tp",))`:
            see `emsjax.Decoder.split`. None: the model is on one device.
        allow_nonfinite: whether weights may be infinite or NaN.

    Raises:
        ValueError: see `emsjax.models.checkpoint.load`.
    """
    dtype = best_dtype() if dtype is None else dtype
    options = {"revision": revision, "allow_nonfinite": allow_nonfinite, "quantize": quantize}
    options["mesh"] = mesh
    return checkpoint.load(make, path_or_repo_id, dtype=dtype, **options)


def make(config: DecoderConfig, **options) -> Decoder:
    """Makes a model of a config; the options are those of `Decoder`."""
    return (OPT if isinstance(config, OPTConfig) else Decoder)(config, **options)


class OPT(Decoder):
    """An OPT model: see `Decoder`."""

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo_id: str | PathLike,
        *,
        dtype: DTypeLike = jnp.bfloat16,
        revision: str | None = None,
        allow_nonfinite: bool = False,
    ) -> "OPT":
        """Loads a checkpoint of this family only: see `emsjax.from_pretrained`."""
        options = {"revision": revision, "allow_nonfinite": allow_nonfinite}
        options["families"] = {FAMILY.model_type: FAMILY}
        return checkpoint.load(cls, path_or_repo_id, dtype=dtype, **options)
