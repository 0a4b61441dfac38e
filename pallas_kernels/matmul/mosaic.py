"""Products of many rows as a Pallas Mosaic GPU kernel, for compute capability 9.0.

A thread block owns one tile of the output, with all rows if they fit, so that weights are read
once. One warpgroup fetches blocks of rows and weights into shared memory; the others multiply,
each its part of the tile. Neighbours in a cluster share the blocks of rows or of weights.

A matrix instruction multiplies 64 rows with up to 256 columns, and reads both from shared memory.
If operands are swapped, its rows are the weights' columns: fewer, longer instructions read less,
and a tile may have nearly any number of rows.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul import mosaic_tiles
from pallas_kernels.matmul.activations import IN_KERNELS
from pallas_kernels.matmul.mosaic_tiles import DEPTH, FETCHING_REGISTERS, LINE, UNIT, Tiling

DELAY = 1  # blocks whose products may still be computed while the next block's begin
MAX_ROWS, ROW_MULTIPLE = None, 8  # any multiple of 8 rows
ITEM_BYTES = (mosaic_tiles.ITEM_BYTES,)
TAKES_ANY_WEIGHT, TAKES_TRANSPOSED, GATES = False, True, False
TAKES = f"16-bit numbers, rows in multiples of {ROW_MULTIPLE}"
tiling_for = mosaic_tiles.tiling_for


@functools.partial(
    jax.jit,
    static_argnames=("tiling", "activation", "transposed", "dtype", "interpret"),
)
def launch(
    x: Array,  # [rows, inputs]
    weight: Array,  # [inputs, outputs], or [outputs, inputs] if transposed
    bias: Array | None,  # [outputs]
    *,
    tiling: Tiling,
    activation: str | None = None,
    transposed: bool = False,
    dtype: jnp.dtype,
    interpret: bool,
) -> Array:
    """[rows, outputs], or shares [splits, rows, outputs]: see `pallas_kernels.linear`."""
    (rows, inputs), outputs = x.shape, weight.shape[0 if transposed else 1]
    kernel = functools.partial(
        _kernel,
        tiling=tiling,
        activation=activation,
        transposed=transposed,
        biased=bias is not None,
    )
    out = jax.ShapeDtypeStruct((rows, outputs), dtype)
    run = over_tiles(kernel, out, tiling, name=f"linear_{inputs}x{outputs}", interpret=interpret)
    return run(x, weight, *(() if bias is None else (bias,)))


def over_tiles(
    kernel: Callable[..., None],
    out: jax.ShapeDtypeStruct,
    tiling: Tiling,
    *,
    name: str,
    interpret: bool,
) -> Callable[..., Array]:
    """Runs a kernel on all tiles of its output.

    Args:
        kernel: computes the tile of a thread block: see `place`.
        out: the output, [rows, outputs]; with several splits each has one of this shape.
        name: for profiles.
    """
    shares = (tiling.splits,) if tiling.splits > 1 else ()
    row_clusters, column_clusters = clusters(*out.shape, tiling)
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((*shares, *out.shape), out.dtype),
        # Tiles with the same columns run at the same time, so that weights are read once.
        grid=(tiling.splits, row_clusters * column_clusters),
        grid_names=("split", "tile"),
        cluster=(tiling.cluster,),
        cluster_names=("neighbour",),
        num_threads=tiling.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )


def _kernel(
    x_ref,  # [rows, inputs]
    weight_ref,  # [inputs, outputs], or [outputs, inputs] if transposed
    *refs,  # bias [outputs] if biased; out [rows, outputs], or [splits, rows, outputs]
    tiling: Tiling,
    activation: str | None,
    transposed: bool,
    biased: bool,
):
    bias_ref, out_ref = refs if biased else (None, *refs)
    share = x_ref.shape[1] // tiling.splits
    split = lax.axis_index("split")
    first_row, first_column = place(x_ref.shape[0], out_ref.shape[-1], tiling)
    warpgroup, swapped = lax.axis_index("warpgroup"), tiling.swapped
    # A warpgroup multiplies some of the tile's rows, or of its columns if operands are swapped.
    own = (tiling.columns if swapped else tiling.rows) // tiling.warpgroups
    skipped = warpgroup * own
    own_part = pl.ds(skipped, own)
    own_rows, own_columns = (tiling.rows, own) if swapped else (own, tiling.columns)
    sums_shape = (own_columns, own_rows) if swapped else (own_rows, own_columns)

    def multiply(_, x_block, weight_block, sums):
        if swapped:
            columns = weight_block.at[:, own_part].transpose((1, 0))
            plgpu.wgmma(sums, columns, x_block.transpose((1, 0)))
        else:
            columns = weight_block.transpose((1, 0)) if transposed else weight_block
            plgpu.wgmma(sums, x_block.at[own_part], columns)
        plgpu.wgmma_wait(DELAY)
        return sums

    def with_bias(sums):
        if not biased:
            return sums[...]
        first = first_column + skipped if swapped else first_column
        bias = plgpu.load(bias_ref.at[pl.ds(first, own_columns)], optimized=False)
        axis = 0 if swapped else 1
        return sums[...] + lax.broadcast_in_dim(bias.astype(jnp.float32), sums_shape, (axis,))

    def finish(sums, staged):
        values = with_bias(sums)
        if activation is not None:
            values = IN_KERNELS[activation](values)
        values = values.astype(out_ref.dtype)
        own_out = out_ref.at[split] if tiling.splits > 1 else out_ref
        first = (0, skipped) if swapped else (skipped, 0)
        write(
            values,
            own_out,
            staged.at[warpgroup],
            first_row + first[0],
            first_column + first[1],
            swapped=swapped,
        )

    lines = swizzled(DEPTH if transposed else tiling.columns, x_ref.dtype)  # of both factors
    neighbours = ("neighbour",) if tiling.cluster > 1 else ()

    def blocks_of(shape, index, *, shared):
        return plgpu.BlockSpec(
            shape,
            index,
            transforms=lines,
            memory_space=plgpu.SMEM,
            delay_release=DELAY,
            collective_axes=neighbours if shared else (),
        )

    along_columns, along_rows = lambda i: (0, i), lambda i: (i, 0)
    of_weight = (tiling.columns, DEPTH) if transposed else (DEPTH, tiling.columns)
    pipeline = functools.partial(
        plgpu.emit_pipeline_warp_specialized,
        grid=(share // DEPTH,),
        memory_registers=FETCHING_REGISTERS,
        in_specs=[
            blocks_of((tiling.rows, DEPTH), along_columns, shared=not tiling.shares_weights),
            blocks_of(
                of_weight,
                along_columns if transposed else along_rows,
                shared=tiling.shares_weights,
            ),
        ],
        wg_axis="warpgroup",
        num_compute_wgs=tiling.warpgroups,
        max_concurrent_steps=tiling.stages,
    )
    depth, columns = pl.ds(split * share, share), pl.ds(first_column, tiling.columns)
    factors = (
        x_ref.at[pl.ds(first_row, tiling.rows), depth],
        weight_ref.at[columns, depth] if transposed else weight_ref.at[depth, columns],
    )

    def run(blocks, staged):
        def context(multiply_all):
            def with_sums(sums):
                multiply_all(sums)
                finish(sums, staged)

            pl.run_scoped(with_sums, plgpu.ACC(sums_shape, jnp.float32))

        pipeline(multiply, compute_context=context)(*factors, allocations=blocks)

    nothing = lambda *_: None
    blocks = pipeline(nothing, compute_context=nothing).get_allocations(*factors)
    staged = staging(own_rows, own_columns, tiling.warpgroups, out_ref.dtype)
    pl.run_scoped(run, blocks, staged, collective_axes="warpgroup")


def staging(rows: int, columns: int, warpgroups: int, dtype) -> plgpu.SMEM:
    """Shared memory for one piece of each warpgroup's part [rows, columns] of the output."""
    piece = tuple(of.stop - of.start for of in _pieces(rows, columns, dtype)[0])
    return plgpu.SMEM((warpgroups, *piece), dtype, transforms=swizzled(piece[1], dtype))


