"""Weights in types of 8 and 4 bits, and the rounding of rows that are multiplied with them.

A weight is (values - zeros) * scales. Its scales belong to output columns, or to groups of inputs
of each column. In two of the formats the rows are rounded as well, so that both factors are of
the narrow type: see `rounding`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

GROUP = 128  # inputs of a group: of weights with their own scales, and of a row's second terms
# Steps of the second term in one of the first, if all numbers have both: what the first leaves of a
# number is half a step at most.
SECOND_STEPS = 254
# Steps of the first term in one of the second, if only large integers have both: the first holds
# what is left of any integer. An odd number has an inverse among the integers of 32 bits.
LARGE_STEP = 255


@dataclasses.dataclass(frozen=True)
class Format:
    """One of the types of weights.

    Attributes:
        dtype: the type of the values; int4 values are stored two in a byte.
        limit: what the largest absolute value of a column or group is divided by to get its scale.
        range: the smallest and largest value.
        grouped: whether each GROUP of inputs has its own scales.
        large: how many times the mean absolute value of its row's other numbers than zero a
            number is to be large; None: rows are not rounded.
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
    def product_dtype(self) -> jnp.dtype:
        """The type in which a matrix unit adds up products of the values."""
        return jnp.dtype(jnp.float32 if self.dtype == jnp.float8_e4m3fn else jnp.int32)

    @property
    def is_packed(self) -> bool:
        """Whether a byte holds two values."""
        return self.dtype == jnp.int4

    @property
    def bytes(self) -> float:
        """Bytes of a value, with its part of the group's 16-bit scale; columns' do not count."""
        return (0.5 if self.is_packed else self.dtype.itemsize) + (2 / GROUP if self.grouped else 0)


FORMATS = {
    "int8": Format(jnp.dtype(jnp.int8), 127.0, (-127.0, 127.0), large=8.0, second_step=LARGE_STEP),
    "fp8": Format(jnp.dtype(jnp.float8_e4m3fn), 448.0, (-448.0, 448.0), large=5.75, second_step=1),
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
    groups = in_groups(wide.T) if kind.grouped else wide.T[:, None]
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


def in_groups(x: Array) -> Array:
    """[n, i] as [n, groups, GROUP], with zeros at the end."""
    return jnp.pad(x, ((0, 0), (0, -x.shape[1] % GROUP))).reshape(len(x), -1, GROUP)
