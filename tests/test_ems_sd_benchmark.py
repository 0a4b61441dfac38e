"""`emsjax bench ems-sd`: its counts, its figures, and its command."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jsonl import save_random_model

import emsjax
from emsjax import plotting
from emsjax.benchmarks import ems_sd, sources, workloads
from emsjax.benchmarks.acceptance import CopyAcceptance, TokenAcceptance
from emsjax.benchmarks.ems_sd_command import rates_of, scripted, texts
from emsjax.benchmarks.rates import Rates
from emsjax.benchmarks.sources import Scripted
from emsjax.benchmarks.step import floor_ms
from emsjax.cli.main import main, make_parser
from emsjax.models import checkpoint
from emsjax.models.numbers import NumberFormats
from emsjax.models.opt import OPTConfig
from emsjax.models.pretrained import from_pretrained

NEW, BATCH, RATES = 10, 3, Rates(1e12, 1e14)
METHODS = tuple(ems_sd.METHODS)


@pytest.fixture(autouse=True, scope="module")
def short(unchecked_annotations):
    """Decode little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workloads, "PROMPT_TOKENS", (8, 12))
        patch.setattr(sources, "SEQUENCES_PER_ROUND", 1)
        patch.setattr(workloads.ScriptedModels, "dtype", jnp.float32)
        yield


@pytest.fixture(scope="module")
def source(short):
    workload = workloads.Workload("prompt-lookup", NEW, CopyAcceptance(draft_tokens=3))
    return Scripted(workloads.ScriptedModels("tiny", "tiny"), workload)


@pytest.fixture(scope="module")
def entry(source):
    said = []
    measured = ems_sd.Bench(source, BATCH, RATES, repeats=2).measure(METHODS, said.append)
    assert len(said) == 2 * len(METHODS)
    return json.loads(json.dumps(measured))


def test_all_methods_output_the_text(entry):
    assert list(entry["methods"]) == list(METHODS)
    assert all(figures["identical"] for figures in entry["methods"].values())
    assert (entry["batch"], entry["prompts"]) == (BATCH, BATCH)
    assert 8 <= entry["mean_prompt_tokens"] <= 12


def test_scripted_models_have_the_given_dtype_and_prompt_lengths():
    models = workloads.ScriptedModels("tiny", "tiny", jnp.float16, prompt_tokens=(3, 5))
    assert models.model.dtype == jnp.float16
    assert {len(prompt) for prompt in models.prompts(64, NEW)} == {3, 4, 5}


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_narrow_model_outputs_the_text(quantize):
    models = workloads.ScriptedModels("tiny", "tiny", quantize=quantize, kv_dtype="int8")
    workload = workloads.Workload("prompt-lookup", NEW, CopyAcceptance(draft_tokens=3))
    bench = ems_sd.Bench(Scripted(models, workload), BATCH, RATES, repeats=1)
    figures = bench.measure(("greedy", "ems"), lambda said: None)["methods"]
    assert all(of["identical"] for of in figures.values())
    model = models.model
    assert (model.quantization, model.kv_dtype) == (quantize, "int8")
    context = np.mean(
        [run["live_cached_tokens"] / NEW / BATCH for run in figures["greedy"]["runs"]]
    )
    expected = floor_ms(model.config, BATCH, 1, context, RATES, models.numbers)
    assert figures["greedy"]["floor_ms"] == pytest.approx(expected)


def test_wrong_tokens_are_noticed(source):
    ((task,),) = source.rounds(BATCH, 1)
    wrong = dataclasses.replace(task, expected=task.expected + 1)
    stub = SimpleNamespace(
        model=source.model,
        new_tokens=NEW,
        end_token_ids=(),
        rounds=lambda batch, count: [[wrong]],
    )
    measured = ems_sd.Bench(stub, BATCH, RATES, 1).measure(("greedy",), lambda line: None)
    assert not measured["methods"]["greedy"]["identical"]
    assert not ems_sd.all_identical({"entries": [measured]})


