"""The devices that have a part of a term each, and how their parts are added up."""

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.common.implementations import check_mosaic, runs_mosaic
from pallas_kernels.common.numerics import is_invariant

IMPLEMENTATIONS = ("mosaic", "xla")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Exchange:
    """Devices that add their parts of terms up, for the calls of one program.

    `add_layer_norm` and `add_rms_norm` take it as `over`. It is made inside of the program that the
    devices run, as by `jax.shard_map`, and serves any number of calls one after the other.

    Attributes:
        axis_name: the devices' axis of a mesh.
        buffers: what the Mosaic kernel keeps between calls; None: a collective operation adds.
        interpret: whether the kernel is interpreted, on any device.
    """

    axis_name: str = dataclasses.field(metadata={"static": True})
    buffers: Any = None
    interpret: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def over(
        cls,
        axis_name: str,
        rows: int,
        size: int,
        *,
        dtype=jnp.float32,
        implementation: str | None = None,
        interpret: bool = False,
        numerics: str | None = None,
    ) -> "Exchange":
        """For terms [rows, size]. To be called on every device.

        Args:
            axis_name: the devices' axis of the mesh.
            rows, size: the shape of the terms.
            dtype: to which parts of many rows may be rounded before they are added in float32.
            implementation: "mosaic" (Pallas Mosaic GPU: the devices write their parts into each
                other's memory, in the launch that adds and normalises; jax 0.11, compute capability
                9.0 and one process), "xla" (a collective operation before that launch), or None:
                Mosaic for few rows in fast numerics where it can be.
            interpret: run the Mosaic kernel in interpret mode, on any device.
            numerics: "fast" or "invariant": see `pallas_kernels.numerics`; None: the context's.

        Raises:
            ValueError: `implementation` or `numerics` is unknown, or cannot be.
        """
        if implementation not in (None, *IMPLEMENTATIONS):
            names = ", ".join(map(repr, IMPLEMENTATIONS))
            raise ValueError(f"implementation must be one of {names}, not {implementation!r}")
        asked = implementation == "mosaic"
        if asked:
            check_mosaic(interpret)
        elif implementation is not None or interpret or not runs_mosaic():
            return cls(axis_name)
        mosaic = importlib.import_module("pallas_kernels.add_norm.mosaic")
        if mosaic.takes(rows, size) and not is_invariant(numerics) and jax.process_count() == 1:
            buffers = () if interpret else mosaic.Buffers.meet(axis_name, (rows, size), dtype)
            return cls(axis_name, buffers, interpret)
        if asked:
            raise ValueError(
                f"implementation 'mosaic' takes {mosaic.TAKES} in fast numerics and one process, "
                f"not an array {(rows, size)}"
            )
        return cls(axis_name)


def sum_over_devices(y: Array, axis_name: str, *, numerics: str | None = None) -> Array:
    """The float32 sum of all devices' parts of a term; in invariant numerics its terms,
    [devices, r, e].

    The terms are then to be added in the devices' order, while the order in which a library for
    collective operations adds depends on the size of the array.

    Args:
        y: this device's part, [r, e], or the shares [shares, r, e] of it.
        axis_name: the axis of the mesh on which the devices are.
        numerics: "fast" or "invariant": see `pallas_kernels.numerics`; None: the context's.
    """
    invariant = is_invariant(numerics)
    y = y.astype(jnp.float32)
    if y.ndim == 3:
        y = functools.reduce(jnp.add, y) if invariant else y.sum(axis=0)
    return lax.all_gather(y, axis_name) if invariant else lax.psum(y, axis_name)
