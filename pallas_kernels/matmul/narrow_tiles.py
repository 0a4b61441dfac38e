"""The tiles of the Mosaic GPU product with narrow weights."""

import itertools
from collections.abc import Iterator

from jax.experimental import pallas as pl

from pallas_kernels.common.blocks import round_up
from pallas_kernels.matmul.mosaic_tiles import (
    CLUSTERS,
    COPIED_ROWS,
    LINE,
    MOST_REGISTERS,
    MOST_STAGES,
    MULTIPROCESSORS,
    REGISTERS,
    SHARED_BYTES,
    SHARED_BYTES_PER_CLOCK,
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
FEW_ROWS = 64  # whose lanes, two of each row, cost less than steps of second terms
FEW_ROWS_COLUMNS, FEW_ROWS_STAGES = (128, 64), 12  # of such a tile
MOST_PACKED_ROWS = 64  # of a tile, for weights with two values in a byte
FEW_ROWS_UNIT = 16  # of their number in a step where groups have scales: both terms' fill a line
TOGETHER, FEWEST_TOGETHER = 2, 4  # GROUPs of a step of such a tile, if it has so many stages
FEWEST_STAGES = 3
ANNOUNCED_BYTES = 1024  # of shared memory: one number, as arrays are aligned there
OTHER_REGISTERS = 24  # for a thread that multiplies, beside its sums
PRODUCTS_PER_CLOCK = 4096  # of a multiprocessor
MEMORY_BYTES_PER_CLOCK = 1900  # of all multiprocessors
L2_BYTES_PER_CLOCK = 4600


def tiling_for(
    rows: int, inputs: int, outputs: int, *, split: bool, swap: bool, sums: int = 1
) -> Tiling:
    """The tiling that takes the fewest clocks.

    Args:
        split: sums may be left in shares, which then have the type of the rows; a whole sum is
            float32.
        swap: operands may be swapped where the output has the type of the rows.
        sums: of each product, that a thread keeps.
    """
    if rows <= FEW_ROWS and swap:
        few = swapped_tiling(rows, inputs, outputs, split=split)
        if few.splits > 1 or not split:
            return few
    fitting = (
        tiling
        for tiling in tilings(SPLITS if split else SPLITS[:1], sums)
        if inputs % (tiling.depth * tiling.splits) == 0
        and (tiling.splits == 1 or inputs // GROUP // tiling.splits >= FEWEST_GROUPS)
        and outputs % (tiling.columns * tiling.cluster) == 0
    )
    smallest = Tiling(UNIT, UNIT, 1, 1, 1, MOST_STAGES, depth=GROUP)
    return min(fitting, key=lambda tiling: clocks(rows, inputs, outputs, tiling), default=smallest)


def swapped_tiling(rows: int, inputs: int, outputs: int, *, split: bool, bits: int = 8) -> Tiling:
    """The tiling with swapped operands, of few rows, or of any rows and weights in 4 bits.

    Few rows wait for their weights, and have one row of tiles.

    Args:
        split: see `tiling_for`. Weights in 4 bits have several shares then, if they have enough
            inputs: no other tile takes them, and this one writes no whole sums.
        bits: of the weight's values.
    """
    row_tiles = pl.cdiv(rows, MOST_PACKED_ROWS) if bits == 4 else 1
    fitting = [columns for columns in FEW_ROWS_COLUMNS if outputs % columns == 0] or [UNIT]
    groups, fewest = inputs // GROUP, 2 if split and bits == 4 else 1

    def splits_of(columns):
        splits = 1
        while (
            split
            and (splits < fewest or 2 * splits * row_tiles * outputs // columns <= MULTIPROCESSORS)
            and groups % (2 * splits) == 0
            and groups // (2 * splits) >= FEWEST_GROUPS
        ):
            splits *= 2
        return splits

    # Fewer columns are better than more shares.
    columns = next((n for n in fitting if splits_of(n) <= fewest), fitting[-1])
    splits = splits_of(columns)
    of_tile, stages = pl.cdiv(rows, row_tiles), FEW_ROWS_STAGES * 8 // bits
    tiling = swapped(of_tile, columns, splits, stages, TOGETHER, bits)
    if groups // splits % TOGETHER or tiling.stages < FEWEST_TOGETHER:
        return swapped(of_tile, columns, splits, stages, 1, bits)
    return tiling


def swapped(
    rows: int,
    columns: int,
    splits: int,
    stages: int = FEW_ROWS_STAGES,
    together: int = 1,
    bits: int = 8,
) -> Tiling:
    """A tile with swapped operands, and lanes for both terms of each row.

    Args:
        rows: of the tile.
        stages: at most so many GROUPs in flight.
        together: GROUPs that are fetched and multiplied together.
    """
    unit = COPIED_ROWS if bits == 8 else max(COPIED_ROWS, FEW_ROWS_UNIT // together)
    height = round_up(rows, unit)
    warpgroups = columns // UNIT
    stages = stages_that_fit(2 * height, columns, warpgroups, stages, bits) // together
    depth = together * GROUP
    return Tiling(height, columns, splits, 1, warpgroups, stages, swapped=True, depth=depth)


def tilings(every_splits: tuple[int, ...], sums: int) -> Iterator[Tiling]:
    """Every tiling that fits on a multiprocessor, with steps of one GROUP."""
    for (rows, warpgroups), columns, cluster, splits in itertools.product(
        ROWS.items(), COLUMNS, CLUSTERS, every_splits
    ):
        stages = stages_that_fit(rows, columns, warpgroups)
        if sums_fit(rows, columns, warpgroups, sums) and stages >= FEWEST_STAGES:
            yield Tiling(rows, columns, splits, cluster, warpgroups, stages, depth=GROUP)


def sums_fit(rows: int, columns: int, warpgroups: int, sums: int) -> bool:
    """Whether the registers that a thread has when the launch begins hold its sums.

    With those that it receives later ptxas would not begin a product before another has ended.
    """
    of_thread = min(MOST_REGISTERS, REGISTERS // (warpgroups + 1))
    of_sums = sums * rows * columns // warpgroups // WARPGROUP_THREADS
    return of_sums + OTHER_REGISTERS <= of_thread and instruction_fits(columns, warpgroups)


def stages_that_fit(
    rows: int, columns: int, warpgroups: int, most: int = MOST_STAGES, bits: int = 8
) -> int:
    """GROUPs that fit in shared memory, beside the staged part of the output.

    Rows are 8-bit numbers. Groups of weights in fewer bits have scales, of rows and of columns.
    """
    staged = warpgroups * UNIT * LINE
    scales = 4 * (rows + columns) if bits < 8 else 0
    of_stage = GROUP * (rows + columns * bits // 8) + scales
    return min(most, (SHARED_BYTES - ANNOUNCED_BYTES - staged) // of_stage)


def clocks(rows: int, inputs: int, outputs: int, tiling: Tiling) -> float:
    """An estimate of a launch's clocks.

    A GROUP takes as long as the slowest of four: its products; shared memory, where it is written
    once and read by every matrix instruction that needs it; reading it from the L2 cache; reading
    its part of the weight from memory.
    """
    row_tiles = pl.cdiv(rows, tiling.rows)
    tiles = row_tiles * (outputs // tiling.columns) * tiling.splits
    at_once = min(tiles, MULTIPROCESSORS)
    computing = tiling.rows * tiling.columns * GROUP / PRODUCTS_PER_CLOCK
    instructions = tiling.rows // UNIT
    moved = tiling.rows + tiling.columns + instructions * (UNIT + tiling.columns)
    moving = GROUP * moved / SHARED_BYTES_PER_CLOCK
    own = tiling.rows / tiling.cluster + tiling.columns
    fetching = GROUP * at_once * own / L2_BYTES_PER_CLOCK
    reading = GROUP * at_once * tiling.columns / row_tiles / MEMORY_BYTES_PER_CLOCK
    groups, waves = inputs // GROUP // tiling.splits, pl.cdiv(tiles, MULTIPROCESSORS)
    return waves * (groups * max(computing, moving, fetching, reading) + TILE_CLOCKS)
