"""Rows of a residual stream that are not on every device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["axis_name"]
)
@dataclasses.dataclass(frozen=True)
class OwnRows:
    """Rows [rows, size] of which each device has some: row r is on device r % devices.

    Attributes:
        rows: [rows, size]; those of other devices are undefined.
        axis_name: the axis of the mesh on which the devices are.
    """

    rows: Array
    axis_name: str

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, and numbers of a row."""
        return self.rows.shape

    @property
    def dtype(self) -> jnp.dtype:
        """That of the numbers."""
        return self.rows.dtype

    def whole(self) -> Array:
        """All rows, on every device. To be called on every device."""
        own = owned(len(self.rows), self.axis_name)
        return lax.psum(jnp.where(own[:, None], self.rows, 0), self.axis_name)


def owned(rows: int, axis_name: str) -> Array:
    """Which rows a device has, bool [rows]."""
    return jnp.arange(rows) % lax.axis_size(axis_name) == lax.axis_index(axis_name)


def whole(x: Array | OwnRows) -> Array:
    """All rows of a stream."""
    return x.whole() if isinstance(x, OwnRows) else x