def test_counts_are_those_of_generate(source, entry):
    """All methods draft and accept the same tokens; they differ only in padding."""
    for number, (task,) in enumerate(source.rounds(BATCH, 2)):
        for method, layout in ems_sd.METHODS.items():
            out = emsjax.vanilla.generate(
                source.model,
                task.prompts,
                None if method == "greedy" else task.drafter,
                max_new_tokens=NEW,
                eos_token_ids=(),
                unpad_inputs=not layout.pad_inputs,
                unpad_kv_cache=not layout.pad_kv_cache,
            )
            run, stats = entry["methods"][method]["runs"][number], out.stats
            assert run["tokens"] == stats.num_emitted.sum() == BATCH * NEW
            assert run["steps"] == stats.model_calls
            assert run["sample_steps"] == stats.num_steps.sum()
            assert run["drafted"] == stats.num_drafted.sum()
            assert run["rows"] == stats.num_drafted.sum() + stats.num_steps.sum()
            assert run["padding_rows"] / run["rows"] == stats.padding_ratio.inputs
            assert run["masked_kv"] / run["tokens"] == stats.padding_ratio.kv
            # All are live in so many steps, and then the first one has its tokens.
            assert run["live_steps"] == stats.num_steps.min()
            assert NEW <= run["live_tokens"] <= BATCH * NEW
            assert run["live_seconds"] > 0


def test_figures_follow_from_the_runs(source, entry):
    greedy = entry["methods"]["greedy"]
    for figures in entry["methods"].values():
        speeds = [run["tokens"] / run["seconds"] for run in figures["runs"]]
        assert figures["tokens_per_s"]["min"] == pytest.approx(min(speeds))
        assert figures["tokens_per_s"]["median"] == pytest.approx(np.mean(speeds))  # of two
        assert figures["tokens_per_s"]["max"] == pytest.approx(max(speeds))
        for which in ("tokens_per_s", "live_tokens_per_s"):
            ratio = figures[which]["median"] / greedy[which]["median"]
            assert figures[which]["speed_up"] == pytest.approx(ratio)
        seconds, steps = (
            sum(run[name] for run in figures["runs"]) for name in ("live_seconds", "live_steps")
        )
        assert figures["step_ms"] == pytest.approx(1e3 * seconds / steps)
        assert figures["of_floor"] == pytest.approx(figures["step_ms"] / figures["floor_ms"])
        assert figures["memory_bytes"] > 0
        assert figures["compile_s"] > 0
        assert figures["prefill_s"] > 0
    # All samples have one row in each step, and on average half of the new tokens.
    context = np.mean([run["live_cached_tokens"] / NEW / BATCH for run in greedy["runs"]])
    assert context == pytest.approx(entry["mean_prompt_tokens"] + NEW / 2 - 1, abs=0.01)
    assert greedy["floor_ms"] == pytest.approx(
        floor_ms(source.model.config, BATCH, 1, context, RATES, NumberFormats(jnp.float32))
    )
    assert greedy["mean_acceptance_length"] == 1
    assert entry["methods"]["vanilla"]["mean_acceptance_length"] > 1


def test_utilisation_is_that_of_all_devices(source, entry, monkeypatch):
    greedy, bench = entry["methods"]["greedy"], ems_sd.Bench(source, BATCH, RATES, repeats=2)
    bench.about["greedy"] = {}
    context = np.mean([run["live_cached_tokens"] / NEW / BATCH for run in greedy["runs"]])
    flops = ems_sd.step_flops(source.model.config, BATCH, context)
    expected = flops / (1e-3 * greedy["step_ms"]) / RATES.matmul
    assert greedy["utilisation"] == pytest.approx(expected)
    split = NumberFormats(jnp.float32, tensor_parallel=2)
    monkeypatch.setattr(NumberFormats, "of", lambda model: split)
    on_two = bench.summary("greedy", greedy["runs"])
    assert on_two["utilisation"] == pytest.approx(expected / 2)


def test_small_batches_have_more_draws_per_round(source, monkeypatch):
    """No draws are used twice, and the prompts are the same."""
    monkeypatch.setattr(sources, "SEQUENCES_PER_ROUND", 5)
    rounds = source.rounds(2, 2)
    assert [len(tasks) for tasks in rounds] == [3, 3]
    tasks = [task for tasks in rounds for task in tasks]
    drawn = {(task.drafter.counts.tobytes(), task.drafter.right.tobytes()) for task in tasks}
    assert len(drawn) == 6
    assert len({np.concatenate(task.prompts).tobytes() for task in tasks}) == 1
    assert [len(tasks) for tasks in source.rounds(5, 2)] == [1, 1]


