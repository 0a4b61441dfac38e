"""Keys and values in 8 bits, with one scale for each row and head.

A scale is a power of two. So a rounded number is exact in 16 bits, rounding it again changes
nothing, and a product with a scale commutes with the rounding of sums: attention over a narrow
cache has the bits of attention over a wide one with the same numbers.

Two numbers share a word of 16 bits, one of each half of a row: a GPU moves words between the lanes
of a warp as a product of 16-bit numbers wants them, and bytes only one by one. The scales of a head
lie side by side, as one program reads them: when that was tried, attention of 24 samples with 900
keys and 32 heads took 59 us, and 71 where those of a row lie side by side (int8, H200).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.pallas import triton as plgpu


class _Format(NamedTuple):
    dtype: Any
    exponent: int  # a row's largest number has 2 ** exponent units or more, but not twice as many
    largest: int  # of the numbers of units
    flipped: int  # bits of a word that differ from those of its two numbers


FORMATS = {
    "int8": _Format(jnp.int8, 6, 127, flipped=-0x7F80),  # the bytes' highest ones: 0x8080
    "fp8": _Format(jnp.float8_e4m3fn, 7, 240, flipped=0),
}
SIZE_BITS, EXPONENT_BITS = 0x7FFFFFFF, 0x7F800000  # of a float32
SMALLEST = 2.0**-100  # of the powers of two, so that a scale and its inverse are normal numbers
SHIFT = 1.5 * 2**23  # added to a float32 below 2 ** 22: the sum's last bits are the nearest integer

# PTX that makes two numbers in bfloat16, $0, of the lower or of the upper bytes of two words, $1.
# int8: a byte holds 128 more than its number, and its 8 bits are, as they are, those of a number of
# bfloat16: the smallest ones have so many, in steps of 2 ** -133. One instruction multiplies by
# 2 ** 127, the largest power of two, and takes 2 off: the result is the number divided by SMALLER.
INT8_TO_BFLOAT16 = """{{
.reg .b32 byte, times, minus;
{moves}
mov.b32 times, 0x7F007F00;
mov.b32 minus, 0xC000C000;
fma.rn.bf16x2 $0, byte, times, minus;
}}"""
INT8_TO_BFLOAT16 = [
    INT8_TO_BFLOAT16.format(moves="and.b32 byte, $1, 0x00FF00FF;"),
    INT8_TO_BFLOAT16.format(moves="prmt.b32 byte, $1, 0, 0x4341;"),
]
# fp8: the exponent and the mantissa move to their places. The exponent's bias is another one: the
# number is 2 ** 120 times as small, which a product makes good, also for the smallest numbers.
FP8_TO_BFLOAT16 = """{{
.reg .b32 size, sign, times, zero;
{moves}
mov.b32 times, 0x7B807B80;
mov.b32 zero, 0x80008000;
and.b32 size, size, 0x07F007F0;
lop3.b32 size, sign, 0x80008000, size, 0xEA;
fma.rn.bf16x2 $0, size, times, zero;
}}"""
FP8_TO_BFLOAT16 = [
    FP8_TO_BFLOAT16.format(moves="shl.b32 size, $1, 4;\nshl.b32 sign, $1, 8;"),
    FP8_TO_BFLOAT16.format(moves="shr.b32 size, $1, 4;\nmov.b32 sign, $1;"),
]
TO_BFLOAT16 = {"int8": INT8_TO_BFLOAT16, "fp8": FP8_TO_BFLOAT16}
SMALLER = {"int8": 2.0**6, "fp8": 1.0}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NarrowRows:
    """An array [..., rows, heads, head_dim] in 8 bits: `values * row_scales[..., None]`.

    It takes the place of a cache's array in `ragged_attention` and `update_kv_caches`.

    Attributes:
        words: int16, [..., rows, heads, head_dim / 2]. The lower byte of word i has number i of the
            row, and the upper one number i + head_dim / 2: those of int8 plus 128.
        scales: powers of two, or NaN for a row with a number that is not finite; float32,
            [..., 1, heads, rows], so that heads are on the same axis in both arrays.
        format: "int8" or "fp8".
    """

    words: Array
    scales: Array
    format: str = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return *self.words.shape[:-1], 2 * self.words.shape[-1]

    @property
    def values(self) -> Array:
        """The numbers, int8 or float8_e4m3fn, [..., rows, heads, head_dim]."""
        return jnp.concatenate(unpack(self.words, self.format), axis=-1)

    @property
    def row_scales(self) -> Array:
        """The scales in the order of the numbers, [..., rows, heads]."""
        return jnp.swapaxes(jnp.squeeze(self.scales, -3), -1, -2)

    @classmethod
    def of(cls, words: Array, row_scales: Array, format: str) -> "NarrowRows":
        """The array of these words and scales [..., rows, heads]."""
        scales = jnp.expand_dims(jnp.swapaxes(row_scales, -1, -2), -3)
        return cls(words, scales, format)

    @classmethod
    def zeros(cls, shape: tuple[int, ...], format: str) -> "NarrowRows":
        """An array of zeros."""
        words = jnp.full((*shape[:-1], shape[-1] // 2), FORMATS[format].flipped, jnp.int16)
        return cls.of(words, jnp.ones(shape[:-1], jnp.float32), format)

    def widen(self, dtype) -> Array:
        """The array in another dtype."""
        wide = self.values.astype(jnp.float32) * self.row_scales[..., None]
        return wide.astype(dtype)


def round_rows(x: Array, format: str) -> NarrowRows:
    """An array [..., rows, heads, head_dim] in 8 bits; `head_dim` is even.

    The largest number of a row becomes one of 64 to 127 units in int8, and one of 128 to 240 in
    float8_e4m3fn, whose smallest step is 2 ** -9.
    """
    halves, scales = round_parts(jnp.split(x, 2, axis=-1), format)
    return NarrowRows.of(pack(*halves, format), scales, format)


def round_parts(parts: Sequence[Array], format: str) -> tuple[list[Array], Array]:
    """Numbers in 8 bits of rows in several parts [..., size], and scales [...].

    Kernels and XLA use this function alike.
    """
    units, scales, is_finite = round_to_units(parts, format)
    if format == "int8":
        units = [jnp.where(is_finite[..., None], x, 0).astype(jnp.int8) for x in units]
    return units, jnp.where(is_finite, scales, jnp.nan)


def round_to_units(parts: Sequence[Array], format: str) -> tuple[list[Array], Array, Array]:
    """`round_parts` as a kernel computes with it, which converts few integers in a clock.

    Returns:
        Numbers of units, int32 or float8_e4m3fn [..., size]. They and their scales are finite, and
        may be anything else for a row that is not.
        Scales [...].
        Which rows are finite [...].
    """
    kind = FORMATS[format]
    parts = [x.astype(jnp.float32) for x in parts]
    # Bits without signs have the order of the sizes, and are largest of what is not finite.
    largest_of = lambda x: jnp.max(_bits(x) & SIZE_BITS, axis=-1)
    largest = functools.reduce(jnp.maximum, map(largest_of, parts))
    is_finite = largest < EXPONENT_BITS
    largest = jnp.where(is_finite, jnp.maximum(largest, _bits(SMALLEST)), _bits(SMALLEST))
    # The power of two that is not above the largest number.
    power = lax.bitcast_convert_type(largest & EXPONENT_BITS, jnp.float32)
    in_units = [x * (2.0**kind.exponent / power)[..., None] for x in parts]
    if format == "int8":
        bounds = (_bits(SHIFT - kind.largest), _bits(SHIFT + kind.largest))
        units = [jnp.clip(_bits(x + SHIFT), *bounds) - _bits(SHIFT) for x in in_units]
    else:
        finite = [jnp.where(is_finite[..., None], x, 0) for x in in_units]
        units = [jnp.clip(x, -kind.largest, kind.largest).astype(kind.dtype) for x in finite]
    return units, power * 2.0**-kind.exponent, is_finite


def units_to_float(units: Array) -> Array:
    """Numbers of units as float32, in a kernel."""
    if units.dtype != jnp.int32:
        return units.astype(jnp.float32)
    return lax.bitcast_convert_type(units + _bits(SHIFT), jnp.float32) - SHIFT


def _bits(x: Array | float) -> Array | int:
    """A float32's bits as an int32."""
    if isinstance(x, float):
        return int(np.float32(x).view(np.int32))
    return lax.bitcast_convert_type(x, jnp.int32)


