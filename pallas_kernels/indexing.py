"""Entries at places that are known to exist.

A plain `x[index]` counts negative places from the end and fills in for those that are not there:
about ten operations around each gather, to trace and to compile, that change nothing where every
place exists. What a place that does not exist gives here is undefined.
"""

import jax.numpy as jnp
from jax import Array


def take(x: Array, *index: Array) -> Array:
    """x[index] of arrays or numbers that count from 0, all inside of their axes."""
    return jnp.asarray(x).at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def take_in_rows(x: Array, index: Array) -> Array:
    """x[i, index[i]] of every row i of x [n, m], index [n, k]; all from 0 to m - 1."""
    return jnp.take_along_axis(
        x, index, axis=1, mode="promise_in_bounds", wrap_negative_indices=False
    )
