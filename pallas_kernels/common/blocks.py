"""A function of rows, computed for a fixed number of rows at a time.

A compiled operation adds up in one order for one shape. Where every call has the same shape, the
bits of a row do not depend on the number of rows.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

ROWS = 16


def in_blocks(function: Callable[..., Array], *arrays: Array, size: int = ROWS) -> Array:
    """function(*arrays), computed for `size` rows at a time.

    Args:
        function: from arrays [size, ...] to an array [size, ...], each row from the same row.
        arrays: [rows, ...] each.
        size: the number of rows of one call.
    """
    rows = arrays[0].shape[0]
    blocks = pl.cdiv(rows, size)
    pad = lambda x: jnp.pad(x, [(0, blocks * size - rows)] + [(0, 0)] * (x.ndim - 1))
    arrays = tuple(map(pad, arrays))
    block = lambda i: [lax.dynamic_slice_in_dim(x, i * size, size) for x in arrays]
    like = jax.eval_shape(lambda: function(*block(0)))
    out = jnp.zeros((blocks * size, *like.shape[1:]), like.dtype)

    def add(i, out):
        return lax.dynamic_update_slice_in_dim(out, function(*block(i)), i * size, 0)

    # A loop whose length the compiler knows to be one would be no loop, and its body another one.
    return lax.fori_loop(0, lax.optimization_barrier(jnp.int32(blocks)), add, out)[:rows]
