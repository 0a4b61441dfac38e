"""Segment-indexed attention as a Pallas Triton kernel, for compute capability 8.0 and newer.

One launch serves committed cache and fresh rows together. A program owns one
work item (a query tile of one sample and a share of its keys) and one K/V head; it
reads that share of the committed K/V once for all rows of the tile and all query heads
that share the K/V head. The items are planned on the device, so the host plans nothing.
Where batch x K/V heads does not fill the device, keys are split and a second launch
combines the shares.

Axis legend: r = packed rows, b = batch, l = cache length, h = query heads, k = K/V heads,
d = head_dim, n = work items, t = lanes of a tile, f = fresh rows of a sample.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.attention import work_items
from pallas_kernels.attention.combine import combine, combine_parts, merge
from pallas_kernels.attention.confine import confine
from pallas_kernels.attention.tilings import (
    Launch,
    Tiling,
    dims_of,
    launch_for,
    padded,
)
from pallas_kernels.attention.work_items import FIELDS, part_places
from pallas_kernels.common.implementations import matmul_precision, stages_that_fit


SUM_UNITS = 2**23  # of a weight: the sum of a part's weights is below 2**31


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
    invariant: bool = True,
    interpret: bool = False,
) -> Array:  # [r, h, d]
    """See `pallas_kernels.ragged_attention`."""
    if not key_cache.shape[1]:  # a kernel needs an address: one entry, which no row sees
        pad = lambda x: jnp.pad(x, [(0, int(axis == 1)) for axis in range(x.ndim)])
        key_cache, value_cache = pad(key_cache), pad(value_cache)
        cache_mask = None
    rows, heads, head_dim = query.shape
    masks = {"ancestors": ancestors, "cache": cache_mask}
    if window is not None:
        masks["positions"] = positions
        if cache_mask is not None:  # the positions of the cache's entries
            masks["entries"] = jnp.cumsum(cache_mask, axis=1, dtype=jnp.int32) - 1
    launch = launch_for(
        heads if key is not None else heads - 2 * key_cache.shape[2],
        key_cache.shape,
        rows,
        min(rows, max_rows_per_sample or rows),
        item_bytes=query.dtype.itemsize,
        scale=head_dim**-0.5 if scale is None else float(scale),
        window=window,
        invariant=invariant,
    )
    return _launch(
        (query,) if key is None else (query, key, value),
        (key_cache, value_cache),
        segment_ids,
        positions,
        cache_lengths,
        {name: mask for name, mask in masks.items() if mask is not None},
        launch=launch,
        interpret=interpret,
    )


# Jitted by itself, so that layers of the same shapes are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("launch", "interpret"))
def _launch(
    fresh, cached, segment_ids, positions, cache_lengths, masks, *, launch: Launch, interpret: bool
) -> Array:
    tiling, splits = launch.tiling, launch.splits
    kv_heads, head_dim = cached[0].shape[2:]
    of_query = (fresh[0].shape[0], kv_heads * launch.group, head_dim)
    of_query = jax.ShapeDtypeStruct(of_query, fresh[0].dtype)
    items = work_items.plan(
        segment_ids,
        positions,
        cache_lengths,
        tile=tiling.rows // launch.group,
        block=tiling.keys,
        splits=splits,
        max_tiles=launch.max_tiles,
        causal="ancestors" not in masks,
        window=launch.window,
    )
    num_items = items.fields.shape[1]
    # Where shares are combined, the combination also writes the zeros of padding rows.
    whole = splits == 1
    shares = (num_items, tiling.rows, kv_heads)
    if launch.invariant:
        batch, length = cached[0].shape[:2]
        most_fresh = launch.max_tiles * (tiling.rows // launch.group)
        num_parts = pl.cdiv(length + most_fresh, tiling.keys)
        shares = (batch * launch.max_tiles * num_parts, tiling.rows, kv_heads)
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    outputs = pl.pallas_call(
        functools.partial(_kernel, launch=launch, masks=tuple(masks), together=len(fresh) == 1),
        # Neighbouring heads lie side by side in the cache and are read together.
        grid=(kv_heads, num_items + whole),
        out_shape=of_query if whole else (f32(*shares, head_dim), f32(*shares), f32(*shares)),
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
        *(x.astype(jnp.int8) if x.dtype == bool else x for x in masks.values()),
    )
    if whole:
        return outputs
    if launch.invariant:
        of_rows = part_places(
            segment_ids,
            positions,
            cache_lengths,
            tile=tiling.rows // launch.group,
            max_tiles=launch.max_tiles,
            keys=tiling.keys,
            num_parts=num_parts,
            causal="ancestors" not in masks,
            window=launch.window,
        )
        return combine_parts(of_rows, outputs, of_query, interpret=interpret)
    return combine(items.of_rows, outputs, of_query, splits=splits, interpret=interpret)


def _kernel(
    items_ref,  # [7, n]
    num_real_ref,  # [1]
    *refs,  # fresh rows [r, h, d], [r, k, d] x 2 or [r, h + 2k, d], caches x 2, masks, outputs
    launch: Launch,
    masks: tuple[str, ...],
    together: bool,
):
    count, group, scale, window = 1 if together else 3, launch.group, launch.scale, launch.window
    fresh_refs, (key_cache_ref, value_cache_ref, *refs) = refs[:count], refs[count:]
    mask_refs, outputs = dict(zip(masks, refs, strict=False)), refs[len(masks) :]
    # [r, f] and [b, l]; with a window also [r] and, beside a mask of the cache, [b, l]
    ancestors_ref, cache_mask_ref = mask_refs.get("ancestors"), mask_refs.get("cache")
    positions_ref, entries_ref = mask_refs.get("positions"), mask_refs.get("entries")
    kv_heads, head_dim = key_cache_ref.shape[2:]
    head, index = pl.program_id(0), pl.program_id(1)
    dims = dims_of(head_dim)[None, :]
    kv_refs, first_heads = fresh_refs[1:], (0, 0)  # of keys and values
    if together:
        kv_refs, first_heads = fresh_refs * 2, (kv_heads * group, kv_heads * (group + 1))

    def row_of(lane):
        """The tile's row that a lane holds."""
        return lane if group == 1 else lane // group

    def head_of(lane):
        """The query head that a lane holds; a column for several heads, to lie beside rows."""
        return head if group == 1 else (head * group + lane % group)[:, None]

    def load(place, size, defined=None):
        """[size, d] at a place, zero where `defined` [size] is given and false."""
        if dims.shape[1] == head_dim and defined is None:
            return plgpu.load(place)
        mask = jnp.broadcast_to(dims < head_dim, (size, dims.shape[1]))
        if defined is not None:
            mask &= defined[:, None]
        return plgpu.load(place, mask=mask, other=0)

    def load_fresh(row, defined=None):
        """Keys and values [m, d] of the fresh rows `row` [m]."""
        places = [
            ref.at[row[:, None], first + head if first else head, dims]
            for ref, first in zip(kv_refs, first_heads, strict=True)
        ]
        return confine(*(load(place, row.shape[0], defined) for place in places))

    def load_cached(ref, sample, entry, defined):
        return load(ref.at[sample, entry[:, None], head, dims], entry.shape[0], defined)

    def attend_item(tiling, *, decoding, one_block):
        lane = key_lane = jnp.arange(tiling.rows)
        item = dict(zip(FIELDS, (items_ref[i, index] for i in range(len(FIELDS))), strict=True))
        sample, before, fresh_end = item["sample"], item["before"], item["fresh_end"]
        sample_row = item["first"] - before
        num_lanes = item["count"] if group == 1 else item["count"] * group
        is_used, last_lane = lane < num_lanes, jnp.minimum(lane, _last(num_lanes))
        query_row = item["first"] + row_of(last_lane)
        place = fresh_refs[0].at[query_row[:, None], head_of(last_lane), dims]
        query = load(place, tiling.rows)
        if window is not None:  # the lowest position that each lane's row sees, and that any does
            lowest = plgpu.load(positions_ref.at[query_row]) - window + 1
            first_seen = jnp.min(lowest)
        attend = functools.partial(_attend, query, scale=scale)

        def fresh_keys(at):
            return load_fresh(sample_row + jnp.minimum(at, _last(fresh_end)))

        def fresh_visible(at):
            visible = (at < fresh_end)[None, :]
            if window is not None:
                place = positions_ref.at[sample_row + jnp.minimum(at, _last(fresh_end))]
                visible &= plgpu.load(place)[None, :] >= lowest[:, None]
            if ancestors_ref is None:
                return visible & (at[None, :] <= (before + row_of(lane))[:, None])
            column = jnp.minimum(at, ancestors_ref.shape[1] - 1)
            place = ancestors_ref.at[query_row[:, None], column[None, :]]
            return visible & (plgpu.load(place) != 0)

        def committed_block(block, carry, *, masked):
            at = block * tiling.keys + jnp.arange(tiling.keys)
            visible = at < item["key_end"] if masked else None
            place = jnp.minimum(at, item["key_end"] - 1) if masked else at
            defined = None
            if cache_mask_ref is not None:
                defined = visible = visible & (plgpu.load(cache_mask_ref.at[sample, place]) != 0)
            if window is not None:
                entry = at if entries_ref is None else plgpu.load(entries_ref.at[sample, place])
                defined = visible = visible & (entry >= first_seen)
            keys = load_cached(key_cache_ref, sample, place, defined)
            values = load_cached(value_cache_ref, sample, place, defined)
            if visible is not None:
                visible = visible[None, :]
            if window is not None:
                visible &= entry[None, :] >= lowest[:, None]
            return attend(carry, keys, values, visible)

        def fresh_block(block, carry, *, masked):
            at = block * tiling.keys + jnp.arange(tiling.keys)
            return attend(carry, *fresh_keys(at), fresh_visible(at) if masked else None)

        def fresh_tile(tile, carry):
            at = tile * tiling.rows + key_lane
            return attend(carry, *fresh_keys(at), fresh_visible(at))

        begin, end = item["key_begin"] // tiling.keys, pl.cdiv(item["key_end"], tiling.keys)
        if window is not None and entries_ref is None and not (launch.invariant and len(outputs) > 1):
            begin = jnp.maximum(begin, first_seen // tiling.keys)

        def finish_part(block, carry, own):
            """A part's softmax is merged into those before it, or stored to be merged later."""
            if len(outputs) == 1:
                return merge(carry, own)
            num_parts = outputs[0].shape[0] // (key_cache_ref.shape[0] * launch.max_tiles)
            tile = sample * launch.max_tiles + before // (tiling.rows // group)
            place = tile * num_parts + block
            out_ref, highest_ref, total_ref = outputs
            stored = is_used[:, None] & (dims < head_dim)
            plgpu.store(out_ref.at[place, lane[:, None], head, dims], own[0], mask=stored)
            plgpu.store(highest_ref.at[place, lane, head], own[1], mask=is_used)
            plgpu.store(total_ref.at[place, lane, head], own[2], mask=is_used)
            return carry

        def in_window(at):
            return jnp.bool_(True) if window is None else at >= first_seen

        def sees(at, defined):
            """Which lanes see committed keys at these places, of which some are not defined."""
            visible = defined[None, :]
            return visible if window is None else visible & (at[None, :] >= lowest[:, None])

        def sees_fresh(at, defined):
            fresh = at - item["key_end"]
            if ancestors_ref is None:
                visible = fresh[None, :] <= (before + row_of(lane))[:, None]
            else:
                column = jnp.clip(fresh, 0, ancestors_ref.shape[1] - 1)
                place = ancestors_ref.at[query_row[:, None], column[None, :]]
                visible = plgpu.load(place) != 0
            return visible & sees(at, defined)

        def committed_part(block, carry):
            at = block * tiling.keys + jnp.arange(tiling.keys)
            defined = None if window is None else in_window(at)
            load = lambda which: load_cached(cache_refs[which], sample, at, defined)
            visible = None if window is None else sees(at, defined)
            return finish_part(block, carry, softmax((load, visible)))

        def fresh_part(block, carry):
            """A part of fresh rows that come before the tile's."""
            at = block * tiling.keys + jnp.arange(tiling.keys)
            load = lambda which: load_fresh(sample_row + at - item["key_end"])[which]
            visible = None if window is None else sees(at, in_window(at))
            return finish_part(block, carry, softmax((load, visible)))

        def mixed_part(block, carry):
            """A part with fresh rows, which may begin with committed keys.

            A matrix unit adds up several keys at once. Those that it adds up together are the same
            whether they are fresh or committed.
            """
            at = block * tiling.keys + jnp.arange(tiling.keys)
            fresh = at - item["key_end"]
            old, new = (fresh < 0) & in_window(at), (fresh >= 0) & (fresh < fresh_end)
            cached = (load_cached(ref, sample, jnp.where(old, at, 0), old) for ref in cache_refs)
            own = load_fresh(sample_row + jnp.where(new, fresh, 0), new)
            both = [jnp.where(new[:, None], *pair) for pair in zip(own, cached, strict=True)]
            visible = jnp.where(new[None, :], sees_fresh(at, new), sees(at, old))
            return finish_part(block, carry, softmax((both.__getitem__, visible)))

        if launch.invariant:
            softmax = functools.partial(_softmax_of_part, query, scale=scale)
            cache_refs = (key_cache_ref, value_cache_ref)
            zero = jnp.zeros(tiling.rows, jnp.float32)
            carry = (jnp.zeros((tiling.rows, dims.shape[1]), jnp.float32), zero - jnp.inf, zero)
            carry = carry if len(outputs) == 1 else ()
            parts = lambda keys: pl.cdiv(keys, tiling.keys)
            mixed, last = item["key_end"] // tiling.keys, parts(item["key_end"] + fresh_end)
            last = jnp.where(fresh_end > 0, last, 0)
            carry = _loop(begin, mixed, committed_part, carry)
            if not decoding and ancestors_ref is None:
                whole = parts(item["key_end"])
                carry = _plain_loop(mixed, jnp.minimum(whole, last), mixed_part, carry)
                mixed = jnp.maximum(whole, (item["key_end"] + before) // tiling.keys)
                carry = _loop(whole, jnp.minimum(mixed, last), fresh_part, carry)
            carry = _plain_loop(mixed, last, mixed_part, carry)
            if len(outputs) == 1:
                out, _, total = carry
                out = (out / total[:, None]).astype(outputs[0].dtype)
                row = (item["first"] + row_of(lane))[:, None]
                stored = is_used[:, None] & (dims < head_dim)
                plgpu.store(outputs[0].at[row, head_of(lane), dims], out, mask=stored)
            return
        if decoding:
            # Fetched before the long loop, needed after it.
            fresh, visible = fresh_keys(key_lane), fresh_visible(key_lane)
            carry = _loop(begin, end, committed_block, _start(tiling, head_dim), masked=True)
            carry = attend(_sum_total(carry), *fresh, visible)
            if not one_block:
                carry = _loop(1, pl.cdiv(fresh_end, tiling.rows), fresh_tile, carry)
        else:
            carry = _start(tiling, head_dim)
            if cache_mask_ref is None and window is None:
                full = item["key_end"] // tiling.keys
                carry = _loop(begin, full, committed_block, carry, masked=False)
                begin = full
            carry = _loop(begin, end, committed_block, carry, masked=True)
            first, full = 0, before // tiling.keys
            if ancestors_ref is not None or window is not None:
                full = 0
            if ancestors_ref is None and window is not None:
                first = jnp.maximum(before - window + 1, 0) // tiling.keys
            carry = _loop(0, full, fresh_block, carry, masked=False)
            end = pl.cdiv(fresh_end, tiling.keys)
            carry = _loop(jnp.maximum(first, full), end, fresh_block, carry, masked=True)
        out, highest, total = _sum_total(carry)
        store_dims = is_used[:, None] & (dims < head_dim)
        if len(outputs) == 1:
            out = (out / total).astype(outputs[0].dtype)
            row = (item["first"] + row_of(lane))[:, None]
            plgpu.store(outputs[0].at[row, head_of(lane), dims], out, mask=store_dims)
        else:
            out_ref, highest_ref, total_ref = outputs
            plgpu.store(out_ref.at[index, lane[:, None], head, dims], out, mask=store_dims)
            plgpu.store(highest_ref.at[index, lane, head], highest * scale, mask=is_used)
            plgpu.store(total_ref.at[index, lane, head], jnp.sum(total, axis=1), mask=is_used)

    def zero_padding():
        lane, tile_rows = jnp.arange(launch.tiling.rows), launch.tiling.rows // group

        def zero(block, _):
            row = num_real_ref[0] + block * tile_rows + row_of(lane)
            mask = (row < outputs[0].shape[0])[:, None] & (dims < head_dim)
            zeros = jnp.zeros(mask.shape, outputs[0].dtype)
            plgpu.store(outputs[0].at[row[:, None], head_of(lane), dims], zeros, mask=mask)

        blocks = pl.cdiv(outputs[0].shape[0] - num_real_ref[0], tile_rows)
        lax.fori_loop(0, blocks, zero, None)

    few, decoding = launch.few, launch.few is None
    attend_tile = functools.partial(
        attend_item, launch.tiling, decoding=decoding, one_block=launch.one_block
    )
    if len(outputs) > 1:
        attend_tile()
        return

    @pl.when(index < items_ref.shape[1])
    def _():
        if decoding:
            attend_tile()
            return
        is_few = items_ref[FIELDS.index("count"), index] <= few.rows // group
        # A tile with few rows may be the last one of a sample with many.
        one_block = launch.max_tiles == 1
        pl.when(is_few)(lambda: attend_item(few, decoding=True, one_block=one_block))
        pl.when(~is_few)(attend_tile)

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


def _softmax_of_part(query, *blocks, scale):
    """A part's weighted values, largest score and sum of weights, each of the part alone.

    A matrix unit adds up the weights, so that the order does not depend on where a tile's numbers
    lie.

    Args:
        query: the tile's queries.
        blocks: for each block of the part, in order, a function that loads its keys (0) or values
            (1), and which lanes see them; None: all do.
        scale: the factor of the scores.
    """
    precision = matmul_precision(query.dtype)
    dot = functools.partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)
    exponent, scores = scale * math.log2(math.e), []
    for load, visible in blocks:
        of = dot(query, load(0).T)
        scores.append(of if visible is None else jnp.where(visible, of, -jnp.inf))
    highest = functools.reduce(jnp.maximum, (jnp.max(of, axis=1) for of in scores)) * exponent
    shift = jnp.where(highest == -jnp.inf, 0, highest)
    out, total = None, 0
    for (load, _), of in zip(blocks, scores, strict=True):
        weights = jnp.exp2(of * exponent - shift[:, None])
        added = dot(weights.astype(query.dtype), load(1))
        out, total = added if out is None else out + added, total + _sum_in_any_order(weights)
    return out, highest, total


def _sum_in_any_order(weights: Array) -> Array:
    """Sums over the last axis of up to PART_KEYS numbers in [0, 1], added up as integers."""
    return jnp.sum((weights * SUM_UNITS).astype(jnp.int32), axis=1).astype(jnp.float32) / SUM_UNITS


def _start(tiling: Tiling, head_dim: int):
    zeros = lambda width: jnp.zeros((tiling.rows, width), jnp.float32)
    highest = jnp.full(tiling.rows, -jnp.inf, jnp.float32)
    return zeros(padded(head_dim)), highest, zeros(tiling.keys)


def _loop(begin, end, body, carry, **static):
    """`fori_loop` from `begin`, counted from zero: the form that Triton pipelines."""
    step = lambda i, carry: body(begin + i, carry, **static)
    return lax.fori_loop(0, jnp.maximum(end - begin, 0), step, carry)


def _plain_loop(begin, end, body, carry):
    """`fori_loop` in a form that Triton does not pipeline, for few iterations."""
    step = lambda state: (state[0] + 1, body(state[0], state[1]))
    return lax.while_loop(lambda state: state[0] < end, step, (begin, carry))[1]


def _sum_total(carry):
    out, highest, total = carry
    return out, highest, jnp.sum(total, axis=1, keepdims=True)


def _last(count):
    """The last of `count` places; 0 if there are none."""
    return jnp.maximum(count - 1, 0)
