"""The plan of an attention launch: packed rows and cache lengths -> work items.

An item is one query tile (some rows of one sample) and one share of that
sample's committed keys. Items are planned on the device from the actual
lengths, so a launch's grid stays static while batches are ragged. The plan is
the same for all layers of a forward: XLA computes it once.

Axis legend: r = packed rows, b = batch, n = items.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.common.indexing import take


class WorkItems(NamedTuple):
    """The items, and the places at which each packed row finds its results."""

    fields: Array
    """int32 [7, n], in the order of `FIELDS`; unused items have no rows and no keys."""
    of_rows: Array
    """int32 [3, r]: a row's first item, its number of items (0: padding), its place in the tile."""
    num_real: Array
    """int32 [1]: the number of rows that are not padding."""


FIELDS = (
    "sample",
    "first",  # packed row at which the tile begins
    "before",  # rows of the sample before the tile
    "count",  # rows of the tile
    "key_begin",  # the share of the committed keys
    "key_end",
    "fresh_end",  # rows of the sample that the tile may see: 0 but in a tile's last share
)


def num_items(rows: int, batch: int, tile: int, splits: int, max_tiles: int) -> int:
    """Static upper bound of the items that `plan` may need."""
    tiles = min(rows, pl.cdiv(rows, tile) + batch, batch * max_tiles)
    # Beyond the first share of each sample there are fewer than `splits`, and every tile of a
    # sample needs an item for each of its shares.
    return tiles if splits == 1 else tiles + splits * max_tiles


def plan(
    segment_ids: Array,  # int32 [r]
    positions: Array,  # int32 [r]
    cache_lengths: Array,  # int32 [b]
    *,
    tile: int,
    block: int,
    splits: int,
    max_tiles: int,
    causal: bool = True,
    window: int | None = None,
) -> WorkItems:
    """Cut rows into tiles, and committed keys into shares.

    Args:
        segment_ids: the sample of each row, int32 [r]; b for padding rows.
        positions: the position of each row in its sample, int32 [r]; only a window needs them.
        cache_lengths: the number of committed keys of each sample, int32 [b].
        tile: most rows of a tile.
        block: a share is a whole number of blocks of this many keys.
        splits: keys of all samples are cut into about this many equal shares; 1: no
            sample's keys are cut. Short samples get fewer shares than long ones.
        max_tiles: the most tiles that a sample may have.
        causal: rows see no fresh rows beyond their tile.
        window: keys that a row sees, itself included; None: all. Blocks that no row of a tile
            sees belong to none of its shares.
    """
    batch, rows = cache_lengths.shape[0], segment_ids.shape[0]
    first, counts = extents(segment_ids, batch)
    tiles, blocks = pl.cdiv(counts, tile), pl.cdiv(cache_lengths, block)
    skipped = jnp.zeros_like(blocks)  # blocks before the window of a sample's first row
    if window is not None:
        skipped = blocks_before_window(positions, first, cache_lengths, window, block)
        blocks -= skipped
    shares = jnp.ones_like(blocks)
    if splits > 1:
        share = pl.cdiv(jnp.sum(jnp.where(counts > 0, blocks, 0)), splits)
        shares = jnp.maximum(1, pl.cdiv(blocks, jnp.maximum(1, share)))
    longest = pl.cdiv(blocks, shares) + pl.cdiv(counts, block)  # of a sample's items, in blocks
    starts = starts_longest_first(longest, tiles * shares)

    index = jnp.arange(num_items(rows, batch, tile, splits, max_tiles), dtype=jnp.int32)
    after = index[:, None] - starts
    its = (after >= 0) & (after < tiles * shares)  # [n, b]: one sample of each item in use
    used, sample = jnp.any(its, axis=1), jnp.argmax(its, axis=1).astype(jnp.int32)
    of_item = lambda x: take(x, sample)
    within, parts = index - of_item(starts), of_item(shares)
    before, part = within // parts * tile, within % parts
    cut = lambda part: (of_item(skipped) + part * of_item(blocks) // parts) * block
    seen = before + tile if causal else rows
    fields = (
        sample,
        of_item(first) + before,
        before,
        jnp.minimum(of_item(counts) - before, tile),
        cut(part),
        jnp.minimum(cut(part + 1), of_item(cache_lengths)),
        jnp.where(part == parts - 1, jnp.minimum(seen, of_item(counts)), 0),
    )

    real = segment_ids < batch
    owner = jnp.where(real, segment_ids, 0)
    of_row = lambda x: take(x, owner)
    place = jnp.arange(rows, dtype=jnp.int32) - of_row(first)
    of_rows = (of_row(starts) + place // tile * of_row(shares), of_row(shares), place % tile)
    return WorkItems(
        jnp.stack([jnp.where(used, field, 0) for field in fields]),
        jnp.stack([jnp.where(real, field, 0) for field in of_rows]),
        jnp.sum(counts, dtype=jnp.int32)[None],
    )


def blocks_before_window(positions, first, cache_lengths, window: int, block: int) -> Array:
    """Blocks of committed keys that no row of a sample sees. [b]"""
    lowest = take(positions, first) - window + 1
    return jnp.clip(lowest // block, 0, pl.cdiv(cache_lengths, block))


def part_places(
    segment_ids: Array,  # int32 [r]
    positions: Array,  # int32 [r]
    cache_lengths: Array,  # int32 [b]
    *,
    tile: int,
    max_tiles: int,
    keys: int,
    num_parts: int,
    causal: bool,
    window: int | None,
) -> Array:
    """int32 [3, r]: a row's first part, its number of parts (0: padding), its place in the tile."""
    batch, rows = cache_lengths.shape[0], segment_ids.shape[0]
    first, counts = extents(segment_ids, batch)
    real = segment_ids < batch
    owner = jnp.where(real, segment_ids, 0)
    of_row = lambda x: take(x, owner)
    place = jnp.arange(rows, dtype=jnp.int32) - of_row(first)
    before = place // tile * tile
    seen = jnp.minimum(before + tile if causal else rows, of_row(counts))
    parts, skipped = pl.cdiv(of_row(cache_lengths) + seen, keys), 0
    if window is not None:
        skipped = of_row(blocks_before_window(positions, first, cache_lengths, window, keys))
    first_part = (owner * max_tiles + place // tile) * num_parts + skipped
    fields = (first_part, parts - skipped, place % tile)
    return jnp.stack([jnp.where(real, field, 0) for field in fields])


def starts_longest_first(lengths: Array, items: Array) -> Array:
    """First item of each sample, in an order in which the longest items come first. [b]

    A device begins items in their order. If the last ones are short, all of its multiprocessors
    are busy until shortly before the end.
    """
    order = jnp.arange(lengths.shape[0])
    alike = (lengths == lengths[:, None]) & (order < order[:, None])
    before = (lengths > lengths[:, None]) | alike  # [b, b]
    return jnp.sum(jnp.where(before, items, 0), axis=1, dtype=jnp.int32)


def extents(segment_ids: Array, batch: int) -> tuple[Array, Array]:
    """First row and row count of each sample. [b], [b]"""
    belongs = segment_ids == jnp.arange(batch)[:, None]  # [b, r]
    first = jnp.argmax(belongs, axis=1).astype(jnp.int32)
    return first, jnp.sum(belongs, axis=1, dtype=jnp.int32)
