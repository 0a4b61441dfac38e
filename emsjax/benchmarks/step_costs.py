"""Times of decoding steps of a model's shape on this device, for draft-length policies.

Weights are random, as their values do not change times. For a deep model two slices with a few
layers are timed, and the time of all layers is extrapolated linearly. The time of a step is
modelled as a cost of its packed rows plus a cost of each cached token that is read; tokens are
partly read again where a sample has many rows. A draft model is timed by itself, and at more batch
sizes, as these need no compilation of the target.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import scipy.optimize

from emsjax.benchmarks.runs import (
    LONG,
    SHORT,
    DraftRun,
    StepRun,
    TimedRun,
    at_once,
    random_model,
    time_steps,
)
from emsjax.decode.row_counts import row_buckets
from emsjax.drafters import DraftModel
from emsjax.models.config import DecoderConfig
from emsjax.models.decoder import Decoder
from emsjax.models.numbers import NumberFormats
from emsjax.policies.costs import FORMAT, TILE_ROWS, StepCosts, accepted_at_rate, synergy_lengths
from emsjax.policies.lengths import FixedLength

SLICES = (2, 6)  # layers
# Steps of a run, if there is room. A GPU needs a while to slow down to its power limit: slices that
# ran for 13 steps at a time took up to 5 % less than their layers do in the whole model.
STEPS = 43
SECONDS, REPETITIONS = 0.5, 25  # time and most repetitions for a point
MUCH = 0.3  # relative change of a draft step's time between batch sizes
DRAFTED = 8  # tokens of a timed draft, at most


@dataclasses.dataclass(frozen=True)
class Point:
    """A timed step."""

    batch: int
    rows: int  # packed, padding included
    cached_tokens: float
    ms: float
    sample_rows: int = 1


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The steps to time."""

    config: DecoderConfig
    draft_config: DecoderConfig | None
    numbers: NumberFormats
    batch_sizes: Sequence[int]
    context: int  # mean cached tokens per sample
    max_draft_tokens: int
    attention: str | None = None

    @property
    def slices(self) -> tuple[int, ...]:
        """Numbers of layers of the timed models: two slices, or a shallow model itself."""
        layers = len(self.config.architecture.layers)
        return SLICES if layers > SLICES[-1] else (layers,)

    @property
    def steps(self) -> int:
        """Steps of the longer runs: fewer than `STEPS` if positions or the context limit them."""
        behind = self.config.max_position_embeddings - self.context - self.max_draft_tokens
        return int(np.clip(2 * min(behind, self.context // 2) - 8, LONG, STEPS))

    def run(self, say: Callable[[str], None]) -> tuple[list[Point], dict[int, float]]:
        """Points for every batch size, and milliseconds of a draft step by batch size.

        Raises:
            ValueError: the runs do not fit into the positions or into memory.
        """
        slices = [
            random_model(self.config.resized(layers=count), self.numbers) for count in self.slices
        ]
        draft_ms = self.time_drafting(say) if self.draft_config is not None else {}
        # One slice after the other. XLA chooses kernels for products by timing them: when slices
        # were compiled concurrently, they had different kernels for the same product, and a bucket
        # took 14 % more time.
        runs = [started(functools.partial(self.start, model), self.batch_sizes) for model in slices]
        points = []
        for batch, of_slices in zip(self.batch_sizes, zip(*runs, strict=True), strict=True):
            for point in self.time_rows(of_slices):
                points.append(point)
                say(
                    f"batch {batch}: {point.rows} rows ({point.sample_rows} of a sample), "
                    f"{point.cached_tokens:.0f} cached tokens: {point.ms:.3f} ms"
                )
        return points, draft_ms

    def start(self, model: Decoder, batch: int) -> StepRun:
        return StepRun(
            model,
            (batch, self.max_draft_tokens + 1),
            self.context,
            self.attention,
            draft_length=FixedLength(self.max_draft_tokens),
            long=self.steps,
        )

    def time_rows(self, runs: Sequence[StepRun]) -> Iterator[Point]:
        """Points of every row bucket at the context, and of the smallest at half the context."""
        batch, k1 = runs[0].shape
        buckets, before = row_buckets(batch, k1), 0
        # The most rows with which caches are read once, beside more rows in the same bucket.
        counts = {min(TILE_ROWS, k1)}
        for bucket in buckets:
            rows = min(bucket // batch, k1)
            if batch * rows > before:  # or this bucket is out of reach
                counts.add(rows)
                before = bucket
        for rows in sorted(counts):
            yield self.time_point(runs, rows)
        for run in runs:
            run.lengths = np.maximum(run.lengths // 2, 1)
        yield self.time_point(runs, max(buckets[0] // batch, 1))

    def time_point(self, runs: Sequence[StepRun], rows: int) -> Point:
        for run in runs:
            run.feed(rows)
        ms = extrapolate(self.slices, best_ms(runs), len(self.config.architecture.layers))
        fed = [run.fed() for run in runs][-1]
        packed = round(fed["rows_per_step"] + fed["padding_rows_per_step"])
        batch = runs[0].shape[0]
        return Point(batch, packed, batch * fed["mean_context"], ms, rows)

    def time_drafting(self, say: Callable[[str], None]) -> dict[int, float]:
        """Milliseconds per draft token, by batch size."""
        draft_model = random_model(self.draft_config, self.numbers.of_draft_model)
        tokens = min(DRAFTED, self.max_draft_tokens)
        drafter = DraftModel(draft_model, tokens, attention_implementation=self.attention)
        start = lambda batch: DraftRun(drafter, batch, self.context)

        def measure(batches: Sequence[int]) -> dict[int, float]:
            found = {}
            for batch, run in zip(batches, started(start, batches), strict=True):
                found[batch] = best_ms([run])[0] / tokens
                say(f"batch {batch}: a draft step {found[batch]:.3f} ms")
            return found

        found = measure(sorted(self.batch_sizes))
        return found | measure(means_between(found))


def started(start: Callable[[Any], TimedRun], subjects: Sequence[Any]) -> list[TimedRun]:
    """Runs of all subjects, compiled concurrently and warmed up.

    Nothing runs while the loops compile: XLA chooses kernels for products by timing them.
    """
    runs = at_once(start, subjects)
    at_once(lambda run: run.compile(), runs)
    for run in runs:
        run.advance(run.long)
    return runs


def means_between(found: dict[int, float]) -> list[int]:
    """Geometric means of neighbouring batch sizes whose times differ much."""
    means = [
        round(math.sqrt(few * many))
        for few, many in itertools.pairwise(sorted(found))
        if abs(found[many] - found[few]) > MUCH * found[few]
    ]
    return [size for size in means if size not in found]


def best_ms(runs: Sequence[TimedRun]) -> list[float]:
    """Milliseconds of a step of each run; runs take turns, as clock rates may change."""
    seconds = max(run.advance(SHORT) + run.advance(run.long) for run in runs)
    repetitions = int(np.clip(SECONDS / seconds, 3, REPETITIONS))
    times = time_steps(dict(enumerate(runs)), repetitions)
    return [of_run["best_ms"] for of_run in times.values()]


def extrapolate(counts: Sequence[int], ms: Sequence[float], layers: int) -> float:
    """The time of `layers` layers, extrapolated from those of one or two numbers of layers."""
    if len(counts) == 1:
        return ms[0]
    (fewer, more), (short, long) = counts, ms
    return long + (layers - more) * (long - short) / (more - fewer)


def fit_costs(
    points: Sequence[Point], draft_ms: dict[int, float]
) -> tuple[StepCosts, dict[str, float]]:
    """Costs of rows and of cached tokens by least squares of the relative error, and that error.

    Costs never decrease with rows or tokens: measured decreases are noise.
    """
    knots = sorted({point.rows for point in points})
    ms = np.array([point.ms for point in points])
    rows = np.array([point.rows for point in points])
    tokens = np.array([point.cached_tokens for point in points])
    again = tokens * [(point.sample_rows - 1) // TILE_ROWS for point in points]
    # Costs of the fewest rows, of each further knot, and of a token that is read, and read again.
    columns = np.column_stack([rows[:, None] >= knots, tokens, again]).astype(float)
    solution, _ = scipy.optimize.nnls(columns / ms[:, None], np.ones(len(ms)))
    errors = np.abs(columns @ solution / ms - 1)
    *added_ms, token_ms, again_ms = solution.tolist()
    row_ms = np.maximum(np.cumsum(added_ms), 1e-6).tolist()
    reread = again_ms / token_ms if token_ms > 0 else 0.0
    costs = StepCosts.of(dict(zip(knots, row_ms, strict=True)), token_ms, draft_ms or 0.0, reread)
    return costs, {"mean_error": float(errors.mean()), "max_error": float(errors.max())}


def fit_synergy(points: Sequence[Point], accepted: np.ndarray) -> dict[str, Any]:
    """The quantitative model of Synergy, and its error.

    t_verify(b, s) = alpha_b s + beta_b for each batch size b, where s + 1 is the number of rows of
    a sample, and accepted tokens l(s) = c s^gamma.

    Reference: The Synergy of Speculative Decoding and Batching, arXiv 2310.18813.
    """
    verify = {}
    for batch in sorted({point.batch for point in points}):
        full = max(point.cached_tokens for point in points if point.batch == batch)
        chosen = [p for p in points if p.batch == batch and p.cached_tokens == full]
        s = np.array([point.sample_rows - 1 for point in chosen])
        ms = np.array([point.ms for point in chosen])
        columns = np.column_stack([s, np.ones(len(s))]) / ms[:, None]
        alpha, beta = np.linalg.lstsq(columns, np.ones(len(s)), rcond=None)[0]
        error = np.abs((alpha * s + beta) / ms - 1).max()
        verify[batch] = {"alpha_ms": alpha, "beta_ms": beta, "max_error": error}
    s = np.arange(1, len(accepted))
    gamma, log_c = np.polyfit(np.log(s), np.log(accepted[1:]), 1) if len(s) > 1 else (1.0, 0.0)
    error = np.abs(np.exp(log_c) * s**gamma / accepted[1:] - 1).max()
    accept = {"c": float(np.exp(log_c)), "gamma": float(gamma), "max_error": float(error)}
    numbers = {b: {name: float(x) for name, x in of.items()} for b, of in verify.items()}
    return {"verify": numbers, "accepted": accept}


def measure_profile(
    measurement: Measurement, acceptance_rate: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """The content of a profile file, except versions and hardware.

    Raises:
        ValueError: an acceptance rate outside 0..1, or steps that cannot be measured here.
    """
    if not 0 < acceptance_rate < 1:
        raise ValueError(f"--acceptance-rate must be between 0 and 1, not {acceptance_rate}")
    points, draft_ms = measurement.run(say)
    costs, errors = fit_costs(points, draft_ms)
    k = measurement.max_draft_tokens
    accepted = accepted_at_rate(acceptance_rate, k)
    sizes = range(1, max(measurement.batch_sizes) + 1)
    lengths = synergy_lengths(costs, sizes, measurement.context, accepted, np.arange(k + 1.0))
    whole = lambda table, values: {int(at): float(x) for at, x in zip(table, values, strict=True)}
    return {
        "format": FORMAT,
        "settings": {
            "batch_sizes": list(measurement.batch_sizes),
            "context": measurement.context,
            "max_draft_tokens": k,
            "attention": measurement.attention,
            "slices": list(measurement.slices),
        },
        "points": [dataclasses.asdict(point) for point in points],
        "costs": {
            "row_ms": whole(costs.rows, costs.row_ms),
            "token_ms": float(costs.token_ms),
            "reread": float(costs.reread),
            "draft_ms": whole(costs.batches, costs.draft_ms),
        },
        "fit": {**errors, "synergy": fit_synergy(points, accepted)},
        "table": {"acceptance_rate": acceptance_rate, "lengths": lengths},
    }
