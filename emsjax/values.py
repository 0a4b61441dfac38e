"""Dataclasses that hold arrays: pytrees, and values that compare as other values do."""

import dataclasses
from typing import Any, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool


def equal(one: Any, other: Any) -> bool:
    """Whether two fields are equal: arrays have the same shape and entries; NaN equals NaN."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        same = type(one) is type(other) and len(one) == len(other)
        return same and all(map(equal, one, other))
    if not any(hasattr(x, "dtype") and hasattr(x, "shape") for x in (one, other)):
        return bool(one == other)
    if np.shape(one) != np.shape(other) or _is_key(one) != _is_key(other):
        return False
    one, other = (np.asarray(jax.random.key_data(x) if _is_key(x) else x) for x in (one, other))
    return bool(np.all((one == other) | ((one != one) & (other != other))))


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


@dataclass_transform(frozen_default=True)
def comparable(cls: type) -> type:
    """A frozen dataclass that compares by its fields, also if these are arrays."""

    def compare(self, other: Any) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [field.name for field in dataclasses.fields(self)]
        return all(equal(getattr(self, name), getattr(other, name)) for name in names)

    cls = dataclasses.dataclass(frozen=True)(cls)
    cls.__eq__ = compare
    return cls


@dataclass_transform(frozen_default=True)
def pytree(cls: type) -> type:
    """A frozen dataclass that compares by its fields and is a pytree."""
    return jax.tree_util.register_dataclass(comparable(cls))


def choose_slots(fresh: Bool[Array, "b"], new: Array, old: Array) -> Array:
    """Selects fresh slots' entries from `new` and the others from `old`; slots are axis 0."""
    return jnp.where(fresh.reshape(-1, *[1] * (old.ndim - 1)), new, old)


def merge_fresh(fresh: Bool[Array, "b"], begun: Any, state: Any) -> Any:
    """`state`, with the entries of fresh slots from `begun` in arrays whose first axis is slots."""
    leads = lambda x: jnp.shape(x)[:1] == fresh.shape
    return jax.tree.map(
        lambda new, old: choose_slots(fresh, new, old) if leads(old) else old, begun, state
    )
