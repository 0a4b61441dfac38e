"""Costs of a step: their arithmetic, their fit to measured times, and how policies read them."""

import contextlib
import dataclasses
import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_model

import emsjax
from emsjax.benchmarks import runs
from emsjax.benchmarks import step_costs as measured
from emsjax.benchmarks.shapes import MODELS
from emsjax.benchmarks.step_costs import Measurement, Point
from emsjax.decode.row_counts import row_buckets
from emsjax.models.numbers import NumberFormats
from emsjax.policies.costs import (
    FORMAT,
    LEAST_GAIN,
    TILE_ROWS,
    accepted_at_rate,
    along,
    synergy_lengths,
    synergy_ms,
)
from pallas_kernels.attention import tilings

pytestmark = pytest.mark.usefixtures("unchecked_annotations")


@pytest.mark.parametrize(
    ("x", "expected"),
    [(0, 2), (4, 2), (6, 3), (8, 4), (14, 7), (16, 8), (20, 10), (48, 24)],
)
def test_costs_are_linear_between_the_knots_and_beyond_the_last(x, expected):
    knots, values = jnp.array([4.0, 8.0, 16.0]), jnp.array([2.0, 4.0, 8.0])
    assert along(jnp.float32(x), knots, values) == expected


def test_costs_beyond_the_last_knot_have_the_last_slope_and_never_fall():
    knots = jnp.array([1.0, 2.0, 4.0])
    last = lambda *values: along(jnp.array([4.0, 6.0]), knots, jnp.array(values)).tolist()
    assert last(1.0, 5.0, 6.0) == [6, 7]
    assert last(1.0, 5.0, 3.0) == [3, 3]


def test_a_single_knot_is_a_constant():
    assert (
        along(jnp.array([0.0, 4.0, 99.0]), jnp.array([4.0]), jnp.array([2.5])).tolist() == [2.5] * 3
    )


def test_a_step_costs_its_rows_and_its_cached_tokens():
    costs = emsjax.StepCosts.of({32: 3.0, 16: 2.0}, 0.01, {8: 0.5, 2: 0.25})
    step_ms = costs.step_ms(jnp.array([8.0, 24.0, 48.0]), jnp.float32(100))
    np.testing.assert_allclose(step_ms, [3, 3.5, 5])
    assert [float(costs.draft_step_ms(slots)) for slots in (1, 2, 5, 8)] == [0.25, 0.25, 0.375, 0.5]
    assert costs.draft_step_ms(14) == 0.75


def test_caches_of_samples_with_many_rows_are_read_again():
    costs = emsjax.StepCosts.of({1: 1.0}, 0.01, reread=0.25)
    rows = jnp.array([[0, 1, 16], [17, 32, 33]])
    read = costs.tokens_read(jnp.array([100.0, 100.0, 200.0]), rows)
    np.testing.assert_allclose(read, [[100, 100, 200], [125, 125, 300]])


def test_one_time_of_a_draft_step_serves_all_batch_sizes():
    costs = emsjax.StepCosts.of({1: 1.0}, draft_ms=0.5)
    assert costs.draft_step_ms(1) == costs.draft_step_ms(64) == 0.5
    assert emsjax.StepCosts.of({1: 1.0}).draft_step_ms(8) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: emsjax.StepCosts.of({}), "row_ms is empty"),
        (lambda: emsjax.StepCosts.of({1: 1.0}, draft_ms={}), "draft_ms is empty"),
        (lambda: emsjax.StepCosts.of({1: 1.0, 2: 0.0}), r"row_ms\[2\] must be finite and"),
        (
            lambda: emsjax.StepCosts.of({1: 1.0, 2: math.nan}),
            r"row_ms\[2\] must be finite and",
        ),
        (lambda: emsjax.StepCosts.of({1: "x"}), r"row_ms\[1\] must be finite and above 0"),
        (lambda: emsjax.StepCosts.of({0: 1.0}), "a key of row_ms must be at least 1, not 0"),
        (
            lambda: emsjax.StepCosts.of({1: 1.0}, -0.1),
            "token_ms must be .* at least 0, not -0.1",
        ),
        (
            lambda: emsjax.StepCosts.of({1: 1.0}, draft_ms=-1.0),
            "draft_ms must be finite and at least",
        ),
        (
            lambda: emsjax.StepCosts.of({1: 1.0}, draft_ms={1: 0, 2: -1}),
            r"draft_ms\[2\] must be finite and at least 0",
        ),
    ],
    ids=[
        "no rows",
        "no draft times",
        "nothing",
        "no number",
        "a text",
        "of no row",
        "a token",
        "a draft",
        "a batch's draft",
    ],
)
def test_impossible_costs_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


