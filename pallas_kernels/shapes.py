"""Checks of what kernels are given: wrong shapes would be broadcast, or fail in other places."""

import jax.numpy as jnp
from jax import Array


def check_shapes(*named: tuple[str, Array, str]) -> None:
    """Whether axes of the same name have the same size in all arrays.

    Args:
        named: of each array, what it is called, itself, and the names of its axes.

    Raises:
        ValueError: an array of another rank, or of another size than one before it.
    """
    sizes: dict[str, int] = {}
    for name, array, axes in named:
        shape, names = jnp.shape(array), axes.split()
        known = {axis: sizes[axis] for axis in names if axis in sizes}
        if len(shape) != len(names) or known.items() - zip(names, shape, strict=True):
            told = ", ".join(f"{axis} = {size}" for axis, size in known.items())
            of = f" with {told}" if told else ""
            raise ValueError(f"{name} must be [{', '.join(names)}]{of}, not {list(shape)}")
        sizes |= zip(names, shape, strict=True)


def check_integers(**arrays: Array) -> None:
    """Raises a ValueError for one that does not hold integers."""
    for name, array in arrays.items():
        if not jnp.issubdtype(jnp.result_type(array), jnp.integer):
            raise ValueError(f"{name} must hold integers, not {jnp.result_type(array)}")
