"""Rows rounded to the type of a narrow weight's values, as the kernels of products take them.

Rounding is a launch of its own, unless the kernel that computes the rows rounds them as well.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.matmul.narrow import Format, round_blocks


class Rounding(NamedTuple):
    """How the kernel of a product takes its rows: see `pallas_kernels.rounding_for`.

    Attributes:
        kind: the weight's format.
        padded: number of rows with those beyond the last, which are zero.
        tiles: into which the kernel divides these rows; both terms of a tile lie together.
    """

    kind: Format
    padded: int
    tiles: int = 1


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales", "second"],
    meta_fields=["rows", "dtype"],
)
@dataclasses.dataclass(frozen=True)
class RoundedRows:
    """Rounded rows [rows, inputs], and zeros up to a number of rows that a kernel asks for.

    Attributes:
        values: int8 or float8_e4m3fn [tiles, 2, rows, inputs]: first and second terms of the rows
            of each tile. Integers are undefined where there is no second term, since their scale
            is zero.
        scales: float32 [blocks, tiles, 2, rows], for blocks of `Format.block_of` inputs.
        second: int32 [groups, blocks]: 1 where a row of a group of them has a second term.
        rows: number of rows.
        dtype: what the rows' numbers had before.
    """

    values: Array
    scales: Array
    second: Array
    rows: int
    dtype: jnp.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and inputs."""
        return self.rows, self.values.shape[3]

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return self.values.shape[0]

    @property
    def padded(self) -> int:
        """Number of rows with those beyond the last."""
        return self.tiles * self.values.shape[2]


def array_types(
    rounding: Rounding, inputs: int, *, groups: int
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes and types of the arrays of `RoundedRows`; each of `groups` of rows has its flags."""
    kind, padded, tiles = rounding
    terms, blocks = (tiles, 2, padded // tiles), inputs // kind.block_of(inputs)
    factor = jnp.float8_e4m3fn if kind.dtype == jnp.float8_e4m3fn else jnp.int8
    return (
        jax.ShapeDtypeStruct((*terms, inputs), factor),
        jax.ShapeDtypeStruct((blocks, *terms), jnp.float32),
        jax.ShapeDtypeStruct((groups, blocks), jnp.int32),
    )


def places_in_blocks(block: Array, size: int) -> Array:
    """The inputs of blocks [n] of this size, [n, size]."""
    return (block * size)[:, None] + jnp.arange(size)[None, :]


def store_rounded(
    values_ref,  # [tiles, 2, rows, inputs]
    scales_ref,  # [blocks, tiles, 2, rows]
    numbers: Array,  # of n blocks, float32 [n, size]
    row: Array,  # [n]
    block: Array,  # [n]
    kind: Format,
    mask: Array | None = None,  # [n]; None: all are stored
) -> Array:
    """Rounds blocks in a Triton kernel and stores them; where they have second terms, int32 [n]."""
    rounded = round_blocks(numbers, kind)
    # A row that is not finite has no part in this: its comparison is false.
    has_second = rounded.second_scales > 0
    is_read = has_second | jnp.issubdtype(values_ref.dtype, jnp.floating)
    terms = (
        (rounded.values, rounded.scales, mask),
        (rounded.second_values, rounded.second_scales, is_read if mask is None else is_read & mask),
    )
    of_tile = values_ref.shape[2]
    tile, row = row // of_tile, row % of_tile
    for term, (values, scales, stored) in enumerate(terms):
        kept = None if stored is None else jnp.broadcast_to(stored[:, None], values.shape)
        at = places_in_blocks(block, values.shape[1])
        place = values_ref.at[tile[:, None], term, row[:, None], at]
        plgpu.store(place, values, mask=kept)
        plgpu.store(scales_ref.at[block, tile, term, row], scales, mask=mask)
    return has_second.astype(jnp.int32)
