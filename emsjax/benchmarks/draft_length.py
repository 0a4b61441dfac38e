"""`emsjax bench draft-length`: draft-length policies beside every fixed length, and plain decoding.

All policies and lengths of a batch size run in one compiled loop, from the same prefilled
prompts: a policy of policies chooses among them by a number. Times are of decoding alone,
until every sample has its tokens (`tokens_per_s`), and until the first one has
(`live_tokens_per_s`: all slots are busy, as where finished samples are replaced). Tokens are
compared with what they must be.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import emsjax
from emsjax.benchmarks import save
from emsjax.benchmarks.runs import LoopRun
from emsjax.benchmarks.workloads import EmbeddedModels, ScriptedModels, Workload
from emsjax.decoding import Counters
from emsjax.drafting.drafter import is_free
from emsjax.step_costs import StepCosts, read_profile, synergy_lengths

SEQUENCES, DRAWS = 16, 2  # at least, for a figure: so many decoded, in so many batches
ALL_STEPS = np.iinfo(np.int32).max // 2
Models = ScriptedModels | EmbeddedModels


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OneOf:
    """The policy policies[index]; another index needs no new compilation."""

    index: Any
    policies: tuple

    def init(self, batch, max_draft_tokens):
        return tuple(policy.init(batch, max_draft_tokens) for policy in self.policies)

    def lengths(self, states, view):
        choices = [
            lambda policy=policy, state=state: jnp.asarray(policy.lengths(state, view), jnp.int32)
            for policy, state in zip(self.policies, states, strict=True)
        ]
        return lax.switch(self.index, choices)

    def update(self, states, view, num_drafted, num_accepted):
        def choice(i: int):
            updated = self.policies[i].update(states[i], view, num_drafted, num_accepted)
            return (*states[:i], updated, *states[i + 1 :])

        choices = [lambda i=i: choice(i) for i in range(len(states))]
        return lax.switch(self.index, choices)


def policies(
    k: int, costs: StepCosts, lengths: Mapping[int, int]
) -> dict[str, tuple[int, tuple[Any, ...]]]:
    """What is compared, by name: an index and the policies of `OneOf`."""
    bass = emsjax.BassHeuristic()
    adaptive = {
        "bass": bass,
        "bass, cost-capped": emsjax.CostCapped(bass, costs),
        "synergy": emsjax.BatchSizeTable(lengths),
        "goodput": emsjax.Goodput(costs),
    }
    rest = tuple(adaptive.values())
    fixed = {f"fixed {n}": (0, (emsjax.FixedLength(n), *rest)) for n in range(k + 1)}
    default = (emsjax.FixedLength(k), *rest)
    return fixed | {name: (i, default) for i, name in enumerate(adaptive, start=1)}


class Bench:
    """The comparison at one batch size.

    Args:
        models: what is decoded.
        costs: of its steps here.
        k: the longest draft.
        max_new_tokens: None: the workload's own.
    """

    def __init__(
        self,
        models: Models,
        batch: int,
        costs: StepCosts,
        k: int,
        max_new_tokens: int | None,
        attention: str | None,
    ):
        self.models, self.batch, self.costs, self.k = models, batch, costs, k
        self.max_new_tokens, self.attention = max_new_tokens, attention
        self.repeats = max(-(-SEQUENCES // batch), DRAWS)
        self.longest = max_new_tokens or max(
            workload.max_new_tokens for workload in models.workloads.values()
        )
        self.prompts = models.prompts(batch, self.longest)
        self.runs: dict[str, LoopRun] = {}
        self.plain: dict[int, dict[str, Any]] = {}

    def measure(self, name: str) -> dict[str, Any]:
        """One workload's figures, as they stand in the JSON file."""
        workload = self.models.workloads[name]
        tokens = self.max_new_tokens or workload.max_new_tokens
        drafters = self.models.drafters(workload, self.batch, self.k, self.repeats)
        if is_free(drafters[0]):
            costs = dataclasses.replace(self.costs, draft_ms=0 * self.costs.draft_ms)
        else:
            costs = self.costs
        fixed = policies(self.k, costs, dict.fromkeys(range(1, self.batch + 1), 0))
        run = self.start(workload, drafters[0], OneOf(*fixed["fixed 0"]))
        limit(run, tokens)
        plain = self.time_plain(run, tokens)
        expected = plain.pop("tokens")
        curves = self.models.acceptance(workload, self.batch, self.k)
        if curves is None:
            curves = measured_acceptance(run, drafters[0], OneOf(*fixed[f"fixed {self.k}"]))
        context = float(np.mean(run.lengths)) + tokens / 2
        lengths = synergy_lengths(costs, range(1, self.batch + 1), context, *curves)
        # One sample is live until the run is over.
        live = workload.live and not (workload.whole and self.batch == 1)
        chosen = {which: OneOf(*one) for which, one in policies(self.k, costs, lengths).items()}
        figures = time_policies(run, drafters, chosen, expected, whole=workload.whole, live=live)
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

    def start(self, workload: Workload, drafter, policy: OneOf) -> LoopRun:
        """The run of this source; all its workloads share the prefilled prompts."""
        if workload.source not in self.runs:
            self.runs.clear()  # two runs' caches need not exist at once
            state = emsjax.init_state(
                self.models.model,
                drafter,
                self.prompts,
                draft_length=policy,
                max_new_tokens=self.longest,
                eos_token_ids=(),
                attention_implementation=self.attention,
            )
            self.runs[workload.source] = LoopRun(
                self.models.model, drafter, state, self.attention, policy
            )
        return self.runs[workload.source]

    def time_plain(self, run: LoopRun, tokens: int) -> dict[str, Any]:
        """Plain decoding from the run's own prompts; beside its figures the tokens."""
        if tokens not in self.plain:
            state = run.rewind()
            bare = {"drafter_state": (), "policy_state": ()}
            counters = Counters.init(self.batch, 0)
            plain = LoopRun(
                run.model,
                None,
                dataclasses.replace(state, counters=counters, **bare),
                self.attention,
            )
            expected = self.models.expected(plain.lengths, tokens)
            plain.advance(1)  # compiles
            seconds = sum(plain.advance(ALL_STEPS) for _ in range(self.repeats))
            said = new_tokens(plain, tokens)
            run.state = dataclasses.replace(
                plain.state, **{name: getattr(state, name) for name in (*bare, "counters")}
            )
            self.plain[tokens] = {
                "tokens": said if expected is None else expected,
                "seconds": seconds,
                "tokens_per_s": self.repeats * said.size / seconds,
                "identical": expected is None or bool(np.array_equal(said, expected)),
            }
        return dict(self.plain[tokens])