def test_arithmetic_of_a_step_by_hand():
    config = OPTConfig(
        vocab_size=10, hidden_size=4, ffn_dim=8, num_hidden_layers=2, num_attention_heads=2
    )
    weights = 2 * (4 * 12 + 4 * 4 + 2 * 4 * 8) + 4 * 10
    scores_and_values = 2 * (2 * 4 * 100)
    assert ems_sd.step_flops(config, 3, 100) == 3 * 2 * (weights + scores_and_values)


def bench(*options):
    sizes = ["--shape", "tiny", "--draft-shape", "tiny", "--max-new-tokens", "4", "--repeats", "1"]
    return main(["bench", "ems-sd", *sizes, *map(str, options)])


def test_the_command_writes_prints_and_resumes(tmp_path, capsys, monkeypatch):
    output, plot = tmp_path / "bench.json", tmp_path / "plot.png"
    asked = ["--methods", "greedy,ems", "--draft-tokens", 2, "--output", output, "--commit", "abc"]
    assert bench(*asked, "--batch-sizes", "1,2") == 0
    results = json.loads(output.read_bytes())
    assert results["settings"]["acceptance"]["draft_tokens"] == 2
    assert [entry["batch"] for entry in results["entries"]] == [1, 2]
    shown = capsys.readouterr().out
    assert "whole run" in shown
    assert "ems" in shown
    assert "…" not in shown  # no cell is cut off
    figures = results["entries"][0]["methods"]["ems"]
    assert results["settings"]["rates"] is None
    assert figures["of_floor"] is figures["utilisation"] is None

    measured = []

    def measure(self, methods, say):
        measured.append(self.batch)
        return results["entries"][0] | {"batch": self.batch}

    monkeypatch.setattr(ems_sd.Bench, "measure", measure)
    asked[-1] = "def"
    assert bench(*asked, "--batch-sizes", "1,2,4", "--plot", plot) == 0
    assert measured == [4]
    results = json.loads(output.read_bytes())
    assert [entry["commit"] for entry in results["entries"]] == ["abc", "abc", "def"]
    assert plot.stat().st_size > 0
    assert bench(*asked, "--rate", 0.5) == 2
    assert "--rate is not a parameter of --draft llma" in capsys.readouterr().err


def test_rates_are_the_given_ones_or_those_of_a_known_device(monkeypatch):
    rates = lambda *options: rates_of(make_parser("").parse_args(["bench", "ems-sd", *options]))
    given = ("--shape", "tiny", "--read-rate", "2", "--matmul-rate", "300")
    assert rates(*given) == Rates(2e12, 3e14)
    assert rates(*given[:2]) is None
    device = SimpleNamespace(device_kind="NVIDIA H200")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert rates(*given[:2]) == Rates(4.35e12, 7.9e14)
    with pytest.raises(SystemExit):
        rates(*given[:3], "0", *given[4:])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--methods", "greedy,both"], "--methods: 'both'"),
        (["--shape", "opt-7b"], "--shape must be one of"),
        (["--draft-shape", "small"], "--draft-shape must be one of"),
        (["--miss", "2"], "miss must lie in"),
        (["--draft", "draft-model", "--whole", "0.5"], "--whole is not a parameter"),
        (["--methods", "ems", "--plot", "x.png"], "must name greedy"),
        (["--plot", "x.xyz"], "must end in"),
        (["--max-new-tokens", "5000"], "positions"),
        (["--data", "x.jsonl"], "--data needs --model"),
        (["--revision", "main"], "--revision needs --model"),
        (["--read-rate", "2"], "--read-rate and --matmul-rate need each other"),
    ],
)
def test_what_cannot_be_measured_is_named(options, error, capsys):
    assert bench(*options) == 2
    assert error in capsys.readouterr().err


