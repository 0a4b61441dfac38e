"""What one program of the attention kernel reads and writes: a tile of rows of one sample.

Axis legend: see `pallas_kernels.attention.triton`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.attention.confine import confine
from pallas_kernels.attention.tilings import Launch, Tiling, dims_of
from pallas_kernels.attention.work_items import FIELDS
from pallas_kernels.common.narrow_rows import (
    FORMATS,
    round_to_units,
    units_to_float,
    unpack,
    widen_in_kernel,
)


class Places(NamedTuple):
    """The program's place in the grid, and the arrays of a launch, as references."""

    head: Array  # the K/V head
    index: Array  # the work item
    items: Array  # [7, n]
    fresh: tuple[Array, ...]  # queries [r, h, d], keys and values [r, k, d]; or one [r, h + 2k, d]
    # Keys and values [b, l, k, d]; or words [b, l, k, d / 2] of both and their scales [b, 1, k, l].
    cached: tuple[Array, ...]
    masks: dict[str, Array]  # ancestors [r, f], cache [b, l], positions [r], entries [b, l]
    outputs: tuple[Array, ...]  # [r, h, d], or shares [n, t, k, d], [n, t, k] x 2


class Tile:
    """The rows of this program's work item, and the keys and values that they may see.

    A row of numbers is a tuple of its parts [..., p]: the whole row, or its two halves where two
    numbers share a word of the cache.

    Attributes:
        tiling: the tile's sizes.
        launch: the launch's.
        places: the launch's arrays.
        head: the program's K/V head.
        index: the program's work item.
        item: the fields of the work item, by name.
        num_parts: parts of a row.
        query: the queries, of parts [t, p].
        is_used: which lanes hold one, [t].
    """

    def __init__(self, tiling: Tiling, launch: Launch, places: Places, *, interpret: bool):
        self.tiling, self.launch, self.places = tiling, launch, places
        self.interpret = interpret
        self.head, self.index = places.head, places.index
        fields = (places.items[i, self.index] for i in range(len(FIELDS)))
        self.item = item = dict(zip(FIELDS, fields, strict=True))
        self.kv_heads, self.part_dim = places.cached[0].shape[2:]
        self.num_parts = 1 if launch.format is None else 2
        self.dims = dims_of(self.part_dim)[None, :]
        self.lane = jnp.arange(tiling.rows)
        self.sample_row = item["first"] - item["before"]  # the sample's first row
        num_lanes = item["count"] if launch.group == 1 else item["count"] * launch.group
        self.is_used, last_lane = self.lane < num_lanes, jnp.minimum(self.lane, last(num_lanes))
        self.query_row = item["first"] + row_of(last_lane, launch.group)
        heads = head_of(last_lane, self.head, launch.group)
        self.query = self.load_parts(places.fresh[0], self.query_row, heads)
        if launch.window is not None:
            # The lowest position that each lane's row sees, and that any does.
            positions = plgpu.load(places.masks["positions"].at[self.query_row])
            self.lowest = positions - launch.window + 1
            self.first_seen = jnp.min(self.lowest)

    def load_parts(self, ref, row, head, defined=None, others=None) -> tuple[Array, ...]:
        """The rows `row` [m] of a head; `others` where `defined` [m] is given and false."""
        others = others or [0] * self.num_parts
        return tuple(
            self._load(ref.at[row[:, None], head, dims], row.shape[0], defined, other)
            for dims, other in zip(self._dims_of_parts(), others, strict=True)
        )

    def load_fresh(self, row, defined=None, others=(None, None)):
        """Keys and values of the sample's fresh rows `row` [m], counted from its first.

        Where `defined` [m] is given and false, they are those of `others`.
        """
        return self.as_cached(self.fetch_fresh(row, defined, others))

    def fetch_fresh(self, row, defined=None, others=(None, None)):
        """What `load_fresh` reads, to be given to `as_cached` when it is needed."""
        fresh, first_heads = self.places.fresh[1:], (0, 0)
        if not fresh:
            heads = self.kv_heads * self.launch.group
            fresh, first_heads = self.places.fresh * 2, (heads, heads + self.kv_heads)
        row = self.sample_row + row
        heads = [first + self.head if first else self.head for first in first_heads]
        return [
            self.load_parts(ref, row, head, defined, other)
            for ref, head, other in zip(fresh, heads, others, strict=True)
        ]

    def as_cached(self, fetched):
        """Fetched keys and values as the cache would hold them, confined: see `confine`."""
        if self.launch.format is None:
            return confine(*fetched)
        rounded = (round_to_units(parts, self.launch.format) for parts in fetched)
        (keys, key_scales, is_key), (values, value_scales, is_value) = rounded
        # Values that are not finite have become finite ones, and their key makes up for it.
        key_scales = jnp.where(is_key & is_value, key_scales, jnp.nan)
        dtype = self.query[0].dtype
        wide = lambda units, scales: (units_to_float(units) * scales[:, None]).astype(dtype)
        return (
            tuple(wide(x, key_scales) for x in keys),
            tuple(wide(x, value_scales) for x in values),
        )

    def load_cached(self, which: int, entry, defined=None):
        """Committed keys (0) or values (1) of the entries `entry` [m].

        Returns:
            Numbers in the query's dtype, and their scales [m], float32; None for scales of 1.
        """
        sample, format = self.item["sample"], self.launch.format
        place = self.places.cached[which].at[sample, entry[:, None], self.head, self.dims]
        zero = 0 if format is None else FORMATS[format].flipped  # of numbers that are left out
        loaded = self._load(place, entry.shape[0], defined, zero)
        if format is None:
            return (loaded,), None
        place = self.places.cached[2 + which].at[sample, 0, self.head, entry]
        scales = plgpu.load(place, mask=defined, other=None if defined is None else 0.0)
        dtype = self.query[0].dtype
        if dtype == jnp.float16:  # in which a weight times a scale may be too small
            wide = (x.astype(jnp.float32) * scales[:, None] for x in unpack(loaded, format))
            return tuple(x.astype(dtype) for x in wide), None
        wide, smaller = widen_in_kernel(loaded, format, dtype, interpret=self.interpret)
        return tuple(wide), scales * smaller

    def descends(self, fresh):
        """Whether each lane's row sees the sample's fresh rows `fresh` [m], [t, m]."""
        ancestors = self.places.masks.get("ancestors")
        if ancestors is None:
            row = self.item["before"] + row_of(self.lane, self.launch.group)
            return fresh[None, :] <= row[:, None]
        column = jnp.clip(fresh, 0, ancestors.shape[1] - 1)
        return plgpu.load(ancestors.at[self.query_row[:, None], column[None, :]]) != 0

    def exp2(self, x):
        """Two to the power of float32 numbers; 0 instead of the smallest, which are not normal.

        A GPU has no instruction for those, and `jnp.exp2` takes three more to have them.
        """
        if self.interpret:
            return jnp.exp2(x)
        (out,) = plgpu.elementwise_inline_asm(
            "ex2.approx.ftz.f32 $0, $1;",
            args=[x],
            constraints="=f,f",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        )
        return out

    def store_rows(self, out):
        """Stores the results of the tile's rows."""
        (out_ref,) = self.places.outputs
        row = (self.item["first"] + row_of(self.lane, self.launch.group))[:, None]
        heads = head_of(self.lane, self.head, self.launch.group)
        for dims, part in zip(self._dims_of_parts(), out, strict=True):
            place = out_ref.at[row, heads, dims]
            plgpu.store(place, part.astype(out_ref.dtype), mask=self._stored())

    def store_share(self, place, out, highest, total):
        """Stores a share's weighted values, largest scores [t] and sums of weights [t]."""
        out_ref, highest_ref, total_ref = self.places.outputs
        at = (place, self.lane, self.head)
        for dims, part in zip(self._dims_of_parts(), out, strict=True):
            place_of_part = out_ref.at[place, self.lane[:, None], self.head, dims]
            plgpu.store(place_of_part, part, mask=self._stored())
        plgpu.store(highest_ref.at[at], highest, mask=self.is_used)
        plgpu.store(total_ref.at[at], total, mask=self.is_used)

    def _dims_of_parts(self):
        return [self.dims + part * self.part_dim for part in range(self.num_parts)]

    def _load(self, place, size: int, defined=None, other=0):
        """[size, p] at a place; `other` where `defined` [size] is given and false."""
        if self.dims.shape[1] == self.part_dim and defined is None:
            return plgpu.load(place)
        mask = jnp.broadcast_to(self.dims < self.part_dim, (size, self.dims.shape[1]))
        if defined is not None:
            mask &= defined[:, None]
        return plgpu.load(place, mask=mask, other=other)

    def _stored(self):
        return self.is_used[:, None] & (self.dims < self.part_dim)


def row_of(lane, group: int):
    """The tile's row that a lane holds."""
    return lane if group == 1 else lane // group


def head_of(lane, kv_head, group: int):
    """The query head that a lane holds; a column for several heads, to lie beside rows."""
    return kv_head if group == 1 else (kv_head * group + lane % group)[:, None]


def last(count):
    """The last of `count` places; 0 if there are none."""
    return jnp.maximum(count - 1, 0)
