"""Products of many rows as a Pallas Mosaic GPU kernel, for compute capability 9.0.

A thread block owns one tile of the output, with all rows if they fit, so that weights are read
once. One warpgroup fetches blocks of rows and weights into shared memory; the others multiply,
each its part of the rows. Neighbours in a cluster share the blocks of rows.
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.activations import IN_KERNELS

WARPGROUP_THREADS = 128
REGISTERS = 512  # for one thread of each warpgroup, together
FETCHING_REGISTERS = 40  # for a thread that fetches; the others share the rest
OTHER_REGISTERS = 32  # for a thread that multiplies, beside its sums
MOST_REGISTERS = 255  # for any thread
DEPTH = 64  # a swizzled line of 16-bit numbers
LINE = 128  # bytes of a swizzled line
UNIT_ROWS = 64  # rows of a matrix instruction
WARPGROUPS = (2, 3, 1)  # that multiply, in order of preference
ROWS = (384, 256, 192, 128, 64)  # of a tile, in order of preference
COLUMNS = (128, 96, 192, 64)  # of the weights in a tile, in order of preference
COLUMNS_GATED = (192, 128, 64)  # half of them belong to the gate
SPLITS = (1, 2, 4, 8)
SHARED_BYTES = 226 * 1024  # of a thread block's shared memory; the rest is for barriers
FEWEST_STAGES, MOST_STAGES = 3, 6
DELAY = 1  # blocks whose products may still be computed while the next block's begin
MULTIPROCESSORS = 132
# What a step of a tile costs, in clocks: a step is as deep as a matrix instruction. At 1.55 GHz the
# estimates are within 14 % of eleven launches measured on an H200, with 192 and 384 rows and the
# weights of Qwen3-8B. A twelfth takes 26 % longer: time to read from memory is not estimated.
STEP = 16
COLUMNS_PER_CLOCK = 2  # of a matrix instruction
SHARED_BYTES_PER_CLOCK = 128  # of a multiprocessor's shared memory
L2_BYTES_PER_CLOCK = 3600  # of all multiprocessors
TILE_CLOCKS = 3000  # to begin and to end
MAX_ROWS, ROW_MULTIPLE = None, 8  # any multiple of 8 rows
ITEM_BYTES = (2,)  # bytes of a number
TAKES_ANY_WEIGHT = False
TAKES = f"16-bit numbers, rows in multiples of {ROW_MULTIPLE}"


class Tiling(NamedTuple):
    """Sizes of one launch."""

    rows: int  # rows of a tile
    columns: int  # columns of the weights in a tile
    splits: int  # shares of the contracted axis
    cluster: int  # neighbouring tiles that share blocks of rows
    warpgroups: int  # warpgroups that multiply, each a part of the tile's rows
    stages: int  # blocks in flight
    depth: int = DEPTH  # size of a block along the contracted axis

    @property
    def multiples(self) -> tuple[int, int]:
        """The numbers of which inputs and outputs must be multiples."""
        return self.depth * self.splits, self.columns


def tiling_for(
    rows: int,
    inputs: int,
    outputs: int,
    *,
    split: bool = False,
    gated: bool = False,
    splits: int | None = None,
) -> Tiling:
    """The tiling that takes the fewest clocks.

    `split` tells whether sums may be left in shares; `splits` is the number of shares, if it must
    not depend on the number of rows. If the sizes are multiples of no tile's, the smallest tile is
    returned.
    """
    every_splits = (SPLITS if split else SPLITS[:1]) if splits is None else (splits,)
    candidates = [
        (of_rows, columns, splits)
        for of_rows, splits in itertools.product(ROWS, every_splits)
        for columns in (COLUMNS_GATED if gated else COLUMNS)
        if inputs % (DEPTH * splits) == 0 and outputs % columns == 0 and fits(of_rows, columns)
    ]

    def cost(candidate):
        return clocks(rows, inputs, outputs, *candidate, gated=gated)

    smallest = ROWS[-1], COLUMNS[-1], every_splits[0]
    of_rows, columns, splits = min(candidates, key=cost, default=smallest)
    warpgroups = warpgroups_of(of_rows, columns)
    stages = stages_that_fit(of_rows, columns, warpgroups)
    return Tiling(of_rows, columns, splits, cluster_of(outputs, columns), warpgroups, stages)


def cluster_of(outputs: int, columns: int) -> int:
    """Neighbouring tiles that share blocks of rows."""
    return 2 if outputs // columns % 2 == 0 else 1


def clocks(
    rows: int, inputs: int, outputs: int, of_rows: int, columns: int, splits: int, *, gated: bool
) -> float:
    """An estimate of a launch's clocks.

    The multiprocessors compute as many tiles at a time as there are of them. A step of these takes
    as long as the slowest of three: the matrix instructions, shared memory, where blocks are
    written once and read by every instruction that needs them, and reading the blocks from the L2
    cache.
    """
    tiles = outputs // columns * pl.cdiv(rows, of_rows) * splits
    parts = 2 if gated else 1
    instructions, width = of_rows // UNIT_ROWS * parts, columns // parts
    computing = instructions * width / COLUMNS_PER_CLOCK
    moved = of_rows + columns + instructions * (UNIT_ROWS + width)
    moving = STEP * ITEM_BYTES[0] * moved / SHARED_BYTES_PER_CLOCK
    fetched = min(tiles, MULTIPROCESSORS) * (of_rows / cluster_of(outputs, columns) + columns)
    fetching = STEP * ITEM_BYTES[0] * fetched / L2_BYTES_PER_CLOCK
    steps = inputs // splits // STEP
    waves = pl.cdiv(tiles, MULTIPROCESSORS)
    return waves * (steps * max(computing, moving, fetching) + TILE_CLOCKS)


def fits(rows: int, columns: int) -> bool:
    """Whether a multiprocessor's registers and shared memory hold a tile of this size."""
    warpgroups = warpgroups_of(rows, columns)
    return bool(warpgroups) and stages_that_fit(rows, columns, warpgroups) >= FEWEST_STAGES


