"""`emsjax bench invariance`: whether a row has the same bits whatever is computed beside it.

One sequence is fed whole. Its rows are then computed again: in calls of every number of rows, and
in batches of samples that are beginnings of the sequence, of random lengths and with random numbers
of rows. Compared are the inputs of the layers, queries, keys and values in all layers, the output
of the last layer, logits and log-probabilities. The weights are random. The exit code is 1 unless
all bits are the same with invariant numerics.

The JSON file has one of the `entries` for each model and kind of numerics: how many `rows` were
compared in how many `calls`, and how many of them differ.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32

from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.results import add_entry, begin
from emsjax.benchmarks.runs import at_once, random_model
from emsjax.benchmarks.shapes import MODELS
from emsjax.decode.base import Model
from emsjax.decode.cache import KVCache
from emsjax.decode.kernels import resolve_kernels
from emsjax.decode.pack import PackedRows, pack
from emsjax.models.numbers import NumberFormats
from emsjax.sampling import log_softmax
from emsjax.terminal.options import NUMERICS
from pallas_kernels.common.blocks import in_blocks
from pallas_kernels.common.indexing import take
from pallas_kernels.common.numerics import numerics

DTYPE = jnp.bfloat16
DRAFT_ROWS = 8  # most rows of a sample in a random batch
# Compiled at once by one process; few, so that all processes end at about the same time.
CALLS_OF_TASK = 12
SCORED_ROWS = 128  # rows of the whole sequence whose logits are computed at once


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: how many tokens of each sample are cached, and how many rows it has.

    Attributes:
        starts: cached tokens of each sample.
        counts: rows of each sample.
        num_rows: rows of the call, padding included.
        bounded: whether the call knows a bound of a sample's rows, as in decoding.
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    num_rows: int
    bounded: bool


def cases(length: int, row_counts: list[int], batches: int, seed: int = 0) -> list[Case]:
    """Every number of rows, after no cached tokens and after some, and random batches."""
    rng = np.random.default_rng(seed)
    found = [Case((0,), (n,), n, False) for n in row_counts]
    later = [n for n in row_counts if n <= 64]
    found += [Case((int(rng.integers(1, length - n)),), (n,), n, True) for n in later]
    for _ in range(batches):
        batch = int(rng.integers(1, 65))
        counts = rng.integers(1, DRAFT_ROWS + 1, batch)
        starts = rng.integers(0, length - DRAFT_ROWS, batch)
        num_rows = -(-int(counts.sum()) // 8) * 8
        found.append(Case(tuple(starts.tolist()), tuple(counts.tolist()), num_rows, True))
    return found


def computed(model: Model, tokens, rows: PackedRows, cache: KVCache, bound: int | None):
    """What the layers compute for the rows, and the final hidden states."""
    out = model(
        take(tokens, rows.positions),
        rows,
        cache,
        attention=resolve_kernels(None).attention,
        max_rows_per_sample=bound,
        taps=tuple(range(len(cache.layers) + 1)),
    )
    return {"inputs": out.taps, "fresh": out.fresh}, out.hidden


def scores(model: Model, hidden) -> dict[str, Array]:
    """Logits and log-probabilities."""
    logits = model.logits(hidden)
    return {"logits": logits, "log-probabilities": log_softmax(logits)}


@jax.jit
def feed_whole(model: Model, tokens: Int32[Array, " t"]):
    """What is computed for the whole sequence, alone."""
    rows = pack(jnp.zeros(1, jnp.int32), jnp.full(1, len(tokens), jnp.int32), len(tokens))
    return computed(model, tokens, rows, model.init_cache(1, len(tokens)), None)


@jax.jit
def score_whole(model: Model, hidden) -> dict[str, Array]:
    """The scores of the whole sequence, some rows at a time."""
    return in_blocks(functools.partial(scores, model), hidden, size=SCORED_ROWS)


def differing(whole, found, positions) -> Array:
    """Which rows have other bits than the same positions of the whole sequence, bool [r]."""

    def same(x, y):
        x, y = (lax.bitcast_convert_type(of, f"uint{8 * y.dtype.itemsize}") for of in (x, y))
        return jnp.all((take(x, positions) == y).reshape(len(positions), -1), axis=1)

    alike = jax.tree.leaves(jax.tree.map(same, whole, found))
    return ~jnp.all(jnp.stack(alike), axis=0)


class Comparison:
    """One model's sequence, and calls that compute its rows again."""

    def __init__(self, model: Model, length: int):
        self.model, vocab = model, model.config.vocab_size
        self.tokens = jnp.asarray(
            np.random.default_rng(1).integers(5, vocab - 1, length), jnp.int32
        )
        self.whole, hidden = feed_whole(model, self.tokens)
        # The scores of other calls are computed with other numbers of rows.
        self.whole |= score_whole(model, hidden)

    def program(self, case: Case) -> Callable[[], Any]:
        """The compiled call, which returns the number of rows with other bits anywhere."""
        bound = max(case.counts) if case.bounded else None

        @jax.jit
        def call(model, tokens, whole, starts, counts):
            cache = cache_of(model, whole["fresh"], starts, len(tokens))
            rows = pack(starts, counts, case.num_rows)
            found, hidden = computed(model, tokens, rows, cache, bound)
            found |= scores(model, hidden)
            is_real = rows.segment_ids < len(case.counts)
            return jnp.sum(differing(whole, found, rows.positions) & is_real)

        numbers = (jnp.asarray(x, jnp.int32) for x in (case.starts, case.counts))
        arguments = (self.model, self.tokens, self.whole, *numbers)
        compiled = call.lower(*arguments).compile()
        return lambda: compiled(*arguments)


