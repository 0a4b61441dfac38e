"""The rounding of rows that are multiplied with narrow weights.

If a format rounds rows, each row has one scale, which nothing but the row determines, so that a
matrix unit adds up all its products before their sum is scaled.

A few large numbers would leave only a few steps to all others of their row (int8), or are rounded
too coarsely beside them (fp8). They have a second term:

    x = scale * (values + second_step * second_values)

The second values are zero unless numbers are larger than LARGE times the mean absolute value of
those that are not zero: zeros, of which a feed-forward part has many after a ReLU, are exact in any
steps. Second terms are multiplied only in groups of inputs in which any number is large.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.matmul.narrow import LARGE_STEP, SECOND_STEPS, Format

# A GPU converts few numbers in a clock. The last bits of a float32 sum with this are those of the
# nearest integer.
WHOLE, BITS_OF_WHOLE = 1.5 * 2.0**23, 0x4B400000
MEAN_UNITS = 2.0**14  # of a row's largest number: 32 bits hold a sum of 2**16 numbers


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
    usual = _mean(sizes, largest) * kind.large
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


def _mean(sizes: Array, largest: Array) -> Array:
    """The mean of a row's numbers above 0, [..., 1]; integers have one sum in any order."""
    whole = _whole(sizes * _over(MEAN_UNITS, largest)[..., None])
    add_up = lambda x: jnp.sum(jnp.sum(x, axis=-1), axis=-1)[..., None].astype(jnp.float32)
    share = _over(1.0, add_up((sizes > 0).astype(jnp.int32)))
    return add_up(whole) * (share * largest * (1 / MEAN_UNITS))


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
