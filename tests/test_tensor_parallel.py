"""Runs the tests of `on_mesh.py` in processes that have four devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOUR_DEVICES = " --xla_force_host_platform_device_count=4"


@pytest.mark.parametrize("part", ["groups", "tokens", "logits", "memory", "errors"])
def test_on_four_devices(part):
    file = Path(__file__).with_name("on_mesh.py")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", str(file), "-k", f"test_{part}"]
    flags = os.environ.get("XLA_FLAGS", "") + FOUR_DEVICES
    settings = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    settings.pop("PYTEST_XDIST_WORKER", None)
    run = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
