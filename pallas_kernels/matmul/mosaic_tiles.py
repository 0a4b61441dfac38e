"""The tiles of the Mosaic GPU product: which fit on a multiprocessor, and which take least time."""

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.common.blocks import round_up
from pallas_kernels.common.implementations import MULTIPROCESSORS
from pallas_kernels.matmul.xla import sums_dtype

WARPGROUP_THREADS = 128
REGISTERS = 512  # for one thread of each warpgroup, together
FETCHING_REGISTERS = 40  # for a thread that fetches; the others share the rest
OTHER_REGISTERS = 32  # for a thread that multiplies, beside its sums
MOST_REGISTERS = 255  # for any thread
INSTRUCTION_REGISTERS = 26  # of a thread, beside an instruction's sums
DEPTH = 64  # a swizzled line of 16-bit numbers
LINE = 128  # bytes of a swizzled line
UNIT = 64  # rows of a matrix instruction
MOST_COLUMNS = 256  # of a matrix instruction
# Warpgroups that multiply, in order of preference. Four would wait for ever: the pipeline of jax
# 0.11 wants 4 * 112 + 40 registers for a thread of each, and five warpgroups have 5 * 96.
WARPGROUPS = (2, 3, 1)
ROWS = (384, 256, 192, 128, 64)  # of a tile, in order of preference
COLUMNS = (128, 96, 192, 64)  # of the weights in a tile, in order of preference
COLUMNS_SWAPPED = (128, 192, 64, 256)
COPIED_ROWS = 8  # rows that are copied together
COPIED_OUTPUTS = 32  # of an unfinished tile: a line of 32-bit numbers
SPLITS = (1, 2, 4, 8)
CLUSTERS = (2, 1)  # thread blocks that share what they fetch, in order of preference
SHARED_BYTES = 226 * 1024  # of a thread block's shared memory; the rest is for barriers
FEWEST_STAGES, MOST_STAGES = 3, 6
ITEM_BYTES = 2  # bytes of a number
# What a step of a tile costs, in clocks: a step is as deep as a matrix instruction. At 1.55 GHz the
# estimates are within 12 % of the fastest launches measured on an H200 with Qwen3-8B's 12288 x 4096
# weights (tests/test_linear_mosaic.py). Shorter launches take a few microseconds more, and those
# that wait for memory up to a third: time to read from memory is not estimated.
STEP = 16
COLUMNS_PER_CLOCK = 2  # of a matrix instruction
SHARED_BYTES_PER_CLOCK = 128  # of a multiprocessor's shared memory
L2_BYTES_PER_CLOCK = 3600  # of all multiprocessors
TILE_CLOCKS = 3000  # to begin and to end


class Tiling(NamedTuple):
    """Sizes of one launch."""

    rows: int  # rows of a tile
    columns: int  # columns of the weights in a tile
    splits: int  # shares of the contracted axis
    cluster: int  # neighbouring tiles that share what they fetch
    warpgroups: int  # warpgroups that multiply, each a part of the tile
    stages: int  # blocks in flight
    # Operands are swapped: the weights' columns are the rows of the matrix instruction. Its columns
    # are the tile's rows then, which need not be a multiple of UNIT.
    swapped: bool = False
    # Neighbours have the same columns and share the weights, instead of the same rows.
    shares_weights: bool = False
    # The last tile may have fewer columns. Such products have no bias.
    partial: bool = False
    depth: int = DEPTH  # size of a block along the contracted axis

    @property
    def multiples(self) -> tuple[int, int]:
        """The numbers of which inputs and outputs must be multiples."""
        return self.depth * self.splits, COPIED_OUTPUTS if self.partial else self.columns

    def divides(self, inputs: int, outputs: int) -> bool:
        """Whether the tiles, neighbours together, cover weights of these sizes."""
        neighbours = 1 if self.partial or self.shares_weights else self.cluster
        of_inputs, of_outputs = self.multiples
        return inputs % of_inputs == outputs % (of_outputs * neighbours) == 0


def tiling_for(
    rows: int,
    inputs: int,
    outputs: int,
    *,
    dtype: jnp.dtype = jnp.bfloat16,
    split: bool = False,
    transposed: bool = False,
    splits: int | None = None,
) -> Tiling:
    """The tiling that takes the fewest clocks.

    If the sizes are multiples of no tile's, the smallest tile is returned.

    Args:
        dtype: that of the factors.
        split: sums may be left in shares.
        transposed: the weight is [outputs, inputs], and sums are wanted.
        splits: the number of shares, if it must not depend on the number of rows.
    """
    every_splits = (SPLITS if split else SPLITS[:1]) if splits is None else (splits,)
    of_sums = split or transposed
    dtype_of = lambda splits: sums_dtype(dtype, splits) if of_sums else jnp.dtype(dtype)
    found = itertools.chain.from_iterable(
        # Only 16-bit outputs can be transposed back.
        tilings(rows, n, partial=transposed, swap=dtype_of(n).itemsize == ITEM_BYTES)
        for n in every_splits
    )
    fitting = [tiling for tiling in found if tiling.divides(inputs, outputs)]
    smallest = Tiling(UNIT, UNIT, every_splits[0], 1, 1, MOST_STAGES, partial=transposed)
    cost = functools.partial(clocks, rows, inputs, outputs)
    return min(fitting, key=cost, default=smallest)


