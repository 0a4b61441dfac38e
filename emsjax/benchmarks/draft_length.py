"""`emsjax bench draft-length`: draft-length policies beside every fixed length, and plain decoding.

All policies and lengths of a batch size start from the same prefilled prompts. Fixed lengths share
one compiled loop, and every other policy has its own. Times exclude prefill and end when all
samples have finished (`tokens_per_s`) or when the first one has (`live_tokens_per_s`: all slots are
busy, as they are where finished samples are replaced). All tokens are compared with the expected
ones.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from emsjax.benchmarks.acceptance import CandidateAcceptance
from emsjax.benchmarks.policy_runs import (
    ALL_STEPS,
    compile_loops,
    limit,
    measured_acceptance,
    new_tokens,
    policies,
    time_policies,
)
from emsjax.benchmarks.results import add_entry
from emsjax.benchmarks.runs import LoopRun
from emsjax.benchmarks.workloads import EmbeddedModels, ScriptedModels, Workload
from emsjax.decode.state import Counters
from emsjax.engine.adapt import as_drafter
from emsjax.generation import init_state
from emsjax.policies.costs import StepCosts, read_profile, synergy_lengths

SEQUENCES = 64  # per figure, if the number of batches is within DRAWS
DRAWS = (2, 16)  # the least and the most batches per figure
Models = ScriptedModels | EmbeddedModels


@dataclasses.dataclass(frozen=True)
class Asked:
    """What to compare.

    Attributes:
        max_draft_tokens: the longest fixed length.
        max_new_tokens: None: the number of each workload.
        draws: batches per figure, each with acceptance drawn anew; None: enough for `SEQUENCES`
            sequences, within `DRAWS`.
    """

    batch_sizes: Sequence[int]
    workloads: Sequence[str]
    max_draft_tokens: int
    max_new_tokens: int | None = None
    draws: int | None = None


class Bench:
    """The comparison at one batch size.

    Args:
        models: the models to decode with.
        costs: the costs of their steps on this device.
    """

    def __init__(
        self,
        models: Models,
        batch: int,
        costs: StepCosts,
        asked: Asked,
    ):
        self.models, self.batch, self.costs, self.k = models, batch, costs, asked.max_draft_tokens
        self.max_new_tokens = asked.max_new_tokens
        self.repeats = asked.draws or int(np.clip(SEQUENCES // batch, *DRAWS))
        self.longest = asked.max_new_tokens or max(
            workload.max_new_tokens for workload in models.workloads.values()
        )
        self.prompts = models.prompts(batch, self.longest)
        self.runs: dict[tuple[str, Any], LoopRun] = {}

    def measure(self, name: str) -> dict[str, Any]:
        """Measure the entry of one workload."""
        workload = self.models.workloads[name]
        tokens = self.max_new_tokens or workload.max_new_tokens
        drafters = self.models.drafters(workload, self.batch, self.k, self.repeats)
        costs = self.costs.without_drafting() if as_drafter(drafters[0]).free else self.costs
        sizes = range(1, self.batch + 1)
        chosen = policies(self.k, costs, dict.fromkeys(sizes, 0))
        run = self.start(workload, drafters[0], chosen)
        limit(run, tokens)
        plain = self.time_plain(run, tokens)
        expected = plain.pop("tokens")
        curves = self.models.acceptance(workload, self.batch, self.k)
        if curves is None:
            curves = measured_acceptance(run, drafters[0], chosen[f"fixed {self.k}"])
        context = float(np.mean(run.lengths)) + tokens / 2
        lengths = synergy_lengths(costs, sizes, context, *curves)
        chosen = policies(self.k, costs, lengths)
        figures = time_policies(run, drafters, chosen, expected, live=workload.live)
        return {
            "workload": name,
            "batch": self.batch,
            "new_tokens": tokens,
            "repeats": len(drafters),
            "mean_prompt_tokens": float(np.mean(run.lengths)),
            "synergy_lengths": lengths,
            "plain": plain,
            "policies": figures,
        }

    def start(self, workload: Workload, drafter, policies: Mapping[str, Any]) -> LoopRun:
        """The run of this source; its workloads share prefilled prompts and compiled loops."""
        kind = (workload.source, jax.tree.structure(drafter))
        if kind not in self.runs:
            self.runs.clear()  # the caches of two runs never exist at once
            policy = policies["fixed 0"]
            state = init_state(
                self.models.model,
                drafter,
                self.prompts,
                draft_length=policy,
                max_new_tokens=self.longest,
                eos_token_ids=(),
            )
            run = LoopRun(self.models.model, drafter, state, None, policy)
            compile_loops(run, policies.values())
            self.runs[kind] = run
        return self.runs[kind]

    def time_plain(self, run: LoopRun, tokens: int) -> dict[str, Any]:
        """Figures and tokens of plain decoding from the run's prompts."""
        state = run.rewind()
        bare = {"drafter_state": (), "policy_state": ()}
        counters = Counters.init(self.batch, 0)
        plain = LoopRun(
            run.model,
            None,
            dataclasses.replace(state, counters=counters, **bare),
            None,
        )
        expected = self.models.expected(plain.lengths, tokens)
        plain.advance(1)  # compiles
        seconds = sum(plain.advance(ALL_STEPS) for _ in range(self.repeats))
        emitted = new_tokens(plain, tokens)
        run.state = dataclasses.replace(
            plain.state, **{name: getattr(state, name) for name in (*bare, "counters")}
        )
        return {
            "tokens": emitted if expected is None else expected,
            "seconds": seconds,
            "tokens_per_s": self.repeats * emitted.size / seconds,
            "identical": expected is None or bool(np.array_equal(emitted, expected)),
        }


