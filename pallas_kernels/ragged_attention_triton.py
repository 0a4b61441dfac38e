"""Segment-indexed attention as a Pallas Triton kernel, for compute capability 8.0 and newer.

One launch serves committed cache and fresh rows together. A program owns one
query tile (up to `tile` rows of one sample), one head and one share of the
sample's keys; it reads that share of the committed K/V once for all its rows,
and lengths on the device, so the host plans nothing. Where batch x heads does
not fill the device, keys are split and the shares combined afterwards.

Axis legend: r = packed rows, b = batch, l = cache length, h = heads,
d = head_dim, n = query tiles, s = key splits.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

DECODE_TILE = 16  # the smallest tile of a matrix unit
PREFILL_TILE = 64
BLOCK_KEYS = 64
PROGRAMS_WANTED = 528  # four for each multiprocessor of an H200


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
    interpret: bool = False,
) -> Array:  # [r, h, d]
    """See `pallas_kernels.ragged_attention`."""
    del positions  # they follow from cache_lengths and the order of the rows
    rows, heads, head_dim = query.shape
    batch, max_len = key_cache.shape[:2]
    decoding = min(rows, max_rows_per_sample or rows) <= DECODE_TILE
    tile = DECODE_TILE if decoding else PREFILL_TILE
    tiles = query_tiles(segment_ids, batch, tile, one_per_sample=decoding)
    num_tiles = tiles.shape[1]
    splits = 1
    if decoding:
        splits = max(1, min(PROGRAMS_WANTED // (batch * heads), max_len // BLOCK_KEYS))

    kernel = functools.partial(
        _kernel,
        tile=tile,
        splits=splits,
        scale=head_dim**-0.5 if scale is None else scale,
        head_dim=head_dim,
    )
    partial_shape = lambda *shape: jax.ShapeDtypeStruct((splits, rows, heads, *shape), jnp.float32)
    out, highest, total = pl.pallas_call(
        kernel,
        grid=(num_tiles, heads, splits),
        out_shape=(partial_shape(head_dim), partial_shape(), partial_shape()),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="ragged_attention",
    )(tiles, cache_lengths, query, key, value, key_cache, value_cache)
    return _combine(out, highest, total, segment_ids < batch).astype(query.dtype)


def query_tiles(segment_ids: Array, batch: int, tile: int, *, one_per_sample: bool) -> Array:
    """The tiles as int32 [4, n]: sample, its first row, rows of it before the tile, all its rows.

    Unused tiles have their sample's rows all before them.
    """
    belongs = segment_ids == jnp.arange(batch)[:, None]  # [b, r]
    first = jnp.argmax(belongs, axis=1).astype(jnp.int32)
    counts = jnp.sum(belongs, axis=1, dtype=jnp.int32)
    if one_per_sample:
        return jnp.stack([jnp.arange(batch, dtype=jnp.int32), first, jnp.zeros_like(first), counts])
    index = jnp.arange(pl.cdiv(segment_ids.shape[0], tile) + batch, dtype=jnp.int32)
    through = jnp.cumsum((counts + tile - 1) // tile, dtype=jnp.int32)
    sample = jnp.searchsorted(through, index, side="right", method="compare_all")
    sample = jnp.minimum(sample, batch - 1).astype(jnp.int32)
    before = jnp.where(sample > 0, through[sample - 1], 0)
    return jnp.stack([sample, first[sample], (index - before) * tile, counts[sample]])


def _kernel(
    tiles_ref,  # [4, n]
    lengths_ref,  # [b]
    query_ref,  # [r, h, d]
    key_ref,  # [r, h, d]
    value_ref,  # [r, h, d]
    key_cache_ref,  # [b, l, h, d]
    value_cache_ref,  # [b, l, h, d]
    out_ref,  # [s, r, h, d]: weighted values, not yet divided
    highest_ref,  # [s, r, h]: largest score
    total_ref,  # [s, r, h]: sum of weights
    *,
    tile: int,
    splits: int,
    scale: float,
    head_dim: int,
):
    index, head, split = (pl.program_id(axis) for axis in range(3))
    sample, first, before, count = (tiles_ref[field, index] for field in range(4))
    length = lengths_ref[sample]
    dims = jnp.arange(max(16, pl.next_power_of_2(head_dim)))[None, :]
    is_dim = dims < head_dim
    precision = lax.Precision.HIGHEST if query_ref.dtype == jnp.float32 else None

    def load(ref, *places, mask):
        places = tuple(p[:, None] if getattr(p, "ndim", 0) else p for p in places)
        return plgpu.load(ref.at[*places, head, dims], mask=mask[:, None] & is_dim, other=0)

    def dot(x, y):
        return jnp.dot(x, y, precision=precision, preferred_element_type=jnp.float32)

    def attend(carry, keys, values, visible):
        out, highest, total = carry
        scores = jnp.where(visible, dot(query, keys.T) * scale, -jnp.inf)
        new_highest = jnp.maximum(highest, jnp.max(scores, axis=1))
        # Rows that see nothing yet must not turn into inf - inf.
        shift = jnp.where(new_highest == -jnp.inf, 0, new_highest)
        weights = jnp.exp(scores - shift[:, None])
        decay = jnp.exp(highest - shift)
        total = total * decay + jnp.sum(weights, axis=1)
        out = out * decay[:, None] + dot(weights.astype(values.dtype), values)
        return out, new_highest, total

    in_tile = jnp.arange(tile)
    is_row = before + in_tile < count
    row = first + before + in_tile
    query = load(query_ref, row, mask=is_row)

    def committed(block, carry):
        at = block * BLOCK_KEYS + jnp.arange(BLOCK_KEYS)
        mask = at < length
        keys = load(key_cache_ref, sample, at, mask=mask)
        values = load(value_cache_ref, sample, at, mask=mask)
        return attend(carry, keys, values, mask[None, :])

    def fresh(block, carry):
        at = block * tile + in_tile
        mask = at < count
        keys = load(key_ref, first + at, mask=mask)
        values = load(value_ref, first + at, mask=mask)
        visible = mask[None, :] & (at[None, :] <= (before + in_tile)[:, None])
        return attend(carry, keys, values, visible)

    carry = (
        jnp.zeros((tile, dims.shape[1]), jnp.float32),
        jnp.full(tile, -jnp.inf, jnp.float32),
        jnp.zeros(tile, jnp.float32),
    )
    used = before < count
    blocks = pl.cdiv(jnp.where(used, length, 0), BLOCK_KEYS)
    share = pl.cdiv(blocks, splits)
    start = split * share
    carry = lax.fori_loop(start, jnp.minimum(start + share, blocks), committed, carry)
    fresh_blocks = jnp.where(used & (split == 0), before // tile + 1, 0)
    out, highest, total = lax.fori_loop(0, fresh_blocks, fresh, carry)

    plgpu.store(out_ref.at[split, row[:, None], head, dims], out, mask=is_row[:, None] & is_dim)
    plgpu.store(highest_ref.at[split, row, head], highest, mask=is_row)
    plgpu.store(total_ref.at[split, row, head], total, mask=is_row)


def _combine(out, highest, total, real):
    """Shares of the keys [s, r, h, ...] -> [r, h, d]; rows that are not real become zero."""
    weight = jnp.exp(highest - jnp.max(highest, axis=0))  # the first share sees the row itself
    total = jnp.sum(total * weight, axis=0)
    out = jnp.sum(out * weight[..., None], axis=0) / total[..., None]
    return jnp.where(real[:, None, None], out, 0)
