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

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.attention import work_items
from pallas_kernels.attention.combine import combine, combine_parts
from pallas_kernels.attention.parts import attend_parts
from pallas_kernels.attention.share import attend_share
from pallas_kernels.attention.tile import Places, Tile, head_of, row_of
from pallas_kernels.attention.tilings import Launch, dims_of, launch_for, padded
from pallas_kernels.attention.work_items import FIELDS, part_places
from pallas_kernels.common.implementations import stages_that_fit
from pallas_kernels.common.narrow_rows import NarrowRows


def ragged_attention(
    query: Array,  # [r, h, d], or [r, h + 2k, d] with keys and values
    key: Array | None,  # [r, k, d]
    value: Array | None,  # [r, k, d]
    key_cache: Array,  # [b, l, k, d], or NarrowRows
    value_cache: Array,  # [b, l, k, d], or NarrowRows
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
    if not key_cache.shape[1]:  # a kernel needs an address: one entry, which no row sees
        key_cache, value_cache = map(_one_entry, (key_cache, value_cache))
        cache_mask = None
    rows, heads, head_dim = query.shape
    format = key_cache.format if isinstance(key_cache, NarrowRows) else None
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
        format=format,
    )
    return _launch(
        (query,) if key is None else (query, key, value),
        _arrays_of(key_cache, value_cache),
        segment_ids,
        positions,
        cache_lengths,
        {name: mask for name, mask in masks.items() if mask is not None},
        launch=launch,
        interpret=interpret,
    )


def _one_entry(empty: Array | NarrowRows) -> Array | NarrowRows:
    """A cache with one entry, of the type of one without."""
    batch, _, *of_entry = empty.shape
    shape = (batch, 1, *of_entry)
    if isinstance(empty, NarrowRows):
        return NarrowRows.zeros(shape, empty.format)
    return jnp.zeros(shape, empty.dtype)


def _arrays_of(*caches: Array | NarrowRows) -> tuple[Array, ...]:
    """The arrays of keys and values, or of their words, then their scales."""
    if not isinstance(caches[0], NarrowRows):
        return caches
    return *(x.words for x in caches), *(x.scales for x in caches)


# Jitted by itself, so that layers of the same shapes are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("launch", "interpret"))
def _launch(
    fresh, cached, segment_ids, positions, cache_lengths, masks, *, launch: Launch, interpret: bool
) -> Array:
    tiling, splits = launch.tiling, launch.splits
    (rows, _, head_dim), kv_heads = fresh[0].shape, cached[0].shape[2]
    of_query = (rows, kv_heads * launch.group, head_dim)
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
        functools.partial(
            _kernel,
            launch=launch,
            masks=tuple(masks),
            together=len(fresh) == 1,
            interpret=interpret,
        ),
        # Neighbouring heads lie side by side in the cache and are read together.
        grid=(kv_heads, num_items + whole),
        out_shape=of_query if whole else (f32(*shares, head_dim), f32(*shares), f32(*shares)),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiling.num_warps,
            num_stages=stages_that_fit(
                tiling.num_stages,
                2 * tiling.keys * padded(cached[0].shape[3]) * cached[0].dtype.itemsize,
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
    *refs,  # fresh rows [r, h, d], [r, k, d] x 2 or [r, h + 2k, d], caches, masks, outputs
    launch: Launch,
    masks: tuple[str, ...],
    together: bool,
    interpret: bool,
):
    count = 1 if together else 3
    fresh, refs = refs[:count], refs[count:]
    count = 2 if launch.format is None else 4
    cached, refs = refs[:count], refs[count:]
    outputs = refs[len(masks) :]
    head, index = pl.program_id(0), pl.program_id(1)
    masks = dict(zip(masks, refs, strict=False))
    places = Places(head, index, items_ref, fresh, cached, masks, outputs)
    few, decoding = launch.few, launch.few is None

    def attend_tile(tiling=launch.tiling, decoding=decoding, one_block=launch.one_block):
        tile = Tile(tiling, launch, places, interpret=interpret)
        if launch.invariant:
            attend_parts(tile, decoding=decoding)
        else:
            attend_share(tile, decoding=decoding, one_block=one_block)

    if len(outputs) > 1:
        attend_tile()
        return

    @pl.when(index < items_ref.shape[1])
    def _():
        if decoding:
            attend_tile()
            return
        is_few = items_ref[FIELDS.index("count"), index] <= few.rows // launch.group
        # A tile with few rows may be the last one of a sample with many.
        one_block = launch.max_tiles == 1
        pl.when(is_few)(lambda: attend_tile(few, decoding=True, one_block=one_block))
        pl.when(~is_few)(attend_tile)

    @pl.when(index == items_ref.shape[1])
    def _():
        _zero_padding(num_real_ref, outputs[0], head, launch)


def _zero_padding(num_real_ref, out_ref, kv_head, launch: Launch):
    """Stores zeros in the rows beyond the last real one."""
    lanes, group, head_dim = launch.tiling.rows, launch.group, out_ref.shape[2]
    lane, dims = jnp.arange(lanes), dims_of(head_dim)[None, :]

    def zero(block, _):
        row = num_real_ref[0] + block * (lanes // group) + row_of(lane, group)
        mask = (row < out_ref.shape[0])[:, None] & (dims < head_dim)
        place = out_ref.at[row[:, None], head_of(lane, kv_head, group), dims]
        plgpu.store(place, jnp.zeros(mask.shape, out_ref.dtype), mask=mask)

    blocks = pl.cdiv(out_ref.shape[0] - num_real_ref[0], lanes // group)
    lax.fori_loop(0, blocks, zero, None)
