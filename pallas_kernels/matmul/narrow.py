"""Weights in types of 8 and 4 bits, and the rounding of rows that are multiplied with them.

A weight is (values - zeros) * scales. Its scales belong to output columns, or to groups of inputs
of each column. In two of the formats the rows are rounded as well, so that both factors are of the
narrow type. Each block of a row then has its own scale, which nothing but the block determines. A
matrix unit adds up the products of a whole block, and only their sum is scaled.

A few large numbers would leave only a few steps to all others of their block (int8), or are
rounded too coarsely beside them (fp8). They have a second term:

    x = scale * values + second_scale * second_values

The second values are zero unless the block has numbers larger than LARGE times the mean absolute
value of those that are not zero: zeros, of which a feed-forward part has many after a ReLU, are
exact in any steps.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.matmul import xla

GROUP = 128  # inputs of a group with its own scales, and of the smallest block of a row
# Steps of the second term in one of the first, if all numbers have both: what the first leaves of a
# number is half a step at most.
SECOND_STEPS = 254
# A GPU converts few numbers in a clock. The last bits of a float32 sum with one of these, of which
# the second takes negative numbers too, are those of the nearest integer.
WHOLE, WHOLE_SIGNED = 2.0**23, 1.5 * 2.0**23
BITS_OF_WHOLE = 0x4B000000  # of the first of these


@dataclasses.dataclass(frozen=True)
class Format:
    """One of the types of weights.

    Attributes:
        dtype: the type of the values; int4 values are stored two in a byte.
        limit: what the largest absolute value of a column or group is divided by to get its scale.
        range: the smallest and largest value.
        grouped: whether each GROUP of inputs has its own scales.
        large: how many times the mean absolute value of its block's other numbers than zero a
            number of a row is to be large; None: rows are not rounded.
        block: inputs of a block of a row: see `block_of`.
    """

    dtype: jnp.dtype
    limit: float
    range: tuple[float, float]
    grouped: bool = False
    large: float | None = None
    block: int = GROUP

    def block_of(self, inputs: int) -> int:
        """The size of the blocks of rows of so many inputs."""
        return GROUP if inputs % self.block else self.block

    @property
    def rounds_rows(self) -> bool:
        """Whether rows are rounded to the type of the values."""
        return self.large is not None

    @property
    def is_packed(self) -> bool:
        """Whether a byte holds two values."""
        return self.dtype == jnp.int4

    @property
    def bytes(self) -> float:
        """Bytes of a value, with its part of the group's 16-bit scale; columns' do not count."""
        return (0.5 if self.is_packed else self.dtype.itemsize) + (2 / GROUP if self.grouped else 0)


FORMATS = {
    "int8": Format(jnp.dtype(jnp.int8), 127.0, (-127.0, 127.0), large=8.0, block=2 * GROUP),
    "fp8": Format(jnp.dtype(jnp.float8_e4m3fn), 448.0, (-448.0, 448.0), large=6.0, block=2 * GROUP),
    "int8-weights": Format(jnp.dtype(jnp.int8), 127.0, (-127.0, 127.0)),
    "int4": Format(jnp.dtype(jnp.int4), 7.5, (-8.0, 7.0), grouped=True),
}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales", "zeros", "order"],
    meta_fields=["format", "inputs"],
)
@dataclasses.dataclass(frozen=True)
class NarrowWeight:
    """The weight matrix [inputs, outputs] of a linear layer in a narrow type.

    Attributes:
        values: [outputs, inputs], int8 or float8_e4m3fn; packed int4: uint8 [outputs, bytes], as
            `pack` returns them.
        scales: [groups, outputs], one group if the scales belong to columns.
        zeros: the values that stand for zero, int8 [groups, outputs]; None: 0.
        order: int32 [inputs]; input k of the matrix is number order[k] of a row. None: k.
        format: a name in FORMATS.
        inputs: size of the contracted axis.
    """

    values: Array
    scales: Array
    zeros: Array | None = None
    order: Array | None = None
    format: str = "int8"
    inputs: int = 0

    @property
    def kind(self) -> Format:
        """What is known of the format."""
        return FORMATS[self.format]

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs and outputs."""
        return self.inputs, self.values.shape[0]

    def ordered(self, x: Array) -> Array:
        """Rows [r, inputs] in the order of the values' inputs."""
        return x if self.order is None else jnp.take(x, self.order, axis=1)

    def dense(self, dtype=jnp.float32) -> Array:
        """The matrix [inputs, outputs] in a type of 16 or 32 bits, in the order of a row's numbers.

        It is computed in float32 and rounded once.
        """
        values = unpack(self.values) if self.kind.is_packed else self.values
        values = values[:, : self.inputs].T.astype(jnp.float32)
        if self.zeros is not None:
            values -= self._of_inputs(self.zeros)
        matrix = (values * self._of_inputs(self.scales)).astype(dtype)
        if self.order is None:
            return matrix
        return jnp.zeros_like(matrix).at[self.order].set(matrix, unique_indices=True)

    def _of_inputs(self, groups: Array) -> Array:
        """What each input has of a number of each group, [inputs, outputs] or [1, outputs]."""
        groups = groups.astype(jnp.float32)
        return groups if len(groups) == 1 else jnp.repeat(groups, GROUP, axis=0)[: self.inputs]