ROW_MS = {1: 1.0, 16: 1.1, 24: 1.6, 40: 3.0}
TOKEN_MS, DRAFT_MS, CONTEXT = 0.001, {1: 0.1, 8: 0.15}, 50
PROFILE = {
    "format": FORMAT,
    "settings": {"max_draft_tokens": 4, "context": CONTEXT},
    "costs": {"row_ms": ROW_MS, "token_ms": TOKEN_MS, "reread": 0.5, "draft_ms": DRAFT_MS},
    "table": {"lengths": {1: 4, 3: 2, 8: 0}},
}


def entries(table) -> dict[int, int]:
    return dict(zip(table.sizes.tolist(), table.draft_lengths.tolist(), strict=True))


def fastest_length(batch, accepted, drafted, draft_ms=DRAFT_MS) -> int:
    """The s with the least T(b, s), one by one."""
    buckets, ms_per_token = row_buckets(batch, len(accepted)), []
    for s in range(len(accepted)):
        share, verify = drafted[s] / max(s, 1), TOKEN_MS * batch * CONTEXT
        for n in range(batch + 1):  # samples that draft
            bucket = min(b for b in buckets if b >= batch + n * s)
            probability = math.comb(batch, n) * share**n * (1 - share) ** (batch - n)
            verify += probability * np.interp(bucket, list(ROW_MS), list(ROW_MS.values()))
        draft = s * np.interp(batch, list(draft_ms), list(draft_ms.values()))
        ms_per_token.append((verify + draft) / (accepted[s] + 1))
    return min(range(len(accepted)), key=ms_per_token.__getitem__)


@pytest.mark.parametrize("written", [False, True], ids=["dict", "file"])
def test_a_profile_has_a_table(written, tmp_path):
    profile = PROFILE
    if written:
        profile = tmp_path / "profile.json"
        profile.write_text(json.dumps(PROFILE))
    assert entries(emsjax.BatchSizeTable.from_profile(profile)) == {1: 4, 3: 2, 8: 0}


@pytest.mark.parametrize("rate", [0, 0.3, 0.6, 0.8, 1])
def test_a_table_of_a_rate_has_the_fastest_lengths(rate):
    found = entries(emsjax.BatchSizeTable.from_profile(PROFILE, rate))
    accepted = [sum(rate**i for i in range(1, s + 1)) for s in range(5)]
    assert found == {b: fastest_length(b, accepted, range(5)) for b in (1, 3, 8)}


@pytest.mark.parametrize(
    ("histogram", "longest"),
    [([[3, 0, 0, 1, 2], [1, 0, 0, 0, 3]], 4), ([[6, 0, 0, 0, 0], [2, 1, 1, 0, 0]], 1)],
    ids=["most are accepted", "most are rejected"],
)
def test_a_table_of_a_run_has_the_fastest_lengths(histogram, longest):
    # A draft of 4 tokens in 6 of 10 steps. If all samples drafted, not more than 1 would pay at 8.
    histogram = np.array(histogram)
    accepted = [sum(min(n, s) * histogram.sum(0)[n] for n in range(5)) / 10 for s in range(5)]
    drafted = [0.6 * s for s in range(5)]
    stats = SimpleNamespace(accepted_histogram=histogram, num_drafted=np.array([16, 8]))
    found = entries(emsjax.BatchSizeTable.from_profile(PROFILE, stats))
    assert found == {b: fastest_length(b, accepted, drafted) for b in (1, 3, 8)}
    assert found[8] == longest


