"""Rows rounded to the type of a narrow weight's values, as the kernels of products take them.

Rounding is a launch of its own, unless the kernel that computes the rows rounds them as well.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.matmul.narrow import GROUP, Format
from pallas_kernels.matmul.rounding import round_groups
from pallas_kernels.matmul.second_terms import in_words, words_for

ROUNDED_BY_WARP, ROUNDING_WARPS = 1024, (4, 16)  # numbers; the fewest warps of a row, and the most


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
            of each tile.
        scales: float32 [scales, tiles, 2, rows]: `Format.scales_of` each row, for either term.
        second: int32 [words, rows]: a bit for each GROUP of inputs: see `second_terms`.
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
    rounding: Rounding, inputs: int
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes and types of the arrays of `RoundedRows`."""
    kind, padded, tiles = rounding
    factor = jnp.float8_e4m3fn if kind.dtype == jnp.float8_e4m3fn else jnp.int8
    of_tile, scales = padded // tiles, kind.scales_of(inputs)
    return (
        jax.ShapeDtypeStruct((tiles, 2, of_tile, inputs), factor),
        jax.ShapeDtypeStruct((scales, tiles, 2, of_tile), jnp.float32),
        jax.ShapeDtypeStruct((words_for(inputs // GROUP), padded), jnp.int32),
    )


def places_in_groups(inputs: int) -> tuple[Array, Array]:
    """The inputs of a row in groups, [n, GROUP], where n is a power of two; whether they exist."""
    group = jnp.arange(pl.next_power_of_2(pl.cdiv(inputs, GROUP)))
    at = (group * GROUP)[:, None] + jnp.arange(GROUP)[None, :]
    return at, at < inputs


def store_rounded(
    values_ref,  # [tiles, 2, rows, inputs]
    scales_ref,  # [scales, tiles, 2, rows]
    second_ref,  # [words, rows of all tiles]
    numbers: Array,  # float32 [n, GROUP], see `places_in_groups`
    row: Array,
    kind: Format,
) -> None:
    """Rounds a row in a Triton kernel and stores it."""
    rounded, (at, exists) = round_groups(numbers, kind), places_in_groups(values_ref.shape[3])
    of_tile = values_ref.shape[2]
    tile, of_row = row // of_tile, row % of_tile
    scale = jnp.arange(len(rounded.scales))
    kept, second_scales = scale < scales_ref.shape[0], rounded.scales * kind.second_step
    terms = (rounded.values, rounded.scales), (rounded.second_values, second_scales)
    for term, (values, scales) in enumerate(terms):
        plgpu.store(values_ref.at[tile, term, of_row, at], values, mask=exists)
        plgpu.store(scales_ref.at[scale, tile, term, of_row], scales, mask=kept)
    words = in_words(rounded.has_second)
    number = jnp.arange(len(words))
    plgpu.store(second_ref.at[number, row], words, mask=number < second_ref.shape[0])


def in_kernel_form(x: Array | RoundedRows, rounding: Rounding, *, interpret: bool) -> RoundedRows:
    """Rows as a kernel takes them, rounded here or before.

    Raises:
        ValueError: they were rounded for another kernel.
    """
    if not isinstance(x, RoundedRows):
        return round_rows(x, rounding, interpret=interpret)
    if (x.padded, x.tiles) != (rounding.padded, rounding.tiles):
        raise ValueError(
            f"rows are rounded for {x.padded} rows in {x.tiles} tiles, and the kernel takes "
            f"{rounding.padded} in {rounding.tiles}"
        )
    return x


def round_rows(x: Array, rounding: Rounding, *, interpret: bool) -> RoundedRows:
    """Rounds rows in a launch of its own, and adds the zeros beyond the last."""
    inputs = x.shape[1]
    fewest, most = ROUNDING_WARPS
    warps = pl.next_power_of_2(inputs) // ROUNDED_BY_WARP
    arrays = pl.pallas_call(
        functools.partial(_round_kernel, kind=rounding.kind),
        grid=(rounding.padded,),
        out_shape=array_types(rounding, inputs),
        compiler_params=plgpu.CompilerParams(num_warps=min(max(warps, fewest), most), num_stages=1),
        interpret=interpret,
        name="round_rows",
    )(x)
    return RoundedRows(*arrays, rows=x.shape[0], dtype=x.dtype)


def _round_kernel(x_ref, values_ref, scales_ref, second_ref, *, kind: Format):
    row, (at, exists) = pl.program_id(0), places_in_groups(x_ref.shape[1])
    numbers = plgpu.load(x_ref.at[row, at], mask=exists & (row < x_ref.shape[0]), other=0)
    store_rounded(values_ref, scales_ref, second_ref, numbers.astype(jnp.float32), row, kind)
