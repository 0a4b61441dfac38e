"""The benchmark's cases are the documented ones, and its figures are right."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention
from pallas_kernels.benchmark import __main__ as benchmark
from pallas_kernels.benchmark import measure, products, programs, report
from pallas_kernels.benchmark.cases import Case
from pallas_kernels.common.implementations import runs_triton
from pallas_kernels.matmul import mosaic

MODEL, GROUPED = ("2x80", 2, 2, 80), ("6:2x80", 6, 2, 80)
RAGGED = Case(*MODEL, "ragged", "given", 16, (3, 5), (2, 4), 8)
SHARED = Case(*GROUPED, "ragged", "given", 16, (3, 5), (2, 4), 8)
SINGLE = Case(*MODEL, "1", "given", 16, (3, 5), (1, 1), 1)
PREFILL = Case(*MODEL, "prefill", "none", 4, (0, 0), (6, 6), 6)


@pytest.fixture
def one_case(monkeypatch):
    """`main` runs one decode case and one prefill case."""
    monkeypatch.setattr(benchmark, "decode_cases", lambda settings: [RAGGED])
    monkeypatch.setattr(benchmark, "prefill_cases", lambda settings: [PREFILL])
    monkeypatch.setattr(benchmark, "all_ratios", lambda decode, prefill: {})


@pytest.fixture
def cudnn_by_xla(monkeypatch):
    """Replace cuDNN's attention by XLA's, with the same arguments, and list the forms used."""
    real, forms = jax.nn.dot_product_attention, []

    def attention(*tensors, implementation, **options):
        assert implementation == "cudnn"
        given = lambda option: option is not None and option is not False
        forms.append({name for name, option in options.items() if given(option)})
        with jax.numpy_dtype_promotion("standard"):  # XLA's needs it for bfloat16
            return real(*tensors, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    return forms


def test_full_cases_are_the_documented_ones():
    cases = benchmark.decode_cases(benchmark.FULL)
    shapes = {(c.kv_heads, c.head_dim, c.committed, c.batch, c.rows) for c in cases}
    assert len(cases) == len(shapes) == 3 * 2 * 4 * 3
    heads = {(32, 32, 128), (32, 32, 80), (32, 8, 128)}
    assert {(c.heads, c.kv_heads, c.head_dim) for c in cases} == heads
    for case in cases:
        random = case.committed == "random 512..1016"
        assert random or (case.committed, set(case.lengths)) == ("all 2040", {2040})
        assert case.max_len == (1024 if random else 2048)
        if random:
            assert sum(case.lengths) == {1: 768, 8: 6700, 24: 18571, 64: 46742}[case.batch]
            assert min(case.lengths) >= 512
            assert max(case.lengths) <= 1016
        assert max(case.lengths) + case.padded_rows <= case.max_len
        assert len(case.counts) == case.batch
        if case.rows == "ragged":
            assert set(case.counts) <= set(range(1, 9))
            assert case.padded_rows == 8
            assert case.batch == 1 or len(set(case.counts)) > 1
        else:
            assert set(case.counts) == {case.padded_rows} == {int(case.rows)}
    assert [(c.counts, c.max_len) for c in benchmark.prefill_cases(benchmark.FULL)] == [
        ((1919,) * 8, 256)
    ] * 3


def test_cases_of_all_head_shapes_are_equal_and_reproducible():
    cases, again = (benchmark.decode_cases(benchmark.FULL) for _ in range(2))
    assert cases == again
    third = len(cases) // 3
    rows = [(c.lengths, c.counts) for c in cases]
    assert rows == rows[:third] * 3


def test_caches_of_a_chain_outgrow_the_l2_and_take_equal_turns():
    for case in benchmark.decode_cases(benchmark.FULL):
        caches = benchmark.count_caches(case, benchmark.FULL)
        assert caches * case.committed_bytes >= 2**28
        for name in ("triton", "xla", "cudnn"):
            calls = benchmark.count_calls(name, case, benchmark.FULL)
            assert calls % caches == 0
            assert 0 <= calls - (4 if name == "xla" else 32) < caches


def test_unread_entries_are_poisoned_and_padded_caches_hold_the_fresh_rows():
    made = [programs.make_inputs(RAGGED, jnp.int32(index)) for index in range(2)]
    packed, padded = made[0]["packed"], made[0]["padded"]
    samples, within = RAGGED.row_places()
    for packed_cache, padded_cache, fresh in zip(packed[1], padded[1], packed[2][:2], strict=True):
        for sample, length in enumerate(RAGGED.lengths):
            assert jnp.all(jnp.isnan(packed_cache[sample, length:]))
            np.testing.assert_array_equal(
                packed_cache[sample, :length], padded_cache[sample, :length]
            )
            assert not jnp.any(padded_cache[sample, length + RAGGED.padded_rows :])
        positions = np.array(RAGGED.lengths)[samples] + within
        np.testing.assert_array_equal(padded_cache[samples, positions], fresh)
    np.testing.assert_array_equal(padded[0][samples, within], packed[0])
    assert np.any(np.asarray(made[1]["padded"][1][0][:, :3] != padded[1][0][:, :3]))


@pytest.mark.parametrize(
    ("case", "form"),
    [
        (RAGGED, {"key_value_seq_lengths", "mask"}),
        (SHARED, {"key_value_seq_lengths", "mask"}),
        (SINGLE, {"key_value_seq_lengths"}),
        (PREFILL, {"is_causal"}),
    ],
    ids=["ragged", "grouped", "single", "prefill"],
)
def test_padded_attention_does_the_same_work(case, form, cudnn_by_xla):
    names = ("xla", "cudnn", "reference")
    chains = {name: programs.build_program(name, case, 2, 1) for name in names}
    assert cudnn_by_xla == [form]
    runs = programs.bind(programs.build_inputs(case), chains, 1)
    errors = programs.compare(case, runs, chains, "reference")
    assert errors.keys() == set(names)
    assert max(errors.values()) <= 1e-2


def test_cudnn_gets_a_mask_where_it_rejects_lengths(cudnn_by_xla, monkeypatch):
    stand_in = jax.nn.dot_product_attention

    def attention(*tensors, **options):
        if options["key_value_seq_lengths"] is not None:
            raise NotImplementedError("no lengths")
        return stand_in(*tensors, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    chains = {name: programs.build_program(name, SINGLE, 1, 1) for name in ("cudnn", "reference")}
    assert chains["cudnn"].form == "mask"
    runs = programs.bind(programs.build_inputs(SINGLE), chains, 1)
    assert programs.compare(SINGLE, runs, chains, "reference")["cudnn"] <= 1e-2


def test_a_chain_passes_outputs_on_and_takes_caches_in_turns():
    lasts = []
    for calls, caches in ((1, 1), (2, 1), (2, 2), (3, 2), (3, 1)):
        chains = {"xla": programs.build_program("xla", RAGGED, calls, caches)}
        first, last = programs.bind(programs.build_inputs(RAGGED), chains, caches)["xla"]()
        assert np.array_equal(first, last) == (calls == 1)
        assert not any(np.array_equal(last, other) for other in lasts)
        lasts.append(last)


def test_quick_run_writes_the_documented_fields(tmp_path, capsys):
    output = tmp_path / "figures.json"
    assert benchmark.main(["--quick", "--commit", "abc", "--output", str(output)]) == 0
    text = output.read_text()
    results = json.loads(text)
    assert text == json.dumps(results, indent=1, sort_keys=True) + "\n"
    assert results["commit"] == "abc"
    assert results["command"].startswith("python -m pallas_kernels.benchmark --quick")
    assert results["hardware"].keys() >= {"device_kind", "compute_capability"}
    assert results["versions"].keys() == {"jax", "jaxlib", "python", "driver"}
    assert results["date"].endswith("+00:00")
    assert results["settings"].keys() == dataclasses.asdict(benchmark.QUICK).keys()
    assert results["pure_read"]["gb_per_s"] > 0

    assert len(results["decode"]) == len(benchmark.decode_cases(benchmark.QUICK))
    for entry in results["decode"]:
        figures = entry["implementations"]["xla"]
        assert entry["implementations"].keys() == {"xla", "reference"}
        assert 0 < figures["best_us"] <= figures["median_us"]
        size = 2 * entry["committed_tokens"] * entry["kv_heads"] * entry["head_dim"] * 2
        assert figures["gb_per_s"] == pytest.approx(size / figures["median_us"] / 1e3)
        share = figures["gb_per_s"] / results["pure_read"]["gb_per_s"]
        assert figures["share_of_pure_read"] == pytest.approx(share)
        assert figures["max_error"] <= benchmark.TOLERANCE
    for entry in results["prefill"]:
        flops = 4 * 2 * entry["heads"] * entry["head_dim"] * 24 * 24 / 2
        figures = entry["implementations"]["xla"]
        assert figures["tflop_per_s"] == pytest.approx(flops / figures["median_us"] / 1e6)

    assert [entry["batch"] for entry in results["updates"]] == [3]
    assert results["updates"][0]["implementations"].keys() == {"xla", "reference"}

    one, eight = results["decode"][:2]
    ratio = results["ratios"]["time_of_8_rows_over_1"]["wall"][0]
    times = [entry["implementations"]["xla"]["median_us"] for entry in (eight, one)]
    assert ratio["xla"] == pytest.approx(times[0] / times[1])
    assert len(results["ratios"]["rate_of_head_dim_80_over_128"]["wall"]) == 6
    shown = capsys.readouterr().out
    for expected in ("pure read", "2x128", "2x80", "8:2x128", "random 8..24", "all 32", "prefill"):
        assert expected in shown


def test_table_shows_what_was_measured_of_each_implementation(capsys):
    triton = {"best_us": 1.0, "median_us": 2.0, "kernel_us": 3.0}
    rates = {"gb_per_s": 4.0, "share_of_pure_read": 0.05}
    cudnn = {"median_us": 7.0, "kernel_us": 8.0}
    implementations = {"triton": triton | rates, "xla": {"median_us": 6.0}, "cudnn": cudnn}
    entry = RAGGED.describe() | {"implementations": implementations}
    names = ("triton", "xla", "cudnn")
    update = {"layers": 2, "batch": 3, "rows": 24, "implementations": {"xla": {"median_us": 9.0}}}
    results = {"implementations": names, "pure_read": rates, "decode": [entry], "prefill": []}
    results["updates"] = [update]
    report.print_tables(results)
    lines = capsys.readouterr().out.splitlines()
    header, row = lines[3:5]
    assert lines[-1].split() == ["2", "3", "24", "9.0"]
    assert header.endswith("  xla median us cudnn median us cudnn kernel us")
    assert row.split() == ["2", "ragged", *(f"{cell}.0" for cell in range(1, 9))]
    implementations["cudnn"] = {"error": "refused"}
    report.print_tables(results)
    assert capsys.readouterr().out.splitlines()[4].split()[-3:] == ["6.0", "-", "-"]


@pytest.mark.parametrize("factor", [1.05, float("nan")], ids=["off", "nan"])
def test_wrong_implementation_stops_the_run(factor, one_case, monkeypatch, tmp_path, capsys):
    real = attention.IMPLEMENTATIONS["xla"]

    def wrong(*args, **options):
        out = real(*args, **options)
        return out.at[-1, -1].multiply(jnp.asarray(factor, out.dtype))

    monkeypatch.setitem(attention.IMPLEMENTATIONS, "xla", wrong)
    monkeypatch.setattr(measure, "time_runs", lambda *args: pytest.fail("timed a wrong result"))
    output = tmp_path / "figures.json"
    assert benchmark.main(["--quick", "--output", str(output)]) == 1
    assert "xla differs from reference" in capsys.readouterr().err
    assert not output.exists()


def test_cudnns_error_is_recorded_not_raised(one_case, monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark, "implementations", lambda: ("xla", "cudnn"))
    output = tmp_path / "figures.json"
    assert benchmark.main(["--quick", "--output", str(output)]) == 0
    results = json.loads(output.read_text())
    for entry in results["decode"] + results["prefill"]:
        assert entry["implementations"]["cudnn"].keys() == {"error"}
        assert entry["implementations"]["cudnn"]["error"]


def test_spans_are_split_where_nothing_runs_for_long():
    gap = measure.GAP_NS
    spans = [(gap * 5, 7), (0, 3), (2, 4), (gap // 2, 1)]
    assert measure.split_at_gaps(spans) == [[3, 4, 1], [7]]
    assert measure.split_at_gaps([]) == []


def test_products_are_timed_and_compared(tmp_path, monkeypatch):
    sizes = {
        "whole": products.Product(128, 384, False, "relu"),
        "gated": products.Product(128, 384, False, "silu", gated=True),
        "sums": products.Product(256, 128, True),
    }
    monkeypatch.setitem(products.PRODUCTS, "qwen3-8b", sizes)
    output = tmp_path / "products.json"
    products.main(["--rows", "8", "--model", "qwen3-8b", "--output", str(output)])
    results = json.loads(output.read_text())
    assert [entry["product"] for entry in results["products"]] == list(sizes)
    assert "pallas_kernels.benchmark.products" in results["command"]
    for entry in results["products"]:
        figures = entry["implementations"]
        assert figures["xla"]["max_error"] == 0
        assert figures["default"]["max_error"] < 1
        assert figures["default"]["median_us"] > 0
        ran = runs_triton()
        assert ran or "compute capability 8.0" in figures["triton"]["error"]


@pytest.mark.parametrize("rows", [160, 384])
def test_every_tiling_that_is_timed_fits(rows):
    of_opt = products.PRODUCTS["opt-6.7b"]
    of_fc1, of_fc2 = (products.fitting(rows, of_opt[name]) for name in ("fc1", "fc2"))
    assert {tiling.splits for tiling in of_fc1} == {1}
    assert {tiling.splits for tiling in of_fc2} == {1, 2, 4, 8}
    for tiling in of_fc1 + of_fc2:
        held = tiling.stages * 2 * tiling.depth * (tiling.rows + tiling.columns)
        assert held <= 227 * 1024
        assert (tiling.columns if tiling.swapped else tiling.rows) % (64 * tiling.warpgroups) == 0
        # Sums that are not in shares have 32 bits, which cannot be transposed back.
        assert not (tiling.swapped and tiling.splits == 1 and tiling in of_fc2)
    assert len(set(of_fc1)) == len(of_fc1)
    assert len(set(of_fc2)) == len(of_fc2)
    kinds = {(tiling.cluster, tiling.swapped, tiling.shares_weights) for tiling in of_fc1}
    assert kinds == {(1, False, False), (2, False, False), (1, True, False)} | {
        (2, True, shares_weights) for shares_weights in (False, True)
    }
    assert mosaic.tiling_for(rows, 4096, 16384) in of_fc1
    assert mosaic.tiling_for(rows, 16384, 4096, split=True) in of_fc2
