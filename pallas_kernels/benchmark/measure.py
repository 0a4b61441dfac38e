"""How long compiled programs take, by the clock and by the profiler."""

import functools
import glob
import tempfile
import time
from collections.abc import Callable, Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.benchmark.cases import DTYPE

MAX_LAUNCHES = 200  # runs queued before the host waits
PAUSE_SECONDS = 0.05  # pause between programs under the profiler
GAP_NS = 20_000_000  # idle time that separates one program's kernels from the next one's


def time_runs(run: Callable[[], object], repetitions: int, seconds: float) -> list[float]:
    """Wall seconds of one run, once for each repetition.

    A repetition queues as many runs as take about `seconds`, and waits for the
    last, so that the host's part hides behind the device's.
    """

    def wall(launches: int) -> float:
        start = time.perf_counter()
        for _ in range(launches):
            out = run()
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / launches

    wall(1)  # the first run may be slower than the others
    launches = int(np.clip(seconds / wall(2), 2, MAX_LAUNCHES))
    return [wall(launches) for _ in range(repetitions)]


def best_and_median_us(seconds: Sequence[float], calls: int) -> dict[str, float]:
    """Best and median microseconds per call, from the seconds of runs with `calls` calls each."""
    us = 1e6 * np.array(seconds) / calls
    return {"best_us": float(np.min(us)), "median_us": float(np.median(us))}


def pure_read(buffers: int, size: int, repetitions: int, seconds: float) -> dict[str, float]:
    """The rate at which XLA reads bfloat16 buffers of `size` bytes to find their maxima."""
    elements = size // jnp.dtype(DTYPE).itemsize
    make = jax.jit(lambda key: jax.random.normal(key, elements, DTYPE))
    made = [make(jax.random.key(i)) for i in range(buffers)]
    largest = jax.jit(lambda made: [jnp.max(buffer) for buffer in made])
    times = time_runs(functools.partial(largest, made), repetitions, seconds)
    figures = best_and_median_us(times, 1)
    total = buffers * size
    return {**figures, "bytes": total, "gb_per_s": total / figures["median_us"] / 1e3}


def kernel_seconds(runs: Collection[Callable[[], object]]) -> list[float] | None:
    """Seconds that the GPU's streams are busy with each run, by the profiler.

    All runs share one trace, since a trace is slow to start and to write, with pauses between
    them. Returns None if the trace cannot be split into one part for each run.
    """
    for run in runs:
        jax.block_until_ready(run())

    def run_all() -> None:
        for run in runs:
            jax.block_until_ready(run())
            time.sleep(PAUSE_SECONDS)

    parts = split_at_gaps([(start, duration) for _, start, duration in stream_events(run_all)])
    return [sum(part) / 1e9 for part in parts] if len(parts) == len(runs) else None


def stream_events(run: Callable[[], object]) -> list[tuple[str, float, float]]:
    """(name, start, duration) of all that the GPU's streams do in the run, in nanoseconds."""
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            jax.block_until_ready(run())
        (path,) = glob.glob(directory + "/**/*.xplane.pb", recursive=True)
        # The variable keeps it alive for as long as the iterators over its planes.
        data = jax.profiler.ProfileData.from_file(path)
        return [
            (event.name, event.start_ns, event.duration_ns)
            for plane in data.planes
            if "GPU" in plane.name
            for line in plane.lines
            # Other lines repeat the kernels under the names of their operations.
            if line.name.startswith("Stream")
            for event in line.events
        ]


def split_at_gaps(spans: Sequence[tuple[float, float]]) -> list[list[float]]:
    """Durations of (start, duration) spans, split where nothing runs for `GAP_NS`."""
    parts, end = [], -float("inf")
    for start, duration in sorted(spans):
        if start - end > GAP_NS:
            parts.append([])
        parts[-1].append(duration)
        end = max(end, start + duration)
    return parts