def best_fixed(figures: Mapping[str, Mapping[str, Any]], which: str) -> tuple[str, float]:
    """Name and speed of the fastest fixed length."""
    fixed = {name: of[which] for name, of in figures.items() if name.startswith("fixed ")}
    name = max(fixed, key=fixed.get)
    return name, fixed[name]


def describe(entry: Mapping[str, Any]) -> list[str]:
    """One entry as lines of text."""
    lines = []
    for which in ("tokens_per_s", "live_tokens_per_s"):
        if entry["policies"]["fixed 0"][which] is None:
            continue
        name, best = best_fixed(entry["policies"], which)
        plain = entry["plain"]["tokens_per_s"]
        others = ", ".join(
            f"{policy} {of[which] / best:.3f}"
            for policy, of in entry["policies"].items()
            if not policy.startswith("fixed ")
        )
        title = f"{entry['workload']}, batch {entry['batch']}"
        title += ", all live" if which.startswith("live") else ", whole run"
        beside = f"{best / plain:.2f} of plain {plain:.0f}"
        lines.append(f"{title}: best {name} {best:.0f} tokens/s ({beside}); of that: {others}")
    figures = {"plain decoding": entry["plain"], **entry["policies"]}
    wrong = [name for name, of in figures.items() if not of["identical"]]
    if wrong:
        where = f"{entry['workload']}, batch {entry['batch']}"
        lines.append(f"{where}: NOT the expected tokens: {', '.join(wrong)}")
    return lines


def all_identical(results: Mapping[str, Any]) -> bool:
    return all(
        of["identical"]
        for entry in results["entries"]
        for of in (entry["plain"], *entry["policies"].values())
    )


def run(
    models: Models,
    profile: Mapping[str, Any] | str | Path,
    asked: Asked,
    results: dict[str, Any],
    *,
    output: Path | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure the entries that are missing in `results`, and write the file after each."""
    costs = StepCosts.from_profile(read_profile(profile))
    done = {(entry["workload"], entry["batch"]) for entry in results["entries"]}
    order = list(models.workloads)
    is_tree = lambda name: isinstance(models.workloads[name].profile, CandidateAcceptance)
    by_source = lambda name: (models.workloads[name].source, is_tree(name), order.index(name))
    for batch in asked.batch_sizes:
        missing = [name for name in asked.workloads if (name, batch) not in done]
        if not missing:
            continue
        bench = Bench(models, batch, costs, asked)
        for name in sorted(missing, key=by_source):
            entry = bench.measure(name)
            for line in describe(entry):
                say(line)
            add_entry(entry, results, output)
        del bench
    return results
