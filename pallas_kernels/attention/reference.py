"""Attention of packed rows in dense jnp: short, slow, and the specification.

Axis legend: r = packed rows, b = batch, l = cache length, h = query heads, k = K/V heads,
d = head_dim, f = fresh rows of a sample.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.attention.confine import confine


def ragged_attention(
    query: Array,  # [r, h, d], or [r, h + 2k, d] with keys and values
    key: Array | None,  # [r, k, d]
    value: Array | None,  # [r, k, d]
    key_cache: Array,  # [b, l, k, d]
    value_cache: Array,  # [b, l, k, d]
    segment_ids: Array,  # int32 [r]
    positions: Array,  # int32 [r]
    cache_lengths: Array,  # int32 [b]
    *,
    max_rows_per_sample: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    ancestors: Array | None = None,  # bool [r, f]
    cache_mask: Array | None = None,  # bool [b, l]
    invariant: bool = False,
    interpret: bool = False,
) -> Array:  # [r, h, d]
    """Attention of packed rows, in float32: see `pallas_kernels.ragged_attention`.

    It gathers each row's whole cache, so memory grows with rows x cache length.
    `max_rows_per_sample`, `invariant` and `interpret` concern the other implementations.
    """
    del max_rows_per_sample, invariant, interpret
    batch, max_len, kv_heads = key_cache.shape[:3]
    if key is None:
        heads = query.shape[1] - 2 * kv_heads
        query, key, value = jnp.split(query, [heads, heads + kv_heads], axis=1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    real = segment_ids < batch
    sample = jnp.where(real, segment_ids, 0)
    out_dtype = query.dtype
    query, key, value = (x.astype(jnp.float32) for x in (query, key, value))

    committed = jnp.arange(max_len) < cache_lengths[sample][:, None]  # [r, l]
    committed &= real[:, None]
    at = jnp.broadcast_to(jnp.arange(max_len), committed.shape)  # position of each entry
    if cache_mask is not None:
        committed &= cache_mask[sample]
        at = (jnp.cumsum(cache_mask, axis=1) - 1)[sample]
    if window is not None:
        committed &= at > positions[:, None] - window
    # Masked entries are zeroed, not only weighted by zero: 0 * NaN is NaN.
    keys, values = (
        jnp.where(committed[..., None, None], cache[sample].astype(jnp.float32), 0)
        for cache in (key_cache, value_cache)
    )  # [r, l, k, d]
    key, value = (jnp.where(real[:, None, None], x, 0) for x in (key, value))
    key, value = confine(key, value)
    group = query.shape[1] // kv_heads  # query heads that share a K/V head
    keys, values = (jnp.repeat(x, group, axis=2) for x in (keys, values))  # [r, l, h, d]
    key, value = (jnp.repeat(x, group, axis=1) for x in (key, value))  # [r, h, d]
    if ancestors is None:
        fresh = positions[:, None] >= positions  # [r, r]
    else:
        # The place of a row among its sample's rows: those since the sample's first one.
        place = jnp.arange(len(segment_ids)) - jnp.argmax(segment_ids[:, None] == segment_ids, 1)
        fresh = ancestors[:, jnp.minimum(place, ancestors.shape[1] - 1)]
    fresh &= (segment_ids[:, None] == segment_ids) & real[:, None]
    if window is not None:
        fresh &= positions > positions[:, None] - window

    dot = lambda spec, x, y: jnp.einsum(spec, x, y, precision=lax.Precision.HIGHEST)
    scores = jnp.concatenate(
        [dot("rhd,rlhd->rhl", query, keys), dot("rhd,shd->rhs", query, key)], axis=-1
    )
    mask = jnp.concatenate([committed, fresh], axis=-1)[:, None]
    weights = jax.nn.softmax(scores * scale, axis=-1, where=mask)
    out = dot("rhl,rlhd->rhd", weights[..., :max_len], values)
    out += dot("rhs,shd->rhd", weights[..., max_len:], value)
    return jnp.where(real[:, None, None], out, 0).astype(out_dtype)