def warpgroups_of(rows: int, columns: int) -> int:
    """Warpgroups that multiply a tile of this size, each the same number of units; 0: it is too
    large."""
    units = rows // UNIT_ROWS
    enough = (n for n in WARPGROUPS if units % n == 0 and sums_fit(rows, columns, n))
    return next(enough, 0)


def sums_fit(rows: int, columns: int, warpgroups: int) -> bool:
    """Whether the registers of the threads that multiply hold a tile's sums beside the rest."""
    of_thread = min(MOST_REGISTERS, (REGISTERS - FETCHING_REGISTERS) // warpgroups)
    return rows // warpgroups * columns // WARPGROUP_THREADS + OTHER_REGISTERS <= of_thread


def stages_that_fit(rows: int, columns: int, warpgroups: int) -> int:
    """Blocks of 16-bit numbers that fit in shared memory beside the staged part of the output."""
    staged = warpgroups * UNIT_ROWS * LINE
    return min(MOST_STAGES, (SHARED_BYTES - staged) // (2 * DEPTH * (rows + columns)))


@functools.partial(jax.jit, static_argnames=("tiling", "activation", "gated", "dtype", "interpret"))
def launch(
    x: Array,  # [rows, inputs]
    weight: Array,  # [inputs, outputs]
    bias: Array | None,  # [outputs]
    *,
    tiling: Tiling,
    activation: str | None = None,
    gated: bool = False,
    dtype: jnp.dtype,
    interpret: bool,
) -> Array:
    """[rows, outputs], or shares [splits, rows, outputs]: see `pallas_kernels.linear`."""
    rows, (inputs, columns) = x.shape[0], weight.shape
    outputs = columns // 2 if gated else columns
    shares = (tiling.splits,) if tiling.splits > 1 else ()
    clusters = columns // tiling.columns // tiling.cluster
    return plgpu.kernel(
        functools.partial(
            _kernel, tiling=tiling, activation=activation, gated=gated, biased=bias is not None
        ),
        out_type=jax.ShapeDtypeStruct((*shares, rows, outputs), dtype),
        # Tiles with the same columns run at the same time, so that weights are read once.
        grid=(tiling.splits, clusters * pl.cdiv(rows, tiling.rows)),
        grid_names=("split", "tile"),
        cluster=(tiling.cluster,),
        cluster_names=("neighbour",),
        num_threads=tiling.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=f"linear_{inputs}x{columns}",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(x, weight, *(() if bias is None else (bias,)))


def _kernel(
    x_ref, weight_ref, *refs, tiling: Tiling, activation: str | None, gated: bool, biased: bool
):
    bias_ref, out_ref = refs if biased else (None, *refs)
    share = x_ref.shape[1] // tiling.splits
    split, tile = lax.axis_index("split"), lax.axis_index("tile")
    row_tiles = pl.cdiv(x_ref.shape[0], tiling.rows)
    first_row = tile % row_tiles * tiling.rows
    place = tile // row_tiles * tiling.cluster + lax.axis_index("neighbour")
    width = tiling.columns // 2 if gated else tiling.columns  # of the output
    first_column = place * width
    # Where the weights' columns begin: of a gated product those of the gate, and of what it gates.
    parts = [first_column, out_ref.shape[-1] + first_column] if gated else [first_column]

    warpgroup = lax.axis_index("warpgroup")
    own_rows = tiling.rows // tiling.warpgroups
    skipped_rows = warpgroup * own_rows
    pieces = _pieces(own_rows, width, out_ref.dtype)

    def multiply(_, x_block, *blocks_and_sums):
        *weight_blocks, sums = blocks_and_sums
        x_block = x_block.at[pl.ds(skipped_rows, own_rows)]
        for total, weight_block in zip(sums, weight_blocks, strict=True):
            plgpu.wgmma(total, x_block, weight_block)
        plgpu.wgmma_wait(DELAY)
        return sums

    def with_bias(total, column):
        if not biased:
            return total[...]
        at = pl.ds(column, width)
        bias = plgpu.load(bias_ref.at[at], optimized=False).astype(jnp.float32)
        return total[...] + lax.broadcast_in_dim(bias, (own_rows, width), (1,))

    def finish(sums, staged):
        values, *gated_values = map(with_bias, sums, parts)
        if activation is not None:
            values = IN_KERNELS[activation](values)
        for factor in gated_values:
            values *= factor
        values = values.astype(out_ref.dtype)
        for rows, columns in pieces:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged[warpgroup] = values[rows, columns]
            plgpu.commit_smem()
            write(first_row + skipped_rows + rows.start, first_column + columns.start, staged)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def write(row, column, staged):
        piece = staged.at[warpgroup]
        # The copy leaves out rows beyond the last.
        at = pl.ds(row, piece.shape[0]), pl.ds(column, piece.shape[1])
        out = out_ref.at[split] if tiling.splits > 1 else out_ref
        plgpu.copy_smem_to_gmem(piece, out.at[at])

    lines = _swizzled(width, x_ref.dtype)  # the same for both factors
    pipeline = functools.partial(
        plgpu.emit_pipeline_warp_specialized,
        grid=(share // DEPTH,),
        memory_registers=FETCHING_REGISTERS,
        in_specs=[
            plgpu.BlockSpec(
                (tiling.rows, DEPTH),
                lambda i: (0, i),
                transforms=lines,
                memory_space=plgpu.SMEM,
                delay_release=DELAY,
                collective_axes=("neighbour",) if tiling.cluster > 1 else (),
            ),
            *(
                plgpu.BlockSpec(
                    (DEPTH, width),
                    lambda i: (i, 0),
                    transforms=lines,
                    memory_space=plgpu.SMEM,
                    delay_release=DELAY,
                )
                for _ in parts
            ),
        ],
        wg_axis="warpgroup",
        num_compute_wgs=tiling.warpgroups,
        max_concurrent_steps=tiling.stages,
    )
    depth = pl.ds(split * share, share)
    factors = (
        x_ref.at[pl.ds(first_row, tiling.rows), depth],
        *(weight_ref.at[depth, pl.ds(column, width)] for column in parts),
    )

    def run(blocks, staged):
        def context(multiply_all):
            def with_sums(*sums):
                multiply_all(sums)
                finish(sums, staged)

            accumulators = [plgpu.ACC((own_rows, width), jnp.float32) for _ in parts]
            pl.run_scoped(with_sums, *accumulators)

        pipeline(multiply, compute_context=context)(*factors, allocations=blocks)

    nothing = lambda *_: None
    blocks = pipeline(nothing, compute_context=nothing).get_allocations(*factors)
    rows, columns = (of.stop - of.start for of in pieces[0])
    staged = plgpu.SMEM(
        (tiling.warpgroups, rows, columns),
        out_ref.dtype,
        transforms=_swizzled(columns, out_ref.dtype),
    )
    pl.run_scoped(run, blocks, staged, collective_axes="warpgroup")


def _pieces(rows: int, columns: int, dtype) -> list[tuple[slice, slice]]:
    """The pieces in which a warpgroup's output is staged: a line of a unit's rows each."""
    width = _line(columns, dtype)
    return [
        (slice(row, row + UNIT_ROWS), slice(column, column + width))
        for row in range(0, rows, UNIT_ROWS)
        for column in range(0, columns, width)
    ]


def _swizzled(columns: int, dtype) -> tuple:
    """Transforms of a block in shared memory, whose lines divide this many columns."""
    line = _line(columns, dtype)
    bytes_of_line = line * jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(bytes_of_line)


def _line(columns: int, dtype) -> int:
    """The length of a swizzled line, in numbers: the largest that divides the columns."""
    return math.gcd(LINE // jnp.dtype(dtype).itemsize, columns)
