"""Dense jnp versions of every operation: short, slow, and the specification.

Axis legend: r = packed rows, b = batch, l = cache length, h = heads, d = head_dim.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax


def ragged_attention(
    query: Array,  # [r, h, d]
    key: Array,  # [r, h, d]
    value: Array,  # [r, h, d]
    key_cache: Array,  # [b, l, h, d]
    value_cache: Array,  # [b, l, h, d]
    segment_ids: Array,  # int32 [r]
    positions: Array,  # int32 [r]
    cache_lengths: Array,  # int32 [b]
    *,
    max_rows_per_sample: int | None = None,
    scale: float | None = None,
    ancestors: Array | None = None,  # bool [r, f]
    cache_mask: Array | None = None,  # bool [b, l]
) -> Array:  # [r, h, d]
    """Attention of packed rows, in float32: see `pallas_kernels.ragged_attention`.

    Gathers each row's whole cache, so memory grows with rows x cache length.
    """
    del max_rows_per_sample  # only a hint for faster implementations
    batch, max_len = key_cache.shape[:2]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    real = segment_ids < batch
    sample = jnp.where(real, segment_ids, 0)
    out_dtype = query.dtype
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))

    committed = jnp.arange(max_len) < cache_lengths[sample][:, None]  # [r, l]
    committed &= real[:, None]
    if cache_mask is not None:
        committed &= cache_mask[sample]
    # Masked entries are zeroed, not only weighted by zero: 0 * NaN is NaN.
    keys, values = (
        jnp.where(committed[..., None, None], cache[sample].astype(jnp.float32), 0)
        for cache in (key_cache, value_cache)
    )  # [r, l, h, d]
    key, value = (jnp.where(real[:, None, None], x, 0) for x in (key, value))
    if ancestors is None:
        fresh = positions[:, None] >= positions  # [r, r]
    else:
        # The place of a row among its sample's: rows since the sample's first one.
        place = jnp.arange(len(segment_ids)) - jnp.argmax(segment_ids[:, None] == segment_ids, 1)
        fresh = ancestors[:, jnp.minimum(place, ancestors.shape[1] - 1)]
    fresh &= (segment_ids[:, None] == segment_ids) & real[:, None]

    dot = lambda spec, x, y: jnp.einsum(spec, x, y, precision=lax.Precision.HIGHEST)
    scores = jnp.concatenate(
        [dot("rhd,rlhd->rhl", query, keys), dot("rhd,shd->rhs", query, key)], axis=-1
    )
    mask = jnp.concatenate([committed, fresh], axis=-1)[:, None]
    weights = jax.nn.softmax(scores * scale, axis=-1, where=mask)
    out = dot("rhl,rlhd->rhd", weights[..., :max_len], values)
    out += dot("rhs,shd->rhd", weights[..., max_len:], value)
    return jnp.where(real[:, None, None], out, 0).astype(out_dtype)


def update_kv_cache(
    key_cache: Array,  # [b, l, h, d]
    value_cache: Array,  # [b, l, h, d]
    key: Array,  # [r, h, d]
    value: Array,  # [r, h, d]
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
