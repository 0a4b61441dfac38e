"""Keeps numbers that are not finite within the rows that see them."""

import jax.numpy as jnp
from jax import Array


def confine(
    key: Array,  # [..., head_dim]
    value: Array,  # [..., head_dim]
) -> tuple[Array, Array]:
    """Keys and values with which a row's NaN reaches exactly the rows that see it.

    A mask replaces the scores of keys that a row does not see, whatever the keys hold. Their
    values are only weighted by zero, and 0 * NaN is NaN. So values that are not finite become
    zero here, and their key becomes NaN: rows that see it get NaN, and other rows get nothing.

    Args:
        key, value: keys and values of the fresh rows, [..., head_dim].

    Returns:
        Both, of the same shapes and dtypes; finite ones are unchanged.
    """
    finite = jnp.abs(value) < jnp.inf
    some = jnp.sum(jnp.where(finite, 0.0, 1.0), axis=-1, keepdims=True) > 0
    return jnp.where(some, jnp.nan, key), jnp.where(finite, value, 0)
