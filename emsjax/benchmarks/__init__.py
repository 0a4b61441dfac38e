"""Measurements of the library, and what they share: the device's rates and its kernels' times."""

import dataclasses
import os
import platform
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

KernelTimes = dict[str, tuple[int, float]]  # launches and microseconds by kernel name
# The first class with a matching part has the kernel.
KERNEL_CLASSES = {
    "attention": ("ragged_attention", "combine"),  # XLA's runs as "gemm" and "rest" instead
    "commit": ("update_kv", "scatter"),
    "norm": ("layer_norm",),
    "copy": ("memcpy", "memset", "copy"),
    "gemm": ("gemm", "nvjet", "cutlass", "splitk", "matmul", "dot"),
}


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a device can do: bytes read per second and bfloat16 FLOPs per second."""

    read: float
    matmul: float

    def describe(self) -> dict[str, float]:
        return {"read_tb_per_s": self.read / 1e12, "matmul_tflop_per_s": self.matmul / 1e12}


def measured_rates(large: bool) -> Rates:
    """This device's rates: maxima of 1 GiB buffers and a product of 8192 cubed if `large`."""
    edge = 8192 if large else 256
    key = jax.random.key(0)
    # Not zeros: a GPU computes those with less power, hence faster.
    a, b = (jax.random.normal(key, (edge, edge), jnp.bfloat16) for _ in range(2))
    # Together far larger than any cache.
    buffers = [jax.random.normal(key, (8 * edge, edge), jnp.bfloat16) for _ in range(4)]
    read = best_seconds(jax.jit(lambda xs: [jnp.max(x) for x in xs]), buffers)
    matmul = best_seconds(jax.jit(jnp.matmul), a, b)
    return Rates(sum(x.nbytes for x in buffers) / read, 2 * edge**3 / matmul)


def best_seconds(call: Callable, *arguments, repetitions: int = 5, calls: int = 10) -> float:
    """Seconds of one compiled call: the best mean of `calls` in a row."""
    jax.block_until_ready(call(*arguments))
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        for _ in range(calls):
            result = call(*arguments)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    return min(times)


def kernel_times(call: Callable) -> KernelTimes:
    """Launches and microseconds of each GPU kernel that the call runs."""
    launches, micros = Counter(), Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        (path,) = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            # Other lines repeat the kernels under the names of their operations.
            streams = (line for line in plane.lines if line.name.startswith("Stream"))
            for line in streams if "GPU" in plane.name else ():
                for event in line.events:
                    launches[event.name] += 1
                    micros[event.name] += event.duration_ns / 1e3
    return {name: (launches[name], micros[name]) for name in launches}


def kernels_per_step(short: KernelTimes, long: KernelTimes, steps: int, top: int) -> dict[str, Any]:
    """Launches and ms per step, where the long run has `steps` more than the short one.

    What runs once per call, and not in every step, drops out.
    """
    kernels = []
    for name, (launches, micros) in long.items():
        before = short.get(name, (0, 0.0))
        if launches > before[0]:
            kernel = {"launches": (launches - before[0]) / steps}
            kernel["ms"] = (micros - before[1]) / steps / 1e3
            kernels.append({"name": name, "class": kernel_class(name), **kernel})
    kernels.sort(key=lambda kernel: -kernel["ms"])
    total = lambda rows: {key: sum(row[key] for row in rows) for key in ("launches", "ms")}
    classes = {
        name: total([kernel for kernel in kernels if kernel["class"] == name])
        for name in (*KERNEL_CLASSES, "rest")
    }
    return {**total(kernels), "classes": classes, "top": kernels[:top]}


def kernel_class(name: str) -> str:
    """The class of a GPU kernel, told by its name."""
    for kind, parts in KERNEL_CLASSES.items():
        if any(part in name.lower() for part in parts):
            return kind
    return "rest"


def surroundings(commit: str | None) -> dict[str, Any]:
    """What a figure depends on beside the settings; `commit` None: the checkout's own."""
    device = jax.devices()[0]
    packages = ("jax", "jaxlib", "flax", "numpy")
    return {
        "hardware": {
            "device": device.device_kind,
            "platform": device.platform,
            "runtime": device.client.platform_version,
        },
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in packages},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "commit": commit or checkout_commit(),
    }


def checkout_commit() -> str | None:
    """HEAD of the checkout this package lies in, "-dirty" if files differ; None outside one."""
    describe = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        found = subprocess.run(
            describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
