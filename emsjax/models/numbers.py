"""How a model stores its numbers."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx

from emsjax.models.decoder import Decoder
from pallas_kernels.common.narrow_rows import FORMATS as CACHE_FORMATS
from pallas_kernels.matmul.narrow import FORMATS as WEIGHT_FORMATS


class NumberFormats(NamedTuple):
    """The formats of a model's numbers.

    Attributes:
        dtype: of activations, and of weights and caches that have no format of their own.
        quantize: the layers' weights: see `emsjax.from_pretrained`.
        kv_dtype: caches: see `emsjax.generate`.
    """

    dtype: Any = jnp.bfloat16
    quantize: str | None = None
    kv_dtype: str | None = None

    @classmethod
    def of(cls, model: Decoder) -> "NumberFormats":
        """The formats of a model."""
        return cls(model.dtype, model.quantization, model.kv_dtype)

    def model(self, config: Any, *, seed: int = 0) -> Decoder:
        """A model of random weights."""
        options = {"dtype": self.dtype, "quantize": self.quantize}
        return Decoder(config, rngs=nnx.Rngs(seed), **options).with_kv_dtype(self.kv_dtype)

    def __str__(self) -> str:
        """Such as "bfloat16, weights in int8"."""
        narrow = {"weights": self.quantize, "caches": self.kv_dtype}
        parts = [f"{what} in {format}" for what, format in narrow.items() if format is not None]
        return ", ".join([jnp.dtype(self.dtype).name, *parts])

    @property
    def settings(self) -> dict[str, str]:
        """The formats as JSON; those that are not narrow are left out."""
        named = {"quantize": self.quantize, "kv_dtype": self.kv_dtype}
        given = {name: format for name, format in named.items() if format is not None}
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