def write(values, out_ref, staged, first_row, first_column, *, swapped: bool = False) -> None:
    """Copies a warpgroup's part of the output to its place, piece by piece.

    Rows and columns beyond the last are left out.

    Args:
        values: [rows, columns], or [columns, rows] if `swapped`.
        out_ref: [rows, outputs].
        staged: the warpgroup's part of what `staging` describes.
    """
    height, width = values.shape[::-1] if swapped else values.shape
    for rows, columns in _pieces(height, width, out_ref.dtype):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if swapped:
            staged.transpose((1, 0))[...] = values[columns, rows]
        else:
            staged[...] = values[rows, columns]
        plgpu.commit_smem()
        at = (
            pl.ds(first_row + rows.start, staged.shape[0]),
            pl.ds(first_column + columns.start, staged.shape[1]),
        )
        plgpu.copy_smem_to_gmem(staged, out_ref.at[at])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def clusters(rows: int, outputs: int, tiling: Tiling) -> tuple[int, int]:
    """Clusters along the rows and along the columns."""
    high, wide = (tiling.cluster, 1) if tiling.shares_weights else (1, tiling.cluster)
    return pl.cdiv(rows, tiling.rows * high), pl.cdiv(outputs, tiling.columns * wide)


def place(rows: int, outputs: int, tiling: Tiling) -> tuple[Array, Array]:
    """The first row and the first column of a thread block's tile."""
    row_clusters, _ = clusters(rows, outputs, tiling)
    cluster, neighbour = lax.axis_index("tile"), lax.axis_index("neighbour")
    row, column = cluster % row_clusters, cluster // row_clusters
    if tiling.shares_weights:
        row = row * tiling.cluster + neighbour
    else:
        column = column * tiling.cluster + neighbour
    return row * tiling.rows, column * tiling.columns


def _pieces(rows: int, columns: int, dtype) -> list[tuple[slice, slice]]:
    """The pieces in which a warpgroup's output is staged: a line of some rows each."""
    height, width = math.gcd(rows, UNIT), _line(columns, dtype)
    return [
        (slice(row, row + height), slice(column, column + width))
        for row in range(0, rows, height)
        for column in range(0, columns, width)
    ]


def swizzled(columns: int, dtype) -> tuple:
    """Transforms of a block in shared memory, whose lines divide this many columns."""
    line = _line(columns, dtype)
    bytes_of_line = line * jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(bytes_of_line)


def _line(columns: int, dtype) -> int:
    """The length of a swizzled line, in numbers: the largest that divides the columns."""
    return math.gcd(LINE // jnp.dtype(dtype).itemsize, columns)
