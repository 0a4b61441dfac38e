"""Inboxes: memory of each device of a mesh that the mesh's other devices write to in kernels.

JAX has no arrays for it: an inbox is named by its address. It exists as long as the process, so
that addresses in compiled functions stay valid, and all functions of these devices share it.
"""

import contextlib
import ctypes
import functools
import threading
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from pallas_kernels.common.blocks import round_up

MOST_ROWS = 256  # of an inbox
MOST_BYTES = 2**23  # that a device sends at a time: for more, a collective operation is faster
SLOTS = 2  # places of a row, used in turn: the next may come before this one has been read
ALIGNED = 256  # bytes
WORD = 4  # bytes
# A word where nothing has come yet: -0.0 in 32 bits, or 0.0 and -0.0 in 16. 0 is sent instead.
NOTHING = 0x80000000

# The devices of the mesh. It is part of the key of JAX's caches, so that a function is compiled for
# each value.
_devices = jax.make_user_context(default_value=None)
_creation = threading.Lock()  # an inbox's address must not change


class Inboxes(NamedTuple):
    """The inboxes of a mesh's devices, for rows of one size.

    An inbox begins with a 32-bit number for each row, which counts its exchanges. Then follow the
    places of rows that come, [slots, devices, rows] of `row_bytes` each, full of `NOTHING`.

    Attributes:
        devices: those of the mesh, in its order.
        rows: how many rows a device takes at a time.
        row_bytes: bytes from one row to the next.
    """

    devices: tuple[jax.Device, ...]
    rows: int
    row_bytes: int

    @classmethod
    def of(cls, count: int, row_bytes: int) -> "Inboxes | None":
        """The inboxes of the mesh whose devices compute now, for rows of this many bytes.

        Args:
            count: of the devices that exchange rows.

        Returns:
            None: these are not all devices of the mesh, or cannot write to one another's memory.
        """
        devices = _devices.value
        if devices is None or len(devices) != count or not reach_each_other(devices):
            return None
        row_bytes = round_up(row_bytes, ALIGNED)
        rows = min(MOST_ROWS, MOST_BYTES // (row_bytes * max(1, len(devices) - 1)))
        return cls(devices, rows, row_bytes)

    @property
    def bytes(self) -> int:
        """Bytes of one inbox."""
        return self.place_of_row(SLOTS, 0, 0)

    def place_of_count(self, row):
        """The place, in bytes, of the number of a row's exchanges; of integers or of arrays."""
        return WORD * row

    def place_of_row(self, slot, device, row):
        """The place of the row that comes from a device."""
        return (
            round_up(WORD * self.rows, ALIGNED)
            + ((slot * len(self.devices) + device) * self.rows + row) * self.row_bytes
        )

    @property
    def addresses(self) -> np.ndarray:
        """Every inbox's address, int32 [devices, 2]: the lower and the upper half."""
        with _creation:
            pointers = [array.unsafe_buffer_pointer() for array in _arrays(self)]
        return np.array(pointers, np.uint64).view(np.uint32).view(np.int32).reshape(-1, 2)


def on_mesh(mesh: Mesh | AbstractMesh) -> contextlib.AbstractContextManager[None]:
    """A context for what each device of a mesh computes, as under `jax.shard_map`.

    Kernels may write to the memory of the mesh's other devices there. Outside such a context they
    do not know them.
    """
    return _devices(None if isinstance(mesh, AbstractMesh) else tuple(mesh.devices.flat))


@functools.cache
def reach_each_other(devices: tuple[jax.Device, ...]) -> bool:
    """Whether kernels on each of the devices can write to the memory of all others.

    XLA lets them where the hardware does.
    """
    own = jax.process_index()
    if any(device.platform != "gpu" or device.process_index != own for device in devices):
        return False
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:  # not an NVIDIA GPU
        return False
    numbers, found = [device.local_hardware_id for device in devices], ctypes.c_int()

    def reaches(one: int, other: int) -> bool:
        failed = cuda.cuDeviceCanAccessPeer(ctypes.byref(found), one, other)
        return not failed and bool(found.value)

    return all(reaches(one, other) for one in numbers for other in numbers if one != other)


@functools.cache
def _arrays(inboxes: Inboxes) -> list[jax.Array]:
    """The memory of each device's inbox."""
    with jax.ensure_compile_time_eval():  # inboxes are needed while functions are traced
        empty = np.full(inboxes.bytes // WORD, NOTHING, np.uint32)
        empty[: inboxes.place_of_row(0, 0, 0) // WORD] = 0
        arrays = [jax.device_put(empty, device) for device in inboxes.devices]
        return jax.block_until_ready(arrays)
