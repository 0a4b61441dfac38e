"""The draft-length comparison: compiled loops, and figures that are consistent."""

import copy
import dataclasses
import json
from itertools import chain
from types import SimpleNamespace
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from toy import tiny_model

import emsjax
from emsjax.benchmarks import draft_length as bench
from emsjax.benchmarks import policy_runs, runs, workloads
from emsjax.benchmarks.results import resume
from emsjax.benchmarks.shapes import MODELS
from emsjax.benchmarks.workloads import ScriptedModels, Workload, source_of
from emsjax.decode.step import decode_loop
from emsjax.policies.costs import FORMAT, synergy_lengths

BATCH, K, NEW_TOKENS, REPEATS = 2, 3, 8, 2
ROWS = BATCH * (K + 1)  # the only bucket for so few rows
COSTS = emsjax.StepCosts.of({1: 1.0, ROWS: 1.5, 16: 3.0}, 0.001, {1: 0.9, 8: 1.2})
TABLE = {1: 3, 2: 1}
ALL_TOKENS = BATCH * NEW_TOKENS * REPEATS
WORKLOADS = ("llma", "mixed", "draft-model")
NAMES = ["fixed 0", "fixed 1", "fixed 2", "fixed 3"]
NAMES += ["bass", "bass, cost-capped", "synergy", "goodput"]


def test_every_fixed_length_and_policy_is_compared():
    chosen = policy_runs.policies(K, COSTS, TABLE)
    assert list(chosen) == NAMES
    assert [chosen[f"fixed {n}"].k for n in range(K + 1)] == [0, 1, 2, 3]
    kinds = [emsjax.BassHeuristic, emsjax.CostCapped, emsjax.BatchSizeTable, emsjax.Goodput]
    assert [type(chosen[name]) for name in NAMES[4:]] == kinds
    assert chosen["synergy"].draft_lengths.tolist() == [3, 1]


class OwnDrafts(ScriptedModels):
    """The sources' own drafts, with texts that are unknown before decoding."""

    def drafters(self, workload, batch, k, repeats):
        return [source_of(workload, k, self)] * repeats

    def expected(self, lengths, max_new_tokens):
        return None

    def acceptance(self, workload, batch, k):
        return None


