"""`emsjax bench ems-sd`: EMS-SD beside plain decoding, padding and its ablations, as in the paper.

At each batch size all methods decode the same prompts with the same drafts in one process. Times
exclude prefill and end when all samples have finished, or when the first one has (all slots are
busy, as they are where finished samples are replaced). All tokens are compared with the expected
ones.

Reference: EMS-SD, arXiv 2405.07542, table 2 and figure 1.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from emsjax.benchmarks.policy_runs import ALL_STEPS
from emsjax.benchmarks.rates import Rates
from emsjax.benchmarks.results import add_entry
from emsjax.benchmarks.runs import at_once
from emsjax.benchmarks.sources import Source, Task
from emsjax.benchmarks.step import floor_ms
from emsjax.decode.layout import UNPADDED, Layout
from emsjax.decode.run import Run
from emsjax.decode.step import decode_loop
from emsjax.engine.adapt import make_run
from emsjax.generation import init_state
from emsjax.models.numbers import NumberFormats

GREEDY = "greedy"
METHODS: dict[str, Layout] = {
    GREEDY: UNPADDED,  # without drafts
    "vanilla": Layout(pad_inputs=True, pad_kv_cache=True),
    "unpad-kv": Layout(pad_inputs=True),
    "unpad-inputs": Layout(pad_kv_cache=True),
    "ems": UNPADDED,
}
BATCH_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 64)


class Bench:
    """All methods at one batch size.

    Args:
        source: the model, prompts and drafts.
        rates: the device's, for the floor; None: unknown, so no floor is computed.
        repeats: number of rounds; each gives one figure.
    """

    def __init__(self, source: Source, batch: int, rates: Rates | None, repeats: int):
        self.source, self.batch, self.rates = source, batch, rates
        self.repeats = repeats
        self.weights: Any = None  # the flat model, once it is known
        self.compiled: dict[Any, Callable] = {}
        self.warm: set[Any] = set()  # keys of compiled loops that have run
        self.about: dict[str, dict[str, Any]] = {}

    def measure(self, methods: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
        """Measure the entry of this batch size; the methods take turns."""
        runs: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
        identical = dict.fromkeys(methods, True)
        rounds = self.source.rounds(self.batch, self.repeats)
        self.prepare(methods, rounds[0][0])
        for tasks in rounds:
            totals = {method: Counter() for method in methods}
            for task in tasks:
                expected = task.expected
                for method in methods:
                    figures, tokens = self.decode(method, task)
                    totals[method].update(figures)
                    expected = tokens if expected is None else expected
                    identical[method] &= bool(np.array_equal(tokens, expected))
            for method, total in totals.items():
                runs[method].append(dict(total))
                speed = total["tokens"] / total["seconds"]
                say(f"batch {self.batch}, {method}: {speed:.0f} tokens/s")
        figures = {
            method: {"identical": identical[method], **self.summary(method, of), "runs": of}
            for method, of in runs.items()
        }
        if GREEDY in figures:
            for which in ("tokens_per_s", "live_tokens_per_s"):
                greedy = figures[GREEDY][which]["median"]
                for of in figures.values():
                    of[which]["speed_up"] = of[which]["median"] / greedy
        return {
            "batch": self.batch,
            "prompts": self.batch * len(rounds[0]),
            "mean_prompt_tokens": float(np.mean([len(p) for t in rounds[0] for p in t.prompts])),
            "methods": figures,
        }

    def decode(self, method: str, task: Task) -> tuple[dict[str, Any], np.ndarray]:
        """Figures of a run to the end and of one while all samples are live, and new tokens [b, n].

        Tokens after a sample's end are -1.
        """
        state = self.start(method, task)
        self.compile(method, task, state)
        if (method, state_shape(state)) not in self.warm:
            self.warm.add((method, state_shape(state)))
            # The first run is slower.
            self.advance(method, task, state, 1)
            state = self.start(method, task)
        lengths = np.asarray(state.lengths)
        state, seconds = self.advance(method, task, state, ALL_STEPS)
        counters = jax.device_get(state.counters)
        emitted = np.asarray(state.lengths) - lengths
        place = np.arange(self.source.new_tokens)
        tokens = np.take_along_axis(np.asarray(state.tokens), lengths[:, None] + place, axis=1)
        tokens = np.where(place < emitted[:, None], tokens, -1)
        figures = {
            "seconds": seconds,
            "tokens": int(emitted.sum()),
            "steps": int(counters.model_calls),
            "sample_steps": int(counters.num_steps.sum()),
            "drafted": int(counters.num_drafted.sum()),
            "rows": int(counters.real_rows),
            "padding_rows": int(counters.padding_rows),
            "masked_kv": int(state.cache.num_masked),
        }
        del state  # two caches never exist at once
        steps = int(counters.num_steps.min())
        begin = time.perf_counter()
        state = self.start(method, task)
        figures["prefill_seconds"] = time.perf_counter() - begin
        state, seconds = self.advance(method, task, state, steps)
        ends = np.asarray(state.lengths)
        figures |= {
            "live_seconds": seconds,
            "live_tokens": int((ends - lengths).sum()),
            "live_steps": steps,
            "live_rows": int(state.counters.real_rows),
            "live_cached_tokens": steps * float(((lengths + ends) / 2 - 1).sum()),
        }
        return figures, tokens

    def run(self, method: str, task: Task) -> Run:
        """The library's run; its model is taken apart once, as in `emsjax.generate`."""
        run = make_run(self.source.model, drafter_of(method, task), layout=METHODS[method])
        if self.weights is None:
            self.weights = run.flat().model
        return dataclasses.replace(run, model=self.weights)

    def advance(self, method: str, task: Task, state, steps: int):
        """The state after at most this many steps, and their seconds."""
        loop = self.compiled[method, state_shape(state)]
        begin = time.perf_counter()
        state, _ = loop(self.run(method, task), state, np.int32(steps))
        return jax.block_until_ready(state), time.perf_counter() - begin

    def start(self, method: str, task: Task):
        """The state after prefill."""
        state = init_state(
            self.source.model,
            drafter_of(method, task),
            task.prompts,
            max_new_tokens=self.source.new_tokens,
            eos_token_ids=self.source.end_token_ids,
            layout=METHODS[method],
        )
        return jax.block_until_ready(state)

    def prepare(self, methods: Sequence[str], task: Task) -> None:
        """Compile the loops of all methods concurrently."""
        identity = lambda state: state
        states = {m: jax.eval_shape(identity, self.start(m, task)) for m in methods}
        at_once(lambda method: self.compile(method, task, states[method]), methods)

    def compile(self, method: str, task: Task, state) -> None:
        """Compile the loop for this state's shapes, unless it has been compiled."""
        if (method, state_shape(state)) in self.compiled:
            return
        begin = time.perf_counter()
        compiled = decode_loop.lower(self.run(method, task), state, np.int32(1)).compile()
        self.compiled[method, state_shape(state)] = compiled
        about = {"compile_s": time.perf_counter() - begin, "memory_bytes": None}
        if (memory := compiled.memory_analysis()) is not None:
            sizes = (memory.argument_size_in_bytes, memory.output_size_in_bytes)
            beside = memory.temp_size_in_bytes - memory.alias_size_in_bytes
            about["memory_bytes"] = sum(sizes) + beside
        # For several shapes the largest values are kept.
        least = self.about.get(method, about)
        self.about[method] = {
            name: value and max(value, least[name]) for name, value in about.items()
        }

    def summary(self, method: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A method's figures.

        A step's time, floor and utilisation are those of steps with all samples live.
        `memory_bytes` covers the loop's weights and caches, and the temporary memory of a step.
        `prefill_s` is the median of `emsjax.init_state` for all prompts of a run, host's work
        included.
        `compile_s` is measured while the other methods compile as well.
        """
        total = {name: sum(run[name] for run in runs) for name in runs[0]}
        config, steps = self.source.model.config, total["live_steps"]
        rows = total["live_rows"] / steps / self.batch
        context = total["live_cached_tokens"] / steps / self.batch
        step = 1e3 * total["live_seconds"] / steps
        floor = utilisation = None
        if self.rates is not None:
            numbers = NumberFormats.of(self.source.model)
            peak = numbers.parts * self.rates.matmul  # of all devices
            floor = floor_ms(config, self.batch, rows, context, self.rates, numbers)
            flops = step_flops(config, self.batch * rows, context)
            utilisation = flops / (step / 1e3) / peak
        return {
            "tokens_per_s": spread([run["tokens"] / run["seconds"] for run in runs]),
            "live_tokens_per_s": spread([run["live_tokens"] / run["live_seconds"] for run in runs]),
            "mean_acceptance_length": total["tokens"] / total["sample_steps"],
            "padding_ratio": {
                "inputs": total["padding_rows"] / total["rows"],
                "kv": total["masked_kv"] / total["tokens"],
            },
            "prefill_s": float(np.median([run["prefill_seconds"] for run in runs])),
            "step_ms": step,
            "floor_ms": floor,
            "of_floor": floor and step / floor,
            "utilisation": utilisation,
            **self.about[method],
        }


def state_shape(state) -> tuple[int, ...]:
    return (*state.tokens.shape, state.cache.layers[0].keys.shape[1])


def drafter_of(method: str, task: Task) -> Any:
    return None if method == GREEDY else task.drafter


def step_flops(config, rows: float, context: float) -> float:
    """Floating-point operations of a step's products and attention, without padding rows."""
    weights = sum(n * m for n, m in config.architecture.products)
    attention = 2 * config.architecture.columns[0] * config.architecture.attended(context)
    return 2 * rows * (weights + attention)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "min": float(np.min(values)),
        "median": float(np.median(values)),
        "max": float(np.max(values)),
    }


def run(
    source: Source,
    results: dict[str, Any],
    *,
    batch_sizes: Sequence[int],
    methods: Sequence[str],
    rates: Rates | None = None,
    repeats: int,
    output: Path | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure the batch sizes that are missing in `results`, and write the file after each."""
    done = {entry["batch"] for entry in results["entries"]}
    for batch in batch_sizes:
        if batch not in done:
            bench = Bench(source, batch, rates, repeats)
            add_entry(bench.measure(methods, say), results, output)
            del bench
    return results


def all_identical(results: Mapping[str, Any]) -> bool:
    return all(of["identical"] for entry in results["entries"] for of in entry["methods"].values())
