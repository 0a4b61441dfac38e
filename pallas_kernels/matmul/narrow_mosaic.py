"""Products with narrow weights as a Pallas Mosaic GPU kernel, for capability 9.0.

Rows are rounded by a launch of their own, as for the Triton kernel. A tile's product of one block
of the rows has sums of its own, which are scaled by the rows' scales of that block and added up in
float32.

A product of few rows waits for its weights. Its one row of tiles has swapped operands, and lanes
for the second terms beside those of the first, whether there are any or not. With many rows, blocks
with second terms come after all others: a small launch lists them, so that those without are
neither fetched nor multiplied again.

Weights in 4 bits are widened in registers, as the first factor of a matrix instruction, in which
rows cannot be: operands are swapped with any number of rows. Each of their groups has its own sums
too, which are scaled by the group's scales of the tile's columns as well.

Tiles, their order and the way to the output are those of `mosaic`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as triton_gpu

from pallas_kernels.common.blocks import round_up
from pallas_kernels.matmul import mosaic, narrow_tiles, narrow_triton
from pallas_kernels.matmul.activations import IN_KERNELS
from pallas_kernels.matmul.mosaic_tiles import (
    COPIED_ROWS,
    FETCHING_REGISTERS,
    ITEM_BYTES,
    Tiling,
)
from pallas_kernels.matmul.narrow import GROUP, SECOND_STEPS, Format, NarrowWeight
from pallas_kernels.matmul.narrow_triton import NIBBLE_UNIT
from pallas_kernels.matmul.rounded import RoundedRows, Rounding
from pallas_kernels.matmul.widened import multiply_widened

MULTIPLES = narrow_tiles.MULTIPLES
GATES = False
TAKES = (
    "weights of formats that round rows (int8, fp8), or 16-bit rows and int4 without zeros (for "
    "sums with inputs enough for two shares),"
)
LISTED_FLAGS, LISTING_WARPS = 16384, 8  # read at once, so that few are waited for in turn


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
    """See `narrow_tiles.tiling_for`; numerics are never invariant here, and all formats alike.

    Args:
        dtype: that of the rows.

    Raises:
        ValueError: `invariant` is set.
    """
    if invariant:
        raise ValueError("implementation 'mosaic' has no invariant numerics with narrow weights")
    if kind.is_packed:
        return narrow_tiles.swapped_tiling(rows, inputs, outputs, split=split, bits=4)
    # Only 16-bit outputs can be transposed back.
    options = {"swap": dtype.itemsize == ITEM_BYTES, "block": kind.block_of(inputs)}
    return narrow_tiles.tiling_for(rows, inputs, outputs, split=split, **options)


def takes(weight: NarrowWeight, x: Array | RoundedRows, *, split: bool) -> bool:
    """Whether the kernel takes rows and a weight of these sizes and types.

    Args:
        split: as for `tiling_for`.
    """
    fits = all(size % unit == 0 for size, unit in zip(weight.shape, MULTIPLES, strict=True))
    if not weight.kind.is_packed:
        return fits and weight.kind.rounds_rows
    if not fits or weight.zeros is not None or x.dtype.itemsize != ITEM_BYTES:
        return False
    tiling = narrow_tiles.swapped_tiling(x.shape[0], *weight.shape, split=split, bits=4)
    return tiling.splits > 1 or not split


def rounding_for(rows: int, weight: NarrowWeight, tiling: Tiling) -> Rounding:
    """How the kernel takes its rows."""
    tiles = mosaic.clusters(rows, weight.shape[1], tiling)[0]
    return Rounding(weight.kind, tiles * tiling.rows, tiles if tiling.swapped else 1)


@functools.partial(jax.jit, static_argnames=("tiling", "activation", "dtype", "interpret"))
def launch(
    x: Array | RoundedRows,  # [rows, inputs]
    weight: NarrowWeight,  # [inputs, outputs]
    bias: Array | None,  # [outputs]
    *,
    tiling: Tiling,
    activation: str | None = None,
    dtype: jnp.dtype,
    interpret: bool,
) -> Array:
    """[rows, outputs], or shares [splits, rows, outputs]: see `pallas_kernels.linear`."""
    (rows, inputs), outputs, kind = x.shape, weight.shape[1], weight.kind
    x = narrow_triton.in_kernel_form(x, rounding_for(rows, weight, tiling), interpret=interpret)
    later = () if tiling.swapped else list_second(x.second, tiling.splits, interpret=interpret)
    static = {"tiling": tiling, "kind": kind, "activation": activation, "interpret": interpret}
    kernel = functools.partial(_kernel, **static)
    # Rows are copied COPIED_ROWS at a time, unless all are fewer.
    copied = rows if rows < COPIED_ROWS else round_up(rows, COPIED_ROWS)
    out = jax.ShapeDtypeStruct((copied, outputs), dtype)
    name = f"narrow_linear_{inputs}x{outputs}"
    values, scales = weight.values, weight.scales
    if kind.is_packed:
        values = lax.bitcast_convert_type(values, jnp.int8)
    if not kind.grouped:
        scales = scales.reshape(outputs).astype(jnp.float32)
    product = mosaic.over_tiles(kernel, out, tiling, name=name, interpret=interpret)(
        x.values.reshape(2 * x.padded, inputs),
        x.scales.reshape(-1, 2 * x.padded),
        values,
        scales,
        *later,
        *(() if bias is None else (bias,)),
    )
    return product if rows == copied else product[..., :rows, :]


def list_second(second: Array, splits: int, *, interpret: bool) -> tuple[Array, Array]:
    """Which blocks of a share have second terms in any row.

    Args:
        second: where they are, int32 [groups of rows, blocks].
        splits: number of shares.

    Returns:
        The numbers of those blocks within each share, int32 [splits, blocks of a share], of which
        the first are set, and how many there are, int32 [splits].
    """
    blocks = second.shape[1] // splits
    return pl.pallas_call(
        functools.partial(_list_kernel, blocks=blocks),
        grid=(splits,),
        out_shape=(
            jax.ShapeDtypeStruct((splits, blocks), jnp.int32),
            jax.ShapeDtypeStruct((splits,), jnp.int32),
        ),
        compiler_params=triton_gpu.CompilerParams(num_warps=LISTING_WARPS, num_stages=1),
        interpret=interpret,
        name="list_second_terms",
    )(second)


def _list_kernel(second_ref, numbers_ref, counts_ref, *, blocks: int):
    split, groups = pl.program_id(0), second_ref.shape[0]
    number = jnp.arange(pl.next_power_of_2(blocks))
    at_once = min(pl.next_power_of_2(groups), max(1, LISTED_FLAGS // len(number)))

    def more(chunk, flag):
        group = chunk * at_once + jnp.arange(at_once)
        place = second_ref.at[group[:, None], (split * blocks + number)[None, :]]
        mask = (group < groups)[:, None] & (number < blocks)[None, :]
        return jnp.maximum(flag, jnp.max(triton_gpu.load(place, mask=mask, other=0), axis=0))

    none = jnp.zeros(number.shape, jnp.int32)
    flag = lax.fori_loop(0, pl.cdiv(groups, at_once), more, none)
    before = (number[None, :] < number[:, None]) & (flag > 0)[None, :]
    rank = jnp.sum(before.astype(jnp.int32), axis=1)
    triton_gpu.store(numbers_ref.at[split, rank], number, mask=flag > 0)
    counts_ref[split] = jnp.sum(flag)


def _kernel(
    rounded_ref,  # [2 * padded, inputs]: first and second terms of each of RoundedRows' tiles
    rounded_scales_ref,  # [blocks, 2 * padded]
    values_ref,  # [outputs, inputs], or bytes
    scales_ref,  # [outputs], or [blocks, outputs]
    *refs,  # many rows: numbers [splits, steps], counts [splits]; bias [outputs]; out
    tiling: Tiling,
    kind: Format,
    activation: str | None,
    interpret: bool,
):
    later, refs = (None, refs) if tiling.swapped else (refs[:2], refs[2:])
    bias_ref, out_ref = refs if len(refs) == 2 else (None, *refs)
    split, warpgroup = lax.axis_index("split"), lax.axis_index("warpgroup")
    size = kind.block_of(rounded_ref.shape[1])
    together = tiling.depth // size  # blocks of a step: one, unless operands are swapped
    steps = rounded_scales_ref.shape[0] // tiling.splits // together
    row_tiles = rounded_scales_ref.shape[1] // 2 // tiling.rows
    tile_row, tile_column = mosaic.place(out_ref.shape[-2], out_ref.shape[-1], tiling)
    # A warpgroup multiplies some of the tile's rows, or of its columns if operands are swapped.
    swapped = tiling.swapped
    own = (tiling.columns if swapped else tiling.rows) // tiling.warpgroups
    lanes = 2 * tiling.rows if swapped else tiling.rows
    own_rows, own_columns = (tiling.rows, own) if swapped else (own, tiling.columns)
    own_part = pl.ds(warpgroup * own, own)
    block_shape = (own, lanes) if swapped else (own, tiling.columns)
    sums_shape = (own, tiling.rows) if kind.is_packed else block_shape
    rows_axis, columns_axis = (1, 0) if swapped else (0, 1)
    skipped = (0, warpgroup * own) if swapped else (warpgroup * own, 0)
    first_row, first_column = tile_row + skipped[0], tile_column + skipped[1]
    first_half, second_half = (lambda x: x[:, : tiling.rows]), (lambda x: x[:, tiling.rows :])
    product_dtype = jnp.float32 if kind.dtype == jnp.float8_e4m3fn else jnp.int32

    def multiply(_, rows_block, scales_block, weight_block, *rest, own_wide=None):
        group_scales, sums = rest if kind.grouped else (None, *rest)
        left, right = (weight_block, rows_block) if swapped else (rows_block, weight_block)

        def products(*of_blocks):
            for place in range(0, tiling.depth, GROUP):
                of_block, group = of_blocks[place // size], pl.ds(place, GROUP)
                rows = right.at[:, group].transpose((1, 0))
                if kind.is_packed:
                    own_bytes = left.at[own_part, pl.ds(place // 2, GROUP // 2)]
                    multiply_widened(of_block, own_bytes, rows, own_wide)
                else:
                    plgpu.wgmma(of_block, left.at[own_part, group], rows)
            return [of_block[...] for of_block in of_blocks]

        found = pl.run_scoped(products, *[plgpu.ACC(block_shape, product_dtype)] * together)
        of_lanes = pl.ds(0, lanes) if swapped else own_part
        if kind.is_packed:  # both terms are added up as integers, in steps of the second one
            of_lanes = pl.ds(tiling.rows, tiling.rows)
            found = [
                first_half(of_block) * SECOND_STEPS + second_half(of_block) for of_block in found
            ]
        for i, of_block in enumerate(found):
            scaled = of_block.astype(jnp.float32)
            of_axes = {rows_axis: scales_block.at[i, of_lanes]}
            if group_scales is not None:
                of_axes[columns_axis] = group_scales.at[i, own_part]
            for axis, ref in of_axes.items():
                scales = plgpu.load(ref, optimized=False).astype(jnp.float32)
                scaled = scaled * lax.broadcast_in_dim(scales, sums_shape, (axis,))
            sums += scaled
        return sums

    def finish(sums, staged):
        if swapped and not kind.is_packed:
            sums = first_half(sums) + second_half(sums)

        def of_columns(ref):
            loaded = plgpu.load(ref.at[pl.ds(first_column, own_columns)], optimized=False)
            return lax.broadcast_in_dim(loaded.astype(jnp.float32), sums.shape, (columns_axis,))

        out = sums / NIBBLE_UNIT if kind.is_packed else sums
        out = out if kind.grouped else out * of_columns(scales_ref)
        out = out if bias_ref is None else out + of_columns(bias_ref)
        out = out if activation is None else IN_KERNELS[activation](out)
        out = out.astype(out_ref.dtype)
        own_out = out_ref.at[split] if tiling.splits > 1 else out_ref
        place = staged.at[warpgroup], first_row, first_column
        mosaic.write(out, own_out, *place, swapped=swapped)

    def term_and_blocks(step):
        """Of a step of the pipeline: 0 or 1, and the number of its blocks, `together` of them."""
        if later is None:
            return 0, split * steps + step
        first = lambda: (jnp.int32(0), split * steps + step)
        second = lambda: (jnp.int32(1), split * steps + later[0][split, step - steps])
        return lax.cond(step < steps, first, second)

    row_tile, column_tile = tile_row // tiling.rows, tile_column // tiling.columns

    def of_rows(step):
        term, blocks = term_and_blocks(step)
        return term * row_tiles + row_tile, blocks

    def of_scales(step):
        term, blocks = term_and_blocks(step)
        return blocks, term * row_tiles + row_tile

    def of_weight(step):
        return column_tile, term_and_blocks(step)[1]

    def of_groups(step):
        return term_and_blocks(step)[1], column_tile

    neighbours = ("neighbour",) if tiling.cluster > 1 else ()
    block_of = functools.partial(plgpu.BlockSpec, memory_space=plgpu.SMEM)
    lines = mosaic.swizzled(GROUP, jnp.int8)
    in_byte = 2 if kind.is_packed else 1  # values
    weight_lines = mosaic.swizzled(GROUP // in_byte, jnp.int8)
    of_group = [block_of((together, tiling.columns), of_groups)] if kind.grouped else []
    pipeline = functools.partial(
        plgpu.emit_pipeline_warp_specialized,
        grid=(steps if later is None else steps + later[1][split],),
        memory_registers=FETCHING_REGISTERS,
        in_specs=[
            block_of((lanes, tiling.depth), of_rows, transforms=lines, collective_axes=neighbours),
            block_of((together, lanes), of_scales),
            block_of((tiling.columns, tiling.depth // in_byte), of_weight, transforms=weight_lines),
            *of_group,
        ],
        wg_axis="warpgroup",
        num_compute_wgs=tiling.warpgroups,
        max_concurrent_steps=tiling.stages,
    )
    factors = rounded_ref, rounded_scales_ref, values_ref
    factors += (scales_ref,) if kind.grouped else ()

    def run(stages, staged, wide=None):
        def context(multiply_all):
            finish(multiply_all(jnp.zeros(sums_shape, jnp.float32)), staged)

        own_wide = None if wide is None else wide.at[warpgroup]
        body = functools.partial(multiply, own_wide=own_wide)
        pipeline(body, compute_context=context)(*factors, allocations=stages)

    nothing = lambda *_: None
    stages = pipeline(nothing, compute_context=nothing).get_allocations(*factors)
    staged = mosaic.staging(own_rows, own_columns, tiling.warpgroups, out_ref.dtype)
    wide = plgpu.SMEM((tiling.warpgroups, own, GROUP), jnp.int8)
    scratch = [wide] if kind.is_packed and interpret else []
    pl.run_scoped(run, stages, staged, *scratch, collective_axes="warpgroup")