def tilings(rows: int, splits: int, *, partial: bool = False, swap: bool) -> Iterator[Tiling]:
    """Every tiling for so many shares that fits on a multiprocessor.

    Args:
        partial: the last tile may have fewer columns.
        swap: operands may be swapped.
    """
    sizes = itertools.product(ROWS, COLUMNS, CLUSTERS, (False,), (False,))
    for size in itertools.chain(_swapped(rows) if swap else (), sizes):
        height, columns, cluster, swapped, shares_weights = size
        warpgroups = warpgroups_of(height, columns, swapped)
        stages = stages_that_fit(height, columns, warpgroups)
        if warpgroups and stages >= FEWEST_STAGES:
            kind = swapped, shares_weights, partial
            yield Tiling(height, columns, splits, cluster, warpgroups, stages, *kind)


def _swapped(rows: int) -> Iterator[tuple[int, int, int, bool, bool]]:
    """Rows, columns, cluster, `swapped` and `shares_weights` of tiles with just enough rows."""
    numbers = range(1, pl.cdiv(rows, UNIT) + 1)
    sharing = [(cluster, weights) for cluster in CLUSTERS for weights in (False, True)[:cluster]]
    choices = itertools.product(COLUMNS_SWAPPED, numbers, sharing)
    for columns, number, (cluster, shares_weights) in choices:
        # Either neighbours copy a part of the rows each, or there is a tile for each of them.
        parts, together = (1, cluster) if shares_weights else (cluster, 1)
        height = round_up(pl.cdiv(rows, number), COPIED_ROWS * parts)
        if height <= MOST_COLUMNS and number % together == 0:
            yield height, columns, cluster, True, shares_weights


def clocks(rows: int, inputs: int, outputs: int, tiling: Tiling) -> float:
    """An estimate of a launch's clocks.

    The multiprocessors compute as many tiles at a time as there are of them. A step of these takes
    as long as the slowest of three: the matrix instructions, shared memory, where blocks are
    written once and read by every instruction that needs them, and reading the blocks from the L2
    cache.
    """
    high, width = tiling.rows, tiling.columns
    tiles = pl.cdiv(outputs, width) * pl.cdiv(rows, high) * tiling.splits
    of_rows, of_weights = (1, tiling.cluster) if tiling.shares_weights else (tiling.cluster, 1)
    own = high / of_rows + width / of_weights  # rows and columns that a thread block fetches
    if tiling.swapped:
        high, width = width, high
    instructions = high // UNIT
    computing = instructions * width / COLUMNS_PER_CLOCK
    moved = high + width + instructions * (UNIT + width)
    moving = STEP * ITEM_BYTES * moved / SHARED_BYTES_PER_CLOCK
    fetching = STEP * ITEM_BYTES * min(tiles, MULTIPROCESSORS) * own / L2_BYTES_PER_CLOCK
    steps = inputs // tiling.splits // STEP
    waves = pl.cdiv(tiles, MULTIPROCESSORS)
    return waves * (steps * max(computing, moving, fetching) + TILE_CLOCKS)


def warpgroups_of(rows: int, columns: int, swapped: bool = False) -> int:
    """Warpgroups that multiply a tile of this size, each the same number of units; 0: it is too
    large."""
    high, width = (columns, rows) if swapped else (rows, columns)
    fits = lambda n: sums_fit(rows, columns, n) and instruction_fits(width, n)
    return next((n for n in WARPGROUPS if high // UNIT % n == 0 and fits(n)), 0)


def sums_fit(rows: int, columns: int, warpgroups: int) -> bool:
    """Whether the registers of the threads that multiply hold a tile's sums beside the rest."""
    of_thread = min(MOST_REGISTERS, (REGISTERS - FETCHING_REGISTERS) // warpgroups)
    return rows * columns // warpgroups // WARPGROUP_THREADS + OTHER_REGISTERS <= of_thread


def instruction_fits(columns: int, warpgroups: int) -> bool:
    """Whether ptxas compiles a matrix instruction with so many columns.

    A thread may receive registers from those that fetch, but one instruction may use no more than
    every thread has when the launch begins.
    """
    of_thread = min(MOST_REGISTERS, REGISTERS // (warpgroups + 1) // 8 * 8)
    sums = UNIT * columns // WARPGROUP_THREADS
    return sums + INSTRUCTION_REGISTERS <= of_thread


def stages_that_fit(rows: int, columns: int, warpgroups: int) -> int:
    """Blocks of 16-bit numbers that fit in shared memory beside the staged part of the output."""
    staged = warpgroups * UNIT * LINE
    return min(MOST_STAGES, (SHARED_BYTES - staged) // (ITEM_BYTES * DEPTH * (rows + columns)))