def limit(run: LoopRun, tokens: int) -> None:
    """So many new tokens of each sample."""
    limits = jnp.array(run.lengths + tokens)
    run.state = dataclasses.replace(run.state, length_limits=limits)


def new_tokens(run: LoopRun, count: int) -> np.ndarray:
    at = run.lengths[:, None] + np.arange(count)
    return np.take_along_axis(np.asarray(run.state.tokens), at, axis=1)


def time_policies(
    run: LoopRun,
    drafters: Sequence[Any],
    policies: Mapping[str, OneOf],
    expected: np.ndarray,
    *,
    whole: bool,
    live: bool,
) -> dict[str, dict[str, Any]]:
    """Speed over all drafters' draws, with which the policies take turns, and their counters."""
    totals = {name: Counter() for name in policies}
    identical = dict.fromkeys(policies, True)
    for drafter in drafters:
        for name, policy in policies.items():
            run.drafter, run.draft_length = drafter, policy
            run.advance(1)  # compiles, the first time of all
            if live:
                seconds = run.advance(steps_until_one_has_finished(run))
                totals[name].update(live_seconds=seconds, live_tokens=int(emitted(run).sum()))
                identical[name] &= says(run, expected)
            if whole:
                seconds = run.advance(ALL_STEPS)
                totals[name].update(seconds=seconds, tokens=int(emitted(run).sum()))
                identical[name] &= says(run, expected)
            totals[name].update(counted(run))
    speed = lambda of, what: of[f"{what}tokens"] / of[f"{what}seconds"]
    return {
        name: {
            **dict.fromkeys(("seconds", "live_seconds", "tokens", "live_tokens"), 0),
            **of,
            "tokens_per_s": speed(of, "") if whole else None,
            "live_tokens_per_s": speed(of, "live_") if live else None,
            "mean_acceptance_length": 1 + of["accepted"] / of["sample_steps"],
            "identical": identical[name],
        }
        for name, of in totals.items()
    }


