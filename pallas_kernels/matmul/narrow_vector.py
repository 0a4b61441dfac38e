"""Products of one row with narrow weights as a Pallas Triton kernel that uses no matrix unit.

It is to begin and end faster than the kernels for many rows, and has not been measured yet. A
thread multiplies four pairs of 8-bit numbers with one instruction and adds them up in an integer,
while the weights of other blocks are on their way. Every program rounds the row itself (see
`narrow.round_parts`), in place of another launch.

A thread adds up its own 16 products of a block, scales the sum and adds it to its own total; the
threads' totals are added up once, at the end. Second terms are multiplied where a step of the loop
has any, or always if rows keep their numbers.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.matmul.narrow import (
    GROUP,
    SECOND_STEPS,
    Format,
    NarrowWeight,
    Rounded,
    round_parts,
)
from pallas_kernels.matmul.narrow_triton import NIBBLE_UNIT, finish, nibbles
from pallas_kernels.matmul.rounded import RoundedRows


class Tiling(NamedTuple):
    """Sizes of one launch."""

    columns: int  # of a program
    together: int  # blocks of a step
    splits: int  # shares of the contracted axis
    num_warps: int


COLUMNS, TOGETHER, NUM_WARPS = 32, 8, 4
PROGRAMS_WANTED, MOST_SPLITS = 256, 4
IN_SUM = 16  # products that a thread adds up as integers
GATES, TAKES = True, "one row and weights of integers without zeros,"
MULTIPLES = (GROUP, 2 * COLUMNS)  # of inputs and outputs; a gated weight has two halves
# Four products, $1 times $2, in one number. The result is declared as four 8-bit numbers, as the
# factors are: see `_dot`.
FOUR_PRODUCTS = """{
.reg .s32 zero;
mov.b32 zero, 0;
dp4a.s32.s32 $0, $1, $2, zero;
}"""


def tiling_for(
    rows: int,
    inputs: int,
    outputs: int,
    kind: Format,
    *,
    dtype: jnp.dtype,
    split: bool,
    invariant: bool = False,
) -> Tiling:
    """The tiling of a product of one row: see `narrow_triton.tiling_for`."""
    del rows, kind, dtype, invariant
    blocks, splits = inputs // GROUP, 1
    while (
        split
        and outputs // COLUMNS * splits < PROGRAMS_WANTED
        and splits < MOST_SPLITS
        and blocks % (2 * splits) == 0
    ):
        splits *= 2
    together = TOGETHER
    while blocks // splits % together:
        together //= 2
    return Tiling(COLUMNS, together, splits, NUM_WARPS)


def takes(weight: NarrowWeight, x: Array | RoundedRows, *, split: bool) -> bool:
    """Whether the kernel takes rows and a weight of these sizes and types."""
    del split
    fits = all(size % unit == 0 for size, unit in zip(weight.shape, MULTIPLES, strict=True))
    is_one = x.shape[0] == 1 and not isinstance(x, RoundedRows)
    return fits and is_one and weight.kind.dtype != jnp.float8_e4m3fn and weight.zeros is None


def rounding_for(rows: int, weight: NarrowWeight, tiling: Tiling) -> None:
    """The kernel takes rows as they are."""
    del rows, weight, tiling


@functools.partial(jax.jit, static_argnames=("tiling", "activation", "gated", "dtype", "interpret"))
def launch(
    x: Array,  # [1, inputs]
    weight: NarrowWeight,  # [inputs, columns]
    bias: Array | None,  # [columns]
    *,
    tiling: Tiling,
    activation: str | None = None,
    gated: bool = False,
    dtype: jnp.dtype,
    interpret: bool,
) -> Array:
    """[1, outputs], or shares [splits, 1, outputs]: see `pallas_kernels.linear`."""
    (_, inputs), columns, kind = x.shape, weight.shape[1], weight.kind
    shares = (tiling.splits,) if tiling.splits > 1 else ()
    # Bytes that hold two values are taken as signed numbers: shifts then extend the sign.
    values = weight.values.view(jnp.int8) if kind.is_packed else weight.values
    return pl.pallas_call(
        functools.partial(
            _kernel,
            kind=kind,
            tiling=tiling,
            steps=inputs // GROUP // tiling.splits // tiling.together,
            activation=activation,
            gated=gated,
            interpret=interpret,
        ),
        grid=(columns // tiling.columns, tiling.splits),
        out_shape=jax.ShapeDtypeStruct((*shares, 1, columns // 2 if gated else columns), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps, num_stages=1),
        interpret=interpret,
        name="narrow_linear_vector",
    )(x, values, weight.scales, *(() if bias is None else (bias,)))


def _kernel(
    x_ref,  # [1, inputs]
    values_ref,  # [columns, inputs], or bytes
    scales_ref,  # [groups, columns]
    *refs,  # bias [columns] or nothing; out
    kind: Format,
    tiling: Tiling,
    steps: int,
    activation: str | None,
    gated: bool,
    interpret: bool,
):
    bias_ref, out_ref = refs if len(refs) == 2 else (None, *refs)
    outputs, split = out_ref.shape[-1], pl.program_id(1)
    width = tiling.columns // 2 if gated else tiling.columns
    column = pl.program_id(0) * width + jnp.arange(width)
    parts = (column, column + outputs) if gated else (column,)
    size = GROUP // 2 if kind.is_packed else GROUP  # bytes of a block, and numbers of its parts
    place = jnp.arange(size)

    def add(total, values, rounded: Rounded, group_scales):
        """A sum [columns, blocks, n] and the products of one step."""
        dot = functools.partial(_dot, interpret=interpret)
        product = lambda of_row: sum(map(dot, values, of_row))
        scaled = lambda sums, scales: sums.astype(jnp.float32) * scales[..., None]
        if group_scales is not None:  # both terms are added up in steps of the second one
            sums = product(rounded.values) * SECOND_STEPS + product(rounded.second_values)
            return total + scaled(sums, group_scales * rounded.second_scales / NIBBLE_UNIT)
        total += scaled(product(rounded.values), rounded.scales[None, :])

        def add_second(total):
            return total + scaled(product(rounded.second_values), rounded.second_scales[None, :])

        has_second = jnp.max(rounded.second_scales) > 0
        return lax.cond(has_second, add_second, lambda total: total, total)

    def step(i, totals):
        block = (split * steps + i) * tiling.together + jnp.arange(tiling.together)
        at = block[:, None] * GROUP + place
        numbers = [plgpu.load(x_ref.at[0, at + first]) for first in range(0, GROUP, size)]
        at = (block[:, None] * size + place)[None]
        loaded = [plgpu.load(values_ref.at[columns[:, None, None], at]) for columns in parts]
        rounded = round_parts([part.astype(jnp.float32) for part in numbers], kind)
        of_groups = [None] * len(parts)
        if kind.grouped:
            load = lambda columns: plgpu.load(scales_ref.at[block[None, :], columns[:, None]])
            of_groups = [load(columns).astype(jnp.float32) for columns in parts]
        of_parts = zip(totals, loaded, of_groups, strict=True)
        unpacked = lambda x: nibbles(x, interpret=interpret) if kind.is_packed else (x,)
        return tuple(add(total, unpacked(x), rounded, scales) for total, x, scales in of_parts)

    zeros = jnp.zeros((width, tiling.together, size // IN_SUM), jnp.float32)
    totals = lax.fori_loop(0, steps, step, (zeros,) * len(parts))
    totals = [jnp.sum(jnp.sum(total, axis=2), axis=1)[None, :] for total in totals]
    of_columns = None if kind.grouped else scales_ref
    out = finish(totals, parts, of_columns, bias_ref, activation=activation)
    at = (jnp.zeros((1, 1), jnp.int32), column[None, :])
    at = (split, *at) if tiling.splits > 1 else at
    plgpu.store(out_ref.at[at], out.astype(out_ref.dtype))


def _dot(values: Array, of_row: Array, *, interpret: bool) -> Array:
    """Sums of IN_SUM products of 8-bit numbers [c, b, n] and [b, n], int32 [c, b, n / IN_SUM]."""
    of_row, size = jnp.broadcast_to(of_row[None], values.shape), values.shape[-1]
    in_groups = lambda x, n: jnp.sum(x.reshape(*values.shape[:-1], -1, n), axis=-1)
    if interpret:
        return in_groups(values.astype(jnp.int32) * of_row.astype(jnp.int32), IN_SUM)
    (products,) = plgpu.elementwise_inline_asm(
        FOUR_PRODUCTS,
        args=[values, of_row],
        constraints="=r,r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(values.shape, jnp.int8)],
    )
    # The four bytes of a number are put together again, which the compiler sees to be no work.
    shift = jnp.arange(size) % 4 * 8
    words = in_groups((products.astype(jnp.int32) & 255) << shift[None, None, :], 4)
    return jnp.sum(words.reshape(*values.shape[:-1], -1, IN_SUM // 4), axis=-1)
