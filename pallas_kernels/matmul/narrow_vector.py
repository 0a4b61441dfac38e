"""Products of one row with 4-bit weights as a Pallas Triton kernel that uses no matrix unit.

A thread multiplies four pairs of 8-bit numbers with one instruction and adds them up in an integer,
while the weights of other blocks are on their way. Every program rounds the row itself, in place of
another launch: see `rounding.round_parts`. In a step of OPT-6.7B at one row the products of a layer
take 41 us, and 45 with the kernel for many rows and the launches that round (H200). Weights in 8
bits take as long here as there.

A thread adds up its own 16 products of a block, scales the sum and adds it to its own total; the
threads' totals are added up once, at the end.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.matmul.narrow import GROUP, SECOND_STEPS, Format, NarrowWeight
from pallas_kernels.matmul.narrow_triton import NIBBLE_UNIT, finish, nibbles
from pallas_kernels.matmul.rounded import RoundedRows
from pallas_kernels.matmul.rounding import round_parts


class Tiling(NamedTuple):
    """Sizes of one launch, found by measurement on an H200."""

    columns: int  # of a program
    together: int  # blocks of a step
    splits: int  # shares of the contracted axis
    num_warps: int


COLUMNS, TOGETHER, NUM_WARPS = 32, 8, 4
PROGRAMS_WANTED, MOST_SPLITS = 512, 4
IN_SUM = 16  # products that a thread adds up as integers
BYTES = GROUP // 2  # of a block of weights: two parts of the block's numbers share them
GATES, TAKES = True, "one row and 4-bit weights without zeros,"
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
    return fits and is_one and weight.kind.is_packed and weight.zeros is None


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
    (_, inputs), columns = x.shape, weight.shape[1]
    shares = (tiling.splits,) if tiling.splits > 1 else ()
    return pl.pallas_call(
        functools.partial(
            _kernel,
            kind=weight.kind,
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
        # Bytes are taken as signed numbers: shifts then extend the sign.
    )(x, weight.values.view(jnp.int8), weight.scales, *(() if bias is None else (bias,)))


def _kernel(
    x_ref,  # [1, inputs]
    values_ref,  # bytes [columns, inputs / 2]
    scales_ref,  # [blocks, columns]
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
    place = jnp.arange(BYTES)

    def product(values, of_row):
        """Sums [columns, blocks, n] of products of weights and numbers of the row, int32."""
        return sum(_dot(x, y, interpret=interpret) for x, y in zip(values, of_row, strict=True))

    def step(i, totals):
        block = (split * steps + i) * tiling.together + jnp.arange(tiling.together)
        first = block[:, None] * GROUP + place
        numbers = [plgpu.load(x_ref.at[0, at]) for at in (first, first + BYTES)]
        at = (block[:, None] * BYTES + place)[None]
        loaded = [plgpu.load(values_ref.at[columns[:, None, None], at]) for columns in parts]
        rounded = round_parts([part.astype(jnp.float32) for part in numbers], kind)
        scales = [plgpu.load(scales_ref.at[block[None, :], columns[:, None]]) for columns in parts]
        new = []
        for total, bytes_, of_blocks in zip(totals, loaded, scales, strict=True):
            values = nibbles(bytes_, interpret=interpret)
            # Both terms of the row are added up in steps of the second one.
            sums = product(values, rounded.values) * SECOND_STEPS
            sums += product(values, rounded.second_values)
            unit = of_blocks.astype(jnp.float32) * rounded.scales * (kind.second_step / NIBBLE_UNIT)
            new.append(total + sums.astype(jnp.float32) * unit[..., None])
        return tuple(new)

    zeros = jnp.zeros((width, tiling.together, BYTES // IN_SUM), jnp.float32)
    totals = lax.fori_loop(0, steps, step, (zeros,) * len(parts))
    totals = [jnp.sum(jnp.sum(total, axis=2), axis=1)[None, :] for total in totals]
    out = finish(totals, parts, None, bias_ref, activation=activation)
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
