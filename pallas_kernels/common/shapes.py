"""Checks of a kernel's arguments: wrong shapes would be broadcast, or fail far from their cause."""

import jax.numpy as jnp
from jax import Array


def check_shapes(*named: tuple[str, Array, str]) -> None:
    """Raises ValueError unless axes of the same name have the same size in all arrays.

    Args:
        named: (name, array, names of its axes) of each array. An array is also refused if it has
            another number of axes than there are names.
    """
    sizes: dict[str, int] = {}
    for name, array, axes in named:
        shape, names = jnp.shape(array), axes.split()
        known = {axis: sizes[axis] for axis in names if axis in sizes}
        if len(shape) != len(names) or known.items() - zip(names, shape, strict=True):
            told = ", ".join(f"{axis} = {size}" for axis, size in known.items())
            given = f" with {told}" if told else ""
            raise ValueError(f"{name} must be [{', '.join(names)}]{given}, not {list(shape)}")
        sizes |= zip(names, shape, strict=True)


def check_heads(heads: int, kv_heads: int) -> None:
    """Raises ValueError unless the query heads are a positive multiple of the K/V heads."""
    if heads < 1 or heads % kv_heads:
        raise ValueError(
            f"query must have a multiple of the caches' {kv_heads} K/V heads, not {heads} heads"
        )


def check_packed_heads(name: str, array: Array, kv_heads: int) -> None:
    """Raises ValueError unless `array` can hold queries, keys and values, in this order.

    Args:
        name: the argument's name.
        array: [rows, heads + 2 * kv_heads, head_dim], `heads` a positive multiple of `kv_heads`.
        kv_heads: heads of the caches.
    """
    heads = array.shape[1] - 2 * kv_heads
    if heads < 1 or heads % kv_heads:
        raise ValueError(
            f"{name} must hold queries, keys and values, [rows, heads + 2 * kv_heads, head_dim] "
            f"with kv_heads = {kv_heads} and heads a multiple of it, not {list(array.shape)}"
        )


def check_integers(**arrays: Array) -> None:
    """Raises ValueError unless all arrays, named by their arguments, hold integers."""
    for name, array in arrays.items():
        if not jnp.issubdtype(jnp.result_type(array), jnp.integer):
            raise ValueError(f"{name} must hold integers, not {jnp.result_type(array)}")
