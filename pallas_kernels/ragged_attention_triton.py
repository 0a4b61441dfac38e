"""Segment-indexed attention as a Pallas Triton kernel, for compute capability 8.0 and newer.

One launch serves committed cache and fresh rows together. A program owns one
work item (a query tile of one sample and a share of its keys) and one head; it
reads that share of the committed K/V once for all rows of the tile, and the
plan on the device, so the host plans nothing. Where batch x heads does not fill
the device, keys are split and a second launch combines the shares.

Axis legend: r = packed rows, b = batch, l = cache length, h = heads,
d = head_dim, n = work items, t = rows of a tile, f = fresh rows of a sample.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import work_items
from pallas_kernels.attention_shares import combine, dims_of, padded
from pallas_kernels.implementations import matmul_precision, stages_that_fit
from pallas_kernels.work_items import FIELDS


class Tiling(NamedTuple):
    """Sizes of one launch, found by measurement on an H200."""

    rows: int  # of a query tile; a matrix unit takes 16 at least
    keys: int  # of a block
    num_warps: int
    num_stages: int


DECODE = Tiling(rows=16, keys=64, num_warps=4, num_stages=3)
# Heads whose size is no power of two pad their blocks in shared memory: where there are
# programs enough to fill the device, smaller blocks let more of them in.
DECODE_PADDED = Tiling(rows=16, keys=32, num_warps=2, num_stages=3)
# Small heads: the same bytes on their way in more stages, or in larger blocks where there
# is hardly a program for each multiprocessor.
DECODE_SMALL = Tiling(rows=16, keys=64, num_warps=2, num_stages=4)
DECODE_FEW_SMALL = Tiling(rows=16, keys=128, num_warps=4, num_stages=4)
DECODE_TILES = 3  # of one sample, each reading its keys: more rows, and larger tiles are faster
PREFILL = Tiling(rows=64, keys=64, num_warps=4, num_stages=3)
PREFILL_FLOAT32 = PREFILL._replace(keys=32)  # as many bytes in shared memory
FEW_ROWS = 16  # of a tile beside long ones: it waits for keys more than it computes
PROGRAMS_WANTED = 128  # about one for each multiprocessor: far fewer, and keys are split
PROGRAMS_THAT_FILL = 1024


def ragged_attention(
    query: Array,  # [r, h, d], or [r, 3, h, d] of all three
    key: Array | None,  # [r, h, d]
    value: Array | None,  # [r, h, d]
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
    interpret: bool = False,
) -> Array:  # [r, h, d]
    """See `pallas_kernels.ragged_attention`."""
    del positions  # they follow from cache_lengths and the order of the rows
    rows, *_, heads, head_dim = query.shape
    if not key_cache.shape[1]:  # a kernel needs an address: one entry, which no row sees
        pad = lambda x: jnp.pad(x, [(0, int(axis == 1)) for axis in range(x.ndim)])
        key_cache, value_cache = pad(key_cache), pad(value_cache)
        cache_mask = None
    batch = key_cache.shape[0]
    most = min(rows, max_rows_per_sample or rows)
    splits, few = 1, None
    if most <= DECODE_TILES * DECODE.rows:
        tiling = _decode_tiling(head_dim, batch * heads)
        # Of so few rows more samples would have short drafts. Where they do, keys stay uncut.
        samples = min(batch, pl.cdiv(rows, most))
        if samples * heads < 3 * PROGRAMS_WANTED // 4:
            splits = pl.cdiv(PROGRAMS_WANTED, heads)
    else:
        tiling = PREFILL_FLOAT32 if query.dtype.itemsize > 2 else PREFILL
        few = tiling._replace(rows=FEW_ROWS)
    masks = {"ancestors": ancestors, "cache": cache_mask}
    return _launch(
        (query,) if key is None else (query, key, value),
        (key_cache, value_cache),
        segment_ids,
        cache_lengths,
        {name: mask for name, mask in masks.items() if mask is not None},
        scale=head_dim**-0.5 if scale is None else float(scale),
        tiling=tiling,
        few=few,
        splits=splits,
        max_tiles=pl.cdiv(most, tiling.rows),
        interpret=interpret,
    )


# Compiled for itself: layers of the same shapes are traced and lowered once.
@functools.partial(
    jax.jit, static_argnames=("scale", "tiling", "few", "splits", "max_tiles", "interpret")
)
def _launch(
    fresh,
    cached,
    segment_ids,
    cache_lengths,
    masks,
    *,
    scale: float,
    tiling: Tiling,
    few: Tiling | None,
    splits: int,
    max_tiles: int,
    interpret: bool,
):
    rows, *_, heads, head_dim = fresh[0].shape
    of_query = jax.ShapeDtypeStruct((rows, heads, head_dim), fresh[0].dtype)
    items = work_items.plan(
        segment_ids,
        cache_lengths,
        tile=tiling.rows,
        block=tiling.keys,
        splits=splits,
        max_tiles=max_tiles,
    )
    num_items = items.fields.shape[1]
    # Where shares are combined, the combination also writes the zeros of padding rows.
    whole = splits == 1
    shares = (num_items, tiling.rows, heads)
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    kernel = functools.partial(
        _kernel,
        tiling=tiling,
        scale=scale,
        head_dim=head_dim,
        decoding=few is None,
        one_tile=max_tiles == 1,
        few=few,
        together=len(fresh) == 1,
        masks=tuple(masks),
    )
    outputs = pl.pallas_call(
        kernel,
        # Neighbouring heads lie side by side in the cache and are read together.
        grid=(heads, num_items + whole),
        out_shape=(of_query if whole else (f32(*shares, head_dim), f32(*shares), f32(*shares))),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiling.num_warps,
            num_stages=stages_that_fit(
                tiling.num_stages,
                2 * tiling.keys * padded(head_dim) * cached[0].dtype.itemsize,
            ),
        ),
        interpret=interpret,
        name="ragged_attention",
    )(
        items.fields,
        items.num_real,
        *fresh,
        *cached,
        *(mask.astype(jnp.int8) for mask in masks.values()),
    )
    if whole:
        return outputs
    return combine(items.of_rows, outputs, of_query, splits=splits, interpret=interpret)


def _decode_tiling(head_dim: int, programs: int) -> Tiling:
    if head_dim <= 64:
        return DECODE_SMALL if programs >= PROGRAMS_WANTED else DECODE_FEW_SMALL
    if padded(head_dim) != head_dim and programs >= PROGRAMS_THAT_FILL:
        return DECODE_PADDED
    return DECODE


def _kernel(
    items_ref,  # [7, n]
    num_real_ref,  # [1]
    *refs,  # fresh rows' [r, h, d] x 3 or [r, 3, h, d], caches [b, l, h, d] x 2, masks, outputs
    tiling: Tiling,
    scale: float,
    head_dim: int,
    decoding: bool,
    one_tile: bool,
    few: Tiling | None,
    together: bool,
    masks: tuple[str, ...],
):
    count = 1 if together else 3
    fresh_refs, (key_cache_ref, value_cache_ref, *refs) = refs[:count], refs[count:]
    mask_refs, outputs = dict(zip(masks, refs, strict=False)), refs[len(masks) :]
    # [r, f] and [b, l]
    ancestors_ref, cache_mask_ref = mask_refs.get("ancestors"), mask_refs.get("cache")
    head, index = pl.program_id(0), pl.program_id(1)
    dims = dims_of(head_dim)[None, :]

    def load(place, size, defined=None):
        """[size, d] at a place; zero where not `defined` [size]: None, and all of it is."""
        if dims.shape[1] == head_dim and defined is None:
            return plgpu.load(place)
        mask = jnp.broadcast_to(dims < head_dim, (size, dims.shape[1]))
        if defined is not None:
            mask &= defined[:, None]
        return plgpu.load(place, mask=mask, other=0)

    def load_fresh(kind, row):
        """Of these rows [m] the queries, keys or values [m, d]: kind 0, 1 or 2."""
        ref, at = (fresh_refs[0], (kind,)) if together else (fresh_refs[kind], ())
        return load(ref.at[row[:, None], *at, head, dims], row.shape[0])

    def load_cached(ref, sample, entry, defined):
        return load(ref.at[sample, entry[:, None], head, dims], entry.shape[0], defined)

    def attend_item(tiling, decoding):
        in_tile = jnp.arange(tiling.rows)
        item = dict(zip(FIELDS, (items_ref[i, index] for i in range(len(FIELDS))), strict=True))
        sample, before, fresh_end = item["sample"], item["before"], item["fresh_end"]
        sample_row = item["first"] - before
        is_row = in_tile < item["count"]
        query = load_fresh(0, item["first"] + jnp.minimum(in_tile, _last(item["count"])))
        attend = functools.partial(_attend, query, scale=scale)

        def fresh_keys(at):
            place = sample_row + jnp.minimum(at, _last(fresh_end))
            return load_fresh(1, place), load_fresh(2, place)

        def fresh_visible(at):
            visible = (at < fresh_end)[None, :]
            if ancestors_ref is None:
                return visible & (at[None, :] <= (before + in_tile)[:, None])
            row = item["first"] + jnp.minimum(in_tile, _last(item["count"]))
            column = jnp.minimum(at, ancestors_ref.shape[1] - 1)
            return visible & (plgpu.load(ancestors_ref.at[row[:, None], column[None, :]]) != 0)

        def committed_block(block, carry, *, masked):
            at = block * tiling.keys + jnp.arange(tiling.keys)
            visible = at < item["key_end"] if masked else None
            place = jnp.minimum(at, item["key_end"] - 1) if masked else at
            defined = None
            if cache_mask_ref is not None:
                defined = visible = visible & (plgpu.load(cache_mask_ref.at[sample, place]) != 0)
            keys = load_cached(key_cache_ref, sample, place, defined)
            values = load_cached(value_cache_ref, sample, place, defined)
            return attend(carry, keys, values, None if visible is None else visible[None, :])

        def fresh_block(block, carry, *, masked):
            at = block * tiling.keys + jnp.arange(tiling.keys)
            return attend(carry, *fresh_keys(at), fresh_visible(at) if masked else None)

        def fresh_tile(tile, carry):
            at = tile * tiling.rows + in_tile
            return attend(carry, *fresh_keys(at), fresh_visible(at))

        begin, end = item["key_begin"] // tiling.keys, pl.cdiv(item["key_end"], tiling.keys)
        if decoding:
            # Fetched before the long loop, needed after it.
            fresh, visible = fresh_keys(in_tile), fresh_visible(in_tile)
            carry = _loop(begin, end, committed_block, _start(tiling, head_dim), masked=True)
            carry = attend(_sum_total(carry), *fresh, visible)
            if not one_tile:
                carry = _loop(1, pl.cdiv(fresh_end, tiling.rows), fresh_tile, carry)
        else:
            carry = _start(tiling, head_dim)
            if cache_mask_ref is None:
                full = item["key_end"] // tiling.keys
                carry = _loop(begin, full, committed_block, carry, masked=False)
                begin = full
            carry = _loop(begin, end, committed_block, carry, masked=True)
            full = 0 if ancestors_ref is not None else before // tiling.keys
            carry = _loop(0, full, fresh_block, carry, masked=False)
            end = pl.cdiv(fresh_end, tiling.keys)
            carry = _loop(full, end, fresh_block, carry, masked=True)
        out, highest, total = _sum_total(carry)
        store_dims = is_row[:, None] & (dims < head_dim)
        if len(outputs) == 1:
            out = (out / total).astype(outputs[0].dtype)
            row = (item["first"] + in_tile)[:, None]
            plgpu.store(outputs[0].at[row, head, dims], out, mask=store_dims)
        else:
            out_ref, highest_ref, total_ref = outputs
            plgpu.store(out_ref.at[index, in_tile[:, None], head, dims], out, mask=store_dims)
            plgpu.store(highest_ref.at[index, in_tile, head], highest * scale, mask=is_row)
            plgpu.store(total_ref.at[index, in_tile, head], jnp.sum(total, axis=1), mask=is_row)

    def zero_padding():
        in_tile = jnp.arange(tiling.rows)

        def zero(block, _):
            row = num_real_ref[0] + block * tiling.rows + in_tile
            mask = (row < outputs[0].shape[0])[:, None] & (dims < head_dim)
            zeros = jnp.zeros(mask.shape, outputs[0].dtype)
            plgpu.store(outputs[0].at[row[:, None], head, dims], zeros, mask=mask)

        blocks = pl.cdiv(outputs[0].shape[0] - num_real_ref[0], tiling.rows)
        lax.fori_loop(0, blocks, zero, None)

    if len(outputs) > 1:
        attend_item(tiling, decoding)
        return

    @pl.when(index < items_ref.shape[1])
    def _():
        if few is None:
            attend_item(tiling, decoding)
            return
        is_few = items_ref[FIELDS.index("count"), index] <= few.rows
        pl.when(is_few)(lambda: attend_item(few, decoding=True))
        pl.when(~is_few)(lambda: attend_item(tiling, decoding))

    pl.when(index == items_ref.shape[1])(zero_padding)


def _attend(query, carry, keys, values, visible, *, scale):
    """One block of keys: the softmax so far as (weighted values, largest score, weights)."""
    precision = matmul_precision(query.dtype)
    dot = functools.partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)
    out, highest, total = carry
    scores = dot(query, keys.T)  # scaled in the exponent, as one multiply-add
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    new_highest = jnp.maximum(highest, jnp.max(scores, axis=1))
    shift = new_highest
    if visible is not None:  # rows that see nothing yet must not turn into inf - inf
        shift = jnp.where(new_highest == -jnp.inf, 0, new_highest)
    exponent = scale * math.log2(math.e)
    weights = jnp.exp2(scores * exponent - (shift * exponent)[:, None])
    decay = jnp.exp2((highest - shift) * exponent)[:, None]
    # Weights are summed over keys once, at the end, where blocks are of one size.
    added = weights if total.shape == weights.shape else jnp.sum(weights, axis=1, keepdims=True)
    out = out * decay + dot(weights.astype(values.dtype), values)
    return out, new_highest, total * decay + added


def _start(tiling: Tiling, head_dim: int):
    zeros = lambda width: jnp.zeros((tiling.rows, width), jnp.float32)
    highest = jnp.full(tiling.rows, -jnp.inf, jnp.float32)
    return zeros(padded(head_dim)), highest, zeros(tiling.keys)


def _loop(begin, end, body, carry, **static):
    """`fori_loop` from `begin`, counted from zero: the form that Triton pipelines."""
    step = lambda i, carry: body(begin + i, carry, **static)
    return lax.fori_loop(0, jnp.maximum(end - begin, 0), step, carry)


def _sum_total(carry):
    out, highest, total = carry
    return out, highest, jnp.sum(total, axis=1, keepdims=True)


def _last(count):
    """The last of `count` places; 0 if there are none."""
    return jnp.maximum(count - 1, 0)
