"""`emsjax bench training`: a training step beside the rate of a large matrix product.

A model of random weights is trained on random tokens, with cross-entropy alone and with the
distribution of a target as well. The count of operations is the model's own: two for each weight
and token in the forward pass, twice as many in the backward pass, and those of causal attention.
It includes neither the target's operations nor those that are repeated to save memory.

The JSON file has the measured `rates`, and one of the `entries` for each way to train: seconds of
each step, whose median gives `tokens_per_s`, `tflop_per_s` and its `share` of the measured
product's rate, and on a GPU the longest kernels of a step.
"""

import argparse
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from emsjax.benchmarks.device_times import kernel_times, measured_rates
from emsjax.benchmarks.ems_sd import step_flops
from emsjax.benchmarks.rates import Rates
from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.results import add_entry, begin
from emsjax.benchmarks.runs import random_model
from emsjax.benchmarks.shapes import MODELS
from emsjax.distillation import PackedSequences, Trainer, make_optimizer
from emsjax.terminal.options import DISTILLATION_LOSSES

WARM_UP, STEPS = 3, 10
KERNELS_LISTED = 16


def training_flops(config, sequences: int, length: int) -> float:
    """Floating-point operations of a step, counted as the module's docstring says."""
    return 3 * step_flops(config, sequences * length, (length + 1) / 2)


def measure(trainer: Trainer, config, sequences: int, length: int, rates: Rates) -> dict[str, Any]:
    """Measure the entry of one way to train."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(5, config.vocab_size, length) for _ in range(sequences)]
    batch = PackedSequences(documents, length, sequences)[0]
    state, seconds = trainer.initial(), []

    def advance():
        nonlocal state
        state, loss = trainer.step(state, batch)
        return loss

    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        jax.block_until_ready(advance())
        seconds.append(time.perf_counter() - start)
    median = float(np.median(seconds[WARM_UP:]))
    flops = training_flops(config, sequences, length) / median
    entry = {
        "first_step_s": seconds[0],
        "steps_s": seconds[WARM_UP:],
        "tokens_per_s": sequences * length / median,
        "tflop_per_s": flops / 1e12,
        "share": flops / rates.matmul,
        "kernels": [],
    }
    if jax.default_backend() == "gpu":
        found = kernel_times(lambda: jax.block_until_ready(advance()))
        longest = sorted(found.items(), key=lambda item: -item[1][1])[:KERNELS_LISTED]
        entry["kernels"] = [
            {"name": name, "launches": launches, "ms": micros / 1e3}
            for name, (launches, micros) in longest
        ]
    return entry


def run(options: argparse.Namespace, command: str) -> int:
    size = (options.batch_size, options.sequence_length)
    rates = measured_rates(large=jax.default_backend() == "gpu")
    settings = {
        "model": options.model,
        "target": options.target,
        "dtype": "bfloat16",
        "batch_size": size[0],
        "sequence_length": size[1],
    }
    results = begin(options, command, settings)
    results["rates"] = rates.describe()
    model = random_model(MODELS[options.model])
    for losses in ({"cross-entropy": 1.0}, DISTILLATION_LOSSES):
        optimizer = make_optimizer(1000, 1e-3, warm_up=100, weight_decay=0.1)
        target = random_model(MODELS[options.target]) if len(losses) > 1 else None
        trainer = Trainer(model, optimizer, losses, target=target, dtype=jnp.bfloat16)
        entry = {"losses": losses, **measure(trainer, model.config, *size, rates)}
        add_entry(entry, results, options.output)
        print(
            f"{', '.join(losses)}: {1e3 * np.median(entry['steps_s']):.1f} ms a step, "
            f"{entry['tokens_per_s']:.0f} tokens/s, {entry['tflop_per_s']:.1f} TFLOP/s, "
            f"{entry['share']:.1%} of a product's {rates.matmul / 1e12:.0f}",
            flush=True,
        )
        for kernel in entry["kernels"]:
            print("{ms:10.3f} ms {launches:5d}x  {name:.90}".format(**kernel))
        del trainer
    return 0


if __name__ == "__main__":
    sys.exit(BENCHMARKS["training"].main())
