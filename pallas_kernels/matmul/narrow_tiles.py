"""The tiles of the Mosaic GPU product with narrow weights."""

import itertools
from collections.abc import Iterator

from jax.experimental import pallas as pl

from pallas_kernels.common.blocks import round_up
from pallas_kernels.matmul.mosaic_tiles import (
    CLUSTERS,
    COPIED_ROWS,
    FETCHING_REGISTERS,
    LINE,
    MOST_REGISTERS,
    MOST_STAGES,
    MULTIPROCESSORS,
    REGISTERS,
    SHARED_BYTES,
    SPLITS,
    TILE_CLOCKS,
    UNIT,
    WARPGROUP_THREADS,
    Tiling,
    instruction_fits,
)
from pallas_kernels.matmul.narrow import GROUP

ROWS = {64: 1, 128: 2, 192: 3, 256: 2}  # of a tile, and the warpgroups that multiply
COLUMNS = (128, 96, 192, 64)  # in order of preference
MULTIPLES = (GROUP, UNIT)  # of inputs and outputs
FEWEST_GROUPS = 8  # of a share
FEW_ROWS = 32  # whose lanes, two of each row, cost less than reading the weights
FEW_ROWS_COLUMNS, FEW_ROWS_STAGES = (128, 64), 8  # of such a tile
MOST_PACKED_ROWS = 64  # of a tile, for weights with two values in a byte
FEW_ROWS_UNIT = 16  # of their number in a step: their lanes' scales fill a line of shared memory
TOGETHER = (1, 2)  # GROUPs of a step of a tile with swapped operands: one block or several
FEWEST_IN_FLIGHT = 3  # GROUPs, in two stages at least
OTHER_REGISTERS = 24  # for a thread that multiplies, beside its sums
# Of all threads of a multiprocessor, in a clock. A sum is converted (integers), scaled and added.
PRODUCTS_PER_CLOCK = 4096
SCALED_PER_CLOCK = 64
STEP_CLOCKS = 350  # between the last product of a step and the first of the next
MEMORY_BYTES_PER_CLOCK = 1900  # of all multiprocessors
L2_BYTES_PER_CLOCK = 4600


