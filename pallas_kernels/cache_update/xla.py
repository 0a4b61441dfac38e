"""The update of KV caches as one XLA scatter per cache.

Axis legend: r = packed rows, b = batch, l = cache length, h = query heads, k = K/V heads,
d = head_dim.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array


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
    """See `pallas_kernels.update_kv_caches`."""
    del interpret  # it concerns the Triton kernel
    batch, max_len, kv_heads = key_caches[0].shape[:3]
    if values is None:
        values = [packed[:, -kv_heads:] for packed in keys]
        keys = [packed[:, -2 * kv_heads : -kv_heads] for packed in keys]
    # Distinct out-of-range places keep the promise of unique indices.
    dropped = max_len + jnp.arange(segment_ids.shape[0], dtype=positions.dtype)
    is_real = (segment_ids >= 0) & (segment_ids < batch) & (positions >= 0)
    positions = jnp.where(is_real, positions, dropped)

    def scatter(caches, rows):
        return [
            cache.at[segment_ids, positions].set(
                new.astype(cache.dtype),
                mode="drop",
                unique_indices=True,
                wrap_negative_indices=False,
            )
            for cache, new in zip(caches, rows, strict=True)
        ]

    return scatter(key_caches, keys), scatter(value_caches, values)
