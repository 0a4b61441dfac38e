"""Products with narrow weights as a Pallas Triton kernel, which multiplies narrow types.

A program reads a tile of the weights once, in blocks of GROUP inputs. It rounds the rows' numbers
of each block itself (see `narrow.round_blocks`), multiplies int8 or fp8 values, and adds the
scaled products up in float32. A row's bits depend on the row and on the weight alone: blocks are
rounded by themselves, integer products are exact, and blocks are added in their order.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.common.implementations import stages_that_fit
from pallas_kernels.matmul.activations import IN_KERNELS
from pallas_kernels.matmul.narrow import GROUP, NarrowWeight, round_blocks


class Tiling(NamedTuple):
    """Sizes of one launch."""

    rows: int  # rows of a tile
    columns: int  # columns of a program's tile of the weights
    splits: int  # shares of the contracted axis
    num_warps: int
    num_stages: int


MAX_ROWS = 128  # of a tile
COLUMNS = 64
PROGRAMS_WANTED = 132
MULTIPLES = (GROUP, 2 * COLUMNS)  # of inputs and outputs; a gated weight has two halves


def tiling_for(rows: int, inputs: int, outputs: int, *, split: bool) -> Tiling:
    """The tiling of a product; `split`: whether its sums may be left in shares.

    The shares depend on the weight alone.
    """
    tile = min(max(16, pl.next_power_of_2(rows)), MAX_ROWS)
    columns, blocks, splits = COLUMNS, inputs // GROUP, 1
    while split and outputs // columns * splits < PROGRAMS_WANTED and blocks % (2 * splits) == 0:
        splits *= 2
    return Tiling(tile, columns, min(splits, 4), num_warps=4, num_stages=4)


def takes(weight: NarrowWeight) -> bool:
    """Whether the kernel takes a weight of these sizes."""
    return all(size % unit == 0 for size, unit in zip(weight.shape, MULTIPLES, strict=True))


@functools.partial(jax.jit, static_argnames=("tiling", "activation", "gated", "dtype", "interpret"))
def launch(
    x: Array,  # [rows, inputs]
    weight: NarrowWeight,  # [inputs, columns]
    bias: Array | None,  # [columns]
    *,
    tiling: Tiling,
    activation: str | None = None,
    gated: bool = False,
    dtype: jnp.dtype,
    interpret: bool,
) -> Array:
    """[rows, outputs], or shares [splits, rows, outputs]: see `pallas_kernels.linear`."""
    (rows, inputs), columns = x.shape, weight.shape[1]
    outputs = columns // 2 if gated else columns
    shares = (tiling.splits,) if tiling.splits > 1 else ()
    optional = {"zeros": weight.zeros, "bias": bias}
    optional = {name: array for name, array in optional.items() if array is not None}
    kernel = functools.partial(
        _kernel,
        names=tuple(optional),
        kind=weight.kind,
        tiling=tiling,
        blocks=inputs // GROUP // tiling.splits,
        activation=activation,
        gated=gated,
    )
    # Bytes that hold two values are taken as signed numbers: shifts then extend the sign.
    values = weight.values.view(jnp.int8) if weight.kind.is_packed else weight.values
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, tiling.rows), columns // tiling.columns, tiling.splits),
        out_shape=jax.ShapeDtypeStruct((*shares, rows, outputs), dtype),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiling.num_warps,
            num_stages=stages_that_fit(
                tiling.num_stages, GROUP * (tiling.columns + tiling.rows * x.dtype.itemsize)
            ),
        ),
        interpret=interpret,
        name="narrow_linear",
    )(x, values, weight.scales, *optional.values())


def _kernel(
    x_ref,  # [rows, inputs]
    values_ref,  # [columns, inputs], or bytes
    scales_ref,  # [groups, columns]
    *refs,  # zeros [groups, columns] and bias [columns] if named; out
    names: tuple[str, ...],
    kind,
    tiling: Tiling,
    blocks: int,
    activation: str | None,
    gated: bool,
):
    out_ref, refs = refs[-1], dict(zip(names, refs, strict=False))
    rows, outputs = x_ref.shape[0], out_ref.shape[-1]
    split = pl.program_id(2)
    row = pl.program_id(0) * tiling.rows + jnp.arange(tiling.rows)
    width = tiling.columns // 2 if gated else tiling.columns
    column = pl.program_id(1) * width + jnp.arange(width)
    parts = (column, column + outputs) if gated else (column,)
    is_row = row < rows
    grouped = scales_ref.shape[0] > 1
    halves = 2 if kind.is_packed else 1
    size = GROUP // halves

    def block(i, totals):
        number = split * blocks + i
        places = [number * GROUP + half * size + jnp.arange(size) for half in range(halves)]
        # Rows beyond the last are masked, not clamped: otherwise every program would read the same
        # last row many times, and wait for the others that read it.
        x = tuple(
            plgpu.load(
                x_ref.at[row[:, None], place[None, :]],
                mask=jnp.broadcast_to(is_row[:, None], (tiling.rows, size)),
                other=0,
            ).astype(jnp.float32)
            for place in places
        )
        rounded = round_blocks(x, kind)
        weights = [_values(values_ref, refs, columns, number, kind) for columns in parts]

        def scaled(values, scales):
            products = (_product(values, weight) * scales[:, None] for weight in weights)
            return tuple(products)

        sums = scaled(rounded.values, rounded.scales)
        again = lambda: scaled(rounded.second_values, rounded.second_scales)
        if kind.rounds_rows:
            none = lambda: tuple(map(jnp.zeros_like, sums))
            # A row that is not finite has no part in this: its comparison is false.
            has_second = jnp.max((rounded.second_scales > 0).astype(jnp.int32)) > 0
            second = lax.cond(has_second, again, none)
        else:
            second = again()
        sums = map(jnp.add, sums, second)
        if grouped:
            of_group = lambda columns: plgpu.load(scales_ref.at[number, columns])
            groups = (of_group(columns).astype(jnp.float32) for columns in parts)
            sums = (total * scales[None, :] for total, scales in zip(sums, groups, strict=True))
        return tuple(map(jnp.add, totals, sums))

    totals = (jnp.zeros((tiling.rows, width), jnp.float32),) * len(parts)
    totals = lax.fori_loop(0, blocks, block, totals)
    finished = []
    for total, columns in zip(totals, parts, strict=True):
        if not grouped:
            total *= plgpu.load(scales_ref.at[0, columns]).astype(jnp.float32)[None, :]
        if "bias" in refs:
            total += plgpu.load(refs["bias"].at[columns]).astype(jnp.float32)[None, :]
        finished.append(total)
    out = finished[0] if activation is None else IN_KERNELS[activation](finished[0])
    out = out * finished[1] if gated else out
    place = (row[:, None], column[None, :])
    place = (split, *place) if tiling.splits > 1 else place
    mask = jnp.broadcast_to(is_row[:, None], out.shape)
    plgpu.store(out_ref.at[place], out.astype(out_ref.dtype), mask=mask)


def _values(values_ref, refs, columns: Array, number, kind) -> tuple[Array, ...]:
    """The weight's values of a block, [columns, n] of each of its parts."""
    size = GROUP // 2 if kind.is_packed else GROUP
    place = number * size + jnp.arange(size)
    values = plgpu.load(values_ref.at[columns[:, None], place[None, :]])
    if not kind.is_packed:
        return (values,)
    parts = ((values << 4) >> 4, values >> 4)
    if "zeros" not in refs:
        return parts
    zeros = plgpu.load(refs["zeros"].at[number, columns])[:, None]
    return tuple(part - zeros for part in parts)


def _product(rows: tuple[Array, ...], weights: tuple[Array, ...]) -> Array:
    """The product of a block's values, float32 [rows, columns]."""
    kind = jnp.float32 if rows[0].dtype == jnp.float8_e4m3fn else jnp.int32
    dot = lambda x, weight: jnp.dot(x, weight.T, preferred_element_type=kind)
    return sum(map(dot, rows, weights)).astype(jnp.float32)
