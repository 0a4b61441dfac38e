"""Runs of draft-length policies, which take turns from the same prefilled prompts."""

import copy
import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from emsjax.benchmarks.runs import LoopRun, at_once
from emsjax.policies.costs import StepCosts
from emsjax.policies.goodput import CostCapped, Goodput
from emsjax.policies.lengths import (
    BassHeuristic,
    BatchSizeTable,
    FixedLength,
    acceptance_curves,
)

ALL_STEPS = np.iinfo(np.int32).max // 2


def policies(k: int, costs: StepCosts, lengths: Mapping[int, int]) -> dict[str, Any]:
    """The policies to compare, by name."""
    bass = BassHeuristic()
    return {f"fixed {n}": FixedLength(n) for n in range(k + 1)} | {
        "bass": bass,
        "bass, cost-capped": CostCapped(bass, costs),
        "synergy": BatchSizeTable(lengths),
        "goodput": Goodput(costs),
    }


def kinds(policies: Iterable[Any]) -> list[Any]:
    """One policy of each kind; policies of a kind differ in numbers and share a compiled loop."""
    return list({jax.tree.structure(policy): policy for policy in policies}.values())


def compile_loops(run: LoopRun, policies: Iterable[Any]) -> None:
    """Compile a loop for each kind of policy, concurrently."""

    def compile_loop(policy: Any) -> None:
        loop = copy.copy(run)
        loop.draft_length = policy
        loop.state = loop.rewind()
        loop.compile()

    at_once(compile_loop, kinds(policies))


def limit(run: LoopRun, tokens: int) -> None:
    """Limit each sample to this many new tokens."""
    limits = jnp.array(run.lengths + tokens)
    run.state = dataclasses.replace(run.state, length_limits=limits)


def new_tokens(run: LoopRun, count: int) -> np.ndarray:
    at = run.lengths[:, None] + np.arange(count)
    return np.take_along_axis(np.asarray(run.state.tokens), at, axis=1)


def time_policies(
    run: LoopRun,
    drafters: Sequence[Any],
    policies: Mapping[str, Any],
    expected: np.ndarray,
    *,
    live: bool,
) -> dict[str, dict[str, Any]]:
    """Each policy's speed over all drafters, and the loop's counters.

    Args:
        drafters: the same drafts with acceptance drawn anew; the policies take turns with each.
        live: runs end when the first sample has finished instead of the last.
    """
    which = "live_" if live else ""
    for policy in kinds(policies.values()):
        run.drafter, run.draft_length = drafters[0], policy
        run.advance(ALL_STEPS)  # untimed: a device loads kernels when it first runs them
    totals = {name: Counter() for name in policies}
    identical = dict.fromkeys(policies, True)
    for drafter in drafters:
        for name, policy in policies.items():
            run.drafter, run.draft_length = drafter, policy
            run.advance(1)
            seconds = run.advance(steps_until_one_has_finished(run) if live else ALL_STEPS)
            tokens = int(emitted(run).sum())
            totals[name].update({f"{which}seconds": seconds, f"{which}tokens": tokens})
            identical[name] &= has_emitted(run, expected)
            totals[name].update(counted(run))
    untimed = dict.fromkeys(("seconds", "live_seconds", "tokens", "live_tokens"), 0)
    untimed |= dict.fromkeys(("tokens_per_s", "live_tokens_per_s"))
    return {
        name: {
            **untimed,
            **of,
            f"{which}tokens_per_s": of[f"{which}tokens"] / of[f"{which}seconds"],
            "mean_acceptance_length": 1 + of["accepted"] / of["sample_steps"],
            "identical": identical[name],
        }
        for name, of in totals.items()
    }


def counted(run: LoopRun) -> dict[str, int]:
    """The last run's counters."""
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
    """Run until the first sample has finished; returns the number of steps."""
    run.advance(1)
    while bool(run.state.active.all()):
        left = int((np.asarray(run.state.length_limits) - np.asarray(run.state.lengths)).min())
        # No sample can finish in fewer steps.
        run.state = run.decode(-(-left // run.state.counters.accepted_histogram.shape[1]))
    return int(run.state.counters.model_calls)


def emitted(run: LoopRun) -> np.ndarray:
    """New tokens of each sample so far, [b]."""
    return np.asarray(run.state.lengths) - run.lengths


def has_emitted(run: LoopRun, expected: np.ndarray) -> bool:
    """Whether the tokens emitted so far are the expected ones, [b, n]."""
    count = expected.shape[1]
    there = np.arange(count) < emitted(run)[:, None]
    return bool((~there | (new_tokens(run, count) == expected)).all())


def measured_acceptance(run: LoopRun, drafter, policy: Any):
    """Mean accepted and drafted tokens by draft length, from one run with the longest drafts."""
    run.drafter, run.draft_length = drafter, policy
    run.advance(ALL_STEPS)
    counters = run.state.counters
    stats = SimpleNamespace(
        accepted_histogram=np.asarray(counters.accepted_histogram),
        num_drafted=np.asarray(counters.num_drafted),
    )
    return acceptance_curves(stats)
