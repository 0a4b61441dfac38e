"""The benchmarks of drafters, row buckets, first calls, refills, training and narrow numbers."""

import json

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer

import emsjax
from emsjax.benchmarks import buckets, drafters, first_call, quality, refill, training, workloads
from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.shapes import MODELS
from emsjax.embedded import DRAFT
from emsjax.models.opt import OPTConfig


def test_typical_steps_represent_equal_shares():
    drafts = buckets.typical_drafts(24)
    assert len(drafts) == buckets.POINTS
    assert all(share == 1 / buckets.POINTS for _, share in drafts)
    totals = [int(counts.sum()) for counts, _ in drafts]
    assert totals == sorted(totals)
    # 24 samples draft 7 tokens with probability 0.7 each.
    assert totals[2] == pytest.approx(24 * 7 * 0.7, abs=7)
    assert all(set(counts) <= {0, 7} for counts, _ in drafts)
    (miss, miss_share), (hit, hit_share) = buckets.typical_drafts(1, 10)
    assert (int(miss[0]), int(hit[0])) == (0, 7)
    assert (miss_share, hit_share) == (pytest.approx(0.3), pytest.approx(0.7))


def test_both_sides_feed_the_same_rows(tmp_path, capsys):
    path = tmp_path / "buckets.json"
    options = ["--model", "tiny", "--batch-sizes", "6", "--context", "20"]
    with jax.numpy_dtype_promotion("standard"):
        assert BENCHMARKS["buckets"].main([*options, "--commit", "abc", "--output", str(path)]) == 0
    results = json.loads(path.read_bytes())
    (entry,) = results["batches"]
    assert (results["commit"], entry["batch"]) == ("abc", 6)
    best = lambda side: np.array([point["times"][side]["best_ms"] for point in entry["points"]])
    shares = np.array([point["share"] for point in entry["points"]])
    assert shares.sum() == pytest.approx(1)
    ratio = shares @ best("bucketed") / (shares @ best("exact"))
    assert entry["ratio"] == pytest.approx(ratio)
    for point in entry["points"]:
        assert point["bucket"] == min(n for n in entry["buckets"] if n >= point["rows"])
    assert "bucketed / exact rows" in capsys.readouterr().out


def test_exact_rows_compile_one_row_count():
    assert buckets.ExactRows(num_rows=37).row_counts(24, 8) == (37,)


def test_a_warm_call_finds_what_the_cold_one_compiled(tmp_path, monkeypatch, capsys):
    """The second process adds nothing to the compilation cache of the first."""
    counts, caches, in_new_process = [], [], first_call.in_new_process

    def spy(arguments, cache):
        found = in_new_process(arguments, cache)
        caches.append(cache)
        counts.append(len(list(tmp_path.glob("**/*-cache"))))
        return found

    monkeypatch.setattr(first_call, "in_new_process", spy)
    monkeypatch.setattr(first_call.tempfile, "tempdir", str(tmp_path))
    output = tmp_path / "first.json"
    options = ["--model", "tiny", "--drafter", "none", "--batch-size", "2"]
    options += ["--commit", "abc", "--output", str(output)]
    assert BENCHMARKS["first-call"].main(options) == 0
    results = json.loads(output.read_bytes())
    assert results["commit"] == "abc"
    assert caches[0] == caches[1]
    assert counts[0] == counts[1] > 0
    for state in ("cold", "warm"):
        assert len(results[state]["calls_s"]) == 2
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_slots_that_refill_are_compared_with_static_batches(tmp_path, capsys):
    path = tmp_path / "refill.json"
    options = ["--model", "tiny", "--prompts", "14", "--batch-size", "4", "--shortest", "5"]
    options += ["--longest", "30", "--max-new-tokens", "16", "--repeats", "1"]
    with jax.numpy_dtype_promotion("standard"):
        assert BENCHMARKS["refill"].main([*options, "--commit", "abc", "--output", str(path)]) == 0
    results = json.loads(path.read_bytes())
    static, refilled, prompts = results["runs"]
    assert [run["side"] for run in results["runs"]] == ["static", "refilled", "prompts"]
    assert all(run["identical"] for run in results["runs"])
    assert prompts["model_calls"] == 4  # one for each batch
    assert refilled["model_calls"] < static["model_calls"]
    assert 0 < refilled["idle_share"] < 0.5
    ratio = refilled["tokens_per_s"] / static["tokens_per_s"]
    assert results["speedup"] == pytest.approx(ratio)
    assert results["prompt_share"] == pytest.approx(prompts["seconds"] / static["seconds"])
    assert "x static batches" in capsys.readouterr().out
    # A wrong token is noticed.
    bench = refill.Bench("tiny", 3, (5, 9), 6, 2)
    bench.expected[2, 3] += 1
    assert not bench.run("refilled")["identical"]


