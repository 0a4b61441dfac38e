"""Residual addition and layer normalisation in XLA operations."""

import jax.numpy as jnp
from jax import Array, lax


def add_layer_norm(
    x: Array,  # [rows, size]
    y: Array,  # [rows, size], or [shares, rows, size]
    y_bias: Array | None,  # [size]
    scale: Array | None,  # [size]
    bias: Array | None,  # [size]
    *,
    epsilon: float,
    dtype,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `pallas_kernels.add_layer_norm`."""
    del interpret  # it concerns the Triton kernel
    total = add(x, y, y_bias)
    return total, normalise(total, scale, bias, epsilon).astype(dtype)


def normalise(x: Array, scale: Array | None, bias: Array | None, epsilon: float) -> Array:
    """The normalisation alone, in float32: see `pallas_kernels.add_layer_norm`."""
    out = x.astype(jnp.float32)
    out -= jnp.mean(out, axis=1, keepdims=True)
    out *= lax.rsqrt(jnp.mean(out * out, axis=1, keepdims=True) + epsilon)
    out = out if scale is None else out * scale.astype(jnp.float32)
    return out if bias is None else out + bias.astype(jnp.float32)


def add(x: Array, y: Array, y_bias: Array | None) -> Array:
    """The sum alone, in x's dtype: see `pallas_kernels.add_layer_norm`."""
    y = y.astype(jnp.float32)
    total = x.astype(jnp.float32) + (jnp.sum(y, axis=0) if y.ndim == 3 else y)
    total = total if y_bias is None else total + y_bias.astype(jnp.float32)
    return total.astype(x.dtype)
