"""Weights in types of 8 and 4 bits, and the rounding of rows that are multiplied with them.

A weight is (values - zeros) * scales. Its scales belong to output columns, or to groups of inputs
of each column. In two of the formats the rows are rounded as well, so that both factors are of the
narrow type. Each row then has one scale, which nothing but the row determines, so that a matrix
unit adds up all its products before their sum is scaled.

A few large numbers would leave only a few steps to all others of their row (int8), or are rounded
too coarsely beside them (fp8). They have a second term:

    x = scale * (values + second_step * second_values)

The second values are zero unless a number is larger than LARGE times the mean of its row's groups'
largest numbers, a geometric mean, which few large groups change little. Groups of zeros, of which a
feed-forward part has many after a ReLU, do not count. Second terms are multiplied only in groups of
inputs in which any number is large.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.matmul import xla

GROUP = 128  # inputs of a group: of weights with their own scales, and of a row's second terms
# Steps of the second term in one of the first, if all numbers have both: what the first leaves of a
# number is half a step at most.
SECOND_STEPS = 254
# Steps of the first term in one of the second, if only large integers have both: the first holds
# what is left of any integer. An odd number has an inverse among the integers of 32 bits.
LARGE_STEP = 255
# A GPU converts few numbers in a clock. The last bits of a float32 sum with this are those of the
# nearest integer.
WHOLE, BITS_OF_WHOLE = 1.5 * 2.0**23, 0x4B400000
MEAN_SHIFT = 12  # the bits of a float32 number without these: 32 bits hold a sum of 2**12 of them


@dataclasses.dataclass(frozen=True)
class Format:
    """One of the types of weights.

    Attributes:
        dtype: the type of the values; int4 values are stored two in a byte.
        limit: what the largest absolute value of a column or group is divided by to get its scale.
        range: the smallest and largest value.
        grouped: whether each GROUP of inputs has its own scales.
        large: how many times the mean of its row's groups' largest numbers a number is to be
            large; None: rows are not rounded.
        second_step: of the second term of a row's number, in steps of the first.
    """

    dtype: jnp.dtype
    limit: float
    range: tuple[float, float]
    grouped: bool = False
    large: float | None = None
    second_step: float = 1 / SECOND_STEPS

    def scales_of(self, inputs: int) -> int:
        """The number of a row's scales: one, or one for each GROUP of inputs."""
        return 1 if self.rounds_rows else -(-inputs // GROUP)

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
    "int8": Format(jnp.dtype(jnp.int8), 127.0, (-127.0, 127.0), large=2.5, second_step=LARGE_STEP),
    "fp8": Format(jnp.dtype(jnp.float8_e4m3fn), 448.0, (-448.0, 448.0), large=1.8, second_step=1),
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


def product_dtype(kind: Format) -> jnp.dtype:
    """The type in which a matrix unit adds up products of a format's values."""
    return jnp.dtype(jnp.float32 if kind.dtype == jnp.float8_e4m3fn else jnp.int32)


class Rounded(NamedTuple):
    """Rows in a narrow type, in groups of their numbers: see `round_groups`.

    Attributes:
        values: [..., groups, n]; of groups in several parts a list of these.
        scales: float32, [..., 1] of whole rows or [..., groups].
        second_values: of the second term, as `values`.
        has_second: bool [..., groups]: where there are any such values.
    """

    values: Array | list[Array]
    scales: Array
    second_values: Array | list[Array]
    has_second: Array


def round_groups(x: Array, kind: Format) -> Rounded:
    """Rounds rows to the values that a kernel multiplies. Kernels and XLA use it alike.

    Args:
        x: float32 [..., groups, n]: rows in groups of their numbers.
        kind: the format of the weight.
    """
    if not kind.rounds_rows:
        (values,), scales, (second_values,), has_second = round_parts([x], kind)
        return Rounded(values, scales, second_values, has_second)
    sizes = abs(x)
    of_groups = _largest([sizes])
    largest = _largest([of_groups])[..., None]
    usual = _mean(of_groups)[..., None] * kind.large
    if kind.dtype == jnp.float8_e4m3fn:
        # Steps are relative, so that the second term is what the first leaves of large numbers.
        [in_steps], scales = _in_steps([x], largest, kind)
        [values] = _nearest([in_steps], kind)
        is_large = sizes > usual[..., None]
        rest = jnp.where(is_large, in_steps - values.astype(jnp.float32), 0)
        return Rounded(values, scales, *_nearest([rest], kind), of_groups > usual)
    # All steps have one size, in which usual numbers fit into the first term, and all into two.
    top = jnp.maximum(jnp.minimum(largest, usual), largest * (1 / LARGE_STEP))
    top = jnp.where(largest < jnp.inf, top, largest)
    [in_steps], scales = _in_steps([x], top, kind)
    whole, upper = (_whole(part) for part in (in_steps, in_steps * (1 / LARGE_STEP)))
    lower = (whole - upper * LARGE_STEP).astype(jnp.int8)
    has_second = of_groups * _over(kind.limit, top) >= kind.limit + 0.5
    return Rounded(lower, scales, upper.astype(jnp.int8), has_second)


def round_parts(parts: Sequence[Array], kind: Format) -> Rounded:
    """`round_groups` of a format that rounds no rows, with groups' numbers in several arrays.

    Each group has a scale, and all numbers have a second term, in steps of 1 / SECOND_STEPS of the
    first's: together the terms keep as much of a number as 16-bit types do.

    Args:
        parts: float32 [..., groups, n] each.
        kind: the format of the weight.
    """
    largest = _largest([abs(x) for x in parts])
    in_steps, scales = _in_steps(parts, largest, kind)
    values = _nearest(in_steps, kind)
    left = zip(in_steps, values, strict=True)
    second = [(x - first.astype(jnp.float32)) * SECOND_STEPS for x, first in left]
    return Rounded(values, scales, _nearest(second, kind), jnp.ones(scales.shape, bool))


def _largest(sizes: Sequence[Array]) -> Array:
    """The largest number of each block of numbers from 0 on; not finite if one of them is not.

    A maximum of floating-point numbers leaves NaN out in a kernel, and one of their bits does not.
    """
    bits = [jnp.max(lax.bitcast_convert_type(x, jnp.int32), axis=-1) for x in sizes]
    return lax.bitcast_convert_type(functools.reduce(jnp.maximum, bits), jnp.float32)


def _mean(largest: Array) -> Array:
    """The geometric mean of the numbers above 0 along the last axis, within a sixteenth.

    The bits of a number, taken as an integer, grow nearly as its logarithm does, and integers have
    one sum in any order.
    """
    bits = lax.bitcast_convert_type(largest, jnp.int32) >> MEAN_SHIFT
    count = jnp.sum((bits > 0).astype(jnp.int32), axis=-1)
    mean = jnp.sum(bits, axis=-1) // jnp.maximum(count, 1)
    return lax.bitcast_convert_type(mean << MEAN_SHIFT, jnp.float32)


def _over(number: float, top: Array) -> Array:
    """number / top, and 0 where that is 0."""
    return jnp.where(top == 0, 0, number / jnp.where(top == 0, 1, top))


def _in_steps(parts: Sequence[Array], top: Array, kind: Format) -> tuple[list[Array], Array]:
    """Numbers over their scales, of which `top` has the format's largest value, and the scales."""
    limit = 448.0 if kind.dtype == jnp.float8_e4m3fn else 127.0
    units = _over(limit, top)[..., None]
    # What is not finite makes the scale so, and with it the products.
    scales = jnp.where(top < jnp.inf, top * (1 / limit), jnp.nan)
    return [x * units for x in parts], scales


def _nearest(parts: Sequence[Array], kind: Format) -> list[Array]:
    """The nearest values."""
    if kind.dtype == jnp.float8_e4m3fn:
        return [x.astype(jnp.float8_e4m3fn) for x in parts]
    return [_whole(x).astype(jnp.int8) for x in parts]


def _whole(x: Array) -> Array:
    """The nearest integers of numbers between -(2**22) and 2**22."""
    bits = lax.bitcast_convert_type(x + WHOLE, jnp.int32)
    return bits - BITS_OF_WHOLE


def round_rows(x: Array, kind: Format) -> Array:
    """The rounded numbers of rows [r, i], float32."""
    groups = _in_groups(x.astype(jnp.float32))
    # Without the barrier XLA would leave out both conversions of numbers in fp8.
    rounded = lax.optimization_barrier(round_groups(groups, kind))
    values, second = (term.astype(jnp.float32) for term in (rounded.values, rounded.second_values))
    wide = (values + second * kind.second_step) * rounded.scales[..., None]
    return wide.reshape(len(x), -1)[:, : x.shape[1]]


def _in_groups(x: Array) -> Array:
    """[n, i] as [n, groups, GROUP], with zeros at the end."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % GROUP))).reshape(len(x), -1, GROUP)


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
