"""The update of KV caches in dense jnp: short, slow, and the specification.

Axis legend: r = packed rows, b = batch, l = cache length, h = query heads, k = K/V heads,
d = head_dim.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array


def update_kv_cache(
    key_cache: Array,  # [b, l, k, d]
    value_cache: Array,  # [b, l, k, d]
    key: Array,  # [r, k, d]
    value: Array,  # [r, k, d]
    segment_ids: Array,  # int32 [r]
    positions: Array,  # int32 [r]
) -> tuple[Array, Array]:
    """Write each real row at (segment, position): see `pallas_kernels.update_kv_cache`."""
    batch, max_len = key_cache.shape[:2]
    hit = segment_ids == jnp.arange(batch)[:, None, None]  # [b, 1, r]
    hit &= positions == jnp.arange(max_len)[:, None]  # [b, l, r]
    row = jnp.argmax(hit, axis=-1)[..., None, None]
    written = jnp.any(hit, axis=-1)[..., None, None]

    def update(cache, rows):
        chosen = jnp.take_along_axis(rows[None].astype(cache.dtype), row, axis=1)
        return jnp.where(written, chosen, cache)

    return update(key_cache, key), update(value_cache, value)


def update_kv_caches(
    key_caches: Sequence[Array],  # [b, l, k, d] each
    value_caches: Sequence[Array],  # [b, l, k, d] each
    keys: Sequence[Array],  # [r, k, d] each, or [r, h + 2k, d] with queries and values
    values: Sequence[Array] | None,  # [r, k, d] each
    segment_ids: Array,  # int32 [r]
    positions: Array,  # int32 [r]
    *,
    interpret: bool = False,
) -> tuple[list[Array], list[Array]]:
    """One layer after the other: see `pallas_kernels.update_kv_caches`."""
    del interpret  # it concerns the Triton kernel
    kv_heads = key_caches[0].shape[2]
    if values is None:
        values = [packed[:, -kv_heads:] for packed in keys]
        keys = [packed[:, -2 * kv_heads : -kv_heads] for packed in keys]
    updated = [
        update_kv_cache(*layer, segment_ids, positions)
        for layer in zip(key_caches, value_caches, keys, values, strict=True)
    ]
    return [keys for keys, _ in updated], [values for _, values in updated]
