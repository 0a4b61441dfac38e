"""`python -m pallas_kernels.benchmark.products`: products with the weights of a layer, in bfloat16.

Each implementation multiplies the same rows with several weights in turn, so that no weight is in
the GPU's cache. `--tune` times every tiling of the Mosaic kernel instead of its default one.

The JSON file holds `command`, `hardware`, `versions`, `commit` and `products`: for each product and
row count the microseconds of every implementation and its largest difference from XLA's, or the
error with which it failed.
"""

import argparse
import functools
import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import linear, linear_sums
from pallas_kernels.benchmark.cases import FULL
from pallas_kernels.benchmark.measure import best_and_median_us, time_runs
from pallas_kernels.benchmark.report import describe_run
from pallas_kernels.matmul import gate, mosaic, mosaic_tiles
from pallas_kernels.matmul.xla import sums_dtype


class Product(NamedTuple):
    """One product of a layer."""

    inputs: int
    outputs: int  # columns of the weights
    split: bool  # whether sums may be left in shares
    activation: str | None = None
    gated: bool = False


PRODUCTS = {
    "opt-6.7b": {
        "qkv_proj": Product(4096, 12288, False),
        "out_proj": Product(4096, 4096, True),
        "fc1": Product(4096, 16384, False, "relu"),
        "fc2": Product(16384, 4096, True),
    },
    "opt-13b-of-two": {  # what one of two devices has of a layer
        "qkv_proj": Product(5120, 7680, False),
        "out_proj": Product(2560, 5120, True),
        "fc1": Product(5120, 10240, False, "relu"),
        "fc2": Product(10240, 5120, True),
    },
    "qwen3-8b": {
        "qkv_proj": Product(4096, 6144, True),
        "o_proj": Product(4096, 4096, True),
        "gate_up_proj": Product(4096, 24576, False, "silu", gated=True),
        "down_proj": Product(12288, 4096, True),
    },
}
ROWS = (64, 128, 160, 192, 256, 320, 384, 512, 1024)
WEIGHTS = 16  # per product: more bytes than a cache holds, more time than a launch takes
ERROR_CHARACTERS = 300
MOST_PADDED = 1.2  # rows of all tiles, relative to those of the smallest tiles
Way = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def implementations(product: Product) -> dict[str, Way]:
    """The implementations by name; a model uses "default"."""

    def multiply(name, x, weight, bias):
        if product.split:
            return linear_sums(x, weight, implementation=name)
        epilogue = {"activation": product.activation, "gated": product.gated}
        return linear(x, weight, bias, implementation=name, **epilogue)

    names = {"default": None, "xla": "xla", "triton": "triton", "mosaic": "mosaic"}
    return {name: functools.partial(multiply, value) for name, value in names.items()}


def tilings(rows: int, product: Product) -> dict[str, Way]:
    """The Mosaic kernel with every tiling that fits, by the tiling's fields."""

    def multiply(tiling, x, weight, bias):
        options = {"tiling": tiling, "interpret": False}
        if product.split:
            dtype = sums_dtype(x.dtype, tiling.splits)
            return mosaic.launch(x, weight, None, dtype=dtype, **options)
        activation = None if product.gated else product.activation
        y = mosaic.launch(x, weight, bias, activation=activation, dtype=x.dtype, **options)
        return (
            gate.launch(y, activation=product.activation, interpret=False) if product.gated else y
        )

    found = {}
    for tiling in fitting(rows, product):
        fields = " ".join(f"{name}={value}" for name, value in tiling._asdict().items())
        found[fields] = functools.partial(multiply, tiling)
    return found


def fitting(rows: int, product: Product) -> list[mosaic_tiles.Tiling]:
    """The kernel's tilings, except those with much padding or with small tiles for many rows."""
    unit = mosaic_tiles.UNIT
    few = -(-rows // unit) * unit
    padded = lambda tiling: -(-rows // tiling.rows) * tiling.rows
    found = []
    for splits in mosaic_tiles.SPLITS if product.split else (1,):
        narrow = not product.split or sums_dtype(jnp.bfloat16, splits).itemsize == 2
        found += mosaic_tiles.tilings(rows, splits, swap=narrow)
    return [
        tiling
        for tiling in found
        if tiling.divides(product.inputs, product.outputs)
        and padded(tiling) <= MOST_PADDED * few
        and tiling.rows >= min(few, unit + 1)
    ]


def measure(name: str, product: Product, rows: int, tune: bool) -> dict[str, object]:
    """The entry in the results for one product and row count."""
    inputs, outputs = product.inputs, product.outputs
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, inputs), jnp.bfloat16)
    make = jax.jit(lambda key: jax.random.normal(key, (inputs, outputs), jnp.bfloat16) / 64)
    weights = [make(key) for key in jax.random.split(keys[1], WEIGHTS)]
    bias = jax.random.normal(keys[2], (outputs,), jnp.bfloat16)

    ways = implementations(product)
    if tune:
        ways = {"xla": ways["xla"], **tilings(rows, product)}

    def build(way):
        one = jax.jit(way)  # traced and lowered once for all weights
        every = jax.jit(lambda x, weights, bias: [one(x, weight, bias) for weight in weights])
        return every.lower(x, weights, bias).compile()

    with ThreadPoolExecutor() as pool:  # programs are compiled in parallel, and timed alone
        programs = {way: pool.submit(build, multiply) for way, multiply in ways.items()}
    expected, figures = whole(programs["xla"].result()(x, weights, bias)[0]), {}
    for way, program in programs.items():
        try:
            run = functools.partial(program.result(), x, weights, bias)
            error = float(np.abs(whole(run()[0]) - expected).max())
        except Exception as error:  # from a compiler or a driver; the others still run
            figures[way] = {"error": str(error)[:ERROR_CHARACTERS]}
            continue
        seconds = time_runs(run, FULL.repetitions, FULL.seconds)
        figures[way] = {**best_and_median_us(seconds, WEIGHTS), "max_error": error}
    return {"product": name, "rows": rows, **product._asdict(), "implementations": figures}


def whole(product: jax.Array) -> np.ndarray:
    """A product, or its shares, as one float32 array."""
    product = jnp.sum(product, axis=0) if product.ndim == 3 else product
    return np.asarray(product, np.float32)


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.benchmark.products")
    numbers = lambda text: [int(number) for number in text.split(",")]
    parser.add_argument("--rows", type=numbers, default=list(ROWS), metavar="N,N,...")
    names = lambda text: text.split(",")
    parser.add_argument("--model", choices=PRODUCTS, default="opt-6.7b")
    parser.add_argument("--products", type=names, metavar="NAME,...", help="default: all")
    parser.add_argument("--tune", action="store_true", help="time every tiling")
    parser.add_argument("--output", type=pathlib.Path, metavar="FILE.json")
    parser.add_argument("--commit", metavar="HASH", help="to record; default: git's HEAD")
    options = parser.parse_args(arguments)
    results = describe_run(arguments, FULL, options.commit)
    results["command"] = results["command"].replace("benchmark", "benchmark.products", 1)
    results["products"] = []
    products = PRODUCTS[options.model]
    for name, rows in itertools.product(options.products or products, options.rows):
        entry = measure(name, products[name], rows, options.tune)
        results["products"].append(entry)
        figures = entry["implementations"]
        for way in sorted(figures, key=lambda way: figures[way].get("median_us", np.inf))[:8]:
            print(f"{name}, {rows} rows, {way}: {figures[way]}", flush=True)
        if options.output:
            options.output.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