def check_format(format: str) -> None:
    """Raises ValueError for a name that is not one of FORMATS."""
    if not isinstance(format, str) or format not in FORMATS:
        known = ", ".join(map(repr, FORMATS))
        raise ValueError(f"quantize must be None or one of {known}, not {format!r}")


def pack(values: Array) -> Array:
    """int4 values [o, i] as bytes [o, ceil(i / GROUP) * GROUP / 2].

    Byte k of a group holds values k, in its lower half, and k + GROUP / 2. Missing values are 0.
    """
    outputs, inputs = values.shape
    values = jnp.pad(values.astype(jnp.int8), ((0, 0), (0, -inputs % GROUP)))
    low, high = jnp.moveaxis(values.reshape(outputs, -1, 2, GROUP // 2), 2, 0)
    return ((low & 15) | (high << 4)).astype(jnp.uint8).reshape(outputs, -1)


def unpack(packed: Array) -> Array:
    """int8 values of bytes: see `pack`."""
    halves = packed.view(jnp.int8).reshape(len(packed), -1, 1, GROUP // 2)
    low, high = (halves << 4) >> 4, halves >> 4
    return jnp.concatenate([low, high], axis=2).reshape(len(packed), -1)


@functools.partial(jax.jit, static_argnames=("format",))
def quantize(weight: Array, *, format: str) -> NarrowWeight:
    """Rounds a matrix [inputs, outputs] to the nearest values of a format.

    Scales are such that the largest absolute value of a column, or of a group of it, becomes the
    format's limit. They are float32 for columns, and have the weight's type for groups.

    Raises:
        ValueError: the format is unknown.
    """
    check_format(format)
    kind, inputs = FORMATS[format], weight.shape[0]
    wide = weight.astype(jnp.float32)
    groups = _in_groups(wide.T) if kind.grouped else wide.T[:, None]
    scales = jnp.max(abs(groups), axis=2) / kind.limit  # [o, g]
    scales = scales.astype(weight.dtype if kind.grouped else jnp.float32)
    # What is divided is 0 where the scale is.
    divisors = jnp.where(scales == 0, 1, scales.astype(jnp.float32))
    values = to_values(groups / divisors[:, :, None], kind).reshape(len(groups), -1)
    values = pack(values) if kind.is_packed else values[:, :inputs]
    return NarrowWeight(values, scales.T, format=format, inputs=inputs)


def to_values(x: Array, kind: Format) -> Array:
    """Numbers rounded to the nearest values of a format."""
    x = jnp.clip(x, *kind.range)
    if jnp.issubdtype(kind.dtype, jnp.floating):
        return x.astype(kind.dtype)
    return jnp.round(x).astype(jnp.int8)


class Rounded(NamedTuple):
    """Blocks of rows in a narrow type: see `round_blocks`.

    Attributes:
        values: [..., n]; of blocks in several parts a list of these.
        scales: float32 [...].
        second_values: of the second term, as `values`.
        second_scales: float32 [...]; 0 where there is no second term.
    """

    values: Array | list[Array]
    scales: Array
    second_values: Array | list[Array]
    second_scales: Array


def round_blocks(x: Array, kind: Format) -> Rounded:
    """Rounds blocks of rows to the values that a kernel multiplies.

    If the format does not round rows, all numbers have a second term, in steps of 1 / SECOND_STEPS
    of the first's: together the terms keep as much of a number as 16-bit types do. Kernels and XLA
    use this function alike.

    Args:
        x: float32 [..., n]: blocks along the last axis.
        kind: the format of the weight.
    """
    (values,), scales, (second_values,), second_scales = round_parts([x], kind)
    return Rounded(values, scales, second_values, second_scales)


def round_parts(parts: Sequence[Array], kind: Format) -> Rounded:
    """`round_blocks` of blocks whose numbers are in several arrays [..., n]."""
    sizes = [abs(x) for x in parts]
    largest = _largest(sizes)
    # What is not finite makes the scale so, and with it the products.
    checked = lambda scales: jnp.where(largest < jnp.inf, scales, jnp.nan)
    if not kind.rounds_rows:
        in_steps, scales = _in_steps(parts, largest, kind)
        values, scales = _nearest(in_steps, kind), checked(scales)
        left = zip(in_steps, values, strict=True)
        second = [(x - first.astype(jnp.float32)) * SECOND_STEPS for x, first in left]
        return Rounded(values, scales, _nearest(second, kind), scales * (1 / SECOND_STEPS))
    usual = _mean(sizes, largest) * kind.large
    has_large = largest > usual
    if kind.dtype == jnp.float8_e4m3fn:
        # Steps are relative, so that the second term is that of large numbers alone.
        top, is_second = largest, [size > usual[..., None] for size in sizes]
    else:
        # All steps have one size, so that the first term is confined to usual numbers.
        top, is_second = jnp.minimum(largest, usual), [has_large[..., None]] * len(parts)
    in_steps, scales = _in_steps(parts, top, kind)
    values = _nearest(in_steps, kind)

    def second_term():
        rest = [
            jnp.where(has_second, x - first.astype(jnp.float32) * scales[..., None], 0)
            for has_second, x, first in zip(is_second, parts, values, strict=True)
        ]
        in_steps, scales_of_rest = _in_steps(rest, _largest([abs(x) for x in rest]), kind)
        return _nearest(in_steps, kind), scales_of_rest

    nothing = lambda: ([jnp.zeros_like(x) for x in values], jnp.zeros_like(scales))
    any_large = jnp.max(has_large.astype(jnp.int32), initial=0) > 0
    return Rounded(values, checked(scales), *lax.cond(any_large, second_term, nothing))


def _largest(sizes: Sequence[Array]) -> Array:
    """The largest number of each block of numbers from 0 on; not finite if one of them is not.

    A maximum of floating-point numbers leaves NaN out in a kernel, and one of their bits does not.
    """
    bits = [jnp.max(lax.bitcast_convert_type(x, jnp.int32), axis=-1) for x in sizes]
    return lax.bitcast_convert_type(functools.reduce(jnp.maximum, bits), jnp.float32)


def _mean(sizes: Sequence[Array], largest: Array) -> Array:
    """The mean of the numbers above 0, `largest` at most; integers have one sum in any order."""
    units = _over(2.0**16, largest)[..., None]
    bits = [lax.bitcast_convert_type(size * units + WHOLE, jnp.int32) for size in sizes]
    wholes = BITS_OF_WHOLE * sum(x.shape[-1] for x in bits)
    wholes = (wholes + 2**31) % 2**32 - 2**31  # in 32 bits, as the sum wraps around
    total = sum(jnp.sum(x, axis=-1) for x in bits) - wholes
    count = sum(jnp.sum((size > 0).astype(jnp.int32), axis=-1) for size in sizes)
    share = _over(1.0, count.astype(jnp.float32))
    return total.astype(jnp.float32) * (share * largest * 2.0**-16)


def _over(number: float, top: Array) -> Array:
    """number / top, and 0 where that is 0."""
    return jnp.where(top == 0, 0, number / jnp.where(top == 0, 1, top))


def _in_steps(parts: Sequence[Array], top: Array, kind: Format) -> tuple[list[Array], Array]:
    """Numbers over their scales, of which `top` has the largest value, and the scales."""
    limit = 448.0 if kind.dtype == jnp.float8_e4m3fn else 127.0
    units = _over(limit, top)[..., None]
    return [jnp.clip(x * units, -limit, limit) for x in parts], top * (1 / limit)


def _nearest(parts: Sequence[Array], kind: Format) -> list[Array]:
    """The nearest values."""
    if kind.dtype == jnp.float8_e4m3fn:
        return [x.astype(jnp.float8_e4m3fn) for x in parts]
    bits = [lax.bitcast_convert_type(x + WHOLE_SIGNED, jnp.int32) for x in parts]
    return [x.astype(jnp.int8) for x in bits]


def round_rows(x: Array, kind: Format) -> Array:
    """The rounded numbers of rows [r, i], float32."""
    blocks = _in_groups(x.astype(jnp.float32), kind.block_of(x.shape[1]))
    # Without the barrier XLA would leave out both conversions of numbers in fp8.
    rounded = lax.optimization_barrier(round_blocks(blocks, kind))
    values, scales, second, second_scales = rounded
    wide = values.astype(jnp.float32) * scales[..., None]
    wide += second.astype(jnp.float32) * second_scales[..., None]
    return wide.reshape(len(x), -1)[:, : x.shape[1]]


def _in_groups(x: Array, size: int = GROUP) -> Array:
    """[n, i] as [n, groups, size], with zeros at the end."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % size))).reshape(len(x), -1, size)


def linear(
    x: Array,  # [rows, inputs]
    weight: NarrowWeight,  # [inputs, columns]
    bias: Array | None,  # [columns]
    *,
    activation: str | None,
    gated: bool,
) -> Array:  # [rows, outputs]
    """The product in XLA operations: see `pallas_kernels.linear`."""
    y = dot(x, weight)
    y = y if bias is None else y + bias.astype(y.dtype)
    return xla.activate(y, activation, gated).astype(x.dtype)


def dot(x: Array, weight: NarrowWeight) -> Array:
    """The product with rows that are rounded if the format has it so, float32 [rows, outputs].

    Both factors are float32 if rows are rounded, otherwise they have the type of the rows.
    """
    x, weight = weight.ordered(x), dataclasses.replace(weight, order=None)
    if weight.kind.rounds_rows:
        x = round_rows(x, weight.kind)
    return xla.dot(x, weight.dense(x.dtype), dtype=jnp.float32)
