"""Times on the device: its best rates, and the kernels that a call runs."""

import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from emsjax.benchmarks.rates import Rates
from pallas_kernels.benchmark.measure import pure_read, stream_events, time_runs

REPETITIONS, SECONDS = 5, 0.01  # for a rate: repetitions, and the length of each
KernelTimes = dict[str, tuple[int, float]]  # launches and microseconds by kernel name
# A kernel has the first class whose pattern occurs in its name in lower case.
KERNEL_CLASSES = {
    "attention": "ragged_attention|combine",  # XLA's runs as "gemm" and "rest" instead
    "commit": "update_kv|scatter",
    "norm": "layer_norm",
    "copy": "memcpy|memset|copy",
    "gemm": "^linear|narrow_linear|gemm|nvjet|cutlass|splitk|matmul|dot",
}


def measured_rates(large: bool) -> Rates:
    """This device's best rates.

    Args:
        large: read 1 GiB buffers and multiply matrices of 8192 rows and columns; otherwise much
            smaller ones.
    """
    edge = 8192 if large else 256
    # Together the buffers are far larger than any cache.
    read = pure_read(4, 16 * edge**2, REPETITIONS, SECONDS)
    key = jax.random.key(0)
    # Not zeros: a GPU multiplies those with less power and hence faster.
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
    """Launches and ms per step, given two runs that differ by `steps` steps.

    Kernels that run once per call instead of once per step cancel out.

    Args:
        top: number of longest kernels to list.
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
    """The class of a GPU kernel with this name."""
    for kind, pattern in KERNEL_CLASSES.items():
        if re.search(pattern, name.lower()):
            return kind
    return "rest"
