"""`emsjax bench ems-sd`: the paper's experiment as a command."""

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from emsjax import plotting, profile_store
from emsjax.benchmarks import Rates, ems_sd, resume, surroundings
from emsjax.benchmarks.runs import MODELS
from emsjax.benchmarks.scripted import CopyAcceptance, Profile, TokenAcceptance
from emsjax.benchmarks.workloads import ScriptedModels, Workload
from emsjax.commands import check_writable, progress

OF_DRAFT = {
    "llma": ("prompt-lookup", CopyAcceptance(), ("draft_tokens", "miss", "whole", "decay")),
    "draft-model": ("model", TokenAcceptance(0.8, 4), ("draft_tokens", "rate")),
}


def bench_ems_sd(options: argparse.Namespace, command: str) -> int:
    """Compare the methods; exit code 1 unless all tokens are identical.

    Raises:
        ValueError: unknown names, options that do not go together, results of another run, a
            place that cannot be written, or what does not fit.
        ImportError: a plot without matplotlib.
    """
    methods = options.methods or tuple(ems_sd.METHODS)
    for method in methods:
        if method not in ems_sd.METHODS:
            known = ", ".join(ems_sd.METHODS)
            raise ValueError(f"--methods: {method!r} is none of {known}")
    for option, name in (("--shape", options.shape), ("--draft-shape", options.draft_shape)):
        if name not in MODELS:
            raise ValueError(f"{option} must be one of {', '.join(MODELS)}, not {name!r}")
    source, profile = acceptance(options)
    if options.plot is not None:
        if ems_sd.GREEDY not in methods:
            raise ValueError(f"--plot shows speed-ups: --methods must name {ems_sd.GREEDY}")
        plotting.check_format(options.plot)
    check_writable("--plot", options.plot)
    check_writable("--output", options.output)
    models = ScriptedModels(options.shape, options.draft_shape)
    workload = Workload(source, options.max_new_tokens, profile)
    rates = Rates(options.read_rate * 1e12, options.matmul_rate * 1e12)
    settings = {
        **models.describe,
        "device": profile_store.subject(models.config, None, models.dtype)["device"],
        "dtype": models.dtype.__name__,
        "draft": options.draft,
        "acceptance": dataclasses.asdict(profile),
        "max_new_tokens": options.max_new_tokens,
        "methods": list(methods),
        "repeats": options.repeats,
        "rates": rates.describe(),
    }
    results = {"command": command, **surroundings(options.commit)}
    resume(settings, results, options.output)
    ems_sd.run(
        ems_sd.Scripted(models, workload),
        results,
        batch_sizes=options.batch_sizes or ems_sd.BATCH_SIZES,
        methods=methods,
        rates=rates,
        repeats=options.repeats,
        output=options.output,
        say=progress(),
    )
    console = Console()
    console.print(speeds(results, "tokens_per_s", "Tokens per second, whole run"))
    console.print(speeds(results, "live_tokens_per_s", "Tokens per second, all samples live"))
    console.print(details(results))
    if options.plot is not None:
        plotting.ems_sd_figure(results).savefig(options.plot)
    return 0 if ems_sd.all_identical(results) else 1


def acceptance(options: argparse.Namespace) -> tuple[str, Profile]:
    """Who drafts, and how often it stands.

    Raises:
        ValueError: a parameter of another drafter, or one out of range.
    """
    source, profile, own = OF_DRAFT[options.draft]
    given = {}
    for name in dict.fromkeys(name for *_, names in OF_DRAFT.values() for name in names):
        if (value := getattr(options, name)) is None:
            continue
        if name not in own:
            raise ValueError(f"--{name} is no parameter of --draft {options.draft}")
        given[name] = value
    return source, dataclasses.replace(profile, **given)


def speeds(results: Mapping[str, Any], which: str, title: str) -> Table:
    """As table 2 of the paper: a row for each batch size, a column for each method."""
    table = make_table(title, ["batch", *results["settings"]["methods"]])
    for entry in results["entries"]:
        cells = []
        for of in entry["methods"].values():
            speed_up = of[which].get("speed_up")
            over = "" if speed_up is None else f" ({speed_up:.2f})"
            cells.append(f"{of[which]['median']:.0f}{over}")
        table.add_row(str(entry["batch"]), *cells)
    return table


def details(results: Mapping[str, Any]) -> Table:
    """Where the time goes."""
    columns = ["batch", "method", "mean\nacceptance", "padding\ninputs", "padding\nKV"]
    columns += ["step\nms", "of\nfloor", "FLOP/s\nof peak", "memory\nGiB", "compile\ns"]
    table = make_table("A step while all samples are live, and padding of the whole run", columns)
    for entry in results["entries"]:
        for method, of in entry["methods"].items():
            memory = of["memory_bytes"]
            table.add_row(
                str(entry["batch"]),
                method,
                f"{of['mean_acceptance_length']:.2f}",
                f"{of['padding_ratio']['inputs']:.2f}",
                f"{of['padding_ratio']['kv']:.2f}",
                f"{of['step_ms']:.3f}",
                f"{of['of_floor']:.2f}",
                f"{of['utilisation']:.1%}",
                "" if memory is None else f"{memory / 2**30:.1f}",
                f"{of['compile_s']:.0f}",
            )
    return table


def make_table(title: str, columns: list[str]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, show_edge=False)
    for column in columns:
        table.add_column(column, justify="right")
    return table