def test_the_options_set_the_acceptance_of_drafts():
    parser = make_parser("")

    def asked_for(*options):
        parsed = parser.parse_args(["bench", "ems-sd", "--shape", "tiny", *options])
        make, _ = scripted(parsed)
        workload = make().workload
        return workload.source, workload.profile

    assert asked_for() == ("prompt-lookup", CopyAcceptance())
    assert asked_for("--miss", "0.1") == ("prompt-lookup", CopyAcceptance(miss=0.1))
    assert asked_for("--draft", "draft-model") == ("model", TokenAcceptance(0.8, 4))
    asked = ("--rate", "0.5", "--draft-tokens", "2")
    assert asked_for("--draft", "draft-model", *asked) == ("model", TokenAcceptance(0.5, 2))
    assert asked_for("--draft", "self") == ("self", TokenAcceptance(0.98, 6))


@pytest.fixture
def bench_texts(tiny_model):
    return lambda *options: main(["bench", "ems-sd", "--model", *map(str, (tiny_model, *options))])


@pytest.fixture
def articles(tmp_path):
    path = tmp_path / "articles.jsonl"
    texts = [
        "import os\nimport sys\n",
        "def f(x):\n    return f(x)\n",
        "class A:\n",
        "x = 1\n",
        "y",
    ]
    lines = [json.dumps({"id": i, "article": text}) for i, text in enumerate(texts)]
    path.write_text("\n".join(lines))
    return path


def test_a_narrow_model_is_drafted_for_by_a_copy_of_the_wide_one():
    wide, narrow = (
        workloads.ScriptedModels("tiny", "tiny", **of) for of in ({}, {"quantize": "int8"})
    )
    workload = workloads.Workload("self", NEW, TokenAcceptance(0.9, 2))
    copies = []
    for models in (wide, narrow):
        (drafter,) = models.drafters(workload, BATCH, 2, 1)
        assert isinstance(drafter.source, emsjax.SelfDraft)
        assert (drafter.shares_cache, drafter.source.max_draft_tokens) == (True, 2)
        copies.append(drafter.source.draft_model)
    table = wide.model.embed_tokens.embedding[...]
    assert copies[0].embed_tokens.embedding[...] is table
    for one, other in zip(*map(jax.tree.leaves, copies), strict=True):
        np.testing.assert_array_equal(one, other)
    assert {copy.quantization for copy in copies} == {"int4"}


