"""Rotary positions and the normalisation of queries and keys in XLA operations."""

import jax.numpy as jnp
from jax import Array, lax


def rotate(
    qkv: Array,  # [rows, heads + 2 * kv_heads, head_dim]
    cos: Array,  # float32 [rows, pairs]
    sin: Array,  # float32 [rows, pairs]
    *scales: Array,  # of queries and of keys [head_dim], or none
    kv_heads: int,
    epsilon: float,
    offset: float,
    interpret: bool = False,
) -> Array:
    """See `pallas_kernels.rotate_heads`."""
    del interpret  # it concerns the Triton kernel
    pairs, heads = cos.shape[1], qkv.shape[1] - 2 * kv_heads
    turned, values = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
    x = turned.astype(jnp.float32)
    if scales:
        x *= lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
        of_heads = jnp.stack(scales).astype(jnp.float32) + offset  # [2, head_dim]
        x *= jnp.repeat(
            of_heads,
            jnp.array([heads, kv_heads]),
            axis=0,
            total_repeat_length=heads + kv_heads,
        )
    first, second, rest = jnp.split(x, [pairs, 2 * pairs], axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    x = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return jnp.concatenate([x.astype(qkv.dtype), values], axis=1)
