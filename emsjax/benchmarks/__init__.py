"""Measurements of the library, and what they share: the device's rates and its kernels' times."""

import dataclasses
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from emsjax.records.output import write_atomically
from pallas_kernels.benchmark import report
from pallas_kernels.benchmark.measure import pure_read, stream_events, time_runs

REPETITIONS, SECONDS = 5, 0.01  # of a rate's measurement, and of each repetition
KernelTimes = dict[str, tuple[int, float]]  # launches and microseconds by kernel name
# The first class whose pattern is found in a kernel's name, in lower case, has the kernel.
KERNEL_CLASSES = {
    "attention": "ragged_attention|combine",  # XLA's runs as "gemm" and "rest" instead
    "commit": "update_kv|scatter",
    "norm": "layer_norm",
    "copy": "memcpy|memset|copy",
    "gemm": "^linear|gemm|nvjet|cutlass|splitk|matmul|dot",
}


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a device can do: bytes read per second and bfloat16 FLOPs per second."""

    read: float
    matmul: float

    def describe(self) -> dict[str, float]:
        return {"read_tb_per_s": self.read / 1e12, "matmul_tflop_per_s": self.matmul / 1e12}


MEASURED_RATES = {"NVIDIA H200": Rates(read=4.35e12, matmul=790e12)}  # by kind of device


def measured_rates(large: bool) -> Rates:
    """This device's best rates: maxima of 1 GiB buffers, a product of 8192 cubed if `large`."""
    edge = 8192 if large else 256
    # Together far larger than any cache.
    read = pure_read(4, 16 * edge**2, REPETITIONS, SECONDS)
    key = jax.random.key(0)
    # Not zeros: a GPU computes those with less power, hence faster.
    factors = [jax.random.normal(key, (edge, edge), jnp.bfloat16) for _ in range(2)]
    product = functools.partial(jax.jit(jnp.matmul), *factors)
    matmul = min(time_runs(product, REPETITIONS, SECONDS))
    return Rates(1e6 * read["bytes"] / read["best_us"], 2 * edge**3 / matmul)


def kernel_times(call: Callable) -> KernelTimes:
    """Launches and microseconds of each GPU kernel that the call runs."""
    launches, micros = Counter(), Counter()
    for name, _, duration_ns in stream_events(call):
        launches[name] += 1
        micros[name] += duration_ns / 1e3
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
    for kind, pattern in KERNEL_CLASSES.items():
        if re.search(pattern, name.lower()):
            return kind
    return "rest"


def surroundings(commit: str | None, *packages: str) -> dict[str, Any]:
    """What a figure depends on beside the settings; `commit` None: the checkout's own."""
    found = report.surroundings("jax", "jaxlib", "flax", "numpy", *packages)
    hardware = found["hardware"]
    hardware["device"] = hardware.pop("device_kind")
    return {**found, "commit": commit or report.checkout_commit()}


def at_once(function: Callable, arguments: Iterable[Any]) -> list[Any]:
    """What the function makes of each: most of its time is compilation, outside of Python."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(function, arguments))


def save(results: Mapping[str, Any], output: Path | None) -> None:
    """Write the results as JSON where a file was asked for."""
    if output is not None:
        write_atomically(output, json.dumps(results, indent=1))


def add_entry(entry: Mapping[str, Any], results: dict[str, Any], output: Path | None) -> None:
    """Add what has been measured, and write all; a resumed run may go on at another commit."""
    results["entries"].append({**entry, "commit": results.get("commit")})
    save(results, output)


def resume(settings: Mapping[str, Any], results: dict[str, Any], output: Path | None) -> None:
    """Take over the entries that an earlier run with these settings has left in the file.

    Raises:
        ValueError: the file is of another run.
    """
    results["settings"], results["entries"] = dict(settings), []
    if output is None or not output.exists():
        return
    try:
        before = json.loads(output.read_bytes())
    except ValueError as error:
        raise ValueError(f"{output} holds no results: {error}") from error
    if not isinstance(before, dict):
        raise ValueError(f"{output} holds no results")
    if before.get("settings") != json.loads(json.dumps(settings)):
        raise ValueError(f"{output} holds results with other settings")
    results["entries"] = before["entries"]
