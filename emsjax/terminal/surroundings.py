"""Where and with what a command or a benchmark ran."""

from typing import Any

from pallas_kernels.benchmark import report


def surroundings(commit: str | None, *packages: str) -> dict[str, Any]:
    """Commit, versions and hardware, on which figures depend as they do on the settings.

    Args:
        commit: None: the checkout's.
        packages: further packages whose versions matter.
    """
    found = report.surroundings("jax", "jaxlib", "flax", "numpy", *packages)
    hardware = found["hardware"]
    hardware["device"] = hardware.pop("device_kind")
    return {**found, "commit": commit or report.checkout_commit()}
