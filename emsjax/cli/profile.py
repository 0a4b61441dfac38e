"""`emsjax profile`: costs of decoding steps on this device, and the draft lengths they imply."""

import argparse
import itertools
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from emsjax.benchmarks.device_profile import fitting_measurement, measure_and_store
from emsjax.benchmarks.shapes import MODELS
from emsjax.device import dtype_name
from emsjax.drafters.folders import check_is_no_drafter
from emsjax.models.config import DecoderConfig
from emsjax.models.numbers import NumberFormats
from emsjax.terminal.models import load_config
from emsjax.terminal.options import number_formats
from emsjax.terminal.reporting import check_writable, line, make_console, make_table, progress


def run(options: argparse.Namespace, command: str) -> None:
    """Measure, report and store how long steps of these models take on this device.

    Raises:
        ValueError: models that cannot be measured, or a file that cannot be written.
    """
    check_writable("--output", options.output)
    draft_model, draft_revision = options.draft_model, options.draft_revision
    if draft_model is not None and draft_model not in MODELS:
        check_is_no_drafter(draft_model, draft_revision)
    measurement = fitting_measurement(
        config_of(options.model, options.revision),
        draft_model and config_of(draft_model, draft_revision),
        NumberFormats(dtype_name(options.dtype), **number_formats(options)),
        batch_sizes=options.batch_sizes,
        context=options.context,
        max_draft_tokens=options.max_draft_tokens,
    )
    measured, path = measure_and_store(
        measurement,
        options.acceptance_rate,
        output=options.output,
        commit=options.commit,
        command=command,
        say=progress(),
    )
    console = make_console()
    report(measured, console)
    also = "" if options.output is None else f" and {options.output}"
    line(console, f"Stored in {path}{also}; {measured['seconds']:.0f} s")


def config_of(model: str, revision: str | None) -> DecoderConfig:
    """The config of a shape that benchmarks name so, of a local folder or of a Hugging Face id."""
    return MODELS.get(model) or load_config(model, revision)


def report(measured: Mapping[str, Any], console: Console) -> None:
    """Print how well the cost model fits, and the draft lengths that follow from it."""
    fit, by_batch, draft_ms = measured["fit"], measured["table"], measured["costs"]["draft_ms"]
    columns = ["batch", "alpha_b\nms/token", "beta_b\nms", "largest\nerror"]
    if drafts := measured["subject"]["draft_model"] is not None:
        columns.append("draft step\nms")
    table = make_table(None, columns)
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
    """Draft lengths by ranges of batch sizes, such as "1..3: 7, 4..64: 0"."""
    parts = []
    for length, group in itertools.groupby(sorted(lengths), key=lengths.__getitem__):
        sizes = list(group)
        span = f"{sizes[0]}..{sizes[-1]}" if len(sizes) > 1 else f"{sizes[0]}"
        parts.append(f"{span}: {length}")
    return ", ".join(parts)
