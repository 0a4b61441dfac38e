"""`emsjax bench buckets`: the cost of rounding row counts up to compiled ones.

The number of rows of a step depends on its drafts and is rounded up to a bucket. This benchmark
times steps whose drafts follow the acceptance profile `llma` beside the same steps compiled for
exactly their row count. The row counts are quantiles of such steps, each with an equal share of
them. Both sides take turns within one process. Weights are random and bfloat16, and all drafts
are rejected.

The JSON file has an entry of `batches` for each batch size: its `buckets`; the `points` with
`rows`, `share` of all steps, `bucket`, and times of both sides in ms (see
`emsjax.benchmarks.runs`); and the `ratio` of the mean best times.
"""

import argparse
import dataclasses
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np

from emsjax.benchmarks.acceptance import CopyAcceptance
from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.rejected import RejectedDrafter
from emsjax.benchmarks.results import add_entry, begin
from emsjax.benchmarks.runs import (
    LONG,
    MAX_NEW_TOKENS,
    REPETITIONS,
    SHORT,
    LoopRun,
    random_model,
    time_steps,
)
from emsjax.benchmarks.shapes import MODELS
from emsjax.decode.layout import UNPADDED, Layout
from emsjax.generation import init_state
from emsjax.models.decoder import Decoder

PROFILE = CopyAcceptance()
POINTS, DRAWS = 5, 4096


@dataclasses.dataclass(frozen=True)
class ExactRows(Layout):
    """Steps compiled for exactly `num_rows` rows."""

    num_rows: int = 0

    def row_counts(self, batch: int, k1: int) -> tuple[int, ...]:
        return (self.num_rows,)


@dataclasses.dataclass
class Side:
    """A run with a layout of its own; both sides share the state of one run."""

    run: LoopRun
    layout: Layout
    long = LONG

    def advance(self, steps: int) -> float:
        self.run.layout = self.layout
        return self.run.advance(steps)


def typical_drafts(batch: int, points: int = POINTS) -> list[tuple[np.ndarray, float]]:
    """Typical steps: the draft tokens of each sample, [b], and the share of all steps.

    All steps are sorted by their rows and divided into equal parts, and the middle of each part
    is taken. Steps with the same number of rows are merged.
    """
    counts, _ = PROFILE.draw(np.random.default_rng(0), batch, DRAWS)
    totals = counts.sum(axis=0)
    order = np.argsort(totals, kind="stable")
    middles = order[(2 * np.arange(points) + 1) * DRAWS // (2 * points)]
    _, first, times = np.unique(totals[middles], return_index=True, return_counts=True)
    return [(counts[:, middles[i]], n / points) for i, n in zip(first, times, strict=True)]


def measure(model: Decoder, batch: int, context: int) -> dict[str, Any]:
    """Measure the entry of one batch size."""
    vocab, k = model.config.vocab_size, PROFILE.max_draft_tokens
    drafts = typical_drafts(batch)
    # As in `StepRun`, the middle of the timed steps has this context.
    length = context - (SHORT + LONG) // 2 + 2
    prompts = np.random.default_rng(1).integers(5, vocab - 1, (batch, length))
    drafter = RejectedDrafter(vocab - 1, k, counts=jnp.asarray(drafts[0][0]))
    state = init_state(
        model, drafter, list(prompts), max_new_tokens=MAX_NEW_TOKENS, eos_token_ids=()
    )
    run = LoopRun(model, drafter, state, None)
    points = []
    for counts, share in drafts:
        rows = batch + int(counts.sum())
        run.drafter = dataclasses.replace(drafter, counts=jnp.asarray(counts))
        sides = {"bucketed": Side(run, UNPADDED), "exact": Side(run, ExactRows(num_rows=rows))}
        fed = {}  # rows per step, padding included
        for name, side in sides.items():
            side.advance(LONG)  # compiles
            real, padding = (
                int(getattr(run.state.counters, f"{kind}_rows")) for kind in ("real", "padding")
            )
            if real != LONG * rows:
                raise RuntimeError(f"{LONG} steps fed {real} rows, not {rows} each")
            fed[name] = (real + padding) // LONG
        point = {"rows": rows, "share": share, "bucket": fed["bucketed"]}
        points.append(point | {"times": time_steps(sides)})
    total = lambda side: sum(of["share"] * of["times"][side]["best_ms"] for of in points)
    return {
        "batch": batch,
        "buckets": UNPADDED.row_counts(batch, k + 1),
        "ratio": total("bucketed") / total("exact"),
        "points": points,
    }


def run(options: argparse.Namespace, command: str) -> int:
    settings = {
        "model": options.model,
        "dtype": "bfloat16",
        "context": options.context,
        "acceptance": dataclasses.asdict(PROFILE),
        "repetitions": REPETITIONS,
    }
    results = begin(options, command, settings, entries="batches")
    model = random_model(MODELS[options.model])
    for batch in options.batch_sizes:
        entry = measure(model, batch, options.context)
        add_entry(entry, results, options.output, "batches")
        shown = ", ".join(
            "{rows} in {bucket}: {0:.3f} / {1:.3f} ms".format(
                *(of["best_ms"] for of in point["times"].values()), **point
            )
            for point in entry["points"]
        )
        print(f"batch {batch}, bucketed / exact rows: {entry['ratio']:.3f} ({shown})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(BENCHMARKS["buckets"].main())
