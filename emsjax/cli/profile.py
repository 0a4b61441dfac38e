"""`emsjax profile`: what steps take on this device, and the draft lengths that follow."""

import argparse
import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import emsjax
from emsjax.benchmarks import save, step_costs, surroundings
from emsjax.benchmarks.runs import LONG, SHORT
from emsjax.cli.bench_arguments import (
    ACCEPTANCE_RATE,
    PROFILED_BATCH_SIZES,
    PROFILED_CONTEXT,
    PROFILED_DRAFT_TOKENS,
)
from emsjax.cli.drafting import read_config
from emsjax.cli.reporting import check_writable, line, make_console, progress
from emsjax.device import dtype_name
from emsjax.models.config import OPTConfig
from emsjax.policies import profiles as profile_store


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
        dtype_name(options.dtype),
        batch_sizes=options.batch_sizes,
        context=options.context,
        max_draft_tokens=options.max_draft_tokens,
        acceptance_rate=options.acceptance_rate,
        output=options.output,
        command=command,
        say=progress(),
    )
    console = make_console()
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
