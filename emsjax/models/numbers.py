"""How a model stores its numbers, and over how many devices."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from emsjax.models.decoder import Decoder
from emsjax.tensor_parallel import first_mesh
from pallas_kernels.common.narrow_rows import FORMATS as CACHE_FORMATS
from pallas_kernels.matmul.narrow import FORMATS as WEIGHT_FORMATS


class NumberFormats(NamedTuple):
    """The formats of a model's numbers.

    Attributes:
        dtype: of activations, and of weights and caches that have no format of their own.
        quantize: the layers' weights: see `emsjax.from_pretrained`.
        kv_dtype: caches: see `emsjax.generate`.
        tensor_parallel: number of devices over which the model is split, or that have all of it.
        is_split: which of the two.
    """

    dtype: Any = jnp.bfloat16
    quantize: str | None = None
    kv_dtype: str | None = None
    tensor_parallel: int = 1
    is_split: bool = True

    @classmethod
    def of(cls, model: Decoder) -> "NumberFormats":
        """The formats of a model."""
        parallel = model.parallel
        devices = (1, True) if parallel is None else (parallel.mesh.size, parallel.is_split)
        return cls(model.dtype, model.quantization, model.kv_dtype, *devices)

    @property
    def of_draft_model(self) -> "NumberFormats":
        """The formats of a draft model, which all devices of the target have."""
        return NumberFormats(
            self.dtype, tensor_parallel=self.tensor_parallel, is_split=self.tensor_parallel == 1
        )

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The first devices; None: the default one.

        Raises:
            ValueError: there are fewer.
        """
        return first_mesh(self.tensor_parallel)

    @property
    def parts(self) -> int:
        """Number of devices that each have a part of the model."""
        return self.tensor_parallel if self.is_split else 1

    def model(self, config: Any, *, seed: int = 0) -> Decoder:
        """A model of random weights."""
        options = {"dtype": self.dtype, "quantize": self.quantize}
        mesh = self.mesh if self.is_split else None
        model = Decoder(config, rngs=nnx.Rngs(seed), mesh=mesh, **options)
        return self.placed(model).with_kv_dtype(self.kv_dtype)

    def placed(self, model: Decoder) -> Decoder:
        """The model on all devices, if it is not split over them."""
        return model if self.mesh is None or self.is_split else model.replicate(self.mesh)

    def __str__(self) -> str:
        """Such as "bfloat16, weights in int8"."""
        narrow = {"weights": self.quantize, "caches": self.kv_dtype}
        parts = [f"{what} in {format}" for what, format in narrow.items() if format is not None]
        parts += [f"on {self.tensor_parallel} devices"] * (self.tensor_parallel > 1)
        return ", ".join([jnp.dtype(self.dtype).name, *parts])

    @property
    def settings(self) -> dict[str, str | int]:
        """The formats as JSON; those that are not narrow are left out."""
        named = {"quantize": self.quantize, "kv_dtype": self.kv_dtype}
        given = {name: format for name, format in named.items() if format is not None}
        given |= {"tensor_parallel": self.tensor_parallel} if self.tensor_parallel > 1 else {}
        return {"dtype": jnp.dtype(self.dtype).name, **given}

    @property
    def weight_bytes(self) -> float:
        """Bytes of a number of the layers' matrices, with its part of the scales."""
        if self.quantize is None:
            return jnp.dtype(self.dtype).itemsize
        return WEIGHT_FORMATS[self.quantize].bytes

    @property
    def speed(self) -> int:
        """How much faster a matrix unit multiplies the layers' matrices than 16-bit numbers."""
        return 2 if self.quantize is not None and WEIGHT_FORMATS[self.quantize].rounds_rows else 1

    def cached_bytes(self, head_dim: int) -> float:
        """Bytes of a number of the caches, with its part of the scales."""
        if self.kv_dtype is None:
            return jnp.dtype(self.dtype).itemsize
        return CACHE_FORMATS[self.kv_dtype].dtype.dtype.itemsize + 4 / head_dim


BFLOAT16 = NumberFormats()
