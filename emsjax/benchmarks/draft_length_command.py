"""The command `emsjax bench draft-length`: see `emsjax.benchmarks.draft_length`."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from emsjax import plotting
from emsjax.benchmarks import draft_length
from emsjax.benchmarks.device_profile import fitting_measurement, measure_and_store
from emsjax.benchmarks.options import ACCEPTANCE_RATE, EMBEDDED
from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.results import begin
from emsjax.benchmarks.subjects import check_absent, check_shapes
from emsjax.benchmarks.workloads import EmbeddedModels, ScriptedModels
from emsjax.policies import profiles as profile_store
from emsjax.policies.costs import FORMAT
from emsjax.terminal.options import number_formats
from emsjax.terminal.reporting import check_plot, check_writable, make_console, progress

# Options of models of random weights.
OF_SHAPES = ("draft_shape", "quantize", "kv_dtype", "tensor_parallel")


def run(options: argparse.Namespace, command: str) -> int:
    """Compare draft-length policies; exit code 1 unless all tokens are identical.

    Raises:
        ValueError: unknown names, an unsuitable profile, results of another run, a file that
            cannot be written, or sequences that exceed the models' positions.
        ImportError: a plot without matplotlib.
    """
    models = find_models(options)
    for name in options.workloads or ():
        if name not in models.workloads:
            known = ", ".join(models.workloads)
            raise ValueError(f"--workloads: {name!r} is none of --shape {options.shape}: {known}")
    check_plot(options.plot)
    check_writable("--output", options.output)
    say = progress()
    wanted = profile_store.subject(models.config, models.draft_config, models.numbers)
    costs = find_costs(models, wanted, options, command, say)
    settings = {
        **models.describe,
        "device": wanted["device"],
        **models.numbers.settings,
        "max_draft_tokens": options.max_draft_tokens,
        "max_new_tokens": options.max_new_tokens,
        "costs": costs,
    }
    results = begin(options, command, settings)
    asked = draft_length.Asked(
        options.batch_sizes or models.batch_sizes,
        options.workloads or tuple(models.workloads),
        options.max_draft_tokens,
        options.max_new_tokens,
        draws=options.draws,
    )
    profile = {"format": FORMAT, "costs": costs}
    draft_length.run(models, profile, asked, results, output=options.output, say=say)
    console = make_console()
    for entry in results["entries"]:
        console.print(comparison(entry))
    if options.plot is not None:
        plotting.draft_length_figure(results).savefig(options.plot)
    return 0 if draft_length.all_identical(results) else 1


def find_models(options: argparse.Namespace) -> draft_length.Models:
    """The models of these shapes; raises a ValueError for unknown ones."""
    if options.shape == EMBEDDED:
        check_absent(options, OF_SHAPES, f"a model's shape instead of --shape {EMBEDDED}")
        return EmbeddedModels()
    draft_shape = check_shapes(options.shape, options.draft_shape, EMBEDDED)
    return ScriptedModels(options.shape, draft_shape, **number_formats(options))


def find_costs(
    models: draft_length.Models,
    wanted: Mapping[str, Any],
    options: argparse.Namespace,
    command: str,
    say: Callable[[str], None],
) -> Mapping[str, Any]:
    """Step costs from `--profile`, from the results to resume, as stored, or measured now."""
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
    measurement = fitting_measurement(models.config, models.draft_config, models.numbers)
    measured, path = measure_and_store(measurement, ACCEPTANCE_RATE, command=command, say=say)
    say(f"Step costs: measured, and stored in {path}")
    return measured["costs"]


def comparison(entry: Mapping[str, Any]) -> Table:
    """A table of one entry."""
    table = Table(
        title=f"{entry['workload']}, batch {entry['batch']}",
        caption="of best: relative to the fastest fixed length",
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
    # In plain decoding all samples are live to its end, with one token each in every step.
    plain = dict.fromkeys(speeds, entry["plain"]["tokens_per_s"]) | {"mean_acceptance_length": 1.0}
    shown = {"plain": plain} | {name: policies[name] for name, _ in best.values()}
    shown |= {name: of for name, of in policies.items() if not name.startswith("fixed ")}
    for name, of in shown.items():
        cells = []
        for which, (_, speed) in best.items():
            cells += [f"{of[which]:.0f}", f"{of[which] / speed:.3f}"]
        table.add_row(name, *cells, f"{of['mean_acceptance_length']:.2f}")
    return table


if __name__ == "__main__":
    sys.exit(BENCHMARKS["draft-length"].main())