def counted(run: LoopRun) -> dict[str, int]:
    """What the counters say of the last run."""
    counters = run.state.counters
    return {
        "steps": int(counters.model_calls),
        "sample_steps": int(counters.num_steps.sum()),
        "drafted": int(counters.num_drafted.sum()),
        "accepted": int(counters.num_accepted.sum()),
        "rows": int(counters.real_rows),
        "padding_rows": int(counters.padding_rows),
    }


def steps_until_one_has_finished(run: LoopRun) -> int:
    run.advance(1)
    while bool(run.state.active.all()):
        left = int((np.asarray(run.state.length_limits) - np.asarray(run.state.lengths)).min())
        # No sample can finish in fewer steps.
        run.state = run.decode(-(-left // run.state.counters.accepted_histogram.shape[1]))
    return int(run.state.counters.model_calls)


def emitted(run: LoopRun) -> np.ndarray:
    """New tokens of each sample so far, [b]."""
    return np.asarray(run.state.lengths) - run.lengths


def says(run: LoopRun, expected: np.ndarray) -> bool:
    """Whether what has been emitted so far is what was expected, [b, n]."""
    count = expected.shape[1]
    there = np.arange(count) < emitted(run)[:, None]
    return bool((~there | (new_tokens(run, count) == expected)).all())


def measured_acceptance(run: LoopRun, drafter, policy: OneOf):
    """Mean accepted and drafted tokens by draft length, from one run with the longest."""
    run.drafter, run.draft_length = drafter, policy
    run.advance(ALL_STEPS)
    counters = run.state.counters
    stats = SimpleNamespace(
        accepted_histogram=np.asarray(counters.accepted_histogram),
        num_drafted=np.asarray(counters.num_drafted),
    )
    return emsjax.draft_length.acceptance_curves(stats)


def best_fixed(figures: Mapping[str, Mapping[str, Any]], which: str) -> tuple[str, float]:
    """The fastest fixed length and its speed."""
    fixed = {name: of[which] for name, of in figures.items() if name.startswith("fixed ")}
    name = max(fixed, key=fixed.get)
    return name, fixed[name]


def describe(entry: Mapping[str, Any]) -> list[str]:
    """One workload at one batch size, as lines of text."""
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
    results: dict[str, Any],
    *,
    batch_sizes: Sequence[int],
    workloads: Sequence[str],
    max_draft_tokens: int,
    max_new_tokens: int | None,
    attention: str | None,
    output: Path | None,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure what `results["entries"]` does not hold yet; the JSON file grows with each entry."""
    costs = StepCosts.from_profile(read_profile(profile))
    done = {(entry["workload"], entry["batch"]) for entry in results["entries"]}
    by_source = lambda name: (models.workloads[name].source, list(models.workloads).index(name))
    for batch in batch_sizes:
        missing = [name for name in workloads if (name, batch) not in done]
        if not missing:
            continue
        bench = Bench(models, batch, costs, max_draft_tokens, max_new_tokens, attention)
        for name in sorted(missing, key=by_source):
            results["entries"].append(bench.measure(name))
            for line in describe(results["entries"][-1]):
                say(line)
            save(results, output)
        del bench
    return results


def resume(settings: Mapping[str, Any], results: dict[str, Any], output: Path | None) -> None:
    """Take over the entries that an earlier run with these settings has left in the file.

    Raises:
        ValueError: the file is of another run.
    """
    results["settings"], results["entries"] = dict(settings), []
    if output is None or not output.exists():
        return
    before = json.loads(output.read_bytes())
    if before.get("settings") != json.loads(json.dumps(settings)):
        raise ValueError(f"{output} holds results with other settings")
    results["entries"] = before["entries"]
