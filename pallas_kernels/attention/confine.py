"""Keeps numbers that are not finite within the rows that see them."""

import jax
import jax.numpy as jnp
from jax import Array


def confine(
    key: Array | tuple[Array, ...],  # [..., head_dim], or its parts
    value: Array | tuple[Array, ...],  # [..., head_dim], or its parts
) -> tuple:
    """Keys and values with which a row's NaN reaches exactly the rows that see it.

    A mask replaces the scores of keys that a row does not see, whatever the keys hold. Their
    values are only weighted by zero, and 0 * NaN is NaN. So values that are not finite become
    zero here, and their key becomes NaN: rows that see it get NaN, and other rows get nothing.

    Args:
        key, value: keys and values of the fresh rows, [..., head_dim]; or tuples of parts of them.

    Returns:
        Both, of the same shapes and dtypes; finite ones are unchanged.
    """
    is_finite = jax.tree.map(lambda x: jnp.abs(x) < jnp.inf, value)
    others = [jnp.where(x, 0.0, 1.0) for x in jax.tree.leaves(is_finite)]
    some = sum(jnp.sum(x, axis=-1, keepdims=True) for x in others) > 0
    key = jax.tree.map(lambda x: jnp.where(some, jnp.nan, x), key)
    return key, jax.tree.map(lambda x, finite: jnp.where(finite, x, 0), value, is_finite)
