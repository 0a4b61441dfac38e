"""`emsjax profile` and `emsjax bench`: measurements of this device, and what they say."""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import emsjax
from emsjax import plotting, profile_store
from emsjax.batch_drafting import read_config
from emsjax.bench_arguments import (
    ACCEPTANCE_RATE,
    PROFILED_BATCH_SIZES,
    PROFILED_CONTEXT,
    PROFILED_DRAFT_TOKENS,
)
from emsjax.benchmarks import draft_length, resume, save, step_costs, surroundings
from emsjax.benchmarks.runs import LONG, MODELS, SHORT
from emsjax.benchmarks.workloads import EmbeddedModels, ScriptedModels
from emsjax.config import OPTConfig
from emsjax.step_costs import FORMAT


def profile(options: argparse.Namespace, command: str) -> None:
    """Measure, report and store what steps of these models take here.

    Raises:
        ValueError: what cannot be measured, or a place that cannot be written.
    """
    check_writable("--output", options.output)
    draft_config = options.draft_model and read_config(options.draft_model, options.draft_revision)
    measured, path = measure_and_store(
        read_config(options.model, options.revision),
        draft_config,
        options.dtype,
        batch_sizes=options.batch_sizes,
        context=options.context,
        max_draft_tokens=options.max_draft_tokens,
        acceptance_rate=options.acceptance_rate,
        output=options.output,
        command=command,
        say=progress(),
    )
    console = Console()
    report(measured, console)
    also = "" if options.output is None else f" and {options.output}"
    line(console, f"Stored in {path}{also}; {measured['seconds']:.0f} s")


def measure_and_store(
    config: OPTConfig,
    draft_config: OPTConfig | None,
    dtype: Any,
    *,
    batch_sizes: tuple[int, ...] = PROFILED_BATCH_SIZES,
    context: int | None = None,
    max_draft_tokens: int = PROFILED_DRAFT_TOKENS,
    acceptance_rate: float = ACCEPTANCE_RATE,
    output: Path | None = None,
    command: str,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], Path]:
    """A profile, and where it was stored.

    Raises:
        ValueError: what cannot be measured, or a folder that cannot be written.
    """
    started = time.perf_counter()
    subject = profile_store.subject(config, draft_config, dtype)
    stored = profile_store.path_of(subject)
    stored.parent.mkdir(parents=True, exist_ok=True)
    check_writable("the store of profiles", stored)
    context = fitting_context(context, config, draft_config, max_draft_tokens)
    measurement = step_costs.Measurement(
        config, draft_config, dtype, batch_sizes, context, max_draft_tokens
    )
    measured = {
        **step_costs.profile(measurement, acceptance_rate, say),
        "subject": subject,
        "command": command,
        "emsjax": emsjax.__version__,
        **surroundings(commit=None),
        "seconds": time.perf_counter() - started,
    }
    save(measured, output)
    return measured, profile_store.store(measured)


def fitting_context(
    context: int | None, config: OPTConfig, draft_config: OPTConfig | None, max_draft_tokens: int
) -> int:
    """The context to measure at: mean cached tokens of a sample; None: the default, if it fits.

    Raises:
        ValueError: the models have not enough positions.
    """
    configs = [config] if draft_config is None else [config, draft_config]
    positions = min(one.max_position_embeddings for one in configs)
    least = (SHORT + LONG) // 2 - 1  # of a `StepRun`
    most = positions - max_draft_tokens - LONG + least - 1  # of its last row
    if most < least:
        raise ValueError(
            f"--max-draft-tokens {max_draft_tokens} leaves no room in {positions} positions: at "
            f"most {max_draft_tokens - (least - most)} would fit"
        )
    if context is None:
        return min(PROFILED_CONTEXT, most)
    if not least <= context <= most:
        raise ValueError(
            f"--context must be in {least}..{most}, not {context}: the models have {positions} "
            f"positions, and drafts of up to {max_draft_tokens} tokens are measured"
        )
    return context


def report(measured: Mapping[str, Any], console: Console) -> None:
    """How well the cost model fits, and which draft lengths follow from it."""
    fit, by_batch, draft_ms = measured["fit"], measured["table"], measured["costs"]["draft_ms"]
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for heading in ("batch", "alpha_b\nms/token", "beta_b\nms", "largest\nerror"):
        table.add_column(heading, justify="right")
    if drafts := measured["subject"]["draft_model"] is not None:
        table.add_column("draft step\nms", justify="right")
    for batch, of in fit["synergy"]["verify"].items():
        cells = [f"{of['alpha_ms']:.4f}", f"{of['beta_ms']:.3f}", f"{of['max_error']:.1%}"]
        table.add_row(str(batch), *cells, *([f"{draft_ms[batch]:.3f}"] if drafts else []))
    errors = "Step costs: error {mean_error:.1%} on average, {max_error:.1%} at most"
    line(console, errors.format(**fit))
    line(console, "Synergy's model of a step, alpha_b s + beta_b ms for s draft tokens:")
    console.print(table)
    of_rate = f"Accepted tokens at an acceptance rate of {by_batch['acceptance_rate']:g}: "
    accepted = "c s^gamma, c {c:.3f}, gamma {gamma:.3f}, error {max_error:.1%} at most"
    line(console, of_rate + accepted.format(**fit["synergy"]["accepted"]))
    line(console, f"Best draft length by batch size at that rate: {ranges(by_batch['lengths'])}")


def ranges(lengths: Mapping[int, int]) -> str:
    """As in "1..3: 7, 4..64: 0"."""
    parts = []
    for length, group in itertools.groupby(sorted(lengths), key=lengths.__getitem__):
        sizes = list(group)
        span = f"{sizes[0]}..{sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}"
        parts.append(f"{span}: {length}")
    return ", ".join(parts)