def pack(low: Array, high: Array, format: str) -> Array:
    """Words [..., n], int16, of numbers in 8 bits [..., n] for their lower and upper bytes."""
    low, high = (lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int16) for x in (low, high))
    return ((high << 8) | (low & 255)) ^ FORMATS[format].flipped


def unpack(words: Array, format: str) -> tuple[Array, Array]:
    """The numbers in the lower and in the upper bytes of words [..., n]."""
    words = words ^ FORMATS[format].flipped
    halves = words.astype(jnp.int8), (words >> 8).astype(jnp.int8)
    return tuple(lax.bitcast_convert_type(x, FORMATS[format].dtype) for x in halves)


def wide_array(x: Array | NarrowRows, dtype) -> Array:
    """The array itself, or in another dtype if it is narrow."""
    return x.widen(dtype) if isinstance(x, NarrowRows) else x


def rounded_like(x: Array | None, cached: Array | NarrowRows) -> Array | None:
    """Keys or values [..., d] of fresh rows as a cache holds them."""
    if x is None or not isinstance(cached, NarrowRows):
        return x
    # Without the barrier XLA would leave out both conversions of numbers in fp8.
    return lax.optimization_barrier(round_rows(x, cached.format)).widen(x.dtype)


def round_packed(qkv: Array, cached: Array | NarrowRows) -> Array:
    """Queries, keys and values [r, heads, d] of fresh rows, the last two as a cache holds them."""
    if not isinstance(cached, NarrowRows):
        return qkv
    first = qkv.shape[1] - 2 * cached.shape[2]
    return jnp.concatenate([qkv[:, :first], rounded_like(qkv[:, first:], cached)], axis=1)


def widen_in_kernel(
    words: Array, format: str, dtype, *, interpret: bool
) -> tuple[list[Array], float]:
    """The numbers in the lower and in the upper bytes of words in a wider type, in a Triton kernel.

    A GPU converts 16 integers in a clock on each multiprocessor, which is slower than it reads
    them. So bfloat16 numbers are put together from the bits of two words at once.

    Returns:
        The numbers divided by a power of two, and that power.
    """
    if interpret or dtype != jnp.bfloat16:
        return [x.astype(dtype) for x in unpack(words, format)], 1.0
    made = (
        plgpu.elementwise_inline_asm(
            program,
            args=[words],
            constraints="=r,r",
            pack=2,
            result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, dtype)],
        )
        for program in TO_BFLOAT16[format]
    )
    return [wide for (wide,) in made], SMALLER[format]
