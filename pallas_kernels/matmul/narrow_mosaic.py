"""Products with narrow weights as a Pallas Mosaic GPU kernel, for capability 9.0.

Rows are rounded by a launch of their own, as for the Triton kernel. A matrix unit adds up all
products of a tile's rows, whose scales belong to rows: integers without an end, and fp8 values,
of whose sums it keeps fewer bits than float32 has, PROMOTED inputs at a time.

A product of few rows waits for its weights. Its one row of tiles has swapped operands, and lanes
for the second terms beside those of the first, whether there are any or not. With many rows, groups
with second terms come after all others. The warpgroup that fetches reads which of them any row has
while the first terms are on their way; those without are neither fetched nor multiplied again.

Weights in 4 bits are widened in registers, as the first factor of a matrix instruction, in which
rows cannot be: operands are swapped with any number of rows. Each of their groups has its own sums,
which are scaled by the group's scales of rows and of the tile's columns and added up in float32.

Tiles, their order and the way to the output are those of `mosaic`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.blocks import round_up
from pallas_kernels.matmul import mosaic, narrow_tiles, second_terms
from pallas_kernels.matmul.activations import IN_KERNELS
from pallas_kernels.matmul.mosaic_tiles import COPIED_ROWS, ITEM_BYTES, Tiling
from pallas_kernels.matmul.narrow import (
    FORMATS,
    GROUP,
    SECOND_STEPS,
    Format,
    NarrowWeight,
)
from pallas_kernels.matmul.narrow_triton import NIBBLE_UNIT
from pallas_kernels.matmul.rounded import RoundedRows, Rounding, in_kernel_form
from pallas_kernels.matmul.steps import Announced, Operand, Steps
from pallas_kernels.matmul.widened import multiply_widened

MULTIPLES = narrow_tiles.MULTIPLES
GATES = False
TAKES = (
    "weights of formats that round rows (int8, fp8), or 16-bit rows and int4 without zeros (for "
    "sums with inputs enough for two shares),"
)
SECOND_INVERSE = pow(int(FORMATS["int8"].second_step), -1, 2**32)
SECOND_INVERSE -= 2**32 if SECOND_INVERSE >= 2**31 else 0  # as a signed number
PROMOTED = 8 * GROUP  # inputs whose products a matrix unit adds up, where its sums lose bits


def tiling_for(
    rows: int,
    inputs: int,
    outputs: int,
    kind: Format,
    *,
    dtype: jnp.dtype,
    split: bool,
    invariant: bool = False,
) -> Tiling:
    """See `narrow_tiles.tiling_for`; numerics are never invariant here, and all formats alike.

    Args:
        dtype: that of the rows.

    Raises:
        ValueError: `invariant` is set.
    """
    if invariant:
        raise ValueError("implementation 'mosaic' has no invariant numerics with narrow weights")
    if kind.is_packed:
        return narrow_tiles.swapped_tiling(rows, inputs, outputs, split=split, bits=4)
    # Only 16-bit outputs can be transposed back.
    # Sums of integers are added up in one place, others in two.
    options = {"swap": dtype.itemsize == ITEM_BYTES, "sums": 1 + (kind.dtype != jnp.int8)}
    return narrow_tiles.tiling_for(rows, inputs, outputs, split=split, **options)


def takes(weight: NarrowWeight, x: Array | RoundedRows, *, split: bool) -> bool:
    """Whether the kernel takes rows and a weight of these sizes and types.

    Args:
        split: as for `tiling_for`.
    """
    fits = all(size % unit == 0 for size, unit in zip(weight.shape, MULTIPLES, strict=True))
    if not weight.kind.is_packed:
        return fits and weight.kind.rounds_rows
    if not fits or weight.zeros is not None or x.dtype.itemsize != ITEM_BYTES:
        return False
    tiling = narrow_tiles.swapped_tiling(x.shape[0], *weight.shape, split=split, bits=4)
    return tiling.splits > 1 or not split


def rounding_for(rows: int, weight: NarrowWeight, tiling: Tiling) -> Rounding:
    """How the kernel takes its rows."""
    tiles = mosaic.clusters(rows, weight.shape[1], tiling)[0]
    return Rounding(weight.kind, tiles * tiling.rows, tiles if tiling.swapped else 1)


@functools.partial(jax.jit, static_argnames=("tiling", "activation", "dtype", "interpret"))
def launch(
    x: Array | RoundedRows,  # [rows, inputs]
    weight: NarrowWeight,  # [inputs, outputs]
    bias: Array | None,  # [outputs]
    *,
    tiling: Tiling,
    activation: str | None = None,
    dtype: jnp.dtype,
    interpret: bool,
) -> Array:
    """[rows, outputs], or shares [splits, rows, outputs]: see `pallas_kernels.linear`."""
    (rows, inputs), outputs, kind = x.shape, weight.shape[1], weight.kind
    x = in_kernel_form(x, rounding_for(rows, weight, tiling), interpret=interpret)
    static = {"tiling": tiling, "kind": kind, "activation": activation, "interpret": interpret}
    kernel = functools.partial(_kernel, **static)
    # Rows are copied COPIED_ROWS at a time, unless all are fewer.
    copied = rows if rows < COPIED_ROWS else round_up(rows, COPIED_ROWS)
    out = jax.ShapeDtypeStruct((copied, outputs), dtype)
    name = f"narrow_linear_{inputs}x{outputs}"
    values, scales = weight.values, weight.scales
    if kind.is_packed:
        values = lax.bitcast_convert_type(values, jnp.int8)
    if not kind.grouped:
        scales = scales.reshape(outputs).astype(jnp.float32)
    product = mosaic.over_tiles(kernel, out, tiling, name=name, interpret=interpret)(
        x.values.reshape(2 * x.padded, inputs),
        x.scales.reshape(-1, 2 * x.padded),
        values,
        scales,
        *(() if tiling.swapped else (x.second,)),
        *(() if bias is None else (bias,)),
    )
    return product if rows == copied else product[..., :rows, :]


def _kernel(
    rounded_ref,  # [2 * padded, inputs]: first and second terms of each of RoundedRows' tiles
    rounded_scales_ref,  # [scales, 2 * padded]
    values_ref,  # [outputs, inputs], or bytes
    scales_ref,  # [outputs], or [groups, outputs]
    *refs,  # many rows: where there are second terms [words, rows]; bias [outputs]; out
    tiling: Tiling,
    kind: Format,
    activation: str | None,
    interpret: bool,
):
    second_ref, refs = (None, refs) if tiling.swapped else (refs[0], refs[1:])
    bias_ref, out_ref = refs if len(refs) == 2 else (None, *refs)
    split, warpgroup = lax.axis_index("split"), lax.axis_index("warpgroup")
    together = tiling.depth // GROUP  # groups of a step
    count = rounded_ref.shape[1] // tiling.splits // tiling.depth  # steps
    row_tiles = rounded_ref.shape[0] // 2 // tiling.rows
    tile_row, tile_column = mosaic.place(out_ref.shape[-2], out_ref.shape[-1], tiling)
    # A warpgroup multiplies some of the tile's rows, or of its columns if operands are swapped.
    swapped = tiling.swapped
    own = (tiling.columns if swapped else tiling.rows) // tiling.warpgroups
    lanes = 2 * tiling.rows if swapped else tiling.rows
    own_rows, own_columns = (tiling.rows, own) if swapped else (own, tiling.columns)
    own_part = pl.ds(warpgroup * own, own)
    products_shape = (own, lanes) if swapped else (own, tiling.columns)
    sums_shape = (own, tiling.rows) if swapped else products_shape
    rows_axis, columns_axis = (1, 0) if swapped else (0, 1)
    skipped = (0, warpgroup * own) if swapped else (warpgroup * own, 0)
    first_row, first_column = tile_row + skipped[0], tile_column + skipped[1]
    row_tile, column_tile = tile_row // tiling.rows, tile_column // tiling.columns

    # Of a term, 0 or 1, and a number of `depth` inputs.
    of_rows = lambda term, number: (term * row_tiles + row_tile, number)
    of_weight = lambda term, number: (column_tile, number)
    of_scales = lambda term, number: (number, row_tile)
    of_groups = lambda term, number: (number, column_tile)
    in_byte = 2 if kind.is_packed else 1  # values
    lines = mosaic.swizzled(GROUP, jnp.int8)
    weight_lines = mosaic.swizzled(GROUP // in_byte, jnp.int8)
    neighbours = ("neighbour",) if tiling.cluster > 1 else ()
    bytes_shape = tiling.columns, tiling.depth // in_byte
    operands = [
        Operand(rounded_ref, (lanes, tiling.depth), of_rows, lines, neighbours),
        Operand(values_ref, bytes_shape, of_weight, weight_lines),
    ]
    if kind.is_packed:
        operands += [
            Operand(rounded_scales_ref, (together, lanes), of_scales),
            Operand(scales_ref, (together, tiling.columns), of_groups),
        ]

    def multiply(sums, rows_block, weight_block):
        left, right = (weight_block, rows_block) if swapped else (rows_block, weight_block)
        for place in range(0, tiling.depth, GROUP):
            group = pl.ds(place, GROUP)
            plgpu.wgmma(sums, left.at[own_part, group], right.at[:, group].transpose((1, 0)))

    first_number = split * count

    def fetch_together(steps, _):
        """Both terms of all groups."""
        one = lambda step, fetched: steps.fetch(fetched, 0, first_number + step)
        steps.end_fetching(lax.fori_loop(0, count, one, steps.begin_fetching()))

    def fetch_in_turn(steps, further):
        """The first terms of all groups, then the second ones of groups that have any."""
        fetched, words = steps.begin_fetching(), []
        for part, (begin, end) in enumerate(second_terms.ranges_of_steps(count)):
            number = second_terms.place_of(first_number)[0] + part

            def first(step, state, begin=begin, end=end, number=number):
                fetched, word, words_before = state
                fetched = steps.fetch(fetched, 0, first_number + step)
                place = row_tile * tiling.rows, tiling.rows, number
                read = second_terms.read(second_ref, *place, step - begin, end - begin)
                # The next fetch does not wait for words of this step.
                return fetched, second_terms.union(word, words_before), read

            none = (jnp.int32(0),) * second_terms.words_of_step(tiling.rows, end - begin)
            state = lax.fori_loop(begin, end, first, (fetched, jnp.int32(0), none))
            fetched, word = state[0], second_terms.union(*state[1:])
            word = second_terms.bits_of_share(word, number, first_number, count)
            words.append((number * second_terms.BITS, word))
        further.announce(sum(second_terms.count_bits(word) for _, word in words))
        for first_of_word, word in words:

            def second(bit, fetched, first_of_word=first_of_word, word=word):
                again = lambda fetched: steps.fetch(fetched, 1, first_of_word + bit)
                is_set = second_terms.flags_of(word, bit) > 0
                return lax.cond(is_set, again, lambda fetched: fetched, fetched)

            fetched = lax.fori_loop(0, second_terms.BITS, second, fetched)
        steps.end_fetching(fetched)

    def sums_of_products(steps, further):
        """Of whole rows, without their scales."""
        dtype, slot = kind.product_dtype, steps.begin()
        in_second = jnp.asarray(kind.second_step, dtype)
        add_up = functools.partial(steps.add_up, multiply=multiply, instructions=together)

        def summed(slot, count):
            run = lambda sums: (add_up(slot, count, sums), sums[...])
            return pl.run_scoped(run, plgpu.ACC(products_shape, dtype))

        def of_integers(sums):
            next_slot = add_up(slot, count, sums)
            again = further.wait()

            @pl.when(again > 0)
            def _():  # in steps of the second term, and back, which is exact in 32 bits
                sums[...] = sums[...] * SECOND_INVERSE
                add_up(next_slot, again, sums)
                sums[...] = sums[...] * in_second

            return sums[...]

        if swapped:
            sums = summed(slot, count)[1]
            sums = sums[:, : tiling.rows] + sums[:, tiling.rows :] * in_second
        elif dtype == jnp.int32 and not interpret:
            sums = pl.run_scoped(of_integers, plgpu.ACC(products_shape, dtype))
        else:  # interpret mode does not write to accumulators
            promoted = count if dtype == jnp.int32 else math.gcd(count, PROMOTED // tiling.depth)

            def add(_, state):
                slot, found = summed(state[0], promoted)
                return slot, state[1] + found

            state = slot, jnp.zeros(products_shape, dtype)
            slot, sums = lax.fori_loop(0, count // promoted, add, state)
            sums += summed(slot, further.wait())[1] * in_second
        return sums.astype(jnp.float32)

    def sums_of_groups(steps, own_wide):
        """Of groups whose sums are scaled each by its own scales, of rows and of columns."""

        def add(rows_block, weight_block, scales_block, group_scales, sums):
            def products(*of_groups):
                for i, of_group in enumerate(of_groups):
                    rows = rows_block.at[:, pl.ds(i * GROUP, GROUP)].transpose((1, 0))
                    own_bytes = weight_block.at[own_part, pl.ds(i * GROUP // 2, GROUP // 2)]
                    multiply_widened(of_group, own_bytes, rows, own_wide)
                return [of_group[...] for of_group in of_groups]

            accumulators = [plgpu.ACC(products_shape, jnp.int32)] * together
            for i, of_group in enumerate(pl.run_scoped(products, *accumulators)):
                # Both terms are added up as integers, in steps of the second one.
                both = of_group[:, : tiling.rows] * SECOND_STEPS + of_group[:, tiling.rows :]
                scaled = both.astype(jnp.float32)
                for axis, ref in (
                    (rows_axis, scales_block.at[i, second]),
                    (columns_axis, group_scales.at[i, own_part]),
                ):
                    scaled *= along(axis, plgpu.load(ref, optimized=False))
                sums += scaled
            return sums

        slot, second = steps.begin(), pl.ds(tiling.rows, tiling.rows)
        return steps.each(slot, count, add, jnp.zeros(sums_shape, jnp.float32))[1] / NIBBLE_UNIT

    def along(axis, numbers):
        return lax.broadcast_in_dim(numbers.astype(jnp.float32), sums_shape, (axis,))

    def finish(out, staged):
        first = 2 * tile_row if swapped else first_row  # second terms' scales lie between tiles'
        loaded = functools.partial(plgpu.load, optimized=False)
        own_outputs = pl.ds(first_column, own_columns)
        if not kind.grouped:
            out *= along(rows_axis, loaded(rounded_scales_ref.at[0, pl.ds(first, own_rows)]))
            out *= along(columns_axis, loaded(scales_ref.at[own_outputs]))
        if bias_ref is not None:
            out += along(columns_axis, loaded(bias_ref.at[own_outputs]))
        out = out if activation is None else IN_KERNELS[activation](out)
        out = out.astype(out_ref.dtype)
        own_out = out_ref.at[split] if tiling.splits > 1 else out_ref
        place = staged.at[warpgroup], first_row, first_column
        mosaic.write(out, own_out, *place, swapped=swapped)

    steps = Steps(operands, tiling)

    def run(memory, staged, further=None, wide=None):
        of_warpgroup = steps.with_memory(*memory)
        further = None if swapped else Announced(*further)

        def compute():
            if kind.is_packed:
                sums = sums_of_groups(of_warpgroup, None if wide is None else wide.at[warpgroup])
            else:
                sums = sums_of_products(of_warpgroup, further)
            finish(sums, staged)

        fetch = functools.partial(
            fetch_together if swapped else fetch_in_turn, of_warpgroup, further
        )
        lax.cond(warpgroup == tiling.warpgroups, fetch, compute)

    staged = mosaic.staging(own_rows, own_columns, tiling.warpgroups, out_ref.dtype)
    wide = plgpu.SMEM((tiling.warpgroups, own, GROUP), jnp.int8)
    scratch = [] if swapped else [Announced.allocations()]
    if kind.is_packed and interpret:
        scratch = [None, wide]
    pl.run_scoped(run, steps.allocations(), staged, *scratch, collective_axes="warpgroup")
