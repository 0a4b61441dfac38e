"""Packed rows in longer arrays, whose further rows nobody will read."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.implementations import choose
from pallas_kernels.update_kv_cache_triton import (
    ARRAYS_PER_LAUNCH,
    ARRAYS_PER_PROGRAM,
    NUMBERS_PER_PROGRAM,
)


def extend_rows(
    arrays: Sequence[Array],  # [rows, ...] each, of one shape
    num_rows: int,
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> list[Array]:
    """Arrays [num_rows, ...] that begin with the given ones; what follows is arbitrary.

    Args:
        arrays: [rows, ...] each, all of one shape.
        num_rows: at least `rows`.
        implementation: "triton" (one launch, which leaves the further rows as they are),
            "xla" (zeros), or None: Triton where the device runs it.
        interpret: run the Triton kernel in interpret mode, on any device.

    Raises:
        ValueError: unknown implementation, or one that the device cannot run.
    """
    name = choose(implementation, ("triton", "xla"), interpret)
    rows, *rest = arrays[0].shape
    if rows == num_rows:
        return list(arrays)
    if name == "xla":
        padding = [(0, num_rows - rows), *[(0, 0)] * len(rest)]
        return [jnp.pad(x, padding) for x in arrays]
    extended = []
    for start in range(0, len(arrays), ARRAYS_PER_LAUNCH):
        # Rows lie one behind the other: what is copied is the beginning of what is returned.
        flat = [x.ravel() for x in arrays[start : start + ARRAYS_PER_LAUNCH]]
        extended += _launch(flat, flat[0].size // rows * num_rows, interpret)
    return [x.reshape(num_rows, *rest) for x in extended]


def _launch(arrays, size, interpret):
    count, given = len(arrays), arrays[0].size
    tile = min(NUMBERS_PER_PROGRAM, pl.next_power_of_2(given))
    return pl.pallas_call(
        functools.partial(_kernel, count=count, tile=tile),
        grid=(pl.cdiv(given, tile), pl.cdiv(count, ARRAYS_PER_PROGRAM)),
        out_shape=[jax.ShapeDtypeStruct((size,), x.dtype) for x in arrays],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="extend_rows",
    )(*arrays)


def _kernel(*refs, count: int, tile: int):
    arrays, extended = refs[:count], refs[count:]
    place, group = pl.program_id(0) * tile + jnp.arange(tile), pl.program_id(1)
    mask = place < arrays[0].shape[0]

    def copy(first):
        part = slice(first, first + ARRAYS_PER_PROGRAM)
        loaded = [plgpu.load(ref.at[place], mask=mask) for ref in arrays[part]]
        for ref, x in zip(extended[part], loaded, strict=True):
            plgpu.store(ref.at[place], x, mask=mask)

    for index, first in enumerate(range(0, count, ARRAYS_PER_PROGRAM)):
        pl.when(group == index)(functools.partial(copy, first))
