"""Attention in XLA operations whose bits depend on a row's own sequence alone.

Some rows at a time, each with the keys of its own sequence: these are taken in parts at fixed
places, as in `pallas_kernels.attention.parts`, so that every operation has one shape, whatever the
number of rows and the length of the cache.

Axis legend: see `pallas_kernels.attention.xla`; p = keys of a part.
"""

import functools
import math

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_kernels.attention.combine import merge
from pallas_kernels.attention.confine import confine
from pallas_kernels.attention.tilings import PART_KEYS
from pallas_kernels.attention.work_items import extents
from pallas_kernels.common.blocks import in_blocks
from pallas_kernels.common.implementations import matmul_precision
from pallas_kernels.common.indexing import take


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
    scale: float | None = None,
    window: int | None = None,
    ancestors: Array | None = None,  # bool [r, f]
) -> Array:  # [r, h, d]
    """See `pallas_kernels.ragged_attention`."""
    rows, (batch, max_len, kv_heads, head_dim) = query.shape[0], key_cache.shape
    if key is None:
        heads = query.shape[1] - 2 * kv_heads
        query, key, value = jnp.split(query, [heads, heads + kv_heads], axis=1)
    if not max_len:  # a gather needs an entry, which no row sees
        pad = lambda x: jnp.pad(x, [(0, 0), (0, 1), (0, 0), (0, 0)])
        key_cache, value_cache = pad(key_cache), pad(value_cache)
    scale = head_dim**-0.5 if scale is None else scale
    first, counts = extents(segment_ids, batch)
    is_real = segment_ids < batch
    sample = jnp.minimum(segment_ids, batch - 1)
    of_row = lambda x: take(x, sample)
    numbers = {
        "sample": sample,
        "first": of_row(first),
        "length": of_row(cache_lengths),
        "end": jnp.where(is_real, of_row(cache_lengths + counts), 0),
        "row": jnp.arange(rows, dtype=jnp.int32),
        "position": positions,
    }
    real = is_real[:, None, None]
    query, key, value = (jnp.where(real, x, 0).astype(key_cache.dtype) for x in (query, key, value))
    fresh, cached = confine(key, value), (key_cache, value_cache)
    seen = functools.partial(_visible, window=window, ancestors=ancestors)

    def attend(query, *columns):
        own = dict(zip(numbers, columns, strict=True))
        queries = query.reshape(query.shape[0], kv_heads, -1, head_dim)  # [r, k, g, d]

        def add(part, carry):
            at = part * PART_KEYS + jnp.arange(PART_KEYS)
            visible = seen(own, at)
            keys, values = _load(own, at, visible, fresh, cached)
            return merge(carry, _softmax(queries, keys, values, visible, scale))

        zeros = jnp.zeros(queries.shape, jnp.float32)
        carry = zeros, zeros[..., 0] - jnp.inf, zeros[..., 0]
        parts = jnp.max(pl.cdiv(own["end"], PART_KEYS))
        out, _, total = lax.fori_loop(0, parts, add, carry)
        return (out / jnp.where(total > 0, total, 1)[..., None]).reshape(query.shape)

    out = in_blocks(attend, query, *numbers.values())
    return jnp.where(real, out, 0).astype(query.dtype)


def _load(own, at, visible, fresh, cached):
    """The keys and values at these places of each row's sequence, [r, p, k, d] each; zero where the
    row does not see them."""
    fresh_row = at - own["length"][:, None]  # [r, p]
    is_old = (fresh_row < 0)[..., None, None]
    entry = jnp.where(visible & (fresh_row < 0), at, 0)
    row = own["first"][:, None] + jnp.where(visible & (fresh_row >= 0), fresh_row, 0)

    def load(new, old):
        both = jnp.where(is_old, take(old, own["sample"][:, None], entry), take(new, row))
        return jnp.where(visible[..., None, None], both, 0)

    return [load(new, old) for new, old in zip(fresh, cached, strict=True)]


def _visible(own, at, *, window: int | None, ancestors: Array | None) -> Array:
    """Which keys at these places each row sees, bool [r, p]."""
    fresh = at - own["length"][:, None]
    if ancestors is None:
        visible = fresh <= (own["row"] - own["first"])[:, None]
    else:
        column = jnp.clip(fresh, 0, ancestors.shape[1] - 1)
        visible = (fresh < 0) | take(ancestors, own["row"][:, None], column)
    visible &= at < own["end"][:, None]
    return visible if window is None else visible & (at > own["position"][:, None] - window)


def _softmax(query, keys, values, visible, scale):
    """A part's weighted values [r, k, g, d], largest scores (in powers of two) and sums of weights,
    [r, k, g] each."""
    options = {"precision": matmul_precision(keys.dtype), "preferred_element_type": jnp.float32}
    scores = jnp.einsum("rkgd,rpkd->rkgp", query, keys, **options) * (scale * math.log2(math.e))
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    highest = jnp.max(scores, axis=-1)
    shift = jnp.where(highest == -jnp.inf, 0, highest)
    weights = jnp.exp2(scores - shift[..., None])
    out = jnp.einsum("rkgp,rpkd->rkgd", weights.astype(values.dtype), values, **options)
    return out, highest, jnp.sum(weights, axis=-1)