@pytest.mark.parametrize("rate", [None, 0.6])
def test_a_table_for_free_drafts_leaves_out_what_the_draft_model_costs(rate):
    # Without a given rate, the profile's is used.
    profile = PROFILE | {"table": PROFILE["table"] | {"acceptance_rate": 0.6}}
    found = entries(emsjax.BatchSizeTable.from_profile(profile, rate, free=True))
    accepted = [sum(0.6**i for i in range(1, s + 1)) for s in range(5)]
    wanted = {b: fastest_length(b, accepted, range(5), {1: 0.0}) for b in (1, 3, 8)}
    assert found == wanted != entries(emsjax.BatchSizeTable.from_profile(profile, 0.6))


@pytest.mark.parametrize("written", [False, True], ids=["dict", "file"])
def test_costs_are_read_back_from_a_profile(written, tmp_path):
    profile = json.loads(json.dumps(PROFILE))
    if written:
        profile = tmp_path / "profile.json"
        profile.write_text(json.dumps(PROFILE))
    for costs in (
        emsjax.StepCosts.from_profile(profile),
        emsjax.Goodput.from_profile(profile).costs,
    ):
        assert dict(zip(costs.rows.tolist(), costs.row_ms, strict=True)) == pytest.approx(ROW_MS)
        assert costs.token_ms == pytest.approx(TOKEN_MS)
        assert costs.draft_step_ms(8) == pytest.approx(DRAFT_MS[8])
        assert costs.batches.tolist() == list(DRAFT_MS)


