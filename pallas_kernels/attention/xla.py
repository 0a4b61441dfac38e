"""Segment-indexed attention in plain XLA operations, for devices without Pallas kernels.

The cache is never gathered per row. With few rows per sample (decoding), each sample is one tile,
and all tiles are computed in one batched product over the cache as it lies. With many rows
(prefill), tiles of up to `TILE` rows of one sample are computed one after the other; of the fresh
rows, a tile reads only as many as a sample may have.

Axis legend: r = packed rows, b = batch, l = cache length, h = query heads, k = K/V heads,
g = query heads that share a K/V head, d = head_dim, q = rows of a tile, f = fresh rows that a
tile may see.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels.attention import xla_parts
from pallas_kernels.attention.confine import confine
from pallas_kernels.attention.work_items import extents
from pallas_kernels.common.implementations import matmul_precision
from pallas_kernels.common.indexing import take

TILE = 128
MAX_DECODE_ROWS = 64
MOST_SCORES = 1 << 20  # most scores of a head in one product, where tiles could be smaller


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
    """See `pallas_kernels.ragged_attention`."""
    del interpret  # it concerns the Triton kernel
    if invariant:
        arrays = query, key, value, key_cache, value_cache, segment_ids, positions, cache_lengths
        options = {"scale": scale, "window": window, "ancestors": ancestors}
        return xla_parts.ragged_attention(*arrays, **options)
    rows, (batch, max_len, kv_heads) = query.shape[0], key_cache.shape[:3]
    if key is None:
        heads = query.shape[1] - 2 * kv_heads
        query, key, value = jnp.split(query, [heads, heads + kv_heads], axis=1)
    tile = min(rows, max_rows_per_sample or rows)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    real = (segment_ids < batch)[:, None, None]
    fresh = [jnp.where(real, x, 0).astype(key_cache.dtype) for x in (query, key, value)]
    fresh[1:] = confine(*fresh[1:])
    # Nothing is padded if every sample may have as many rows as there are for it.
    whole = batch * tile <= rows and rows * (max_len + tile) <= MOST_SCORES
    path = _all_samples_at_once if tile <= MAX_DECODE_ROWS or whole else _tile_by_tile
    tensors = (*fresh, key_cache, value_cache)
    committed = jnp.arange(max_len) < cache_lengths[:, None]  # [b, l]
    entries = jnp.broadcast_to(jnp.arange(max_len), committed.shape)  # their positions
    if cache_mask is not None:
        committed &= cache_mask
        entries = jnp.cumsum(cache_mask, axis=1, dtype=jnp.int32) - 1
    places = (segment_ids, positions, committed, entries)
    out = path(tensors, *places, ancestors, tile, scale, window)
    return out.astype(query.dtype)


def _all_samples_at_once(
    tensors, segment_ids, positions, committed, entries, ancestors, tile, scale, window
):
    query, key, value, key_cache, value_cache = tensors
    batch = key_cache.shape[0]
    first, counts = extents(segment_ids, batch)
    row = jnp.minimum(first[:, None] + jnp.arange(tile), query.shape[0] - 1)  # [b, q]
    index = jnp.arange(tile)
    if ancestors is None:
        visible = index[:, None] >= index  # [q, f=q]
    else:
        seen = ancestors[:, :tile]  # whole rows are copied faster than single entries
        seen = jnp.pad(seen, [(0, 0), (0, tile - seen.shape[1])])
        visible = take(seen, row)  # [b, q, f]
    visible = visible & (index < counts[:, None, None])
    committed = committed[:, None]  # [b, 1, l]
    if window is not None:
        place = take(positions, row)  # [b, q]
        lowest = place[..., None] - window
        visible &= place[:, None] > lowest
        committed = committed & (entries[:, None] > lowest)  # [b, q, l]
        committed &= (index < counts[:, None])[..., None]  # other samples' rows see nothing
    tiles = [take(x, row) for x in (query, key, value)]
    out = _attend(*tiles, key_cache, value_cache, visible, committed, scale)
    sample = jnp.minimum(segment_ids, batch - 1)
    within = jnp.clip(jnp.arange(query.shape[0]) - take(first, sample), 0, tile - 1)
    return jnp.where((segment_ids < batch)[:, None, None], take(out, sample, within), 0)


def _tile_by_tile(
    tensors, segment_ids, positions, committed, entries, ancestors, most, scale, window
):
    query, key, value, key_cache, value_cache = tensors
    rows, batch, tile = query.shape[0], key_cache.shape[0], min(most, TILE)
    first, counts = extents(segment_ids, batch)
    tiles = (counts + tile - 1) // tile  # [b]
    tiles_through = jnp.cumsum(tiles)
    tiles_before = tiles_through - tiles

    def attend_tile(i, out):
        sample = jnp.sum(tiles_through <= i, dtype=jnp.int32)  # the first with a tile after this
        of_sample = lambda x: take(x, sample)
        start = of_sample(first) + (i - of_sample(tiles_before)) * tile
        # The slice may begin earlier than the tile, to stay inside the array.
        row = jnp.minimum(start, rows - tile) + jnp.arange(tile)
        mine = (row >= start) & (take(segment_ids, row) == sample)
        # The sample's rows are among these.
        begin = jnp.minimum(of_sample(first), rows - most)
        near = lambda x: lax.dynamic_slice_in_dim(x, begin, most)
        segments, places = near(segment_ids), near(positions)
        if ancestors is None:
            visible = places <= take(positions, row)[:, None]  # [q, f]
        else:
            place = begin + jnp.arange(most) - of_sample(first)
            place = jnp.clip(place, 0, ancestors.shape[1] - 1)
            visible = take(ancestors, row[:, None], place)
        visible = visible & (segments == sample)
        cached = of_sample(committed)[None]  # [1, l]
        if window is not None:
            lowest = take(positions, row)[:, None] - window
            visible &= places > lowest
            cached = cached & (of_sample(entries) > lowest) & mine[:, None]  # [q, l]
        result = _attend(
            take(query, row)[None],
            near(key)[None],
            near(value)[None],
            of_sample(key_cache)[None],
            of_sample(value_cache)[None],
            visible[None],
            cached[None],
            scale,
        )[0]
        result = jnp.where(mine[:, None, None], result, take(out, row))
        return lax.dynamic_update_slice_in_dim(out, result, row[0], axis=0)

    return lax.fori_loop(0, tiles_through[-1], attend_tile, jnp.zeros_like(query))


def _attend(query, key, value, key_cache, value_cache, visible, committed, scale):
    """Attention of tiles over their samples' caches and fresh rows, [b, q, h, d].

    Args:
        query: [b, q, h, d].
        key, value: [b, f, k, d].
        key_cache, value_cache: [b, l, k, d].
        visible: the fresh rows that each row sees, bool [q, f] or [b, q, f].
        committed: the cache's entries that each row, or all rows see, bool [b, q or 1, l].
        scale: the factor of the scores.
    """
    group = query.shape[2] // key_cache.shape[2]
    if group > 1:  # the query heads that share a K/V head become rows of the tile
        query, visible = _fold_heads(query, group), jnp.repeat(visible, group, axis=-2)
        if committed.shape[1] > 1:
            committed = jnp.repeat(committed, group, axis=1)
    # XLA would like the caches transposed, and would transpose those of all layers
    # at once, before the step: a second copy of everything. Pinned to their layout,
    # and available no earlier than the queries, they are transposed layer by layer.
    query, key_cache, value_cache = lax.optimization_barrier((query, key_cache, value_cache))
    layout = Layout(major_to_minor=(0, 1, 2, 3))
    key_cache, value_cache = (
        with_layout_constraint(cache, layout) for cache in (key_cache, value_cache)
    )
    precision = matmul_precision(key_cache.dtype)

    def dot(spec, x, y):
        return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=jnp.float32)

    def scores(keys, mask):  # mask: broadcastable to [b, k, q, keys]
        return jnp.where(mask, scale * dot("bqkd,blkd->bkql", query, keys), -jnp.inf)

    old = scores(key_cache, committed[:, None])
    new = scores(key, visible[:, None])
    highest = jnp.maximum(jnp.max(old, axis=-1, initial=-jnp.inf), jnp.max(new, axis=-1))
    # Rows that see nothing (tile padding) must not turn into inf - inf.
    highest = jnp.maximum(highest, jnp.finfo(jnp.float32).min)[..., None]
    old, new = jnp.exp(old - highest), jnp.exp(new - highest)
    total = jnp.sum(old, axis=-1) + jnp.sum(new, axis=-1)  # [b, k, q]
    # Zeroed, not only weighted by zero: 0 * NaN is NaN.
    values = jnp.where(jnp.any(committed, axis=1)[..., None, None], value_cache, 0)
    out = dot("bkql,blkd->bqkd", old.astype(value.dtype), values)
    out += dot("bkqf,bfkd->bqkd", new.astype(value.dtype), value)
    total = jnp.where(total > 0, total, 1).swapaxes(1, 2)[..., None]
    out = (out / total).astype(value.dtype)
    return out if group == 1 else _unfold_heads(out, group)


def _fold_heads(x: Array, group: int) -> Array:
    """[b, q, k * g, d] -> [b, q * g, k, d]"""
    batch, rows, heads, head_dim = x.shape
    x = x.reshape(batch, rows, heads // group, group, head_dim).swapaxes(2, 3)
    return x.reshape(batch, rows * group, heads // group, head_dim)


def _unfold_heads(x: Array, group: int) -> Array:
    """[b, q * g, k, d] -> [b, q, k * g, d]"""
    batch, rows, kv_heads, head_dim = x.shape
    x = x.reshape(batch, rows // group, group, kv_heads, head_dim).swapaxes(2, 3)
    return x.reshape(batch, rows // group, kv_heads * group, head_dim)
