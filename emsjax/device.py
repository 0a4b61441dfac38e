"""What the default device computes best in."""

import jax
import jax.numpy as jnp

from pallas_kernels.common.implementations import runs_triton


def best_dtype():
    """The type to load a model in on the default device.

    Returns:
        float32 on a CPU, where 16-bit types are not faster; bfloat16 on GPUs that run the
        Triton kernels (NVIDIA, compute capability 8.0 and newer) and on TPUs; float16 on other
        GPUs, such as a T4, which have no bfloat16.
    """
    backend = jax.default_backend()
    if backend == "cpu":
        return jnp.float32
    return jnp.float16 if backend == "gpu" and not runs_triton() else jnp.bfloat16


def dtype_name(given: str | None) -> str:
    """A type chosen by name, or that of `best_dtype`."""
    return given or jnp.dtype(best_dtype()).name