READERS = [emsjax.StepCosts, emsjax.Goodput, emsjax.BatchSizeTable]


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_a_file_that_is_not_a_profile_is_refused(reader, tmp_path):
    path = tmp_path / "other"
    for text, message in (
        ("rows", "other is not JSON"),
        (json.dumps([PROFILE]), "other is not of the format"),
        (json.dumps(PROFILE | {"format": "emsjax profile 1"}), "other is not of the format"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            reader.from_profile(path)
    for none in ({}, {"costs": [1]}):
        with pytest.raises(ValueError, match="profile holds no costs"):
            reader.from_profile({"format": FORMAT} | none)
    some = {name: PROFILE["costs"][name] for name in ("row_ms", "draft_ms")}
    with pytest.raises(ValueError, match="profile holds no token_ms, reread"):
        reader.from_profile(PROFILE | {"costs": some})
    if reader is emsjax.BatchSizeTable:
        with pytest.raises(ValueError, match="no table"):
            reader.from_profile({"format": FORMAT, "costs": PROFILE["costs"]})
    for other in ({}, {"costs": PROFILE["costs"]}):
        with pytest.raises(ValueError, match="profile is not of the format 'emsjax profile 2'"):
            reader.from_profile(other)


@pytest.mark.parametrize("rate", [1.1, -0.1, np.nan])
def test_a_rate_that_is_not_a_probability_is_refused(rate):
    with pytest.raises(ValueError, match=r"acceptance must be in 0\.\.1"):
        emsjax.BatchSizeTable.from_profile(PROFILE, rate)


def points_of(row_ms, token_ms, cached=(100.0, 50.0)) -> list[Point]:
    """Each row count at the first number of cached tokens, the first one at the others too."""
    places = [(rows, cached[0]) for rows in row_ms] + [(min(row_ms), n) for n in cached[1:]]
    return [Point(1, rows, n, row_ms[rows] + token_ms * n) for rows, n in places]


def of_points(points, draft_ms=None):
    costs, errors = measured.fit_costs(points, draft_ms or {})
    read = lambda p: costs.tokens_read(jnp.float32(p.cached_tokens), jnp.array(p.sample_rows))
    fitted = [float(costs.step_ms(jnp.float32(point.rows), read(point))) for point in points]
    relative = np.abs(np.array(fitted) / [point.ms for point in points] - 1)
    assert errors["mean_error"] == pytest.approx(relative.mean(), abs=1e-6)
    assert errors["max_error"] == pytest.approx(relative.max(), abs=1e-6)
    return costs, errors


def test_exact_times_are_fitted_exactly():
    row_ms = {16: 2.0, 32: 2.5, 64: 7.0}
    costs, errors = of_points(points_of(row_ms, 0.004), {1: 0.25, 8: 0.5})
    assert dict(zip(costs.rows.tolist(), costs.row_ms, strict=True)) == pytest.approx(row_ms)
    assert costs.token_ms == pytest.approx(0.004)
    assert costs.batches.tolist() == [1, 8]
    assert costs.draft_ms.tolist() == [0.25, 0.5]
    assert errors["max_error"] < 1e-9


def test_the_cost_of_reading_a_cache_again_is_fitted_exactly():
    row_ms, token_ms, reread = {16: 2.0, 32: 2.5, 64: 7.0}, 0.004, 0.4
    places = [(16, 100, 16), (16, 50, 16), (32, 100, 17), (64, 100, 16), (64, 100, 33)]
    times = [row_ms[rows] + token_ms * n * (1 + reread * ((m - 1) // 16)) for rows, n, m in places]
    costs, errors = of_points(
        [Point(1, rows, n, ms, m) for (rows, n, m), ms in zip(places, times, strict=True)]
    )
    assert costs.reread == pytest.approx(reread)
    assert costs.row_ms.tolist() == pytest.approx(list(row_ms.values()))
    assert errors["max_error"] < 1e-6


def test_the_cost_of_reading_again_is_0_if_all_caches_are_read_once():
    assert of_points(points_of({16: 2.0, 32: 2.5}, 0.004))[0].reread == 0


def test_the_error_of_a_fit_is_relative_and_reported():
    points = points_of({16: 2.0, 32: 2.5}, 0.004, (100.0, 50.0, 75.0))
    points[-1] = Point(1, 16, 75, 1.1 * points[-1].ms)
    costs, errors = of_points(points)
    assert 0.01 < errors["mean_error"] < errors["max_error"] < 0.1
    assert costs.draft_ms.tolist() == [0]
    squares = lambda row, token: sum(
        ((row + token * p.cached_tokens) / p.ms - 1) ** 2 for p in points if p.rows == 16
    )
    row, token = float(costs.row_ms[0]), float(costs.token_ms)
    for other in ((1.01 * row, token), (0.99 * row, token), (row, 1.1 * token), (row, 0.9 * token)):
        assert squares(row, token) < squares(*other)


def test_no_cached_token_makes_a_step_faster():
    # The constant with the least squares of (1 / 1 - 1) and (ms / 2 - 1) is 1.5 / 1.25.
    costs, errors = of_points([Point(1, 16, 100, 1), Point(1, 16, 50, 2), Point(1, 32, 100, 5)])
    assert costs.token_ms == 0
    assert costs.row_ms.tolist() == pytest.approx([1.2, 5])
    assert errors["max_error"] == pytest.approx(0.4)


def test_more_rows_make_no_step_faster():
    # The constant with the least squares of (c / 4 - 1) and (c / 3 - 1) is (1/4 + 1/3) / (25/144).
    times = {16: 2.0, 32: 4.0, 64: 3.0, 128: 6.0}
    costs, errors = of_points([Point(1, rows, 0, ms) for rows, ms in times.items()])
    assert costs.row_ms.tolist() == pytest.approx([2, 3.36, 3.36, 6])
    assert errors["max_error"] == pytest.approx(0.16)


@pytest.mark.parametrize(
    ("counts", "ms", "expected"), [((2,), [5.0], 5), ((2, 6), [5.0, 9.0], 35), ((1, 2), [3, 4], 34)]
)
def test_further_layers_cost_as_much_as_those_between_the_slices(counts, ms, expected):
    assert measured.extrapolate(counts, ms, 32) == expected


def test_times_that_follow_the_synergy_model_are_fitted_exactly():
    verify = {1: (0.5, 4.0), 8: (1.5, 6.0)}
    points = [
        Point(batch, 64, 100, alpha * s + beta, s + 1)
        for batch, (alpha, beta) in verify.items()
        for s in (0, 1, 3)
    ]
    # Times at another context are left out of the fit.
    points += [Point(batch, batch, 50, 99.0) for batch in verify]
    accepted = 0.9 * np.arange(5.0) ** 0.6
    found = measured.fit_synergy(points, accepted)
    for batch, (alpha, beta) in verify.items():
        assert found["verify"][batch] == pytest.approx(
            {"alpha_ms": alpha, "beta_ms": beta, "max_error": 0}, abs=1e-9
        )
    assert found["accepted"] == pytest.approx({"c": 0.9, "gamma": 0.6, "max_error": 0}, abs=1e-9)


def test_a_synergy_fit_reports_its_largest_error():
    points = [Point(1, rows, 9, ms, rows) for rows, ms in ((1, 4.0), (2, 4.0), (3, 6.0))]
    found = measured.fit_synergy(points, accepted_at_rate(0.7, 8))
    verify, accepted = found["verify"][1], found["accepted"]
    off = [(verify["alpha_ms"] * s + verify["beta_ms"]) / ms - 1 for s, ms in enumerate((4, 4, 6))]
    assert verify["max_error"] == pytest.approx(np.abs(off).max())
    assert 0.05 < verify["max_error"] < 0.3
    s, means = np.arange(1, 9), np.cumsum(0.7 ** np.arange(1, 9))
    off = accepted["c"] * s ** accepted["gamma"] / means - 1
    assert accepted["max_error"] == pytest.approx(np.abs(off).max())
    assert 0.01 < accepted["max_error"] < 0.3


def test_accepted_tokens_of_a_rate_are_sums_of_its_powers():
    np.testing.assert_allclose(accepted_at_rate(0.5, 3), [0, 0.5, 0.75, 0.875])


MEASUREMENT = Measurement(
    config=MODELS["tiny"],
    draft_config=MODELS["tiny"],
    numbers=NumberFormats(jnp.float32),
    batch_sizes=(1, 2),
    context=24,
    max_draft_tokens=3,
)


@pytest.fixture(scope="module")
def profile() -> dict:
    said = []
    found = measured.measure_profile(MEASUREMENT, 0.7, said.append)
    assert len(said) == len(found["points"]) + len(MEASUREMENT.batch_sizes)
    return json.loads(json.dumps(found))


def test_points_are_steps_of_every_bucket_and_of_half_the_context(profile):
    # So few rows have one bucket, of 4 rows per sample.
    fed = [(point["batch"], point["rows"]) for point in profile["points"]]
    assert fed == [(1, 4), (1, 4), (2, 8), (2, 8)]
    for whole, half in (profile["points"][:2], profile["points"][2:]):
        assert whole["cached_tokens"] == pytest.approx(24 * whole["batch"], abs=whole["batch"])
        assert half["cached_tokens"] / whole["cached_tokens"] == pytest.approx(0.6, abs=0.1)
    assert all(point["ms"] > 0 for point in profile["points"])
    assert min(profile["costs"]["row_ms"].values()) > 0
    assert profile["costs"]["token_ms"] >= 0
    assert profile["costs"]["draft_ms"].keys() == {"1", "2"}
    assert min(profile["costs"]["draft_ms"].values()) > 0


def buckets_reached(shape, rows):
    """The buckets of steps in which every sample of a batch of this shape has so many rows."""
    buckets = np.array(row_buckets(*shape))
    return set(buckets[np.searchsorted(buckets, shape[0] * np.array(rows))])


def test_rows_up_to_which_caches_are_read_once_are_timed_beside_more_of_the_same_bucket():
    fed = []

    class Timed(Measurement):
        def time_point(self, runs, rows):
            fed.append(rows)

    counts = lambda batch, k1: SimpleNamespace(shape=(batch, k1), lengths=np.array([9] * batch))
    for shape, expected in (((8, 17), 17), ((64, 17), 17), ((8, 16), 16), ((1, 17), 17)):
        fed.clear()
        list(Timed(**vars(MEASUREMENT)).time_rows([counts(*shape)]))
        *whole, half = fed
        assert whole == sorted(set(whole))
        assert half == whole[0]
        assert whole[-1] == expected
        assert 16 in whole
        reached = buckets_reached(shape, rows=range(1, shape[1] + 1))
        assert buckets_reached(shape, rows=whole) == reached


def test_a_tile_of_rows_is_the_attentions():
    assert tilings.DECODE.rows == TILE_ROWS
    assert emsjax.Goodput(emsjax.StepCosts.of({1: 1.0})).limit == TILE_ROWS - 1


@pytest.mark.parametrize(
    ("positions", "context", "steps"),
    [(2048, 900, 43), (941, 900, 43), (925, 900, 36), (64, 24, 16)],
)
def test_slices_run_long_where_there_is_room(positions, context, steps):
    config = dataclasses.replace(MEASUREMENT.config, max_position_embeddings=positions)
    deep = dataclasses.replace(MEASUREMENT, config=config, context=context)
    assert deep.steps == steps


def test_two_slices_of_a_deep_model_take_turns(monkeypatch):
    turns, compiled = [], []
    compile_run = runs.StepRun.compile

    def take_turns(runs, repetitions):
        assert {run.long for run in runs.values()} == {deep.steps}
        turns.append([run.model.config.num_hidden_layers for run in runs.values()])
        return {name: {"best_ms": 10.0 + n} for name, n in zip(runs, turns[-1], strict=True)}

    def noted(run):
        compiled.append(run.model.config.num_hidden_layers)
        compile_run(run)

    monkeypatch.setattr(measured, "SLICES", (1, 2))
    monkeypatch.setattr(measured, "time_steps", take_turns)
    monkeypatch.setattr(runs.StepRun, "compile", noted)
    config = dataclasses.replace(MEASUREMENT.config, num_hidden_layers=5)
    deep = dataclasses.replace(MEASUREMENT, config=config, draft_config=None, batch_sizes=(1, 2))
    points, draft_ms = deep.run(lambda line: None)
    assert compiled == [1, 1, 2, 2]
    assert turns == [[1, 2]] * 4
    assert [point.ms for point in points] == [15.0] * 4
    assert draft_ms == {}
    assert points[0].cached_tokens > points[1].cached_tokens + 5


@pytest.mark.parametrize(
    ("found", "between"),
    [
        ({1: 0.32, 8: 0.38, 64: 1.05}, [23]),
        ({1: 1.0, 8: 2.0, 64: 4.0}, [3, 23]),
        ({1: 1.0, 2: 2.0}, []),
        ({1: 1.0}, []),
    ],
)
def test_drafting_is_timed_between_batch_sizes_whose_times_differ_much(found, between):
    assert measured.means_between(found) == between


def test_loops_compile_before_any_of_them_runs(monkeypatch):
    order = []
    for name in ("compile", "advance"):
        original = getattr(runs.DraftRun, name)

        def noted(run, *arguments, name=name, original=original):
            order.append(name)
            return original(run, *arguments)

        monkeypatch.setattr(runs.DraftRun, name, noted)
    drafter = emsjax.DraftModel(tiny_model(), 3)
    with compilations() as compiled:
        found = measured.started(lambda batch: runs.DraftRun(drafter, batch, 11), (5, 6))
    assert order == ["compile"] * 2 + ["advance"] * 2
    assert [run.state.lengths.shape for run in found] == [(5,), (6,)]
    with compilations() as again:
        for run in found:
            run.advance(4)
    assert compiled
    assert not again


@contextlib.contextmanager
def compilations():
    """Yields a list that collects the durations of compilations."""
    found = []
    note = lambda name, seconds, **_: found.append(seconds) if "backend_compile" in name else None
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def test_the_draft_model_drafts_at_the_context_in_every_timed_step():
    drafter, context = emsjax.DraftModel(tiny_model(), 3), 11
    run = runs.DraftRun(drafter, 2, context)
    for steps in (1, 4, 2):
        run.advance(steps)
        assert run.state.cache.lengths.tolist() == [context] * 2
    start, limits = run.rewind(), jnp.full(2, 3, jnp.int32)
    draft, _ = drafter.propose(start.cache, start.tokens, start.lengths, limits, None, None)
    assert run.state.tokens[:, -3:].tolist() == draft.tokens.tolist()
    assert start.lengths.tolist() == [context + 1] * 2


def test_policies_read_the_measured_profile(profile):
    costs = emsjax.Goodput.from_profile(profile).costs
    assert costs.rows.tolist() == [4, 8]
    assert costs.batches.tolist() == [1, 2]
    np.testing.assert_allclose(costs.row_ms, list(profile["costs"]["row_ms"].values()))
    accepted = accepted_at_rate(0.7, 3)
    lengths = synergy_lengths(costs, (1, 2), 24, accepted, np.arange(4.0))
    assert profile["table"] == {
        "acceptance_rate": 0.7,
        "lengths": {str(batch): k for batch, k in lengths.items()},
    }
    for acceptance in (None, 0.7, np.float64(0.7)):
        assert entries(emsjax.BatchSizeTable.from_profile(profile, acceptance)) == lengths
    assert profile["settings"]["max_draft_tokens"] == 3


@pytest.mark.parametrize("rate", [0, 1, -1])
def test_a_rate_that_leaves_nothing_to_fit_is_refused(rate):
    with pytest.raises(ValueError, match=f"must be between 0 and 1, not {rate}"):
        measured.measure_profile(MEASUREMENT, rate, print)


def test_the_synergy_model_is_step_and_drafting_time_by_emitted_tokens():
    costs = emsjax.StepCosts.of({1: 2.0}, token_ms=0.01, draft_ms=0.5)
    accepted, drafted = np.array([0, 1, 1.5]), np.arange(3.0)
    ms = synergy_ms(costs, 2, 100, accepted, drafted)
    np.testing.assert_allclose(ms, [4, 4.5 / 2, 5 / 2.5], rtol=1e-6)
    assert synergy_lengths(costs, [2], 100, accepted, drafted) == {2: 2}


@pytest.mark.parametrize(
    ("gain", "first", "length"), [(-0.01, 0, 0), (0.01, 0, 2), (-0.01, 0.001, 1), (0.01, 0.001, 2)]
)
def test_drafts_that_make_a_step_longer_must_gain_something(gain, first, length):
    costs = emsjax.StepCosts.of({16: 1.0, 24: 1.5 / (1 + LEAST_GAIN + gain)})
    # 16 rows is the smallest bucket: 8 samples fill it with one draft token each.
    found = synergy_lengths(costs, [8], 100, np.array([0, first, 0.5]), np.arange(3.0))
    assert found == {8: length}


def test_in_the_synergy_model_long_drafts_read_the_cache_again():
    costs = emsjax.StepCosts.of({1: 2.0}, token_ms=0.01, reread=0.5)
    # There are 2 samples with 100 cached tokens each; on average a quarter of them drafts.
    ms = synergy_ms(costs, 2, 100, np.arange(34.0), np.arange(34.0) / 4)
    further = [0] * 16 + [1] * 16 + [2] * 2
    expected = [(4 + 0.25 * n) / (s + 1) for s, n in enumerate(further)]
    np.testing.assert_allclose(ms, expected, rtol=1e-6)