def bench_draft_length(options: argparse.Namespace, command: str) -> int:
    """Compare draft-length policies; exit code 1 unless all tokens are identical.

    Raises:
        ValueError: unknown names, a profile that does not suit, results of another run, a place
            that cannot be written, or what does not fit into the models' positions.
        ImportError: a plot without matplotlib.
    """
    models = find_models(options.shape, options.draft_shape)
    for name in options.workloads or ():
        if name not in models.workloads:
            known = ", ".join(models.workloads)
            raise ValueError(f"--workloads: {name!r} is none of --shape {options.shape}: {known}")
    if options.plot is not None:
        plotting.check_format(options.plot)
    check_writable("--plot", options.plot)
    check_writable("--output", options.output)
    say = progress()
    wanted = profile_store.subject(models.config, models.draft_config, models.dtype)
    costs = find_costs(models, wanted, options, command, say)
    settings = {
        **models.describe,
        "device": wanted["device"],
        "dtype": wanted["dtype"],
        "max_draft_tokens": options.max_draft_tokens,
        "max_new_tokens": options.max_new_tokens,
        "costs": costs,
    }
    results = {"command": command, **surroundings(options.commit)}
    resume(settings, results, options.output)
    draft_length.run(
        models,
        {"format": FORMAT, "costs": costs},
        results,
        batch_sizes=options.batch_sizes or models.batch_sizes,
        workloads=options.workloads or tuple(models.workloads),
        max_draft_tokens=options.max_draft_tokens,
        max_new_tokens=options.max_new_tokens,
        attention=None,
        draws=options.draws,
        output=options.output,
        say=say,
    )
    console = Console()
    for entry in results["entries"]:
        console.print(comparison(entry))
    if options.plot is not None:
        plotting.draft_length_figure(results).savefig(options.plot)
    return 0 if draft_length.all_identical(results) else 1


def find_models(shape: str, draft_shape: str | None) -> draft_length.Models:
    """The models by their shapes' names; raises a ValueError for others."""
    if shape == "embedded":
        if draft_shape is not None:
            raise ValueError("--draft-shape is an option of other shapes than --shape embedded")
        return EmbeddedModels()
    draft_shape = draft_shape or "opt-125m"
    for option, name, known in (
        ("--shape", shape, ["embedded", *MODELS]),
        ("--draft-shape", draft_shape, MODELS),
    ):
        if name not in known:
            raise ValueError(f"{option} must be one of {', '.join(known)}, not {name!r}")
    return ScriptedModels(shape, draft_shape)


def find_costs(
    models: draft_length.Models,
    wanted: Mapping[str, Any],
    options: argparse.Namespace,
    command: str,
    say: Callable[[str], None],
) -> Mapping[str, Any]:
    """Of the profile given, of the results to be gone on with, as stored, or measured now."""
    if options.profile is not None:
        return profile_store.read_for(options.profile, wanted)["costs"]
    output = options.output
    if output is not None and output.exists():
        try:
            return json.loads(output.read_bytes())["settings"]["costs"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"--output: {output} exists and is not from emsjax bench draft-length"
            ) from error
    path = profile_store.find(wanted)
    if path is not None:
        say(f"Step costs: from the stored profile {path}")
        return profile_store.read_for(path, wanted)["costs"]
    measured, path = measure_and_store(
        models.config, models.draft_config, models.dtype, command=command, say=say
    )
    say(f"Step costs: measured, and stored in {path}")
    return measured["costs"]


def comparison(entry: Mapping[str, Any]) -> Table:
    """One workload at one batch size."""
    table = Table(
        title=f"{entry['workload']}, batch {entry['batch']}",
        caption="of best: of the fastest fixed length's speed",
        box=SIMPLE_HEAD,
        show_edge=False,
    )
    policies = entry["policies"]
    speeds = {"tokens_per_s": "whole run", "live_tokens_per_s": "all live"}
    speeds = {which: of for which, of in speeds.items() if policies["fixed 0"][which] is not None}
    table.add_column("")
    for title in speeds.values():
        table.add_column(f"{title}\ntokens/s", justify="right")
        table.add_column("of\nbest", justify="right")
    table.add_column("mean acceptance\nlength", justify="right")
    best = {which: draft_length.best_fixed(policies, which) for which in speeds}
    # Plain decoding has all samples live to its end: one token each in every step.
    plain = dict.fromkeys(speeds, entry["plain"]["tokens_per_s"]) | {"mean_acceptance_length": 1.0}
    shown = {"plain": plain} | {name: policies[name] for name, _ in best.values()}
    shown |= {name: of for name, of in policies.items() if not name.startswith("fixed ")}
    for name, of in shown.items():
        cells = []
        for which, (_, speed) in best.items():
            cells += [f"{of[which]:.0f}", f"{of[which] / speed:.3f}"]
        table.add_row(name, *cells, f"{of['mean_acceptance_length']:.2f}")
    return table


def check_writable(name: str, path: Path | None) -> None:
    """Raises a ValueError, before the work, if this file could not be written after it."""
    if path is None:
        return
    new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"{name}: {path} cannot be written: {error.strerror}") from error
    if new:
        path.unlink()


def progress() -> Callable[[str], None]:
    """Prints lines beside the results, not among them."""
    console = Console(stderr=True)
    return lambda text: line(console, text)


def line(console: Console, text: str) -> None:
    """As it is: a path may hold brackets, and is not to be broken."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
