"""Which implementation of an operation runs."""

from collections.abc import Collection

import jax


def choose(implementation: str | None, available: Collection[str], interpret: bool = False) -> str:
    """The implementation to run: the one asked for, or the device's best of `available`.

    Raises:
        ValueError: `implementation` is not one of `available`, or the default
            device cannot run it and `interpret` is not set.
    """
    if implementation is None:
        return "triton" if "triton" in available and runs_triton() else "xla"
    if implementation not in available:
        known = ", ".join(repr(name) for name in sorted(available))
        raise ValueError(f"implementation must be None or one of {known}, not {implementation!r}")
    if implementation == "triton" and not (interpret or runs_triton()):
        raise ValueError(
            "implementation 'triton' needs an NVIDIA GPU of compute capability 8.0 or newer, "
            f"and the default device is {jax.devices()[0].device_kind}: use 'xla' or interpret=True"
        )
    return implementation


def runs_triton() -> bool:
    """Whether the default device runs Pallas Triton kernels."""
    if jax.default_backend() != "gpu":
        return False
    capability = getattr(jax.devices()[0], "compute_capability", None)
    try:
        return float(capability) >= 8.0
    except (TypeError, ValueError):  # not from NVIDIA
        return False
