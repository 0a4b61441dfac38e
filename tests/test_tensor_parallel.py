"""Runs the tests of `on_mesh.py`, `on_devices.py` and `sums_on_devices.py` in a process that has
four devices, and those of `on_eight_devices.py` in one that has eight.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DEPENDS_ON_JAX = "logits or sum or kernels or memory"


def settings(devices: int) -> dict[str, str]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    kept = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    path = f"{TESTS}:{TESTS.parent}"
    return kept | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}


@pytest.mark.parametrize("part", [DEPENDS_ON_JAX, f"not ({DEPENDS_ON_JAX})"])
def test_on_four_devices(part, pytestconfig):
    """In two processes, of which the first is enough for another version of jax."""
    chosen = pytestconfig.option
    options = ["-k", part, "--every", str(chosen.every), "--turn", str(chosen.turn)]
    run_tests(4, "on_mesh.py", "on_devices.py", "sums_on_devices.py", options=options)


def test_on_eight_devices():
    run_tests(8, "on_eight_devices.py")


def run_tests(devices: int, *files: str, options: Sequence[str] = ()) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, *(str(TESTS / name) for name in files), *options],
        env=settings(devices),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
