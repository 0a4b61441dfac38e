"""Scatter of packed K/V rows into a batch of caches, each row at its own place."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels import reference
from pallas_kernels.implementations import choose


def update_kv_cache(
    key_cache: Array,  # [batch, max_len, heads, head_dim]
    value_cache: Array,  # [batch, max_len, heads, head_dim]
    key: Array,  # [rows, heads, head_dim]
    value: Array,  # [rows, heads, head_dim]
    segment_ids: Array,  # int32 [rows]
    positions: Array,  # int32 [rows]
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Write row r of `key` and `value` at [segment_ids[r], positions[r]] of the caches.

    Rows whose segment id is `batch` write nothing; every other entry keeps its
    bits. Two real rows must not name the same place. Donate the caches to the
    surrounding `jax.jit` to update them in place.

    Args:
        implementation: "xla" (one scatter per cache), "reference", or None to
            let the device decide.
        interpret: run Pallas kernels in interpret mode; the others ignore it.

    Returns:
        The updated (key_cache, value_cache), in the caches' dtype.

    Raises:
        ValueError: unknown implementation.

    Reference: the unpadded KV cache of EMS-SD, arXiv 2405.07542, section 3.
    """
    update = IMPLEMENTATIONS[choose(implementation, IMPLEMENTATIONS)]
    return update(key_cache, value_cache, key, value, segment_ids, positions)


def _scatter(key_cache, value_cache, key, value, segment_ids, positions):
    batch, max_len = key_cache.shape[:2]
    # Distinct out-of-range places keep the promise of unique indices.
    dropped = max_len + jnp.arange(segment_ids.shape[0], dtype=positions.dtype)
    positions = jnp.where(segment_ids < batch, positions, dropped)

    def scatter(cache, rows):
        at = cache.at[segment_ids, positions]
        return at.set(rows.astype(cache.dtype), mode="drop", unique_indices=True)

    return scatter(key_cache, key), scatter(value_cache, value)


IMPLEMENTATIONS = {"xla": _scatter, "reference": reference.update_kv_cache}
