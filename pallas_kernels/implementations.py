"""Which implementation of an operation runs."""

from collections.abc import Callable, Collection

import jax
import jax.numpy as jnp
from jax import lax


def choose(implementation: str | None, available: Collection[str], interpret: bool = False) -> str:
    """The implementation to run: the one asked for, or the device's best of `available`.

    Raises:
        ValueError: `implementation` is not one of `available`, or the default
            device cannot run it and `interpret` is not set.
    """
    if implementation is None:
        return "triton" if "triton" in available and runs_triton() else "xla"
    if not isinstance(implementation, str) or implementation not in available:
        known = ", ".join(repr(name) for name in sorted(available))
        raise ValueError(f"implementation must be None or one of {known}, not {implementation!r}")
    if implementation == "triton" and not (interpret or runs_triton()):
        raise ValueError(
            "implementation 'triton' needs an NVIDIA GPU of compute capability 8.0 or newer, "
            f"and the default device is {jax.devices()[0].device_kind}: use 'xla' or interpret=True"
        )
    if implementation == "mosaic":
        check_mosaic(interpret)
    return implementation


def check_mosaic(interpret: bool) -> None:
    """Whether Pallas Mosaic GPU kernels run here.

    Raises:
        ValueError: they do not.
    """
    if jax.__version_info__ < (0, 11):
        raise ValueError(f"implementation 'mosaic' needs jax 0.11, and this is {jax.__version__}")
    if not interpret and _compute_capability() != 9.0:
        raise ValueError(
            "implementation 'mosaic' needs an NVIDIA GPU of compute capability 9.0, and the "
            f"default device is {jax.devices()[0].device_kind}: use 'xla' or interpret=True"
        )


def runs_triton() -> bool:
    """Whether the default device runs Pallas Triton kernels."""
    return (_compute_capability() or 0) >= 8.0


def stages_that_fit(num_stages: int, bytes_per_stage: int) -> int:
    """At most `num_stages` stages of a software pipeline, as many as shared memory holds."""
    # Maximum of a block by compute capability: CUDA C++ Programming Guide, "Technical
    # Specifications per Compute Capability". Kernels need a little beside the pipeline.
    large = {8.0: 163, 8.7: 163, 9.0: 227, 10.0: 227, 10.3: 227, 11.0: 227, None: 227}
    available = (large.get(_compute_capability(), 99) - 16) * 1024
    return max(1, min(num_stages, available // bytes_per_stage))


def _compute_capability() -> float | None:
    """Of the default device; None: not a GPU from NVIDIA."""
    if jax.default_backend() != "gpu":
        return None
    try:
        return float(getattr(jax.devices()[0], "compute_capability", None))
    except (TypeError, ValueError):
        return None


def with_gradient_of(reference: Callable, kernel: Callable) -> Callable:
    """`kernel`, whose gradient is that of `reference`: the same function of the same arrays."""
    function = jax.custom_vjp(kernel)
    function.defvjp(
        lambda *args: (kernel(*args), args),
        lambda args, cotangents: jax.vjp(reference, *args)[1](cotangents),
    )
    return function


def matmul_precision(dtype) -> lax.Precision | None:
    """float32 means float32: not TF32, which a GPU would choose by default."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None
