"""`emsjax bench step`: the time of a decoding step beside the least that the device allows.

A step consists of draft, pack, forward, verify and commit in the library's own device loop, here
with random weights and drafts that are always rejected: at a shape BxR every step feeds R
rows of each of B samples and emits one token per sample. Only the program for these rows is
compiled, and the contexts' keys and values are random. The state is reset before every run, so
that all runs have the same contexts. The time of a step is a tenth of the difference between runs
of 13 and of 3 steps. The floor counts the work that no step can avoid: every product takes the time
to read its weights or to compute, whichever is longer, and the committed keys and values are read
once.

The JSON file has the `rates` and an entry of `shapes` for each shape: the runs' times in ms by
number of steps (`runs_ms`), the time of a step (`best_ms` from the fastest runs, `median_ms` from
the differences), the floor in ms and the ratios to it at the reference and at the measured rates
(`floor_ms`, `best_ratio`, `median_ratio`), the loop's counts of rows, seconds of
compilation (`setup_s`), and on a GPU a `profile` of device time per step by kernel class.
"""

import argparse
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from emsjax.benchmarks.device_times import measured_rates
from emsjax.benchmarks.rates import Rates
from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.results import add_entry, begin
from emsjax.benchmarks.runs import (
    LONG,
    REPETITIONS,
    StepRun,
    kernel_profile,
    random_model,
    time_steps,
)
from emsjax.benchmarks.shapes import MODELS
from emsjax.decode.kernels import resolve_kernels
from emsjax.models.config import DecoderConfig
from emsjax.models.numbers import BFLOAT16, NumberFormats
from emsjax.terminal.options import number_formats


def floor_ms(
    config: DecoderConfig,
    batch: int,
    rows: float,
    context: float,
    rates: Rates,
    numbers: NumberFormats = BFLOAT16,
) -> float:
    """The least time of a step with `rows` rows of each of `batch` samples of `context` tokens.

    Products of two factors in 8 bits take half as long to compute. Several devices divide the work;
    what they exchange is not counted.
    """
    a, wide = config.architecture, NumberFormats(numbers.dtype)
    of_layers, others = a.products[: a.products_of_layers], a.products[a.products_of_layers :]

    def least(n: int, m: int, kind: NumberFormats) -> float:
        read = n * m * kind.weight_bytes / rates.read
        return max(read, 2 * batch * rows * n * m / (kind.speed * rates.matmul))

    seconds = sum(least(*sizes, numbers) for sizes in of_layers)
    seconds += sum(least(*sizes, wide) for sizes in others)
    _, keys, values = a.part(numbers.parts).columns
    cached = batch * a.attended(context) * (keys + values) * numbers.cached_bytes(a.head_dim)
    return 1e3 * (seconds / numbers.parts + cached / rates.read)


def measure(model, shape, context, attention, rates: dict[str, Rates], top: int) -> dict[str, Any]:
    """Measure the entry of one shape."""
    start = time.perf_counter()
    run = StepRun(model, shape, context, attention)
    run.advance(LONG)  # compiles
    setup = time.perf_counter() - start
    times = time_steps({"step": run})["step"]
    fed = run.fed()
    numbers = NumberFormats.of(model)
    floors = {
        name: floor_ms(model.config, *shape, fed["mean_context"], rate, numbers)
        for name, rate in rates.items()
    }
    ratios = {
        f"{which}_ratio": {name: times[f"{which}_ms"] / floor for name, floor in floors.items()}
        for which in ("best", "median")
    }
    return {
        "shape": f"{shape[0]}x{shape[1]}",
        "batch": shape[0],
        "rows_per_sample": shape[1],
        **fed,
        **times,
        "floor_ms": floors,
        **ratios,
        "setup_s": setup,
        "profile": kernel_profile(run, top) if top and jax.default_backend() == "gpu" else None,
    }


def report(entry: dict[str, Any]) -> None:
    """Print the figures of one shape."""
    print(
        f"{entry['shape']:>6}  best {entry['best_ms']:.3f} ms, median {entry['median_ms']:.3f} ms"
        + "".join(
            f"; floor at {name} rates {floor:.3f} ms, best/floor {entry['best_ratio'][name]:.2f}"
            for name, floor in entry["floor_ms"].items()
        )
        + f"; {entry['rows_per_step']:g} rows, mean context {entry['mean_context']:g}",
        flush=True,
    )
    if entry["profile"]:
        line = lambda name, at: print(f"{at['ms']:12.4f} ms {at['launches']:7.1f}x  {name}")
        line("kernels, per step", entry["profile"])
        for name, times in entry["profile"]["classes"].items():
            line(f"class {name}", times)
        for kernel in entry["profile"]["top"]:
            line(f"{kernel['name'][:90]} ({kernel['class']})", kernel)


def run(options: argparse.Namespace, command: str) -> int:
    """Measure and print every shape; the JSON file grows with each.

    Raises:
        ValueError: the library refuses the model, context or shape.
        RuntimeError: a step did not feed the rows of its shape.
    """
    config = MODELS[options.model]
    if options.layers is not None:
        config = config.resized(layers=options.layers)
    rates = {
        "reference": Rates(options.read_rate * 1e12, options.matmul_rate * 1e12),
        "measured": measured_rates(large=jax.default_backend() == "gpu"),
    }
    numbers = NumberFormats(jnp.bfloat16, **number_formats(options))
    settings = {
        "model": options.model,
        "config": config.to_json(),
        **numbers.settings,
        "context": options.context,
        "repetitions": REPETITIONS,
        "attention": resolve_kernels(options.attention).attention.implementation,
    }
    results = begin(options, command, settings, entries="shapes")
    results["rates"] = {name: rate.describe() for name, rate in rates.items()}
    model = random_model(config, numbers)
    for shape in options.shapes:
        asked = (options.context, options.attention)
        entry = measure(model, shape, *asked, rates, options.profile_top)
        report(entry)
        add_entry(entry, results, options.output, "shapes")
    return 0


if __name__ == "__main__":
    sys.exit(BENCHMARKS["step"].main())
