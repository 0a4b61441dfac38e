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


class _Format(NamedTuple):
    dtype: Any
    exponent: int  # a row's largest number has 2 ** exponent units or more, but not twice as many
    largest: int  # of the numbers of units


FORMATS = {"int8": _Format(jnp.int8, 6, 127), "fp8": _Format(jnp.float8_e4m3fn, 7, 240)}
EXPONENT_BITS = 0x7F800000  # of a float32
SMALLEST = 2.0**-100  # of the powers of two, so that a scale and its inverse are normal numbers


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
        return next(name for name, of in FORMATS.items() if of.dtype == self.values.dtype)

    @classmethod
    def zeros(cls, shape: tuple[int, ...], format: str) -> "NarrowRows":
        """An array of zeros."""
        return cls(jnp.zeros(shape, FORMATS[format].dtype), jnp.ones(shape[:-1], jnp.float32))

    def widen(self, dtype) -> Array:
        """The array in another dtype."""
        wide = self.values.astype(jnp.float32) * self.scales[..., None]
        return wide.astype(dtype)


def round_rows(x: Array, format: str) -> NarrowRows:
    """An array [..., head_dim] in 8 bits.

    The largest number of a row becomes one of 64 to 127 units in int8, and one of 128 to 240 in
    float8_e4m3fn, whose smallest step is 2 ** -9.
    """
    dtype, exponent, most = FORMATS[format]
    x = x.astype(jnp.float32)
    largest = jnp.maximum(jnp.max(jnp.abs(x), axis=-1), SMALLEST)  # NaN if a number is
    bits = lax.bitcast_convert_type(largest, jnp.int32) & EXPONENT_BITS
    power = lax.bitcast_convert_type(bits, jnp.float32)  # the power of two that is not above it
    units = x * (2.0**exponent / power)[..., None]
    units = jnp.clip(jnp.round(units) if format == "int8" else units, -most, most)
    scales = jnp.where(jnp.isfinite(largest), power / 2.0**exponent, jnp.nan)
    units = jnp.where(jnp.isfinite(largest)[..., None], units, 0)
    return NarrowRows(units.astype(dtype), scales)


def wide_array(x: Array | NarrowRows, dtype) -> Array:
    """The array itself, or in another dtype if it is narrow."""
    return x.widen(dtype) if isinstance(x, NarrowRows) else x


def round_fresh(qkv: Array, cached: Array | NarrowRows) -> Array:
    """Queries, keys and values [r, heads, d] of fresh rows, the last two as a cache holds them."""
    if not isinstance(cached, NarrowRows):
        return qkv
    first = qkv.shape[1] - 2 * cached.shape[2]
    narrow = round_rows(qkv[:, first:], cached.format)
    return jnp.concatenate([qkv[:, :first], narrow.widen(qkv.dtype)], axis=1)