def tiling_for(
    rows: int, inputs: int, outputs: int, *, split: bool, swap: bool, block: int = GROUP
) -> Tiling:
    """The tiling that takes the fewest clocks.

    Args:
        block: inputs of a block of the rows.
        split: sums may be left in shares, which then have the type of the rows; a whole sum is
            float32.
        swap: operands may be swapped where the output has the type of the rows.
    """
    if rows <= FEW_ROWS and swap:
        few = swapped_tiling(rows, inputs, outputs, split=split, block=block)
        if few.splits > 1 or not split:
            return few
    fitting = (
        tiling
        for tiling in tilings(SPLITS if split else SPLITS[:1], block)
        if inputs % (tiling.depth * tiling.splits) == 0
        and (tiling.splits == 1 or inputs // GROUP // tiling.splits >= FEWEST_GROUPS)
        and outputs % (tiling.columns * tiling.cluster) == 0
    )
    smallest = Tiling(UNIT, UNIT, 1, 1, 1, MOST_STAGES, depth=block)
    return min(fitting, key=lambda tiling: clocks(rows, inputs, outputs, tiling), default=smallest)


def swapped_tiling(
    rows: int, inputs: int, outputs: int, *, split: bool, bits: int = 8, block: int = GROUP
) -> Tiling:
    """The tiling with swapped operands, of few rows, or of any rows and weights in 4 bits.

    Few rows wait for their weights, and have one row of tiles.

    Args:
        split: see `tiling_for`. Weights in 4 bits have several shares then, if they have enough
            inputs: no other tile takes them, and this one writes no whole sums.
        bits: of the weight's values.
        block: inputs of a block of the rows.
    """
    row_tiles = pl.cdiv(rows, MOST_PACKED_ROWS) if bits == 4 else 1
    fitting = [columns for columns in FEW_ROWS_COLUMNS if outputs % columns == 0] or [UNIT]
    groups, fewest = inputs // GROUP, 2 if split and bits == 4 else 1

    def splits_of(columns):
        splits = 1
        while (
            split
            and (splits < fewest or 2 * splits * row_tiles * outputs // columns <= MULTIPROCESSORS)
            and inputs % (2 * splits * block) == 0
            and groups // (2 * splits) >= FEWEST_GROUPS
        ):
            splits *= 2
        return splits

    # Fewer columns are better than more shares.
    columns = next((n for n in fitting if splits_of(n) <= fewest), fitting[-1])
    splits = splits_of(columns)
    together = max(n for n in TOGETHER if groups // splits % n == 0)
    of_tile, stages = pl.cdiv(rows, row_tiles), FEW_ROWS_STAGES * 8 // bits
    return swapped(of_tile, columns, splits, stages, together, bits, block)


def swapped(
    rows: int,
    columns: int,
    splits: int,
    stages: int = FEW_ROWS_STAGES,
    together: int = 1,
    bits: int = 8,
    block: int = GROUP,
) -> Tiling:
    """A tile with swapped operands, and lanes for both terms of each row.

    Args:
        rows: of the tile.
        stages: at most so many GROUPs in flight.
        together: GROUPs that are fetched and multiplied together: a whole number of blocks.
        block: inputs of a block of the rows.
    """
    height = round_up(rows, max(COPIED_ROWS, FEW_ROWS_UNIT * block // (together * GROUP)))
    warpgroups = columns // UNIT
    stages = stages_that_fit(2 * height, columns, warpgroups, stages, bits) // together
    depth = together * GROUP
    return Tiling(height, columns, splits, 1, warpgroups, stages, swapped=True, depth=depth)


def tilings(every_splits: tuple[int, ...], block: int = GROUP) -> Iterator[Tiling]:
    """Every tiling that fits on a multiprocessor, with steps of one such block of the rows."""
    fewest = max(2, pl.cdiv(FEWEST_IN_FLIGHT * GROUP, block))
    for (rows, warpgroups), columns, cluster, splits in itertools.product(
        ROWS.items(), COLUMNS, CLUSTERS, every_splits
    ):
        stages = stages_that_fit(rows, columns, warpgroups) * GROUP // block
        if sums_fit(rows, columns, warpgroups) and stages >= fewest:
            yield Tiling(rows, columns, splits, cluster, warpgroups, stages, depth=block)


def sums_fit(rows: int, columns: int, warpgroups: int, blocks: int = 1) -> bool:
    """Whether a thread's registers hold its sums, those of a step's blocks and those of all."""
    of_thread = min(MOST_REGISTERS, (REGISTERS - FETCHING_REGISTERS) // warpgroups)
    sums = (1 + blocks) * rows * columns // warpgroups // WARPGROUP_THREADS
    return sums + OTHER_REGISTERS <= of_thread and instruction_fits(columns, warpgroups)


def stages_that_fit(
    rows: int, columns: int, warpgroups: int, most: int = MOST_STAGES, bits: int = 8
) -> int:
    """GROUPs that fit in shared memory, with their scales, beside the staged part of the output.

    Rows are 8-bit numbers. Weights in fewer bits have scales as well.
    """
    staged = warpgroups * UNIT * LINE
    of_stage = GROUP * (rows + columns * bits // 8) + 4 * (rows + (columns if bits < 8 else 0))
    return min(most, (SHARED_BYTES - staged) // of_stage)


def clocks(rows: int, inputs: int, outputs: int, tiling: Tiling) -> float:
    """An estimate of a launch's clocks.

    Where rows had one scale for each GROUP, the tiles that it chose took at most 3 % longer than
    the fastest on an H200 (jax 0.11.2): for OPT-6.7B's four weights at 64 rows, and for two of them
    (4096 x 12288, 16384 x 4096) at 192. With larger blocks it has not been compared.

    A GROUP takes as long as the slowest of three: its products, its part of their scaling and of a
    step; reading it from the L2 cache; reading its part of the weight from memory.
    """
    row_tiles = pl.cdiv(rows, tiling.rows)
    tiles = row_tiles * (outputs // tiling.columns) * tiling.splits
    at_once, size = min(tiles, MULTIPROCESSORS), tiling.rows * tiling.columns
    of_step = size / SCALED_PER_CLOCK + STEP_CLOCKS
    computing = size * GROUP / PRODUCTS_PER_CLOCK + of_step * GROUP / tiling.depth
    own = tiling.rows / tiling.cluster + tiling.columns
    fetching = GROUP * at_once * own / L2_BYTES_PER_CLOCK
    reading = GROUP * at_once * tiling.columns / row_tiles / MEMORY_BYTES_PER_CLOCK
    groups, waves = inputs // GROUP // tiling.splits, pl.cdiv(tiles, MULTIPROCESSORS)
    return waves * (groups * max(computing, fetching, reading) + TILE_CLOCKS)
