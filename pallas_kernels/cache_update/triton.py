"""The update of KV caches as a Pallas Triton kernel, in place.

Axis legend: r = packed rows, b = batch, l = cache length, h = query heads, k = K/V heads,
d = head_dim.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.common.narrow_rows import NarrowRows, round_rows

ARRAYS_PER_PROGRAM = 8  # caches for which a program loads rows at the same time
NUMBERS_PER_PROGRAM = 4096  # of each array, held in registers
# Of one launch. An array takes three of its parameters; in 8 bits its scales take two more.
ARRAYS_PER_LAUNCH, NARROW_PER_LAUNCH = 128, 64


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
    layers = (NARROW_PER_LAUNCH if narrow else ARRAYS_PER_LAUNCH) // 2
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
    count, num_rows, (kv_heads, head_dim) = len(caches), rows[0].shape[0], caches[0].shape[2:]
    tile = min(kv_heads, max(1, NUMBERS_PER_PROGRAM // pl.next_power_of_2(head_dim)))
    updated = pl.pallas_call(
        functools.partial(_kernel, count=count, tile=tile, format=format),
        grid=(num_rows, pl.cdiv(count, ARRAYS_PER_PROGRAM), pl.cdiv(kv_heads, tile)),
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
    # Rows; then, as inputs and as outputs, the caches [b, l, k, d], keys before values, each in 8
    # bits followed by its scales [b, l, k].
    *refs,
    count: int,
    tile: int,
    format: str | None,
):
    each = 1 if format is None else 2
    rows, outputs = refs[: -2 * each * count], refs[-each * count :]
    caches, scales = outputs[::each], outputs[1::each]
    row, group = pl.program_id(0), pl.program_id(1)
    sample, position = segment_ids_ref[row], positions_ref[row]
    kv_heads, head_dim = caches[0].shape[2:]
    in_tile = jnp.arange(pl.next_power_of_2(tile))
    head = pl.program_id(2) * tile + in_tile
    dim = jnp.arange(pl.next_power_of_2(head_dim))[None, :]
    has_head = (in_tile < tile) & (head < kv_heads)
    mask = has_head[:, None] & (dim < head_dim)

    def copy(first):
        part = range(first, min(first + ARRAYS_PER_PROGRAM, count))
        other = None if format is None else 0
        new = [plgpu.load(place(i), mask=mask, other=other) for i in part]
        for i, x in zip(part, new, strict=True):
            if format is not None:
                narrow = round_rows(x, format)
                x = narrow.values
                place_of_scales = scales[i].at[sample, position, head]
                plgpu.store(place_of_scales, narrow.scales, mask=has_head)
            x = x.astype(caches[i].dtype)
            plgpu.store(caches[i].at[sample, position, head[:, None], dim], x, mask=mask)

    def place(i):
        if len(rows) == count:
            return rows[i].at[row, head[:, None], dim]
        packed, is_value = rows[i % len(rows)], i >= len(rows)
        first_head = packed.shape[1] - (1 if is_value else 2) * kv_heads
        return packed.at[row, first_head + head[:, None], dim]

    batch, max_len = caches[0].shape[:2]
    is_real = (sample >= 0) & (sample < batch) & (position >= 0) & (position < max_len)
    for index, first in enumerate(range(0, count, ARRAYS_PER_PROGRAM)):
        pl.when(is_real & (group == index))(functools.partial(copy, first))
