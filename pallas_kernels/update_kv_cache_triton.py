"""The scatter of packed K/V rows as a Pallas Triton kernel, in place."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

ARRAYS_PER_PROGRAM = 8  # whose loads are in flight together
NUMBERS_PER_PROGRAM = 4096  # of each array, which its registers hold
ARRAYS_PER_LAUNCH = 128  # an array takes three of a launch's parameters


def update(
    caches: Sequence[Array],  # [b, l, h, d] each, those of values behind all of keys
    rows: Sequence[Array],  # [r, h, d] for each, or [r, 3, h, d] for each pair
    segment_ids: Array,  # int32 [r]
    positions: Array,  # int32 [r]
    *,
    interpret: bool = False,
) -> list[Array]:
    """Every cache with its rows written: see `pallas_kernels.update_kv_caches`."""
    layers, updated = len(caches) // 2, list(caches)
    for start in range(0, layers, ARRAYS_PER_LAUNCH // 2):
        keys = range(start, min(start + ARRAYS_PER_LAUNCH // 2, layers))
        both = [*keys, *(layers + i for i in keys)]
        part = keys if len(rows) == layers else both
        of = [caches[i] for i in both], [rows[i] for i in part]
        for i, cache in zip(both, _launch(*of, segment_ids, positions, interpret), strict=True):
            updated[i] = cache
    return updated


def _launch(caches, rows, segment_ids, positions, interpret):
    count, (num_rows, *_, heads, head_dim) = len(caches), rows[0].shape
    tile = min(heads, max(1, NUMBERS_PER_PROGRAM // pl.next_power_of_2(head_dim)))
    return pl.pallas_call(
        functools.partial(_kernel, count=count, tile=tile),
        grid=(num_rows, pl.cdiv(count, ARRAYS_PER_PROGRAM), pl.cdiv(heads, tile)),
        out_shape=[jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches],
        input_output_aliases={2 + len(rows) + i: i for i in range(count)},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="update_kv_cache",
    )(segment_ids, positions, *rows, *caches)


def _kernel(segment_ids_ref, positions_ref, *refs, count: int, tile: int):
    rows, caches = refs[: -2 * count], refs[-count:]  # between them, the caches as inputs
    row, group = pl.program_id(0), pl.program_id(1)
    sample, position = segment_ids_ref[row], positions_ref[row]
    *_, heads, head_dim = rows[0].shape
    in_tile = jnp.arange(pl.next_power_of_2(tile))[:, None]
    head = pl.program_id(2) * tile + in_tile
    dim = jnp.arange(pl.next_power_of_2(head_dim))[None, :]
    mask = (in_tile < tile) & (head < heads) & (dim < head_dim)

    def copy(first):
        part = range(first, min(first + ARRAYS_PER_PROGRAM, count))
        new = [plgpu.load(place(i), mask=mask) for i in part]
        for i, x in zip(part, new, strict=True):
            x = x.astype(caches[i].dtype)
            plgpu.store(caches[i].at[sample, position, head, dim], x, mask=mask)

    def place(i):
        if len(rows) == count:
            return rows[i].at[row, head, dim]
        layer, kind = i % len(rows), 1 + i // len(rows)
        return rows[layer].at[row, kind, head, dim]

    is_real = sample < caches[0].shape[0]
    for index, first in enumerate(range(0, count, ARRAYS_PER_PROGRAM)):
        pl.when(is_real & (group == index))(functools.partial(copy, first))