def test_training_flops_are_six_per_weight_and_token():
    config = OPTConfig(num_hidden_layers=1)  # of 125m, but for the layers
    weights = 12 * 768**2 + 768 * config.vocab_size
    # Attention multiplies queries and keys, and weights and values, of (t + 1) / 2 on average.
    attention = 2 * 768 * (1024 + 1) / 2
    found = training.training_flops(config, 4, 1024)
    assert found == 6 * 4 * 1024 * (weights + attention)


def test_training_is_timed_with_and_without_a_target(tmp_path, capsys):
    path = tmp_path / "training.json"
    options = ["--model", "tiny", "--target", "tiny", "--batch-size", "2"]
    options += ["--sequence-length", "16", "--commit", "abc", "--output", str(path)]
    assert BENCHMARKS["training"].main(options) == 0
    results = json.loads(path.read_bytes())
    assert results["commit"] == "abc"
    assert [list(entry["losses"]) for entry in results["entries"]] == [
        ["cross-entropy"],
        ["forward-kl", "cross-entropy"],
    ]
    flops = training.training_flops(MODELS["tiny"], 2, 16)
    for entry in results["entries"]:
        median = np.median(entry["steps_s"])
        assert entry["tokens_per_s"] == pytest.approx(32 / median)
        assert entry["tflop_per_s"] == pytest.approx(flops / median / 1e12)
        rate = results["rates"]["matmul_tflop_per_s"]
        assert entry["share"] == pytest.approx(entry["tflop_per_s"] / rate)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_narrow_numbers_are_compared_in_bits_per_byte_and_acceptance(tmp_path, monkeypatch):
    texts = {f"{name}.py": f"def {name}(x):\n    return x + 1\n\n\n" * 30 for name in "abc"}
    monkeypatch.setattr(quality.corpus, "read_library", lambda: texts)
    texts["trained_on.py"] = "x = 1\n" * 90
    held_out = tmp_path / "held_out.json"
    held_out.write_text(json.dumps(["a.py", "b.py", "c.py", "of_another_version.py"]))
    monkeypatch.setattr(quality.corpus, "HELD_OUT", held_out)
    for module in (quality, workloads):
        monkeypatch.setattr(module, "TARGET", DRAFT)  # it has fewer layers to compile
    for name, value in {
        "WEIGHT_FORMATS": ("int4",),
        "KV_DTYPES": ("fp8",),
        "COPIES": ("int4",),
        "NEW_TOKENS": 6,
        "PROMPTS": 2,
    }.items():
        monkeypatch.setattr(quality, name, value)
    path = tmp_path / "quality.json"
    options = ["--passages", "2", "--tokens", "24", "--commit", "abc", "--output", str(path)]
    assert BENCHMARKS["quality"].main(options) == 0
    results = json.loads(path.read_bytes())
    *formats, alone, copy, embedded = results["entries"]
    names = ["wide", "weights in int4", "caches in fp8"]
    assert [of["format"] for of in formats] == names
    assert [of["ratio"] for of in formats] == pytest.approx(
        [of["bits_per_byte"] / formats[0]["bits_per_byte"] for of in formats]
    )
    assert len({of["bits_per_byte"] for of in formats}) == 3
    # The first token is given, and no byte of it counts.
    tokenizer = AutoTokenizer.from_pretrained(DRAFT)
    model, nats, size = emsjax.from_pretrained(DRAFT, dtype="float32"), 0.0, 0
    for text in (texts["a.py"], texts["c.py"]):
        ids = tokenizer(text).input_ids[:24]
        nats -= emsjax.score(model, [ids[:1]], [ids[1:]]).logprobs[0].sum()
        size += len(text.encode()[: len(tokenizer.decode(ids))]) - len(tokenizer.decode(ids[:1]))
    assert results["settings"]["bytes"] == size
    assert results["settings"]["modules"] == 3
    assert formats[0]["bits_per_byte"] == pytest.approx(nats / np.log(2) / size, rel=1e-5)
    drafters = [of["drafter"] for of in (alone, copy, embedded)]
    assert drafters == ["self, int4", "a copy, int4", "the embedded draft model"]
    assert all(0 < of["acceptance_rate"] <= 1 for of in (alone, copy, embedded))


