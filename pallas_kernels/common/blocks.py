"""Blocks of rows: sizes that are multiples, and functions computed a fixed number at a time.

A compiled operation adds up in one order for one shape. Where every call has the same shape, the
bits of a row do not depend on the number of rows.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

ROWS = 16


def in_blocks(
    function: Callable, *arrays: Array, size: int = ROWS, axes: Sequence[int] | None = None
):
    """function(*arrays), computed for `size` rows at a time.

    It has no gradient, as the length of its loop is hidden from the compiler.

    Args:
        function: from arrays of `size` rows to an array [size, ...] or a pytree of such arrays,
            each row from the same row.
        arrays: the arrays, with as many rows each.
        size: the number of rows of one call.
        axes: the axis of each array's rows; None: the first one of all.
    """
    axes = (0,) * len(arrays) if axes is None else axes
    rows = arrays[0].shape[axes[0]]
    blocks = pl.cdiv(rows, size)
    # A part that is the whole array would not be cut out, and be computed outside of the loop.
    held = max(2, blocks) * size
    arrays = [_pad(x, held - rows, axis) for x, axis in zip(arrays, axes, strict=True)]

    def block(i):
        part = lambda x, axis: lax.dynamic_slice_in_dim(x, i * size, size, axis)
        return function(*map(part, arrays, axes))

    def add(i, out):
        put = lambda old, new: lax.dynamic_update_slice_in_dim(old, new, i * size, 0)
        return jax.tree.map(put, out, block(i))

    empty = lambda x: jnp.zeros((held, *x.shape[1:]), x.dtype)
    out = jax.tree.map(empty, jax.eval_shape(lambda: block(0)))
    # A loop whose length the compiler knows to be one would be no loop, and its body another one.
    out = lax.fori_loop(0, lax.optimization_barrier(jnp.int32(blocks)), add, out)
    return jax.tree.map(lambda x: x[:rows], out)


def _pad(x: Array, count: int, axis: int) -> Array:
    """The array with `count` rows of zeros after its own."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, count)
    return jnp.pad(x, widths)


def round_up(number: int, multiple: int) -> int:
    """Rounds up to the next multiple."""
    return pl.cdiv(number, multiple) * multiple
