"""Residual addition and normalisation in XLA operations."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.common.inboxes import Inboxes
from pallas_kernels.matmul.rounded import RoundedRows, Rounding


class Norm(NamedTuple):
    """The static part of a normalisation.

    Attributes:
        epsilon: added to the variance or to the mean square.
        dtype: the dtype of the result.
        centred: whether the mean is subtracted: layer normalisation, otherwise RMS normalisation.
        offset: added to the scales.
    """

    epsilon: float
    dtype: Any
    centred: bool
    offset: float = 0.0


def add_norm(
    x: Array,  # [rows, size]
    y: Array,  # [rows, size], or [shares, rows, size]
    vectors: Mapping[str, Array],  # y_bias, scale, bias, y_scale: [size] each, or left out
    *,
    norm: Norm,
    rounding: Rounding | None = None,
    inboxes: Inboxes | None = None,
    axis_name: str | None = None,
    interpret: bool = False,
) -> tuple[Array, Array | RoundedRows]:
    """See `pallas_kernels.add_layer_norm` and `pallas_kernels.add_rms_norm`; y is whole."""
    del rounding, inboxes, axis_name, interpret  # they concern the Triton kernel
    if "y_scale" in vectors:
        y = add(jnp.zeros(x.shape, jnp.float32), y, vectors.get("y_bias"))
        y = normalise(y, vectors["y_scale"], None, norm._replace(dtype=jnp.float32))
        total = add(x, y, None)
    else:
        total = add(x, y, vectors.get("y_bias"))
    return total, normalise(total, vectors.get("scale"), vectors.get("bias"), norm)


def normalise(x: Array, scale: Array | None, bias: Array | None, norm: Norm) -> Array:
    """The normalisation alone, computed in float32."""
    out = x.astype(jnp.float32)
    if norm.centred:
        out -= jnp.mean(out, axis=-1, keepdims=True)
    out *= lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + norm.epsilon)
    out = out if scale is None else out * (scale.astype(jnp.float32) + norm.offset)
    out = out if bias is None else out + bias.astype(jnp.float32)
    return out.astype(norm.dtype)


def add(x: Array, y: Array, y_bias: Array | None) -> Array:
    """The sum alone, in x's dtype: see `pallas_kernels.add_layer_norm`."""
    y = y.astype(jnp.float32)
    total = x.astype(jnp.float32) + (jnp.sum(y, axis=0) if y.ndim == 3 else y)
    total = total if y_bias is None else total + y_bias.astype(jnp.float32)
    return total.astype(x.dtype)
