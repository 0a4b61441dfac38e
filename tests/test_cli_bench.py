"""`emsjax bench draft-length`: measurements, output, resumption and errors."""

import json
import shutil

import jax
import jax.numpy as jnp
import pytest
from jsonl import assert_error

from emsjax.benchmarks import draft_length, policy_runs, step_costs, workloads
from emsjax.benchmarks.workloads import ScriptedModels
from emsjax.cli.main import main
from emsjax.policies import profiles as profile_store
from emsjax.policies.costs import FORMAT, StepCosts

pytestmark = pytest.mark.usefixtures("unchecked_annotations")

SIZES = ["--batch-sizes", "2", "--max-draft-tokens", "2", "--max-new-tokens", "4"]
TINY = ["--shape", "tiny", "--draft-shape", "tiny", "--workloads", "llma,mixed"]
POLICIES = list(policy_runs.policies(2, StepCosts.of({1: 1.0}), {1: 0}))
ADAPTIVE = [name for name in POLICIES if not name.startswith("fixed ")]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Decode little, once, in a dtype that flax does not promote."""
    monkeypatch.setattr(draft_length, "SEQUENCES", 2)
    monkeypatch.setattr(draft_length, "DRAWS", (1, 1))
    monkeypatch.setattr(workloads, "PROMPT_TOKENS", (8, 12))
    monkeypatch.setattr(workloads.ScriptedModels, "dtype", jnp.float32)


def profile_of(models):
    subject = profile_store.subject(models.config, models.draft_config, models.numbers)
    costs = {
        "row_ms": {"1": 1.0, "100": 2.0},
        "token_ms": 0.0,
        "reread": 0.0,
        "draft_ms": {"1": 0.1},
    }
    return {"format": FORMAT, "subject": subject, "costs": costs}


@pytest.fixture
def stored():
    """A stored profile of the tiny pair."""
    profile = profile_of(ScriptedModels("tiny", "tiny"))
    profile_store.store(profile)
    return profile


def bench(*options):
    return main(["bench", "draft-length", *SIZES, *map(str, options)])


@pytest.fixture
def fake_entries(monkeypatch):
    """Replace decoding; returns the list of (workload, batch size) pairs that were measured."""
    measured = []

    def measure(self, name):
        measured.append((name, self.batch))
        figures = {"tokens_per_s": 10.0, "live_tokens_per_s": 12.0, "mean_acceptance_length": 1.5}
        figures["identical"] = True
        names = [*(f"fixed {n}" for n in range(self.k + 1)), *ADAPTIVE]
        return {
            "workload": name,
            "batch": self.batch,
            "plain": {"tokens_per_s": 8.0, "identical": True},
            "policies": {policy: dict(figures) for policy in names},
        }

    monkeypatch.setattr(draft_length.Bench, "measure", measure)
    return measured


def test_results_describe_the_run_and_every_policy_outputs_the_text(stored, tmp_path, capsys):
    output = tmp_path / "bench.json"
    assert bench(*TINY, "--output", output, "--commit", "abc", "--draws", 2) == 0
    results = json.loads(output.read_bytes())
    assert results["command"].startswith("emsjax bench draft-length --batch-sizes 2 ")
    assert results["commit"] == "abc"
    assert results["hardware"]["platform"] == jax.default_backend()
    assert results["settings"] == {
        "shape": "tiny",
        "draft_shape": "tiny",
        "device": stored["subject"]["device"],
        "dtype": "float32",
        "max_draft_tokens": 2,
        "max_new_tokens": 4,
        "costs": stored["costs"],
    }
    pairs = [(entry["workload"], entry["batch"]) for entry in results["entries"]]
    assert sorted(pairs) == [("llma", 2), ("mixed", 2)]
    for entry in results["entries"]:
        assert list(entry["policies"]) == POLICIES
        assert all(figures["identical"] for figures in entry["policies"].values())
        assert entry["repeats"] == 2

    shown = capsys.readouterr()
    assert "stored profile" in shown.err
    for pair in ("llma, batch 2", "mixed, batch 2"):
        assert pair in shown.out
    for row in ("plain", "fixed ", *ADAPTIVE):
        assert shown.out.count(f"\n {row}") >= 2


def test_the_embedded_pair_is_the_default(profiles, tmp_path, fake_entries):
    given = tmp_path / "given.json"
    given.write_text(json.dumps(profile_of(workloads.EmbeddedModels())))
    assert bench("--profile", given) == 0
    assert sorted(fake_entries) == [("model", 2), ("prompt-lookup", 2)]
    assert not profiles.exists()  # nothing measured


def test_an_interrupted_run_resumes_with_its_costs(
    stored, profiles, tmp_path, monkeypatch, fake_entries, capsys
):
    output = tmp_path / "bench.json"
    whole = draft_length.Bench.measure

    def interrupted(self, name):
        if len(fake_entries) == 3:
            raise KeyboardInterrupt
        return whole(self, name)

    sizes = ["--batch-sizes", "1,2"]
    monkeypatch.setattr(draft_length.Bench, "measure", interrupted)
    assert bench(*TINY, *sizes, "--output", output) == 130
    assert "start it again" in capsys.readouterr().err
    assert len(json.loads(output.read_bytes())["entries"]) == 3
    monkeypatch.setattr(draft_length.Bench, "measure", whole)
    shutil.rmtree(profiles)
    monkeypatch.delattr(step_costs.Measurement, "run")  # nothing is measured anew
    before, fake_entries[:] = list(fake_entries), []
    assert bench(*TINY, *sizes, "--output", output) == 0
    assert sorted(before + fake_entries) == [
        (name, batch) for name in ("llma", "mixed") for batch in (1, 2)
    ]
    assert len(fake_entries) == 1
    content = output.read_bytes()
    assert bench(*TINY, *sizes, "--output", output) == 0
    assert output.read_bytes() == content

    capsys.readouterr()
    assert_error(capsys, bench(*TINY, "--output", output, "--max-draft-tokens", 3), str(output))
    assert output.read_bytes() == content


def test_one_wrong_token_is_a_failure(stored, monkeypatch, fake_entries):
    whole = draft_length.Bench.measure
    assert bench(*TINY) == 0
    for which in ("plain", "goodput"):

        def wrong(self, name, which=which):
            entry = whole(self, name)
            figures = entry["plain"] if which == "plain" else entry["policies"][which]
            figures["identical"] = name != "llma"
            return entry

        monkeypatch.setattr(draft_length.Bench, "measure", wrong)
        assert bench(*TINY) == 1


def test_without_a_profile_one_is_measured_and_stored(profiles, monkeypatch, fake_entries, capsys):
    asked = []

    def measure(self, say):
        asked.append(self)
        points = [step_costs.Point(1, 1, 10.0, 1.0), step_costs.Point(1, 17, 10.0, 2.0)]
        return points, {1: 0.1}

    monkeypatch.setattr(step_costs.Measurement, "run", measure)
    assert bench(*TINY) == 0
    (measurement,) = asked
    assert measurement.batch_sizes == (1, 8, 64)
    assert (measurement.max_draft_tokens, measurement.context) == (16, 900)
    assert len(list(profiles.iterdir())) == 1
    assert bench(*TINY) == 0
    assert len(asked) == 1
    assert "stored profile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--shape", "opt-7b"], ["--shape", "embedded, opt-125m", "'opt-7b'"]),
        (["--shape", "tiny", "--draft-shape", "small"], ["--draft-shape", "'small'"]),
        (["--draft-shape", "tiny"], ["--draft-shape", "--shape embedded"]),
        (["--kv-dtype", "int8"], ["--kv-dtype", "--shape embedded"]),
        (["--tensor-parallel", "2"], ["--tensor-parallel", "--shape embedded"]),
        (["--workloads", "model,llma"], ["--workloads", "'llma'", "prompt-lookup, model"]),
        ([*TINY, "--workloads", ""], ["--workloads", "''"]),
        ([*TINY, "--batch-sizes", "8,"], ["--batch-sizes", "'8,'"]),
        ([*TINY, "--max-new-tokens", "0"], ["--max-new-tokens", "at least 1"]),
        ([*TINY, "--output", "no/such/folder/b.json"], ["--output", "no/such/folder"]),
        ([*TINY, "--profile", "none.json"], ["none.json"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_bad_option_is_named(stored, fake_entries, capsys, options, parts):
    try:
        code = bench(*options)
    except SystemExit as stop:
        code = stop.code
    assert_error(capsys, code, *parts)
    assert not fake_entries


def test_a_profile_of_other_models_is_refused(tmp_path, fake_entries, capsys):
    given = tmp_path / "given.json"
    given.write_text(json.dumps(profile_of(workloads.EmbeddedModels())))
    code = bench(*TINY, "--profile", given)
    assert_error(capsys, code, str(given), "another model")


@pytest.mark.parametrize("content", ["", "notes", "[1]", "{}"])
def test_a_file_with_other_content_is_left_unchanged(
    stored, tmp_path, fake_entries, capsys, content
):
    output = tmp_path / "notes.json"
    output.write_text(content)
    code = bench(*TINY, "--output", output)
    assert_error(capsys, code, "--output", str(output), "not from emsjax bench")
    assert output.read_text() == content


def test_a_bench_needs_a_name(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench"])
    assert_error(capsys, stop.value.code, "BENCHMARK")