def cache_of(model: Model, fresh, starts, length: int) -> KVCache:
    """A cache whose samples hold the first `starts` tokens of the sequence."""
    cache = model.init_cache(len(starts), length)
    layers = []
    for layer, qkv in zip(cache.layers, fresh, strict=True):
        kv_heads = layer.keys.shape[2]
        keys, values = qkv[:, -2 * kv_heads : -kv_heads], qkv[:, -kv_heads:]
        fill = lambda x, like: jnp.broadcast_to(x, like.shape).astype(like.dtype)
        filled = {"keys": fill(keys, layer.keys), "values": fill(values, layer.values)}
        layers.append(dataclasses.replace(layer, **filled))
    return dataclasses.replace(cache, layers=tuple(layers), lengths=starts)


class Task(NamedTuple):
    """Calls of one model that a process compares."""

    model: str
    layers: int
    context: int
    numerics: str
    calls: tuple[Case, ...]


@functools.lru_cache(maxsize=1)
def comparison_of(model: str, layers: int, context: int, kind: str) -> Comparison:
    """The model's sequence. A process keeps the one of its last task."""
    with numerics(kind):
        config = MODELS[model].resized(layers=layers)
        return Comparison(random_model(config, NumberFormats(DTYPE)), context)


def compare(task: Task) -> list[int]:
    """The number of rows with other bits in each call."""
    comparison = comparison_of(task.model, task.layers, task.context, task.numerics)
    with numerics(task.numerics):
        return [int(program()) for program in at_once(comparison.program, task.calls)]


def entry_of(calls: Sequence[Case], differing: Sequence[int]) -> dict[str, Any]:
    """The numbers of one model."""
    return {
        "calls": len(calls),
        "rows": sum(sum(call.counts) for call in calls),
        "differing_calls": sum(number > 0 for number in differing),
        "differing_rows": sum(differing),
    }


def row_counts(text: str) -> list[int]:
    """All numbers of "1-64,72,128": ranges and single numbers."""
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def run(options: argparse.Namespace, command: str) -> int:
    settings = {
        name: getattr(options, name) for name in ("layers", "context", "row_counts", "batches")
    }
    if options.processes > 1:  # they share the device's memory
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    results = begin(options, command, settings | {"dtype": jnp.dtype(DTYPE).name})
    calls = cases(options.context, row_counts(options.row_counts), options.batches)
    starts = range(0, len(calls), CALLS_OF_TASK)
    parts = [tuple(calls[at : at + CALLS_OF_TASK]) for at in starts]
    kinds = NUMERICS[1:] if options.skip_fast else NUMERICS[::-1]
    known = {(entry["model"], entry["numerics"]) for entry in results["entries"]}
    subjects = [of for of in itertools.product(options.models, kinds) if of not in known]
    tasks = [
        Task(name, options.layers, options.context, kind, part)
        for name, kind in subjects
        for part in parts
    ]
    with contextlib.ExitStack() as stack:
        mapped = map
        if options.processes > 1:
            spawn = multiprocessing.get_context("spawn")
            mapped = stack.enter_context(ProcessPoolExecutor(options.processes, spawn)).map
        found = iter(mapped(compare, tasks))
        for name, kind in subjects:
            differing = list(itertools.chain(*itertools.islice(found, len(parts))))
            entry = {"model": name, "numerics": kind, **entry_of(calls, differing)}
            print(
                f"{name}, {kind}: {entry['differing_rows']} of {entry['rows']} rows differ, in "
                f"{entry['differing_calls']} of {entry['calls']} calls",
                flush=True,
            )
            add_entry(entry, results, options.output)
    comparison_of.cache_clear()
    wrong = [of["differing_rows"] for of in results["entries"] if of["numerics"] == "invariant"]
    return int(any(wrong))


if __name__ == "__main__":
    sys.exit(BENCHMARKS["invariance"].main())
