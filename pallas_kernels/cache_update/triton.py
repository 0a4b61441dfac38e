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

ARRAYS_PER_PROGRAM = 8  # caches for which a program loads rows at the same time
NUMBERS_PER_PROGRAM = 4096  # of each array, held in registers
ARRAYS_PER_LAUNCH = 128  # an array takes three of a launch's parameters


def update_kv_caches(
    key_caches: Sequence[Array],  # [b, l, k, d] each
    value_caches: Sequence[Array],  # [b, l, k, d] each
    keys: Sequence[Array],  # [r, k, d] each, or [r, h + 2k, d] with queries and values
    values: Sequence[Array] | None,  # [r, k, d] each
    segment_ids: Array,  # int32 [r]
    positions: Array,  # int32 [r]
    *,
    interpret: bool = False,
) -> tuple[list[Array], list[Array]]:
    """See `pallas_kernels.update_kv_caches`."""
    new_keys, new_values = [], []
    for start in range(0, len(keys), ARRAYS_PER_LAUNCH // 2):
        part = slice(start, start + ARRAYS_PER_LAUNCH // 2)
        caches = [*key_caches[part], *value_caches[part]]
        rows = [*keys[part], *([] if values is None else values[part])]
        updated = _launch(caches, rows, segment_ids, positions, interpret)
        new_keys += updated[: len(caches) // 2]
        new_values += updated[len(caches) // 2 :]
    return new_keys, new_values


def _launch(caches, rows, segment_ids, positions, interpret):
    """The caches with the rows written; `rows` of each cache, or packed ones of each layer."""
    count, num_rows, (kv_heads, head_dim) = len(caches), rows[0].shape[0], caches[0].shape[2:]
    tile = min(kv_heads, max(1, NUMBERS_PER_PROGRAM // pl.next_power_of_2(head_dim)))
    return pl.pallas_call(
        functools.partial(_kernel, count=count, tile=tile),
        grid=(num_rows, pl.cdiv(count, ARRAYS_PER_PROGRAM), pl.cdiv(kv_heads, tile)),
        out_shape=[jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches],
        input_output_aliases={2 + len(rows) + i: i for i in range(count)},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="update_kv_cache",
    )(segment_ids, positions, *rows, *caches)


def _kernel(
    segment_ids_ref,  # [r]
    positions_ref,  # [r]
    *refs,  # rows, caches as inputs, caches [b, l, k, d] as outputs; keys before values
    count: int,
    tile: int,
):
    rows, caches = refs[: -2 * count], refs[-count:]
    row, group = pl.program_id(0), pl.program_id(1)
    sample, position = segment_ids_ref[row], positions_ref[row]
    kv_heads, head_dim = caches[0].shape[2:]
    in_tile = jnp.arange(pl.next_power_of_2(tile))[:, None]
    head = pl.program_id(2) * tile + in_tile
    dim = jnp.arange(pl.next_power_of_2(head_dim))[None, :]
    mask = (in_tile < tile) & (head < kv_heads) & (dim < head_dim)

    def copy(first):
        part = range(first, min(first + ARRAYS_PER_PROGRAM, count))
        new = [plgpu.load(place(i), mask=mask) for i in part]
        for i, x in zip(part, new, strict=True):
            x = x.astype(caches[i].dtype)
            plgpu.store(caches[i].at[sample, position, head, dim], x, mask=mask)

    def place(i):
        if len(rows) == count:
            return rows[i].at[row, head, dim]
        packed, is_value = rows[i % len(rows)], i >= len(rows)
        first_head = packed.shape[1] - (1 if is_value else 2) * kv_heads
        return packed.at[row, first_head + head, dim]

    batch, max_len = caches[0].shape[:2]
    is_real = (sample >= 0) & (sample < batch) & (position >= 0) & (position < max_len)
    for index, first in enumerate(range(0, count, ARRAYS_PER_PROGRAM)):
        pl.when(is_real & (group == index))(functools.partial(copy, first))
