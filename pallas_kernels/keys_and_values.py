"""Keys and values of packed rows, taken from where one product has put them beside queries."""

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

PAIRS_PER_PROGRAM = ARRAYS_PER_PROGRAM // 2


def keys_and_values(
    qkv: Sequence[Array],  # [rows, 3, heads, head_dim] each
    num_rows: int,
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[list[Array], list[Array]]:
    """Keys and values of each layer from queries, keys and values side by side.

    Args:
        qkv: of each layer, [rows, 3, heads, head_dim], all of one shape.
        num_rows: of what is returned, at least `rows`; rows beyond these are arbitrary.
        implementation: "triton" (one launch for up to 128 layers), "xla", or None: Triton where the
            device runs it.
        interpret: run the Triton kernel in interpret mode, on any device.

    Returns:
        Keys and values of each layer, [num_rows, heads, head_dim].

    Raises:
        ValueError: unknown implementation, or one that the device cannot run; fewer rows than
            there are.
    """
    name = choose(implementation, ("triton", "xla"), interpret)
    rows, _, heads, head_dim = qkv[0].shape
    if num_rows < rows:
        raise ValueError(f"num_rows must be at least {rows}, the number of rows, not {num_rows}")
    if name == "xla":
        padding = [(0, num_rows - rows), (0, 0), (0, 0)]
        return tuple([jnp.pad(x[:, kind], padding) for x in qkv] for kind in (1, 2))
    keys, values = [], []
    for start in range(0, len(qkv), ARRAYS_PER_LAUNCH):
        flat = [x.reshape(rows, 3, -1) for x in qkv[start : start + ARRAYS_PER_LAUNCH]]
        taken = _launch(flat, num_rows, interpret)
        keys += taken[: len(flat)]
        values += taken[len(flat) :]
    shape = (num_rows, heads, head_dim)
    return [x.reshape(shape) for x in keys], [x.reshape(shape) for x in values]


def _launch(qkv, num_rows: int, interpret: bool):
    count, (rows, _, width) = len(qkv), qkv[0].shape
    tile = min(NUMBERS_PER_PROGRAM, pl.next_power_of_2(width))
    return pl.pallas_call(
        functools.partial(_kernel, count=count, tile=tile),
        grid=(rows, pl.cdiv(width, tile), pl.cdiv(count, PAIRS_PER_PROGRAM)),
        out_shape=[jax.ShapeDtypeStruct((num_rows, width), x.dtype) for x in (*qkv, *qkv)],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="keys_and_values",
    )(*qkv)


def _kernel(*refs, count: int, tile: int):
    qkv, keys, values = refs[:count], refs[count : 2 * count], refs[2 * count :]
    row, group = pl.program_id(0), pl.program_id(2)
    place = pl.program_id(1) * tile + jnp.arange(tile)
    mask = place < keys[0].shape[1]

    def copy(first):
        part = slice(first, first + PAIRS_PER_PROGRAM)
        load = lambda kind: [plgpu.load(ref.at[row, kind, place], mask=mask) for ref in qkv[part]]
        loaded = load(1) + load(2)
        for ref, x in zip((*keys[part], *values[part]), loaded, strict=True):
            plgpu.store(ref.at[row, place], x, mask=mask)

    for index, first in enumerate(range(0, count, PAIRS_PER_PROGRAM)):
        pl.when(group == index)(functools.partial(copy, first))
