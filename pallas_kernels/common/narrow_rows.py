"""Keys and values in 8 bits, with one scale for each row and head.

A scale is a power of two. So a rounded number is exact in 16 bits, rounding it again changes
nothing, and a product with a scale commutes with the rounding of sums: attention over a narrow
cache has the bits of attention over a wide one with the same numbers.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import triton as plgpu


class _Format(NamedTuple):
    dtype: Any
    exponent: int  # a row's largest number has 2 ** exponent units or more, but not twice as many
    largest: int  # of the numbers of units


FORMATS = {"int8": _Format(jnp.int8, 6, 127), "fp8": _Format(jnp.float8_e4m3fn, 7, 240)}
EXPONENT_BITS = 0x7F800000  # of a float32
SMALLEST = 2.0**-100  # of the powers of two, so that a scale and its inverse are normal numbers

# A byte's lower seven bits become the mantissa of a number from 128 to 255, and its sign that of
# 128 or 256, which is taken off: x & 127 - (x & 128).
INT8_TO_BFLOAT16 = """{
.reg .b32 t, one, sign, minus;
mov.b32 minus, 0xBF80BF80;
prmt.b32 t, $2, 0, 0x4140;
lop3.b32 one, t, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 sign, t, 0x00800080, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, sign, minus, one;
prmt.b32 t, $2, 0, 0x4342;
lop3.b32 one, t, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 sign, t, 0x00800080, 0x43004300, 0xEA;
fma.rn.bf16x2 $1, sign, minus, one;
}"""
# The exponent and the mantissa move to their places. The exponent's bias is another one: the number
# is 2 ** 120 times as small, which a product makes good, also for the smallest numbers.
FP8_TO_BFLOAT16 = """{
.reg .b32 t, size, times, zero;
mov.b32 times, 0x7B807B80;
mov.b32 zero, 0x80008000;
prmt.b32 t, $2, 0, 0x1404;
shr.b32 size, t, 4;
and.b32 size, size, 0x07F007F0;
lop3.b32 size, t, 0x80008000, size, 0xEA;
fma.rn.bf16x2 $0, size, times, zero;
prmt.b32 t, $2, 0, 0x3424;
shr.b32 size, t, 4;
and.b32 size, size, 0x07F007F0;
lop3.b32 size, t, 0x80008000, size, 0xEA;
fma.rn.bf16x2 $1, size, times, zero;
}"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NarrowRows:
    """An array [..., head_dim] in 8 bits: `values * scales[..., None]`.

    It takes the place of a cache's array in `ragged_attention` and `update_kv_caches`.

    Attributes:
        values: int8 or float8_e4m3fn, [..., head_dim].
        scales: powers of two, or NaN for a row with a number that is not finite; float32, [...].
    """

    values: Array
    scales: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.values.shape

    @property
    def format(self) -> str:
        """ "int8" or "fp8"."""
        return format_of(self.values.dtype)

    @classmethod
    def zeros(cls, shape: tuple[int, ...], format: str) -> "NarrowRows":
        """An array of zeros."""
        return cls(jnp.zeros(shape, FORMATS[format].dtype), jnp.ones(shape[:-1], jnp.float32))

    def widen(self, dtype) -> Array:
        """The array in another dtype."""
        wide = self.values.astype(jnp.float32) * self.scales[..., None]
        return wide.astype(dtype)


def format_of(dtype) -> str:
    """The name of the format whose numbers have this type."""
    return next(name for name, of in FORMATS.items() if of.dtype == dtype)


def round_rows(x: Array, format: str) -> NarrowRows:
    """An array [..., head_dim] in 8 bits. Kernels and XLA use this function alike.

    The largest number of a row becomes one of 64 to 127 units in int8, and one of 128 to 240 in
    float8_e4m3fn, whose smallest step is 2 ** -9.
    """
    dtype, exponent, most = FORMATS[format]
    sizes = jnp.abs(x.astype(jnp.float32))
    # A maximum of numbers that are not finite may be any number in a kernel.
    is_finite = jnp.max(jnp.where(sizes < jnp.inf, 0.0, 1.0), axis=-1) == 0
    largest = jnp.maximum(jnp.max(sizes, axis=-1), SMALLEST)
    bits = lax.bitcast_convert_type(largest, jnp.int32) & EXPONENT_BITS
    power = lax.bitcast_convert_type(bits, jnp.float32)  # the power of two that is not above it
    units = x.astype(jnp.float32) * (2.0**exponent / power)[..., None]
    units = jnp.clip(jnp.floor(units + 0.5) if format == "int8" else units, -most, most)
    scales = jnp.where(is_finite, power * 2.0**-exponent, jnp.nan)
    units = jnp.where(is_finite[..., None], units, 0)
    return NarrowRows(units.astype(dtype), scales)


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


def widen_in_kernel(x: Array, dtype, *, interpret: bool) -> Array:
    """Numbers in 8 bits in a wider type, in a Triton kernel.

    A GPU converts 16 integers in a clock on each multiprocessor, which is slower than it reads
    them. So bfloat16 numbers are put together from the bits of four numbers at once.
    """
    if interpret or dtype != jnp.bfloat16:
        return x.astype(dtype)
    (wide,) = plgpu.elementwise_inline_asm(
        INT8_TO_BFLOAT16 if x.dtype == jnp.int8 else FP8_TO_BFLOAT16,
        args=[x],
        constraints="=r,=r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, dtype)],
    )
    return wide
