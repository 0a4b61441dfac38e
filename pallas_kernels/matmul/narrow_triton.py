"""Products with narrow weights as two Pallas Triton kernels.

The first rounds the rows to values that a matrix unit multiplies (see `rounding.round_groups`). The
second reads a tile of the weights once and multiplies int8 or fp8 values. Where rows are rounded,
the products of all inputs are added up and then scaled; groups with second terms are rare, and
multiplied before all others. Where rows keep their numbers, all have second terms, which take
further lanes of the same tile, and each group's sums are scaled and added up in float32.

A row's bits depend on the row and on the weight alone: rows are rounded by themselves, integer
products are exact, groups are added in their order, and a second term that is zero changes nothing.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.common.implementations import stages_that_fit
from pallas_kernels.matmul import second_terms
from pallas_kernels.matmul.activations import IN_KERNELS
from pallas_kernels.matmul.narrow import GROUP, Format, NarrowWeight
from pallas_kernels.matmul.rounded import RoundedRows, Rounding, in_kernel_form


class Tiling(NamedTuple):
    """Sizes of one launch."""

    rows: int  # rows of a tile
    columns: int  # columns of a program's tile of the weights
    splits: int  # shares of the contracted axis
    num_warps: int
    num_stages: int


# The sizes below were the fastest, or within a tenth of it, of those tried on an H200 (jax 0.11.2)
# with 8, 64 and 192 rows and OPT-6.7B's weights.
MIN_LANES, MAX_ROWS = 16, 64  # of a tile
COLUMNS, FEW_COLUMNS = 64, 32
PROGRAMS_WANTED = 384
MOST_SPLITS, FEWEST_GROUPS = 8, 8  # shares of the contracted axis, and GROUPs of a share
NIBBLE_UNIT = 16  # four bits in the upper half of a byte are this many times as large
GATES, TAKES = True, "narrow weights"
MULTIPLES = (GROUP, 2 * COLUMNS)  # of inputs and outputs; a gated weight has two halves


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
    """The tiling of a product.

    The shares depend on the weight alone. The sums of integers are exact, but those of fp8 depend
    on the kind of matrix instruction, and so on the tile.

    Args:
        kind: the weight's format.
        dtype: that of the rows; all are tiled alike.
        split: sums may be left in shares.
        invariant: sums must not depend on the number of rows.
    """
    del dtype
    if invariant and kind.dtype == jnp.float8_e4m3fn:
        rows = MAX_ROWS
    terms = 1 if kind.rounds_rows else 2
    lanes = max(MIN_LANES, terms * min(pl.next_power_of_2(rows), MAX_ROWS))
    groups, splits = inputs // GROUP, 1
    programs = outputs // COLUMNS
    while (
        split
        and programs * splits < PROGRAMS_WANTED
        and splits < MOST_SPLITS
        and groups % (2 * splits) == 0
        and groups // (2 * splits) >= FEWEST_GROUPS
    ):
        splits *= 2
    few = lanes == MIN_LANES and programs * splits < PROGRAMS_WANTED
    columns = FEW_COLUMNS if few else COLUMNS
    return Tiling(lanes // terms, columns, splits, num_warps=4, num_stages=5 - terms)


def takes(weight: NarrowWeight, x: Array | RoundedRows, *, split: bool) -> bool:
    """Whether the kernel takes a weight of these sizes, with any rows, whole or in shares."""
    del x, split
    return all(size % unit == 0 for size, unit in zip(weight.shape, MULTIPLES, strict=True))


@functools.partial(jax.jit, static_argnames=("tiling", "activation", "gated", "dtype", "interpret"))
def launch(
    x: Array | RoundedRows,  # [rows, inputs]
    weight: NarrowWeight,  # [inputs, columns]
    bias: Array | None,  # [columns]
    *,
    tiling: Tiling,
    activation: str | None = None,
    gated: bool = False,
    dtype: jnp.dtype,
    interpret: bool,
) -> Array:
    """[rows, outputs], or shares [splits, rows, outputs]: see `pallas_kernels.linear`."""
    (rows, inputs), columns, kind = x.shape, weight.shape[1], weight.kind
    outputs = columns // 2 if gated else columns
    shares = (tiling.splits,) if tiling.splits > 1 else ()
    x = in_kernel_form(x, rounding_for(rows, weight, tiling), interpret=interpret)
    optional = {"zeros": weight.zeros, "bias": bias}
    optional = {name: array for name, array in optional.items() if array is not None}
    kernel = functools.partial(
        _kernel,
        names=tuple(optional),
        kind=kind,
        tiling=tiling,
        groups=inputs // GROUP // tiling.splits,
        activation=activation,
        gated=gated,
        interpret=interpret,
    )
    # Bytes that hold two values are taken as signed numbers: shifts then extend the sign.
    values = weight.values.view(jnp.int8) if kind.is_packed else weight.values
    lanes = tiling.rows if kind.rounds_rows else 2 * tiling.rows
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, tiling.rows), columns // tiling.columns, tiling.splits),
        out_shape=jax.ShapeDtypeStruct((*shares, rows, outputs), dtype),
        compiler_params=plgpu.CompilerParams(
            num_warps=tiling.num_warps,
            num_stages=stages_that_fit(tiling.num_stages, GROUP * (tiling.columns + lanes)),
        ),
        interpret=interpret,
        name="narrow_linear",
    )(x.values, x.scales, x.second, values, weight.scales, *optional.values())


def rounding_for(rows: int, weight: NarrowWeight, tiling: Tiling) -> Rounding:
    """How the kernel takes its rows."""
    return Rounding(weight.kind, pl.cdiv(rows, tiling.rows) * tiling.rows)


def _kernel(
    rounded_ref,  # [1, 2, rows, inputs]
    rounded_scales_ref,  # [scales, 1, 2, rows]
    second_ref,  # [words, rows]
    values_ref,  # [columns, inputs], or bytes
    scales_ref,  # [groups, columns]
    *refs,  # zeros [groups, columns] and bias [columns] if named; out
    names: tuple[str, ...],
    kind: Format,
    tiling: Tiling,
    groups: int,
    activation: str | None,
    gated: bool,
    interpret: bool,
):
    out_ref, refs = refs[-1], dict(zip(names, refs, strict=False))
    rows, outputs = out_ref.shape[-2:]
    first_row, split = pl.program_id(0) * tiling.rows, pl.program_id(2)
    width = tiling.columns // 2 if gated else tiling.columns
    column = pl.program_id(1) * width + jnp.arange(width)
    parts = (column, column + outputs) if gated else (column,)
    grouped = scales_ref.shape[0] > 1
    lanes = jnp.arange(tiling.rows if kind.rounds_rows else 2 * tiling.rows)
    unpacked = functools.partial(nibbles, interpret=interpret)
    unit = NIBBLE_UNIT if kind.is_packed and "zeros" not in refs else 1
    of_lane, own_term = first_row + lanes % tiling.rows, lanes // tiling.rows

    def products(i, term):
        """Of a group, for each part of the output: [lanes, columns]."""
        number = split * groups + i
        factors = _rows(rounded_ref, term, of_lane, number, kind)
        return number, [
            _product(factors, _values(values_ref, refs, columns, number, kind, unpacked), kind)
            for columns in parts
        ]

    def add(i, totals, term):
        added = zip(totals, products(i, term)[1], strict=True)
        return tuple(total + product for total, product in added)

    def add_scaled(i, totals):
        number, of_parts = products(i, own_term)
        scales = plgpu.load(rounded_scales_ref.at[number, 0, own_term, of_lane]) / unit
        new = []
        for total, product, columns in zip(totals, of_parts, parts, strict=True):
            scaled = product.astype(jnp.float32) * scales[:, None]
            if grouped:
                of_group = plgpu.load(scales_ref.at[number, columns])
                scaled *= of_group.astype(jnp.float32)[None, :]
            new.append(total + scaled)
        return tuple(new)

    zeros = lambda dtype: (jnp.zeros((len(lanes), width), dtype),) * len(parts)
    if kind.rounds_rows:
        row = first_row + jnp.arange(tiling.rows)

        def has_second(numbers, mask=None):
            number, bit = second_terms.place_of(numbers[None, :])
            words = plgpu.load(
                second_ref.at[number, row[:, None]],
                mask=None if mask is None else jnp.broadcast_to(mask, (len(row), len(numbers))),
                other=None if mask is None else 0,
            )
            return jnp.max(second_terms.flags_of(words, bit)) > 0

        def add_second(i, totals):
            here = has_second(split * groups + i + jnp.arange(1))
            return lax.cond(here, lambda: add(i, totals, own_term + 1), lambda: totals)

        every = jnp.arange(pl.next_power_of_2(groups))
        anywhere = has_second(split * groups + every, (every < groups)[None, :])
        most = jnp.where(anywhere, jnp.int32(groups), jnp.int32(0))
        totals = zeros(kind.product_dtype)
        totals = lax.fori_loop(jnp.int32(0), most, add_second, totals)
        totals = tuple(total * jnp.asarray(kind.second_step, total.dtype) for total in totals)
        totals = lax.fori_loop(0, groups, lambda i, totals: add(i, totals, own_term), totals)
        scales = plgpu.load(rounded_scales_ref.at[0, 0, 0, of_lane])[:, None]
        totals = tuple(total.astype(jnp.float32) * scales for total in totals)
    else:
        totals = lax.fori_loop(0, groups, add_scaled, zeros(jnp.float32))
        both = lambda total: jnp.sum(total.reshape(2, tiling.rows, width), axis=0)
        totals = tuple(map(both, totals))
    of_columns = None if grouped else scales_ref
    out = finish(totals, parts, of_columns, refs.get("bias"), activation=activation)
    row = first_row + jnp.arange(tiling.rows)
    place = (row[:, None], column[None, :])
    place = (split, *place) if tiling.splits > 1 else place
    mask = jnp.broadcast_to((row < rows)[:, None], out.shape)
    plgpu.store(out_ref.at[place], out.astype(out_ref.dtype), mask=mask)


def finish(
    totals: Sequence[Array], parts: Sequence[Array], scales_ref, bias_ref, *, activation: str | None
) -> Array:
    """The output of sums [rows, columns]: scaled, with the bias, the activation and the gate.

    Args:
        totals: the sums of each part of the output; of a gated product gate and up.
        parts: the columns of each, [columns].
        scales_ref: of columns, [1, columns]; None: the sums are scaled.
        bias_ref: [columns], or None.
    """
    finished = []
    for total, columns in zip(totals, parts, strict=True):
        if scales_ref is not None:
            total *= plgpu.load(scales_ref.at[0, columns]).astype(jnp.float32)[None, :]
        if bias_ref is not None:
            total += plgpu.load(bias_ref.at[columns]).astype(jnp.float32)[None, :]
        finished.append(total)
    out = finished[0] if activation is None else IN_KERNELS[activation](finished[0])
    return out * finished[1] if len(finished) > 1 else out


def _rows(rounded_ref, term, row: Array, number, kind: Format) -> tuple[Array, ...]:
    """The rounded values of a group, [lanes, n] of each of its parts."""
    halves = 2 if kind.is_packed else 1
    size = GROUP // halves
    at = (number * GROUP + half * size + jnp.arange(size) for half in range(halves))
    return tuple(
        plgpu.load(rounded_ref.at[0, term[:, None], row[:, None], place[None, :]]) for place in at
    )


def _values(values_ref, refs, columns: Array, number, kind: Format, unpacked) -> tuple[Array, ...]:
    """The weight's values of a group, [columns, n] of each of its parts.

    Those of packed weights without zeros are NIBBLE_UNIT times as large.
    """
    size = GROUP // 2 if kind.is_packed else GROUP
    place = number * size + jnp.arange(size)
    values = plgpu.load(values_ref.at[columns[:, None], place[None, :]])
    if not kind.is_packed:
        return (values,)
    parts = unpacked(values)
    if "zeros" not in refs:
        return parts
    zeros = plgpu.load(refs["zeros"].at[number, columns])[:, None]
    return tuple((part >> 4) - zeros for part in parts)


def nibbles(values: Array, *, interpret: bool) -> tuple[Array, Array]:
    """The lower and the upper four bits of bytes as signed numbers, times NIBBLE_UNIT.

    On a GPU, four bytes are taken at once: there is no shift of single bytes.
    """
    if interpret:
        return values << 4, values & -NIBBLE_UNIT
    of_four = functools.partial(
        plgpu.elementwise_inline_asm,
        args=[values],
        constraints="=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(values.shape, jnp.int8)],
    )
    (low,) = of_four("shl.b32 $0, $1, 4; and.b32 $0, $0, 0xF0F0F0F0;")
    (high,) = of_four("and.b32 $0, $1, 0xF0F0F0F0;")
    return low, high


def _product(rows: tuple[Array, ...], weights: tuple[Array, ...], kind: Format) -> Array:
    """The product of a group's values, [lanes, columns]."""
    dot = functools.partial(jnp.dot, preferred_element_type=kind.product_dtype)
    return sum(dot(x, weight.T) for x, weight in zip(rows, weights, strict=True))
