"""Products of few rows, as in decoding, as a Pallas Triton kernel limited by memory bandwidth."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.common.implementations import (
    MULTIPROCESSORS,
    matmul_precision,
    stages_that_fit,
)
from pallas_kernels.matmul.activations import IN_KERNELS


class Tiling(NamedTuple):
    """Sizes of one launch."""

    columns: int  # columns of a program's tile of the weights
    depth: int  # size of a block along the contracted axis
    splits: int  # shares of the contracted axis
    num_warps: int
    num_stages: int

    @property
    def multiples(self) -> tuple[int, int]:
        """The numbers of which inputs and outputs must be multiples."""
        return self.depth * self.splits, self.columns


# The tilings of whole products and of sums in shares, by the padded number of rows. They were
# found by measurement on an H200, at the sizes of OPT-6.7B.
_WIDE = Tiling(columns=128, depth=64, splits=1, num_warps=4, num_stages=5)
TILINGS = {
    16: (
        _WIDE._replace(num_warps=8),
        Tiling(columns=64, depth=128, splits=2, num_warps=4, num_stages=5),
    ),
    32: (_WIDE, _WIDE._replace(splits=4)),
    64: (_WIDE, Tiling(columns=64, depth=64, splits=2, num_warps=4, num_stages=8)),
    128: (_WIDE, Tiling(columns=64, depth=64, splits=2, num_warps=4, num_stages=6)),
}
# With more programs than multiprocessors, fewer stages let two programs share one: 49 us in place
# of 51 for 4096 x 24576 weights and 1 row, 52 of 57 for 64 rows, in steps of Qwen3-8B.
SHARED = {"num_warps": 4, "num_stages": 4}
SHARING_ROWS, MIN_TILE_ROWS = 64, min(TILINGS)
# If a tiling makes too few programs, the one for this number of rows is used, which has more
# shares, and if there are still too few, narrower ones.
IN_MORE_SHARES = 32
NARROWER = ((64, 4), (32, 2))  # columns, warps
PROGRAMS_WANTED = 90  # for 132 multiprocessors
MAX_ROWS = max(TILINGS)  # with more rows the arithmetic dominates, and other kernels are faster
ROW_MULTIPLE, ITEM_BYTES = 1, (2, 4)  # bytes of a number
TAKES = f"at most {MAX_ROWS} rows"
TAKES_ANY_WEIGHT = True  # of any sizes, where masks are allowed
TAKES_TRANSPOSED = GATES = True
# Offsets are 32-bit numbers, so no array may have more elements.
MAX_ELEMENTS = 2**31 - 1
# The depth of float32 blocks if the bits of a row must not depend on the number of rows: it was
# seen not to matter for 16-bit numbers only.
FLOAT32_DEPTH = 64


def tiling_for(
    rows: int,
    inputs: int,
    outputs: int,
    *,
    dtype: jnp.dtype | None = None,
    split: bool = False,
    transposed: bool = False,
    splits: int | None = None,
) -> Tiling:
    """The tiling of a product; `split`: whether its sums may be left in shares.

    `splits` is the number of shares, if it must not depend on the number of rows.
    """
    del dtype, transposed
    row_tiles = pl.cdiv(rows, MAX_ROWS)
    programs = lambda tiling: outputs // tiling.columns * tiling.splits * row_tiles
    too_few = lambda tiling: programs(tiling) < PROGRAMS_WANTED
    tile_rows = _tile_rows(rows)

    def measured(tile_rows):
        tiling = TILINGS[tile_rows][split]
        return tiling if splits is None else tiling._replace(splits=splits)

    tiling = measured(tile_rows)
    if programs(tiling) > MULTIPROCESSORS and tiling.splits == 1:
        tiling = tiling._replace(**SHARED)
    if too_few(tiling):
        tiling = measured(max(tile_rows, IN_MORE_SHARES))
    for columns, num_warps in NARROWER:
        if too_few(tiling):
            tiling = tiling._replace(columns=columns, depth=128, num_warps=num_warps)
    return tiling if inputs % (tiling.depth * tiling.splits) == 0 else tiling._replace(depth=64)


def runs_at_once(rows: int, inputs: int, outputs: int, *, split: bool) -> bool:
    """Whether a product of so many rows has no program that waits for another to end.

    If two share a multiprocessor, they do so with few rows alone. With the fewest rows all programs
    wait for memory, whether they run at once or not.
    """
    tiling = tiling_for(rows, inputs, outputs, split=split)
    shared = rows <= SHARING_ROWS and tiling.num_stages <= SHARED["num_stages"]
    programs = outputs // tiling.columns * tiling.splits
    return rows <= MIN_TILE_ROWS or programs <= MULTIPROCESSORS * (2 if shared else 1)


def shares_of(inputs: int, outputs: int, *, split: bool) -> int:
    """The number of shares of a product if it depends on the weight alone: that for one row."""
    tiling = tiling_for(1, inputs, outputs, split=split)
    return tiling.splits if inputs % tiling.multiples[0] == 0 else 1


def _tile_rows(rows: int) -> int:
    """Rows of a tile."""
    return min(max(16, pl.next_power_of_2(rows)), MAX_ROWS)


@functools.partial(
    jax.jit,
    static_argnames=(
        "tiling",
        "activation",
        "gated",
        "rounded",
        "transposed",
        "dtype",
        "interpret",
    ),
)
def launch(
    x: Array,  # [rows, inputs]
    weight: Array,  # [inputs, columns], or [columns, inputs] if transposed
    bias: Array | None,  # [columns]
    *,
    tiling: Tiling,
    activation: str | None = None,
    gated: bool = False,
    rounded: bool = False,
    transposed: bool = False,
    dtype: jnp.dtype,
    interpret: bool,
) -> Array:
    """[rows, outputs], or shares [splits, rows, outputs]: see `pallas_kernels.linear`.

    The kernel takes any number of rows, and weights whose sizes are no multiples of the tiling's.
    `rounded`: both halves of a gated product are rounded first, as if they were outputs.
    """
    (rows, inputs), columns = x.shape, weight.shape[0 if transposed else 1]
    outputs = columns // 2 if gated else columns
    shares = (tiling.splits,) if tiling.splits > 1 else ()
    if max(x.size, weight.size, rows * outputs * tiling.splits) > MAX_ELEMENTS:
        raise ValueError(f"{rows} rows and weights {weight.shape} need offsets of 64 bits")
    # Along the first axis neighbours run at the same time, so that all rows read the same columns
    # of the weights, and memory is read once.
    row_tiles = (pl.cdiv(rows, MAX_ROWS),) if rows > MAX_ROWS else ()
    kernel = functools.partial(
        _kernel,
        tiling=tiling,
        share=inputs // tiling.splits,
        activation=activation,
        gated=gated,
        rounded=rounded,
        transposed=transposed,
        biased=bias is not None,
    )
    return pl.pallas_call(
        kernel,
        grid=(*row_tiles, pl.cdiv(columns, tiling.columns), tiling.splits),
        out_shape=jax.ShapeDtypeStruct((*shares, rows, outputs), dtype),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiling.num_warps,
            num_stages=stages_that_fit(
                tiling.num_stages,
                tiling.depth * (tiling.columns + _tile_rows(rows)) * x.dtype.itemsize,
            ),
        ),
        interpret=interpret,
        name="linear",
    )(x, weight, *(() if bias is None else (bias,)))


def _kernel(
    x_ref,  # [rows, inputs]
    weight_ref,  # [inputs, columns], or [columns, inputs] if transposed
    *refs,  # bias [columns] if biased; out [rows, outputs], or [splits, rows, outputs]
    tiling: Tiling,
    share: int,
    activation: str | None,
    gated: bool,
    rounded: bool,
    transposed: bool,
    biased: bool,
):
    bias_ref, out_ref = refs if biased else (None, *refs)
    rows, outputs = x_ref.shape[0], out_ref.shape[-1]
    row_axes = 1 if rows > MAX_ROWS else 0
    tile, split = pl.program_id(row_axes), pl.program_id(row_axes + 1)
    row = jnp.arange(_tile_rows(rows))
    if row_axes:
        row += pl.program_id(0) * MAX_ROWS
    width = tiling.columns // 2 if gated else tiling.columns
    column = tile * width + jnp.arange(width)
    parts = (column, column + outputs) if gated else (column,)
    # Rows beyond the last are masked, not clamped: otherwise every program would read the same
    # last row many times, and wait for the others that read it.
    is_row = row[:, None] < rows
    is_column = None if outputs % width == 0 else column < outputs

    def block(i, totals):
        depth = split * share + i * tiling.depth + jnp.arange(tiling.depth)
        is_depth = None if share % tiling.depth == 0 else depth < (split + 1) * share
        x = _load(x_ref, row, depth, is_row, _along(is_depth, 1))

        def add(total, columns):
            if transposed:
                masks = _along(is_column, 0), _along(is_depth, 1)
                weight = _load(weight_ref, columns, depth, *masks).T
            else:
                masks = _along(is_depth, 0), _along(is_column, 1)
                weight = _load(weight_ref, depth, columns, *masks)
            return total + jnp.dot(
                x,
                weight,
                precision=matmul_precision(x.dtype),
                preferred_element_type=jnp.float32,
            )

        return tuple(map(add, totals, parts))

    totals = (jnp.zeros((row.shape[0], width), jnp.float32),) * len(parts)
    totals = lax.fori_loop(0, pl.cdiv(share, tiling.depth), block, totals)
    if biased:
        load = lambda columns: plgpu.load(bias_ref.at[columns], mask=is_column)
        biases = (load(columns).astype(jnp.float32) for columns in parts)
        totals = tuple(total + bias[None, :] for total, bias in zip(totals, biases, strict=True))
    if rounded:
        totals = tuple(total.astype(out_ref.dtype).astype(jnp.float32) for total in totals)
    out = totals[0] if activation is None else IN_KERNELS[activation](totals[0])
    out = out * totals[1] if gated else out
    mask = _all(out.shape, is_row, _along(is_column, 1))
    place = (row[:, None], column[None, :])
    place = (split, *place) if tiling.splits > 1 else place
    plgpu.store(out_ref.at[place], out.astype(out_ref.dtype), mask=mask)


def _load(ref, rows: Array, columns: Array, *masks: Array | None) -> Array:
    """A tile of a matrix, in which what is masked is zero."""
    mask = _all((rows.shape[0], columns.shape[0]), *masks)
    options = {} if mask is None else {"mask": mask, "other": 0}
    return plgpu.load(ref.at[rows[:, None], columns[None, :]], **options)


def _along(mask: Array | None, axis: int) -> Array | None:
    """A mask of places along this axis of a matrix."""
    return None if mask is None else jnp.expand_dims(mask, 1 - axis)


def _all(shape: tuple[int, int], *masks: Array | None) -> Array | None:
    """All masks together for a tile of this shape; None: nothing is masked."""
    masks = [jnp.broadcast_to(mask, shape) for mask in masks if mask is not None]
    return functools.reduce(jnp.logical_and, masks) if masks else None
