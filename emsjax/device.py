"""The dtype that suits the default device, and the memory that a device has free."""

import math
import os
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.implementations import default_device, runs_triton


def best_dtype():
    """The dtype in which to load a model on the default device.

    Returns:
        float32 on a CPU, where 16-bit types are not faster; bfloat16 on GPUs that run the
        Triton kernels (NVIDIA, compute capability 8.0 and newer) and on TPUs; float16 on other
        GPUs, such as a T4, which have no bfloat16.
    """
    backend = default_device().platform
    if backend == "cpu":
        return jnp.float32
    return jnp.float16 if backend == "gpu" and not runs_triton() else jnp.bfloat16


def dtype_name(given: str | None) -> str:
    """The given dtype name, or that of `best_dtype`."""
    return given or jnp.dtype(best_dtype()).name


def tree_bytes(tree: Any) -> int:
    """Bytes of the arrays of a pytree, which may be abstract."""
    return sum(x.size * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def device_bytes(tree: Any) -> int:
    """Bytes that the arrays of a pytree have on each device; abstract ones are on one."""

    def size(x) -> int:
        is_put = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
        shape = x.sharding.shard_shape(x.shape) if is_put else x.shape
        return math.prod(shape) * jnp.dtype(x.dtype).itemsize

    return sum(map(size, jax.tree.leaves(tree)))


def is_of_one_process(tree: Any) -> bool:
    """Whether this process has all of the arrays of a pytree; traced ones are not asked."""
    arrays = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array))
    return all(isinstance(x, jax.core.Tracer) or x.is_fully_addressable for x in arrays)


def available_bytes(device: jax.Device | None = None) -> int | None:
    """Free memory of a device, or of the default one; None where it cannot be told."""
    device = device or default_device()
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        # A reserve for fragmentation and for the libraries' own workspaces.
        return int(0.98 * stats["bytes_limit"]) - stats["bytes_in_use"]
    return available_host_bytes() if device.platform == "cpu" else None


def available_host_bytes() -> int | None:
    """Free memory of the host, including file caches where the system reports them; None where it
    cannot be told."""
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return None
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def readable(size: int) -> str:
    """Bytes with a binary unit."""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
