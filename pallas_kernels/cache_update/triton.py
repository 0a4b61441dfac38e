"""The update of KV caches as a Pallas Triton kernel, in place.

Axis legend: r = packed rows, b = batch, l = cache length, h = query heads, k = K/V heads,
d = head_dim.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.common.narrow_rows import NarrowRows, pack, round_parts


class Sizes(NamedTuple):
    """Of a launch, and of one program."""

    arrays: int  # caches for which a program loads rows at the same time
    numbers: int  # of each array, held in registers
    arrays_of_launch: int


# An array takes three parameters of a launch; in 8 bits its scales take two more.
WIDE = Sizes(arrays=8, numbers=4096, arrays_of_launch=128)
# Rounding takes many more instructions than copying. All arrays share them, so that a program need
# not wait for its own to be fetched; Triton then takes a time to compile them that grows with the
# square of the arrays of a launch.
NARROW = Sizes(arrays=2, numbers=1024, arrays_of_launch=32)


def update_kv_caches(
    key_caches: Sequence[Array],  # [b, l, k, d] each, or NarrowRows
    value_caches: Sequence[Array],  # [b, l, k, d] each, or NarrowRows
    keys: Sequence[Array],  # [r, k, d] each, or [r, h + 2k, d] with queries and values
    values: Sequence[Array] | None,  # [r, k, d] each
    segment_ids: Array,  # int32 [r]
    positions: Array,  # int32 [r]
    *,
    interpret: bool = False,
) -> tuple[list[Array], list[Array]]:
    """See `pallas_kernels.update_kv_caches`."""
    new_keys, new_values = [], []
    narrow = bool(key_caches) and isinstance(key_caches[0], NarrowRows)
    layers = (NARROW if narrow else WIDE).arrays_of_launch // 2
    for start in range(0, len(keys), layers):
        part = slice(start, start + layers)
        caches = [*key_caches[part], *value_caches[part]]
        rows = [*keys[part], *([] if values is None else values[part])]
        updated = _launch(caches, rows, segment_ids, positions, interpret)
        new_keys += updated[: len(caches) // 2]
        new_values += updated[len(caches) // 2 :]
    return new_keys, new_values


def _launch(caches, rows, segment_ids, positions, interpret):
    """The caches with the rows written; `rows` of each cache, or packed ones of each layer."""
    arrays, structure = jax.tree.flatten(caches)
    format = caches[0].format if isinstance(caches[0], NarrowRows) else None
    sizes = WIDE if format is None else NARROW
    count, num_rows, (kv_heads, head_dim) = len(caches), rows[0].shape[0], caches[0].shape[2:]
    tile = min(kv_heads, max(1, sizes.numbers // pl.next_power_of_2(head_dim)))
    at_once = min(sizes.arrays, count)
    updated = pl.pallas_call(
        functools.partial(_kernel, count=count, at_once=at_once, tile=tile, format=format),
        grid=(num_rows, pl.cdiv(count, at_once), pl.cdiv(kv_heads, tile)),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays],
        input_output_aliases={2 + len(rows) + i: i for i in range(len(arrays))},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="update_kv_cache",
    )(segment_ids, positions, *rows, *arrays)
    return jax.tree.unflatten(structure, updated)


def _kernel(
    segment_ids_ref,  # [r]
    positions_ref,  # [r]
    # Rows; then, as inputs and as outputs, the caches [b, l, k, d], keys before values: in 8 bits
    # as words [b, l, k, d / 2], each followed by its scales [b, 1, k, l].
    *refs,
    count: int,
    at_once: int,
    tile: int,
    format: str | None,
):
    each = 1 if format is None else 2
    rows, outputs = refs[: -2 * each * count], refs[-each * count :]
    caches, scales = outputs[::each], outputs[1::each]
    row, group = pl.program_id(0), pl.program_id(1)
    sample, position = segment_ids_ref[row], positions_ref[row]
    kv_heads, part_dim = caches[0].shape[2:]
    in_tile = jnp.arange(pl.next_power_of_2(tile))
    head = pl.program_id(2) * tile + in_tile
    dim = jnp.arange(pl.next_power_of_2(part_dim))[None, :]
    has_head = (in_tile < tile) & (head < kv_heads)
    mask = has_head[:, None] & (dim < part_dim)

    def load(i):
        """The parts of the rows: numbers that share a word are of two halves."""
        dims = [dim] if format is None else [dim, part_dim + dim]
        other = None if format is None else 0
        return [plgpu.load(place(i, part), mask=mask, other=other) for part in dims]

    def place(i, dim):
        if len(rows) == count:
            return rows[i].at[row, head[:, None], dim]
        packed, is_value = rows[i % len(rows)], i >= len(rows)
        first_head = packed.shape[1] - (1 if is_value else 2) * kv_heads
        return packed.at[row, first_head + head[:, None], dim]

    def load_all(first):
        return [load(min(i, count - 1)) for i in range(first, first + at_once)]

    def store_all(new, first):
        for i, (rows_of_array, scales_of_rows) in zip(range(first, count), new, strict=False):
            if scales_of_rows is not None:
                place_of_scales = scales[i].at[sample, 0, head, position]
                plgpu.store(place_of_scales, scales_of_rows, mask=has_head)
            place_of_rows = caches[i].at[sample, position, head[:, None], dim]
            plgpu.store(place_of_rows, rows_of_array.astype(caches[i].dtype), mask=mask)

    def rounded(parts):
        """A cache's rows, and their scales if it has some."""
        if format is None:
            return parts[0], None
        numbers, scales_of_rows = round_parts(parts, format)
        return pack(*numbers, format), scales_of_rows

    def copy():
        firsts = range(0, count, at_once)
        loaded = _switch(group, [functools.partial(load_all, first) for first in firsts])
        new = list(map(rounded, loaded))
        _switch(group, [functools.partial(store_all, new, first) for first in firsts])

    batch, max_len = caches[0].shape[:2]
    is_real = (sample >= 0) & (sample < batch) & (position >= 0) & (position < max_len)
    pl.when(is_real)(copy)


def _switch(index, branches: Sequence[Callable]):
    """What the branch of this index returns. It is found in halves, in few comparisons."""
    if len(branches) == 1:
        return branches[0]()
    half = len(branches) // 2
    first = functools.partial(_switch, index, branches[:half])
    second = functools.partial(_switch, index - half, branches[half:])
    return lax.cond(index < half, first, second)