def test_sources_take_turns_alone_and_mixed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(drafters, "EMBEDDED_PROMPTS", 3)
    monkeypatch.setattr(workloads, "TARGET", DRAFT)  # it has fewer layers to compile
    path = tmp_path / "drafters.json"
    options = ["--batch-sizes", "2", "--max-new-tokens", "12", "--repeats", "2"]
    options += ["--draft-tokens", "2", "--commit", "abc", "--output", str(path)]
    assert BENCHMARKS["drafters"].main(options) == 0
    results = json.loads(path.read_bytes())
    (entry,) = results["entries"]
    assert (entry["batch"], entry["batches"], entry["tokens"]) == (2, 1, 24)
    plain, *others = found = entry["drafters"].values()
    assert list(entry["drafters"]) == ["plain", "prompt lookup", "suffix", "model", "mixed"]
    assert all(of["identical"] and len(of["seconds"]) == 2 for of in found)
    assert (plain["tokens_per_step"], plain["steps"], plain["drafting_ms"]) == (1, 12, None)
    for of in found:
        median = np.median(of["seconds"])
        assert of["tokens_per_s"] == pytest.approx(24 / median)
        assert of["step_ms"] == pytest.approx(1e3 * median / of["steps"])
        best = np.min([other["seconds"] for other in others[:3]], axis=0)
        assert of["of_best"] == pytest.approx(np.median(best / of["seconds"]))
    assert all(of["tokens_per_step"] > 1 and of["acceptance_rate"] <= 1 for of in others)
    assert "of which" in capsys.readouterr().out
    # A run that is started again has nothing to measure; one with other settings is refused.
    monkeypatch.setattr(drafters, "measure", None)
    assert BENCHMARKS["drafters"].main(options) == 0
    assert BENCHMARKS["drafters"].main([*options, "--draft-cost", "0.2"]) != 0


def test_a_replay_repeats_the_steps_of_a_drafter():
    target = emsjax.from_pretrained(DRAFT, dtype="float32")
    prompts = [[5, 6, 7, 5, 6], [9, 9, 9]]
    subject = drafters.Subject(target, {}, prompts, 24, ())
    drafter = emsjax.SuffixDrafter(4)
    replay = subject.replay(drafter, prompts)
    stats = [subject.decode([of], [prompts])[1][0].stats for of in (drafter, replay)]
    assert stats[0].num_accepted.sum() > 0
    for name in ("model_calls", "num_steps", "num_drafted", "num_accepted", "accepted_histogram"):
        np.testing.assert_array_equal(*(getattr(of, name) for of in stats))


def test_prompts_are_repeated_to_fill_a_batch():
    batches = drafters.Subject(None, {}, [[1], [2], [3]], 1).batches
    assert batches(2) == [[[1], [2]]]
    assert batches(3) == [[[1], [2], [3]]]
    assert batches(5) == [[[1], [2], [3], [1], [2]]]
