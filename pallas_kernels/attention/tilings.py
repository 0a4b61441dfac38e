"""The sizes of an attention launch, chosen from the shapes of its arrays.

A tile's lanes hold pairs of a packed row and one of the query heads that share a K/V head: lane t
is the tile's row t // group and the group's head t % group.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl


class Tiling(NamedTuple):
    """Sizes of one program, found by measurement on an H200."""

    rows: int  # lanes of a query tile; a matrix unit takes 16 at least
    keys: int  # keys of a block
    num_warps: int
    num_stages: int

    def holding(self, lanes: int) -> "Tiling":
        """This tiling, with more rows if these lanes need them: the next power of two."""
        rows = max(self.rows, pl.next_power_of_2(lanes))
        return self._replace(rows=rows, num_warps=max(self.num_warps, rows // ROWS_PER_WARP))


class Launch(NamedTuple):
    """The static parameters of one launch."""

    tiling: Tiling
    few: Tiling | None  # for tiles with few rows in prefill; None in decoding
    group: int  # query heads that share a K/V head
    splits: int  # shares into which the keys of all samples are cut
    max_tiles: int  # the most tiles that a sample may have
    one_block: bool  # whether tiling.rows keys hold the fresh rows of any sample
    scale: float  # factor of the scores
    window: int | None  # positions that a row sees; None: all
    invariant: bool  # whether a row's bits depend on its own sequence alone
    format: str | None  # of a cache in 8 bits


PART_KEYS = 64  # keys of a part, where bits do not depend on the rows of a call
DECODE = Tiling(rows=16, keys=64, num_warps=4, num_stages=3)
# Heads whose size is not a power of two pad their blocks in shared memory: where there are
# enough programs to fill the device, more of them fit with smaller blocks.
DECODE_PADDED = Tiling(rows=16, keys=32, num_warps=2, num_stages=3)
# Caches in 8 bits: warps that widen numbers wait for one another less where there are two, if many
# programs fill the device. On an H200, 147 us in place of 153 for 64 samples of 32 heads, but 66 of
# 59 for 24.
DECODE_NARROW = Tiling(rows=16, keys=64, num_warps=2, num_stages=4)
# Small heads: as many bytes in flight as with large ones, in more stages, or in larger blocks
# where there is hardly a program for each multiprocessor.
DECODE_SMALL = Tiling(rows=16, keys=64, num_warps=2, num_stages=4)
DECODE_FEW_SMALL = Tiling(rows=16, keys=128, num_warps=4, num_stages=4)
# A sample with more rows than this many tiles of DECODE.rows is a prefill: each tile reads the
# sample's keys, and larger tiles read them less often.
DECODE_TILES = 3
DECODE_LANES = 64  # most lanes of a tile in decoding, where query heads share a K/V head
# Tiles of DECODE.rows lanes are faster than that while they are few, although several read the same
# keys: they do so at about the same time, and all but one find them in the L2 cache. In long caches
# they drift apart by more than it holds. On an H100, with groups of 4: 42 us in place of 46 for 24
# samples of 8 rows (384 tiles) and 900 keys, 57 of 64 for 16 rows (768), but 107 of 105 for 64
# samples (1,024), and 382 of 302 for 24 samples with 8,192 keys.
SMALL_TILES = 768
SMALL_TILES_IN_PARTS = 256  # the same, with parts of keys
SHARED_BYTES = 2**27  # of a layer's cache, at most, with small tiles
ROWS_PER_WARP = 16  # most lanes of a grouped tile for each warp, whose registers hold them
PREFILL = Tiling(rows=64, keys=64, num_warps=4, num_stages=3)
PREFILL_FLOAT32 = PREFILL._replace(keys=32)  # as many bytes in shared memory
FEW_ROWS = 16  # rows of a short tile beside long ones: it waits for keys more than it computes
PROGRAMS_WITH_PARTS = 48  # with parts of keys: the results of each have to be stored and read
PROGRAMS_WANTED = 128  # about one for each multiprocessor: far fewer, and keys are split
PROGRAMS_THAT_FILL = 1024


def launch_for(
    heads: int,
    cache_shape: tuple[int, int, int, int],  # [b, l, k, d]
    rows: int,
    most: int,
    *,
    item_bytes: int,
    scale: float,
    window: int | None,
    invariant: bool = False,
    format: str | None = None,
) -> Launch:
    """The launch for `rows` packed rows with `heads` query heads.

    Args:
        heads: query heads.
        cache_shape: [batch, max_len, kv_heads, head_dim].
        rows: packed rows.
        most: the most rows that a sample may have.
        item_bytes: bytes of one number of the queries.
        scale: the factor of the scores.
        window: positions that a row sees; None: all.
        invariant: whether a row's bits depend on its own sequence alone.
        format: "int8" or "fp8" for a cache in 8 bits.
    """
    batch, max_len, kv_heads, head_dim = cache_shape
    group = heads // kv_heads
    splits, few = 1, None
    if most <= DECODE_TILES * DECODE.rows:
        tiling = _decode_tiling(head_dim, batch * kv_heads, format)
        # With so few rows, more samples than these would have short drafts. Where there are
        # more, keys stay uncut.
        samples = min(batch, pl.cdiv(rows, most))
        programs = samples * kv_heads
        if group > 1:
            tiling = tiling.holding(group)
            tiles = programs * pl.cdiv(most, tiling.rows // group)
            cache_bytes = 2 * batch * max_len * kv_heads * head_dim * item_bytes
            most_tiles = SMALL_TILES_IN_PARTS if invariant else SMALL_TILES
            if most <= DECODE.rows and tiles <= most_tiles and cache_bytes <= SHARED_BYTES:
                programs = tiles
            else:
                lanes = min(DECODE_LANES, group * min(most, DECODE.rows))
                tiling = tiling.holding(max(group, lanes))
        enough = PROGRAMS_WITH_PARTS if invariant else 3 * PROGRAMS_WANTED // 4
        if programs < enough:
            splits = pl.cdiv(PROGRAMS_WANTED, kv_heads)
    else:
        tiling = PREFILL_FLOAT32 if item_bytes > 2 else PREFILL
        few = tiling._replace(rows=FEW_ROWS)
        if group > 1:
            tiling, few = tiling.holding(group), few.holding(group)
    max_tiles = pl.cdiv(most, tiling.rows // group)
    if invariant:
        tiling, few = _in_parts(tiling), few and _in_parts(few)
    one_block = most <= tiling.rows
    sizes = (tiling, few, group, splits, max_tiles, one_block)
    return Launch(*sizes, scale, window, invariant, format)


def _in_parts(tiling: Tiling) -> Tiling:
    """The tiling whose blocks are parts, which have one size."""
    return tiling._replace(keys=PART_KEYS, num_warps=max(4, tiling.num_warps), num_stages=3)


def _decode_tiling(head_dim: int, programs: int, format: str | None) -> Tiling:
    if head_dim <= 64:
        return DECODE_SMALL if programs >= PROGRAMS_WANTED else DECODE_FEW_SMALL
    if padded(head_dim) != head_dim and programs >= PROGRAMS_THAT_FILL:
        return DECODE_PADDED
    if format is not None and programs >= PROGRAMS_THAT_FILL:
        return DECODE_NARROW
    return DECODE


def padded(head_dim: int) -> int:
    """The size of a head's tile, which a matrix unit takes: a power of two, 16 at least."""
    return max(16, pl.next_power_of_2(head_dim))


def dims_of(head_dim: int) -> Array:
    """The places of a head's numbers in its tile, int32 [padded(head_dim)]."""
    return jnp.arange(padded(head_dim))
