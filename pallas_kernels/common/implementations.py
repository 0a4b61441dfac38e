"""The choice of an operation's implementation, by name or by device."""

from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.numbers import check_flag

MULTIPROCESSORS = 132  # of an H100 or H200, for which tilings are chosen
MOSAIC_JAX = (0, 11)  # the first version whose Pallas Mosaic GPU has what the kernels use


def choose(implementation: str | None, available: Collection[str], interpret: bool = False) -> str:
    """The requested implementation, or the best one of `available` for the default device.

    Raises:
        ValueError: `implementation` is not one of `available`, or the default
            device cannot run it and `interpret` is not set; or `interpret` is not a boolean.
    """
    interpret = check_flag("interpret", interpret)
    if implementation is None:
        return "triton" if "triton" in available and runs_triton() else "xla"
    if not isinstance(implementation, str) or implementation not in available:
        known = ", ".join(repr(name) for name in sorted(available))
        raise ValueError(f"implementation must be None or one of {known}, not {implementation!r}")
    if implementation == "triton" and not (interpret or runs_triton()):
        raise ValueError(
            "implementation 'triton' needs an NVIDIA GPU of compute capability 8.0 or newer, "
            f"and the default device is {default_device().device_kind}: use 'xla' or interpret=True"
        )
    if implementation == "mosaic":
        check_mosaic(interpret)
    return implementation


def check_mosaic(interpret: bool) -> None:
    """Raises ValueError unless this jax and the default device run Pallas Mosaic GPU kernels."""
    if jax.__version_info__ < MOSAIC_JAX:
        raise ValueError(f"implementation 'mosaic' needs jax 0.11, and this is {jax.__version__}")
    if not (interpret or runs_mosaic()):
        raise ValueError(
            "implementation 'mosaic' needs an NVIDIA GPU of compute capability 9.0, and the "
            f"default device is {default_device().device_kind}: use 'xla' or interpret=True"
        )


def runs_mosaic() -> bool:
    """Whether this jax and the default device run Pallas Mosaic GPU kernels."""
    return jax.__version_info__ >= MOSAIC_JAX and _compute_capability() == 9.0


def runs_triton() -> bool:
    """Whether the default device runs Pallas Triton kernels."""
    return (_compute_capability() or 0) >= 8.0


def stages_that_fit(num_stages: int, bytes_per_stage: int) -> int:
    """The stages of a software pipeline: at most `num_stages`, and no more than fit in shared
    memory."""
    # The most that one block may use, in KiB, by compute capability: CUDA C++ Programming Guide,
    # "Technical Specifications per Compute Capability". The pipeline leaves 16 KiB to the rest.
    large = {8.0: 163, 8.7: 163, 9.0: 227, 10.0: 227, 10.3: 227, 11.0: 227, None: 227}
    available = (large.get(_compute_capability(), 99) - 16) * 1024
    return max(1, min(num_stages, available // bytes_per_stage))


def default_device() -> jax.Device:
    """The device that computes if no argument lies on another: `jax.default_device`'s, if set."""
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):  # the name of a platform
        device = jax.local_devices(backend=device)[0]
    return device


def _compute_capability() -> float | None:
    """The default device's compute capability; None if it is not an NVIDIA GPU."""
    device = default_device()
    if device.platform != "gpu":
        return None
    try:
        return float(getattr(device, "compute_capability", None))
    except (TypeError, ValueError):
        return None


def with_gradient_of(reference: Callable, kernel: Callable) -> Callable:
    """`kernel` with the gradient of `reference`, which computes the same function."""
    function = jax.custom_vjp(kernel)
    function.defvjp(
        lambda *args: (kernel(*args), args),
        lambda args, cotangents: jax.vjp(reference, *args)[1](cotangents),
    )
    return function


def matmul_precision(dtype) -> lax.Precision | None:
    """Full precision for float32, where a GPU would use TF32 by default."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None