@pytest.mark.parametrize("numbers", [[], ["--quantize", "int8", "--kv-dtype", "int8"]])
def test_a_trained_model_drafts_for_itself(tiny_model, articles, numbers):
    asked = ["--model", str(tiny_model), "--data", str(articles), "--draft", "self"]
    asked += ["--max-new-tokens", "6", "--batch-sizes", "2", *numbers]
    make, _ = texts(make_parser("").parse_args(["bench", "ems-sd", *asked]))
    drafter = make().drafter
    assert isinstance(drafter, emsjax.SelfDraft)
    copy, wide = drafter.draft_model, from_pretrained(tiny_model, dtype="float32")
    assert copy.quantization == "int4"
    for one, other in zip(*map(jax.tree.leaves, (copy, wide.quantize("int4"))), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("draft", ["llma", "draft-model", "self"])
def test_a_model_decodes_a_file_of_texts(bench_texts, articles, tmp_path, draft):
    output, drafts = tmp_path / "bench.json", ["--draft", draft]
    if draft == "draft-model":
        save_random_model(tmp_path / "draft", 1)
        drafts += ["--draft-model", tmp_path / "draft", "--draft-tokens", 2]
    asked = ["--data", articles, "--dtype", "float32", "--batch-sizes", 2, "--max-new-tokens", 6]
    asked += ["--methods", "greedy,ems,vanilla", "--repeats", 2, "--output", output]
    assert bench_texts(*asked, *drafts) == 0
    (entry,) = json.loads(output.read_bytes())["entries"]
    assert entry["prompts"] == 4  # two batches of two; one is left over
    for figures in entry["methods"].values():
        assert figures["identical"]
        assert len(figures["runs"]) == 2
        assert figures["runs"][0]["tokens"] == figures["runs"][1]["tokens"] <= 4 * 6


def test_each_model_is_loaded_at_its_revision(articles, tmp_path, tiny_model, monkeypatch):
    save_random_model(tmp_path / "draft", 1)
    load, loaded = checkpoint.load, []

    def spied(make, path, *, dtype, revision, **options):
        loaded.append((str(path), revision))
        return load(make, path, dtype=dtype)

    monkeypatch.setattr(checkpoint, "load", spied)
    asked = ["--model", str(tiny_model), "--revision", "v2", "--data", str(articles)]
    asked += ["--draft", "draft-model", "--draft-model", str(tmp_path / "draft")]
    asked += ["--draft-revision", "refs/pr/3", "--max-new-tokens", "6", "--batch-sizes", "2"]
    parsed = make_parser("").parse_args(["bench", "ems-sd", *asked])
    make, settings = texts(parsed)
    assert not loaded
    make()
    assert set(loaded) == {(str(tiny_model), "v2"), (str(tmp_path / "draft"), "refs/pr/3")}
    assert (settings["revision"], settings["draft_revision"]) == ("v2", "refs/pr/3")
    assert settings["dtype"] == "float32"  # the default on a CPU


def test_results_of_another_run_are_refused_before_weights_are_read(
    bench_texts, articles, tmp_path, monkeypatch, capsys
):
    output = tmp_path / "bench.json"
    output.write_text('{"settings": {}, "entries": []}')
    monkeypatch.setattr(checkpoint, "load", None)  # fails when it is called
    asked = ["--data", articles, "--batch-sizes", 1, "--max-new-tokens", 6, "--output", output]
    assert bench_texts(*asked) == 2
    assert "bench.json holds results with other settings" in capsys.readouterr().err


def test_too_few_texts_are_named_before_weights_are_read(
    bench_texts, articles, monkeypatch, capsys
):
    monkeypatch.setattr(checkpoint, "load", None)  # fails when it is called
    for asked, most in (([], 64), (["--batch-sizes", "2,8"], 8)):
        assert bench_texts("--data", articles, "--max-new-tokens", 6, *asked) == 2
        error = f"--batch-sizes: {most} is more than the 5 prompts of --data"
        assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ([], "--model needs --data"),
        (["--data", "x", "--miss", "0.1"], "--miss needs --shape"),
        (["--data", "x", "--draft-shape", "tiny"], "--draft-shape needs --shape"),
        (["--data", "x", "--draft", "draft-model"], "need each other"),
        (["--data", "x", "--draft-model", "y"], "need each other"),
        (["--data", "x", "--draft-revision", "y"], "--draft-revision needs --draft-model"),
        (["--data", "missing.jsonl"], "missing.jsonl"),
    ],
)
def test_unsuitable_options_for_a_file_of_texts_are_named(bench_texts, options, error, capsys):
    assert bench_texts(*options) == 2
    assert error in capsys.readouterr().err


def test_the_figure_has_a_line_for_each_method():
    speeds = lambda x: {"tokens_per_s": {"speed_up": x}, "live_tokens_per_s": {"speed_up": x + 1}}
    entries = [
        {"batch": batch, "methods": {"greedy": speeds(1), "ems": speeds(4 / batch)}}
        for batch in (8, 1)
    ]
    whole, live = plotting.ems_sd_figure({"entries": entries}).axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in whole.get_lines()}
    plain, ems = "plain decoding (greedy)", "no padding: EMS-SD (ems)"
    assert drawn == {plain: [[1, 1], [8, 1]], ems: [[1, 4], [8, 0.5]]}
    assert live.get_lines()[1].get_ydata().tolist() == [5, 1.5]
    with pytest.raises(ValueError, match="nothing to draw"):
        plotting.ems_sd_figure({"entries": []})


def test_labels_of_batch_sizes_do_not_overlap():
    speed = {"tokens_per_s": {"speed_up": 1}, "live_tokens_per_s": {"speed_up": 1}}
    entries = [{"batch": batch, "methods": {"ems": speed}} for batch in ems_sd.BATCH_SIZES]
    figure = plotting.ems_sd_figure({"entries": entries})
    figure.draw_without_rendering()
    for axes in figure.axes:
        labels = [label for label in axes.get_xticklabels() if label.get_text()]
        named = [int(label.get_text()) for label in labels]
        assert {1, 8, 24, 64} <= set(named)
        assert named == [label.get_position()[0] for label in labels]
        boxes = [label.get_window_extent() for label in labels]
        assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))
        assert axes.get_xticks().tolist() == list(ems_sd.BATCH_SIZES)
