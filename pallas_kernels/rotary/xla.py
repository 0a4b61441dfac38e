"""Rotary positions and the normalisation of queries and keys in XLA operations."""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array, lax


def rotate(
    qkv: Array,  # [rows, heads + 2 * kv_heads, head_dim], or [shares, rows, ...]
    vectors: Mapping[str, Array],  # bias, query_scale, key_scale, or left out
    cos: Array,  # float32 [rows, pairs]
    sin: Array,  # float32 [rows, pairs]
    *,
    kv_heads: int,
    epsilon: float,
    offset: float,
    dtype,
    interpret: bool = False,
) -> Array:
    """See `pallas_kernels.rotate_heads`."""
    del interpret  # it concerns the Triton kernel
    x = qkv.astype(jnp.float32)
    x = x.sum(axis=0) if x.ndim == 4 else x
    x = x + vectors["bias"].astype(jnp.float32) if "bias" in vectors else x
    heads, pairs = x.shape[1] - 2 * kv_heads, cos.shape[1]
    queries, keys, values = jnp.split(x, [heads, heads + kv_heads], axis=1)

    def turned(x, scale: str):
        if scale in vectors:
            x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
            x = x * (vectors[scale].astype(jnp.float32) + offset)
        first, second, rest = jnp.split(x, [pairs, 2 * pairs], axis=-1)
        c, s = cos[:, None, :], sin[:, None, :]
        return jnp.concatenate([first * c - second * s, second * c + first * s, rest], axis=-1)

    parts = [turned(queries, "query_scale"), turned(keys, "key_scale"), values]
    return jnp.concatenate(parts, axis=1).astype(dtype)