@pytest.fixture(scope="module")
def small(unchecked_annotations):
    """Make comparisons small: models, prompts and repeats."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "small", tiny_model(num_hidden_layers=1).config)
        patch.setattr(workloads, "PROMPT_TOKENS", (5, 9))
        patch.setattr(bench, "SEQUENCES", BATCH * REPEATS)
        patch.setattr(bench, "DRAWS", (1, REPEATS))
        patch.setattr(ScriptedModels, "dtype", jnp.float32)
        yield


def asked(new_tokens: int | None, draws: int | None = None) -> bench.Asked:
    return bench.Asked((BATCH,), WORKLOADS, K, new_tokens, draws=draws)


def start(models, draws: int | None = None) -> bench.Bench:
    return bench.Bench(models, BATCH, COSTS, asked(NEW_TOKENS, draws))


@pytest.fixture(scope="module")
def measured(small):
    """Entries by workload, the compilations of each, and how often prompts were prefilled."""
    comparison, compiled, entries = start(ScriptedModels("small", "small")), [], {}
    prefill = mock.Mock(side_effect=emsjax.init_state)
    with mock.patch.object(bench, "init_state", prefill):
        for name in WORKLOADS:
            before = decode_loop._cache_size()
            entries[name] = comparison.measure(name)
            compiled.append(decode_loop._cache_size() - before)
    return SimpleNamespace(entries=entries, compiled=compiled, prefilled=prefill.call_count)


def test_all_lengths_and_all_workloads_of_a_source_share_compilations(measured):
    # Beside one for all fixed lengths one for each other policy, and once plain decoding's.
    policies = len(NAMES) - K
    assert measured.compiled == [policies + 1, 0, policies]
    assert measured.prefilled == 2


@pytest.mark.parametrize(("least", "most"), [(1, REPEATS - 1), (1, 9), (REPEATS + 1, 9)])
def test_draws_are_enough_for_the_sequences_within_limits(small, monkeypatch, least, most):
    monkeypatch.setattr(bench, "DRAWS", (least, most))
    enough = min(max(REPEATS, least), most)
    assert start(ScriptedModels("small", "small")).repeats == enough
    assert start(ScriptedModels("small", "small"), enough + 1).repeats == enough + 1


def test_workloads_of_other_lengths_start_at_the_same_prompts(small, monkeypatch):
    lengths = {"llma": NEW_TOKENS, "mixed": NEW_TOKENS + 4}
    for name, tokens in lengths.items():
        workload = dataclasses.replace(workloads.SCRIPTED[name], max_new_tokens=tokens)
        monkeypatch.setitem(workloads.SCRIPTED, name, workload)
    for name in workloads.SCRIPTED.keys() - lengths:
        monkeypatch.delitem(workloads.SCRIPTED, name)
    comparison = bench.Bench(ScriptedModels("small", "small"), BATCH, COSTS, asked(None))
    entries = [comparison.measure(name) for name in lengths]
    assert [entry["new_tokens"] for entry in entries] == list(lengths.values())
    assert bench.all_identical({"entries": entries})


def test_policies_take_turns_once_each_loop_has_run(small, monkeypatch):
    turns, advance = [], runs.LoopRun.advance

    def noted(run, steps):
        if steps == policy_runs.ALL_STEPS and run.drafter is not None:
            turns.append((type(run.draft_length).__name__, id(run.drafter)))
        return advance(run, steps)

    monkeypatch.setattr(runs.LoopRun, "advance", noted)
    start(ScriptedModels("small", "small")).measure("draft-model")
    policies = [type(policy).__name__ for policy in policy_runs.policies(K, COSTS, TABLE).values()]
    untimed, first, second = turns[:5], turns[5:-8], turns[-8:]
    assert [policy for policy, _ in untimed] == policies[3:]
    assert [policy for policy, _ in first] == [policy for policy, _ in second] == policies
    assert len({drafter for _, drafter in first}) == len({drafter for _, drafter in second}) == 1
    assert first[0] != second[0]


each_workload = pytest.mark.parametrize("name", WORKLOADS)


@each_workload
def test_the_counters_of_a_figure_are_consistent(measured, name):
    entry, workload = measured.entries[name], workloads.SCRIPTED[name]
    assert list(entry["policies"]) == NAMES
    for figure in entry["policies"].values():
        assert figure["identical"]
        # Each step of a sample feeds one row more than it drafts and emits one token more than it
        # accepts.
        assert figure["rows"] == figure["sample_steps"] + figure["drafted"]
        assert figure["rows"] + figure["padding_rows"] == ROWS * figure["steps"]
        emitted = figure["sample_steps"] + figure["accepted"]
        assert emitted == figure["live_tokens" if workload.live else "tokens"]
        assert figure["mean_acceptance_length"] == pytest.approx(emitted / figure["sample_steps"])
        assert figure["tokens"] == (0 if workload.live else ALL_TOKENS)
        for which, timed in (("", not workload.live), ("live_", workload.live)):
            speed = figure[f"{which}tokens"] / figure[f"{which}seconds"] if timed else None
            assert figure[f"{which}tokens_per_s"] == speed
    plain = entry["plain"]
    assert plain["identical"]
    assert plain["tokens_per_s"] * plain["seconds"] == pytest.approx(ALL_TOKENS)
    assert (entry["batch"], entry["new_tokens"], entry["repeats"]) == (BATCH, NEW_TOKENS, REPEATS)
    assert 5 <= entry["mean_prompt_tokens"] <= 9


@each_workload
def test_without_drafts_the_steps_are_those_of_plain_decoding(measured, name):
    none = measured.entries[name]["policies"]["fixed 0"]
    assert (none["drafted"], none["accepted"]) == (0, 0)
    assert none["steps"] == NEW_TOKENS * REPEATS
    assert none["rows"] == none["sample_steps"] == ALL_TOKENS
    live = workloads.SCRIPTED[name].live  # and all samples finish in the same step
    assert none["live_tokens"] == (ALL_TOKENS if live else 0)


def simulate(drafter, lengths, n) -> list[np.ndarray]:
    """Drafted and accepted tokens of a sample by step, [steps, 2], from the draws alone."""
    found = []
    for counts, right, start in zip(drafter.counts, drafter.right, lengths, strict=True):
        position, end, steps = start, start + NEW_TOKENS, []
        while position < end:
            drafted = min(int(counts[position]), n, end - position - 1)
            steps.append((drafted, min(int(right[position]), drafted)))
            position += steps[-1][1] + 1
        found.append(np.array(steps))
    return found


@each_workload
def test_fixed_lengths_count_the_draws_of_each_repeat(measured, name):
    models, workload = ScriptedModels("small", "small"), workloads.SCRIPTED[name]
    lengths = [len(prompt) for prompt in models.prompts(BATCH, NEW_TOKENS)]
    drafters = models.drafters(workload, BATCH, K, REPEATS)
    assert (drafters[0].right != drafters[1].right).any()
    for n in range(1, K + 1):
        runs_of_samples = [simulate(drafter, lengths, n) for drafter in drafters]
        # Until one sample has finished, or all have.
        live = [[s[: min(map(len, samples))] for s in samples] for samples in runs_of_samples]
        live, whole = (np.concatenate([*chain(*runs)]) for runs in (live, runs_of_samples))
        counted = live if workload.live else whole
        figure = measured.entries[name]["policies"][f"fixed {n}"]
        assert figure["sample_steps"] == len(counted)
        assert [figure["drafted"], figure["accepted"]] == counted.sum(axis=0).tolist()
        if workload.live:
            assert figure["live_tokens"] == len(live) + live[:, 1].sum()


def test_wrong_drafts_are_accepted_less_and_change_no_token(small, measured):
    class Corrupted(ScriptedModels):
        def drafters(self, *asked):
            wrong = lambda drafter: dataclasses.replace(drafter, text=drafter.text[:, ::-1])
            return [wrong(drafter) for drafter in super().drafters(*asked)]

    right = measured.entries["llma"]
    entry = start(Corrupted("small", "small")).measure("llma")
    assert bench.all_identical({"entries": [right, entry]})
    accepted = lambda entry: entry["policies"]["fixed 3"]["accepted"]
    assert accepted(entry) < accepted(right) / 2


@pytest.mark.parametrize("name", ["mixed", "draft-model"], ids=["live", "whole"])
def test_tokens_other_than_the_expected_ones_are_found(name, small):
    class Misled(ScriptedModels):
        def expected(self, lengths, max_new_tokens):
            tokens = super().expected(lengths, max_new_tokens).copy()
            tokens[-1, 0] += 1
            return tokens

    entry = start(Misled("small", "small")).measure(name)
    assert not entry["plain"]["identical"]
    assert not any(figure["identical"] for figure in entry["policies"].values())


@pytest.mark.parametrize(("name", "paid"), [("llma", False), ("draft-model", True)])
def test_the_table_uses_the_workloads_acceptance_and_its_sources_costs(measured, name, paid):
    entry, models = measured.entries[name], ScriptedModels("small", "small")
    curves = models.acceptance(workloads.SCRIPTED[name], BATCH, K)
    context = entry["mean_prompt_tokens"] + NEW_TOKENS / 2
    tables = [
        synergy_lengths(dataclasses.replace(COSTS, draft_ms=draft_ms), (1, 2), context, *curves)
        for draft_ms in (0 * COSTS.draft_ms, COSTS.draft_ms)
    ]
    assert entry["synergy_lengths"] == tables[paid] != tables[not paid]


@pytest.mark.parametrize("where", ["plain", "fixed 2", "goodput"])
def test_wrong_tokens_in_one_figure_are_a_failure(measured, where):
    entry = copy.deepcopy(measured.entries["llma"])
    (entry["plain"] if where == "plain" else entry["policies"][where])["identical"] = False
    assert not bench.all_identical({"entries": [measured.entries["mixed"], entry]})
    last = bench.describe(entry)[-1]
    assert last.startswith("llma, batch 2: NOT the expected tokens: " + where)
    assert "NOT" not in "".join(bench.describe(measured.entries["llma"]))


@pytest.mark.parametrize("source", ["prompt-lookup", "model"])
def test_sources_may_draft_for_themselves(source, small, monkeypatch):
    monkeypatch.setattr(OwnDrafts, "workloads", {"own": Workload(source, NEW_TOKENS)})
    entry = start(OwnDrafts("small", "small")).measure("own")
    assert bench.all_identical({"entries": [entry]})
    assert entry["synergy_lengths"].keys() == {1, 2}
    assert (entry["policies"]["fixed 3"]["drafted"] > 0) == (source == "model")


PROFILE = {
    "format": FORMAT,
    "costs": {"row_ms": {"1": 1.0}, "token_ms": 0.0, "reread": 0.0, "draft_ms": {"1": 0.0}},
}


def entry_of(workload, batch, **speeds):
    speeds = {"fixed 0": 100.0, "fixed 1": 150.0, "goodput": 147.0} | speeds
    figures = {
        name: {"tokens_per_s": speed, "live_tokens_per_s": 2 * speed, "identical": True}
        for name, speed in speeds.items()
    }
    plain = {"tokens_per_s": 120.0, "identical": True}
    return {"workload": workload, "batch": batch, "plain": plain, "policies": figures}


def run(results, output, measured, said):
    class Fake:
        def __init__(self, models, batch, *settings):
            self.batch = batch

        def measure(self, name):
            measured.append((name, self.batch))
            return entry_of(name, self.batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "Bench", Fake)
        return bench.run(
            SimpleNamespace(workloads=workloads.SCRIPTED),
            PROFILE,
            bench.Asked((1, 8), ("llma", "draft-model", "mixed"), K),
            results,
            output=output,
            say=said.append,
        )


def test_a_run_resumes_with_earlier_entries(tmp_path):
    output, settings, said, measured = tmp_path / "bench.json", {"batch_sizes": (1, 8)}, [], []
    results = {"commit": "abc"}
    resume(settings, results, output)
    assert results == {"commit": "abc", "settings": settings, "entries": []}
    earlier = [entry_of(name, 1, bass=1.0) for name in ("draft-model", "llma", "mixed")]
    earlier.append(entry_of("mixed", 8, bass=1.0))
    output.write_text(json.dumps(results | {"entries": earlier}))
    resume(settings, results, output)
    run(results, output, measured, said)
    assert measured == [("draft-model", 8), ("llma", 8)]
    assert results["entries"][:4] == earlier
    assert [entry["commit"] for entry in results["entries"][4:]] == ["abc", "abc"]
    assert json.loads(output.read_text()) == json.loads(json.dumps(results))
    assert len(said) == 4


def test_workloads_of_a_source_are_measured_together():
    measured = []
    run({"entries": []}, None, measured, [])
    order = ["draft-model", "llma", "mixed"]
    assert measured == [(name, batch) for batch in (1, 8) for name in order]


def test_results_with_other_settings_are_left_unchanged(tmp_path):
    output = tmp_path / "bench.json"
    output.write_text(json.dumps({"settings": {"k": 3}, "entries": []}))
    with pytest.raises(ValueError, match=r"bench.json holds results with other settings"):
        resume({"k": 4}, {}, output)
    for text in ("{", "[]"):
        output.write_text(text)
        with pytest.raises(ValueError, match=r"bench.json holds no results"):
            resume({"k": 4}, {}, output)
    results = {"entries": [1]}
    resume({"k": 4}, results, None)
    assert results == {"settings": {"k": 4}, "entries": []}


def test_policies_are_described_beside_the_best_fixed_length():
    entry = entry_of("llma", 8, bass=300.0)
    assert bench.best_fixed(entry["policies"], "tokens_per_s") == ("fixed 1", 150.0)
    whole, live = bench.describe(entry)
    assert whole == (
        "llma, batch 8, whole run: best fixed 1 150 tokens/s (1.25 of plain 120); "
        "of that: goodput 0.980, bass 2.000"
    )
    assert live == (
        "llma, batch 8, all live: best fixed 1 300 tokens/s (2.50 of plain 120); "
        "of that: goodput 0.980, bass 2.000"
    )
    for which, line in (("tokens_per_s", live), ("live_tokens_per_s", whole)):
        untimed = {name: figures | {which: None} for name, figures in entry["policies"].items()}
        assert bench.describe(entry | {"policies": untimed}) == [line]
