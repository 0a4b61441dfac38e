"""Tensor parallelism: each layer of a model is split over the devices of a mesh.

A split model has the shape of a model for one device, whose arrays hold the parts of all devices
side by side. `jax.shard_map` runs it on every device with that device's own part. The functions
below that say so are called there.

Reference: Megatron-LM, arXiv 1909.08053.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from emsjax.checks import check_instance
from pallas_kernels.common.inboxes import on_mesh
from pallas_kernels.common.indexing import take

AXIS = "tp"
REPLICATED = PartitionSpec()


def on_axis(axis: int | None) -> PartitionSpec:
    """The layout of an array whose parts lie on this axis; None: every device has all of it."""
    return REPLICATED if axis is None else PartitionSpec(*[None] * axis, AXIS)


def meshes(size: int) -> list[Mesh]:
    """This process's devices in meshes of this many, as many as there are.

    Raises:
        ValueError: the devices cannot be divided so.
    """
    devices = jax.local_devices()
    if len(devices) % size:
        raise ValueError(
            f"tensor_parallel must divide the number of devices, {len(devices)}, not {size}"
        )
    grouped = np.asarray(devices, object).reshape(-1, size)
    return [Mesh(group, (AXIS,)) for group in grouped]


def first_mesh(size: int | None) -> Mesh | None:
    """The first of the `meshes`; None for one device, which needs no mesh."""
    return None if size in (None, 1) else meshes(size)[0]


def places(size: int | None) -> list[jax.Device] | list[Mesh] | None:
    """Where this process's replicas are: its devices, or meshes of `size` of them.

    None: there is only one place, the default device.
    """
    if size not in (None, 1):
        return meshes(size)
    devices = jax.local_devices()
    return devices if len(devices) > 1 else None


@dataclasses.dataclass(frozen=True)
class TensorParallel:
    """The devices of a model, and whether it is split over them.

    Attributes:
        mesh: the devices, on the axis "tp".
        is_split: whether each device has a part of the model; otherwise each has all of it.
    """

    mesh: Mesh
    is_split: bool = True

    @classmethod
    def over(cls, mesh: Mesh, *, is_split: bool = True) -> "TensorParallel":
        """The devices of a mesh, whatever the type of its axis is.

        Raises:
            ValueError: it is not a mesh whose only axis is "tp".
        """
        check_instance("mesh", mesh, Mesh, 'such as jax.make_mesh((2,), ("tp",))')
        if mesh.axis_names != (AXIS,):
            raise ValueError(f'mesh must have one axis, "{AXIS}", not {mesh.axis_names}')
        return cls(Mesh(mesh.devices, (AXIS,)), is_split)

    @property
    def size(self) -> int:
        """Number of devices that share the model; 1 if each has all of it."""
        return self.mesh.size if self.is_split else 1

    @property
    def own_devices(self) -> list[tuple[int, jax.Device]]:
        """This process's devices, with their places in the mesh."""
        every, own = enumerate(self.mesh.devices.flat), jax.process_index()
        return [(place, device) for place, device in every if device.process_index == own]

    def on_axis(self, axis: int | None) -> PartitionSpec:
        """See `on_axis`; all layouts of a replicated model are the same."""
        return on_axis(axis if self.is_split else None)

    def sharding(self, axis: int | None) -> NamedSharding:
        """How an array lies on the devices whose parts are on this axis."""
        return self.sharding_of(self.on_axis(axis))

    def sharding_of(self, spec: PartitionSpec) -> NamedSharding:
        """How an array of this layout lies on the devices."""
        return NamedSharding(self.mesh, spec)

    def put(self, parts: Callable[[int], Any], axis: int | None) -> Array:
        """An array from its parts, each of which is moved to its device.

        Args:
            parts: returns the part of the device with this place in the mesh.
            axis: the axis of the parts; None: every device has all of the array.
        """
        axis = axis if self.is_split else None
        arrays = [jax.device_put(parts(i), device) for i, device in self.own_devices]
        shape = list(arrays[0].shape)
        if axis is not None:
            shape[axis] *= self.mesh.size
        sharding = self.sharding(axis)
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, arrays)

    def map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """`function` on every device, with the device's parts of the arguments."""

        def on_device(*parts):
            with on_mesh(self.mesh):
                return function(*parts)

        specs = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.shard_map(on_device, mesh=self.mesh, check_vma=False, **specs)


def side_by_side(part: Array) -> Array:
    """The arrays of all devices, joined on the last axis. To be called on every device."""
    return lax.all_gather(part, AXIS, axis=part.ndim - 1, tiled=True)


def take_rows(table: Array, index: Array) -> Array:
    """Rows of a table whose parts are on axis 0. To be called on every device.

    Args:
        table: the device's own part.
        index: rows of the whole table, at least 0.
    """
    own = index - lax.axis_index(AXIS) * table.shape[0]
    is_here = (own >= 0) & (own < table.shape[0])
    rows = take(table, jnp.clip(own, 0, table.shape[0] - 1))
    return lax.psum(jnp.where(is_here[:, None], rows, 0), AXIS)
