"""The step benchmark: its floor, its figures on a tiny model, and its grouping of kernels."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import emsjax
from emsjax.benchmarks import device_times, drafting, overheads, runs, starts, step
from emsjax.benchmarks.rates import Rates
from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.shapes import MODELS
from emsjax.engine import group
from emsjax.models.numbers import NumberFormats
from emsjax.models.opt import OPTConfig

# flax's LayerNorm promotes bfloat16 to float32 on its own.
standard_dtypes = functools.partial(jax.numpy_dtype_promotion, "standard")
REFERENCE = Rates(read=4.35e12, matmul=790e12)


@pytest.mark.parametrize(
    ("batch", "rows", "expected"),
    [(1, 1, 3.17), (1, 8, 3.17), (8, 1, 3.93), (8, 8, 3.93), (24, 1, 5.66), (24, 8, 5.83)],
)
def test_floor_of_opt_6_7b(batch, rows, expected):
    floor = step.floor_ms(MODELS["opt-6.7b"], batch, rows, 900, REFERENCE)
    assert floor == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize(
    ("quantize", "kv_dtype", "layers", "cached"),
    [
        (None, None, 2, 2),
        ("int8", "int8", 1, 1 + 4 / 128),  # a scale of 4 bytes for each token and head
        ("int8-weights", None, 1, 2),
        ("int4", "fp8", 0.5 + 2 / 128, 1 + 4 / 128),  # a scale for 128 weights
    ],
)
def test_the_floor_reads_narrow_numbers(quantize, kv_dtype, layers, cached):
    numbers = NumberFormats(jnp.bfloat16, quantize, kv_dtype)
    floor = step.floor_ms(MODELS["opt-6.7b"], 1, 1, 900, REFERENCE, numbers)
    weights = 32 * (4 * 4096**2 + 2 * 4096 * 16384) * layers + 4096 * 50272 * 2
    read = weights + 900 * 32 * 2 * 4096 * cached
    assert floor == pytest.approx(1e3 * read / REFERENCE.read, rel=1e-6)


@pytest.mark.parametrize(("quantize", "speed"), [(None, 1), ("fp8", 2), ("int4", 1)])
def test_the_floor_multiplies_two_narrow_factors_twice_as_fast(quantize, speed):
    numbers = NumberFormats(jnp.bfloat16, quantize)
    floor = step.floor_ms(MODELS["opt-6.7b"], 64, 64, 0, Rates(1e18, 1e12), numbers)
    layers, head = 32 * (4 * 4096**2 + 2 * 4096 * 16384), 4096 * 50272
    assert floor == pytest.approx(1e3 * 2 * 64 * 64 * (layers / speed + head) / 1e12)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_steps_of_narrow_models_are_timed(quantize, tmp_path):
    path = tmp_path / "step.json"
    arguments = ["--model", "tiny", "--context", "20", "--shapes", "1x2", "--layers", "1"]
    arguments += ["--quantize", quantize, "--kv-dtype", "fp8", "--output", str(path)]
    with standard_dtypes():
        assert BENCHMARKS["step"].main(arguments) == 0
    results = json.loads(path.read_text())
    formats = {"dtype": "bfloat16", "quantize": quantize, "kv_dtype": "fp8"}
    assert results["settings"].items() >= formats.items()
    (entry,) = results["shapes"]
    wide = step.floor_ms(MODELS["tiny"].resized(layers=1), 1, 2, entry["mean_context"], REFERENCE)
    assert entry["floor_ms"]["reference"] < 0.8 * wide


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_a_random_cache_takes_the_memory_of_the_old_one(kv_dtype):
    numbers = NumberFormats(jnp.bfloat16, kv_dtype=kv_dtype)
    with standard_dtypes():
        cache = numbers.model(MODELS["tiny"]).init_cache(2, 64)
        made = starts.random_cache(cache, jnp.full(2, 5, jnp.int32))
    arrays = jax.tree.leaves(cache.layers)
    assert all(array.is_deleted() for array in arrays)
    assert [x.nbytes for x in jax.tree.leaves(made.layers)] == [x.nbytes for x in arrays]


def test_default_shapes_and_rates():
    options = BENCHMARKS["step"].make_parser().parse_args([])
    assert options.shapes == [(1, 1), (1, 8), (8, 1), (8, 8), (24, 1), (24, 8)]
    assert (options.read_rate, options.matmul_rate) == (4.35, 790)


@pytest.mark.parametrize("text", ["8", "8x", "x8", "8y4", "0x1", "1x0", "1x1,", "", "1x2x3"])
def test_wrong_shapes_are_refused(text, capsys):
    with pytest.raises(SystemExit) as stopped:
        BENCHMARKS["step"].main(["--shapes", text])
    assert stopped.value.code == 2
    assert "--shapes: must be like 8x1,24x8 (batch x rows per sample, both at least 1), not " in (
        capsys.readouterr().err
    )


def test_a_negative_number_of_kernels_is_refused(capsys):
    with pytest.raises(SystemExit):
        BENCHMARKS["step"].main(["--profile-top", "-1"])
    assert "--profile-top: must be at least 0, not -1" in capsys.readouterr().err


def test_attention_is_chosen_alike_in_all_benchmarks():
    for name in ("step", "overheads"):
        parser = BENCHMARKS[name].make_parser()
        assert parser.parse_args([]).attention is None
        assert parser.parse_args(["--attention", "xla"]).attention == "xla"
        with pytest.raises(SystemExit):
            parser.parse_args(["--attention", "None"])


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("step") / "step.json"
    arguments = ["--model", "tiny", "--context", "20", "--shapes", "1x1,2x4"]
    with standard_dtypes():
        arguments += ["--layers", "1", "--commit", "abc", "--output", str(path)]
        assert BENCHMARKS["step"].main(arguments) == 0
    return json.loads(path.read_text())


def test_the_file_describes_the_measurement_and_the_machine(results):
    assert results["commit"] == "abc"
    assert results["command"].startswith("python -m emsjax.benchmarks.step --model tiny")
    assert results["hardware"]["platform"] == jax.default_backend()
    assert results["hardware"].keys() >= {"device", "runtime"}
    assert results["versions"]["jax"] == jax.__version__
    assert results["settings"]["config"]["num_hidden_layers"] == 1
    assert results["settings"]["attention"] in ("xla", "triton")
    assert results["rates"]["reference"] == {"read_tb_per_s": 4.35, "matmul_tflop_per_s": 790}
    assert results["rates"]["measured"].keys() == results["rates"]["reference"].keys()
    assert [entry["shape"] for entry in results["shapes"]] == ["1x1", "2x4"]


def test_steps_feed_exactly_the_rows_of_their_shape(results):
    for entry, (batch, rows) in zip(results["shapes"], [(1, 1), (2, 4)], strict=True):
        assert (entry["batch"], entry["rows_per_sample"]) == (batch, rows)
        assert entry["rows_per_step"] == batch * rows
        assert entry["padding_rows_per_step"] == entry["accepted_tokens"] == 0
        assert entry["mean_context"] == pytest.approx(20, abs=0.5)
        assert entry["cache_length"] >= 20 + runs.LONG


def test_times_floors_and_ratios_are_consistent(results):
    config = OPTConfig(**results["settings"]["config"])
    for entry in results["shapes"]:
        times = entry["runs_ms"]
        assert [len(times["3"]), len(times["13"])] == [7, 7]
        assert entry["best_ms"] == pytest.approx((min(times["13"]) - min(times["3"])) / 10)
        shape = entry["batch"], entry["rows_per_sample"]
        floor = step.floor_ms(config, *shape, entry["mean_context"], REFERENCE)
        assert entry["floor_ms"]["reference"] == pytest.approx(floor)
        for which in ("best", "median"):
            ratio = entry[f"{which}_ms"] / entry["floor_ms"]["measured"]
            assert entry[f"{which}_ratio"]["measured"] == pytest.approx(ratio)
        assert (entry["profile"] is None) == (jax.default_backend() != "gpu")


def test_rows_other_than_the_shape_are_an_error():
    with standard_dtypes():
        run = runs.StepRun(runs.random_model(MODELS["tiny"]), (1, 2), 20, None)
        run.advance(runs.LONG)
    assert run.fed()["rows_per_step"] == 2
    run.shape = (1, 3)
    with pytest.raises(RuntimeError, match="26 rows"):
        run.fed()


def test_a_context_too_short_for_the_steps_is_an_error():
    with pytest.raises(ValueError, match="--context must be at least 7, not 6"):
        runs.StepRun(runs.random_model(MODELS["tiny"]), (1, 1), 6, None)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_a_timed_step_has_one_row_count_and_no_prefill(kv_dtype, monkeypatch):
    monkeypatch.setattr(group, "_prefilled", None)  # nothing may be prefilled
    model = runs.random_model(MODELS["tiny"]).with_kv_dtype(kv_dtype)
    with standard_dtypes():
        run = runs.StepRun(model, (2, 9), 20, None)
    state, layout = run.state, run.assembled().whole().layout
    assert layout.row_counts(2, 9) == (18,)
    assert len(runs.StepRun.layout.row_counts(2, 9)) > 1  # of other runs
    np.testing.assert_array_equal(state.cache.lengths, state.lengths - 1)
    seen = []
    for layer in state.cache.layers:
        for array in (layer.keys, layer.values):
            wide = array if kv_dtype is None else array.widen(jnp.float32)
            seen.append(np.asarray(wide, np.float32))
    assert len({array.tobytes() for array in seen}) == len(seen)  # others in each place
    assert 0.9 < np.std(seen) < 1.1


def test_a_source_drafts_and_its_tokens_are_replaced():
    draft_model = emsjax.DraftModel(runs.random_model(MODELS["tiny"]), 3)
    with standard_dtypes():
        run = runs.StepRun(
            draft_model.draft_model, (2, 4), 20, None, drafts={"source": draft_model}
        )
        run.advance(runs.LONG)
        fed = run.fed()
    assert (fed["rows_per_step"], fed["accepted_tokens"]) == (8, 0)
    # Every token but the last drafted one has been fed, or forgotten again as rejected.
    np.testing.assert_array_equal(run.state.drafter_state.lengths, run.state.lengths - 1)
    np.testing.assert_array_equal(run.rewind().drafter_state.lengths, run.lengths - 1)


def test_what_a_drafter_keeps_of_hidden_states_is_forgotten_between_runs():
    """Otherwise its cache would grow from run to run, until its rows lay outside of it."""
    model = runs.random_model(MODELS["tiny"])
    source = drafting.Sources(model, "tiny", None).make("eagle3")
    with standard_dtypes():
        run = runs.StepRun(model, (2, 5), 20, None, drafts={"source": source})
        lengths = []
        for _ in range(2):
            run.advance(runs.LONG)
            lengths.append(np.asarray(run.state.drafter_state.cache.lengths))
    np.testing.assert_array_equal(lengths[0], lengths[1])
    np.testing.assert_array_equal(lengths[0], run.state.lengths - 2)


def test_drafters_are_timed_beside_drafts_that_cost_nothing(tmp_path, capsys):
    path = tmp_path / "drafting.json"
    options = ["--model", "tiny", "--draft-model", "tiny", "--batch-sizes", "2", "--context", "20"]
    with standard_dtypes():
        assert BENCHMARKS["drafting"].main([*options, "--output", str(path)]) == 0
    found = json.loads(path.read_text())["entries"]
    assert [entry["source"] for entry in found] == list(drafting.SOURCES)
    assert len(capsys.readouterr().out.splitlines()) == len(found)
    for entry in found:
        base, other = (times["best_ms"] for times in entry["times"].values())
        assert entry["ratio"] == pytest.approx(other / base)
        fed = {of["rows_per_step"] for of in entry["fed"].values()}
        assert fed == {2 * entry["rows_per_sample"]}
    # A run that was interrupted goes on with what is missing.
    results = json.loads(path.read_text())
    path.write_text(json.dumps(results | {"entries": found[:3]}))
    options += ["--sources", "suffix,observed", "--output", str(path)]
    with standard_dtypes():
        assert BENCHMARKS["drafting"].main(options) == 0
    resumed = json.loads(path.read_text())["entries"]
    assert resumed[:3] == found[:3]
    assert [entry["source"] for entry in resumed[3:]] == ["observed"]
    assert BENCHMARKS["drafting"].main([*options, "--layers", "2"]) == 2
    assert "holds results with other settings" in capsys.readouterr().err
    assert BENCHMARKS["drafting"].main(["--model", "tiny", "--sources", "suffix,other"]) == 2
    assert "--sources: 'other' is none of suffix, model" in capsys.readouterr().err


def test_the_bare_loop_emits_the_tokens_of_plain_decoding():
    model = runs.random_model(MODELS["tiny"])
    with standard_dtypes():
        plain = runs.StepRun(model, (3, 1), 20, None)
        bare = overheads.PlainRun(model, runs.StepRun(model, (3, 1), 20, None).state, None)
        for run in (plain, bare):
            run.advance(runs.LONG)
    np.testing.assert_array_equal(bare.state.lengths, plain.state.lengths)
    for name in ("tokens", "logprobs"):
        emitted = [np.asarray(getattr(run.state, name))[:, :33] for run in (plain, bare)]
        np.testing.assert_allclose(*emitted, rtol=1e-5)
    assert np.asarray(plain.state.logprobs)[:, 20:27].all()


@pytest.mark.parametrize("states", [1, 2])
def test_calls_of_a_step_each_do_the_steps_of_the_loop(states):
    model = runs.random_model(MODELS["tiny"])
    with standard_dtypes():
        loop = runs.StepRun(model, (3, 2), 20, None)
        calls = overheads.CallsRun(model, (3, 2), 20, None, states=states)
        for _ in range(2):  # from the prompts on each time
            calls.advance(4 * states)
        loop.advance(4)
    for state in calls.states:
        assert int(state.counters.model_calls) == 4
        np.testing.assert_array_equal(state.lengths, loop.state.lengths)
        np.testing.assert_array_equal(state.tokens, loop.state.tokens)


def test_overheads_are_ratios_of_times_in_the_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(overheads, "SAMPLING_SHAPE", (8, 4))
    monkeypatch.setattr(overheads, "DRAFTED_BATCH", 2)
    monkeypatch.setattr(overheads, "PLAIN_BATCHES", (2,))
    path = tmp_path / "overheads.json"
    models = ["--model", "tiny", "--draft-model", "tiny"]
    with standard_dtypes():
        options = ["--context", "20", "--output", str(path), "--commit", "abc"]
        assert BENCHMARKS["overheads"].main([*models, *options]) == 0
    found = json.loads(path.read_text())
    assert found["commit"] == "abc"
    names = [entry["comparison"] for entry in found["comparisons"]]
    assert names == ["plain", "drafting", "sampling", "controls", "calls", "calls"]
    assert len(capsys.readouterr().out.splitlines()) == len(names)
    for entry in found["comparisons"]:
        base, other = (times["best_ms"] for times in entry["times"].values())
        assert entry["ratio"] == pytest.approx(other / base)
        if "share" in entry:
            assert entry["draft_step_ms"] == pytest.approx((other - base) / 4)
            assert entry["share"] == pytest.approx(1 - base / other)
    for entry in found["comparisons"][2:4]:
        assert entry["fed"]["sampled"]["rows_per_step"] == 8 * 4


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "gemm"),
        ("gemm_fusion_dot_12", "gemm"),
        ("linear", "gemm"),
        ("linear__3", "gemm"),
        ("loop_nonlinear_fusion", "rest"),
        ("ragged_attention_triton", "attention"),
        ("combine_shares", "attention"),
        ("update_kv_cache_triton", "commit"),
        ("input_scatter_fusion", "commit"),
        ("layer_norm", "norm"),
        ("MemcpyD2D", "copy"),
        ("loop_add_fusion", "rest"),
    ],
)
def test_kernel_classes(name, kind):
    assert device_times.kernel_class(name) == kind


def test_kernels_that_run_once_per_call_do_not_count():
    short = {"MemcpyD2D": (4, 90.0), "nvjet": (6, 60.0), "loop_fusion": (3, 3.0)}
    long = {"MemcpyD2D": (4, 80.0), "nvjet": (26, 260.0), "loop_fusion": (13, 13.0)}
    found = device_times.kernels_per_step(short, long, 10, top=1)
    assert (found["launches"], found["ms"]) == (3, pytest.approx(0.021))
    assert found["classes"]["gemm"] == {"launches": 2, "ms": pytest.approx(0.02)}
    assert found["classes"]["copy"] == {"launches": 0, "ms": 0}
    assert [kernel["name"] for kernel in found["top"]] == ["nvjet"]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there a GPU has kernels")
def test_a_run_without_a_gpu_has_no_gpu_kernels():
    assert device_times.kernel_times(lambda: jnp.ones(3) + 1) == {}
