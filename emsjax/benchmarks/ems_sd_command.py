"""The command `emsjax bench ems-sd`: see `emsjax.benchmarks.ems_sd`."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
from rich.table import Table

from emsjax import plotting
from emsjax.benchmarks import ems_sd
from emsjax.benchmarks.acceptance import PROFILES
from emsjax.benchmarks.rates import MEASURED_RATES, Rates
from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.results import begin
from emsjax.benchmarks.sources import Scripted, Texts
from emsjax.benchmarks.subjects import OF_TRAINED, check_absent, check_shapes, load, read_trained
from emsjax.benchmarks.workloads import ScriptedModels, Workload
from emsjax.drafters import DraftModel, PromptLookup
from emsjax.drafters.self_draft import SelfDraft, narrow_copy
from emsjax.models.numbers import NumberFormats
from emsjax.policies import profiles as profile_store
from emsjax.terminal.options import flag, number_formats
from emsjax.terminal.reporting import (
    check_plot,
    check_writable,
    make_console,
    make_table,
    progress,
)

OF_DRAFT = {
    "llma": ("prompt-lookup", PROFILES["llma"], ("draft_tokens", "miss", "whole", "decay")),
    "draft-model": ("model", PROFILES["draft-model"], ("draft_tokens", "rate")),
    "self": ("self", PROFILES["self"], ("draft_tokens", "rate")),
}


def run(options: argparse.Namespace, command: str) -> int:
    """Compare the methods; exit code 1 unless all tokens are identical.

    Raises:
        ValueError: unknown names, options that do not go together, results of another run, a
            file that cannot be written, or sequences that do not fit.
        ImportError: a plot without matplotlib.
    """
    methods = options.methods or tuple(ems_sd.METHODS)
    for method in methods:
        if method not in ems_sd.METHODS:
            known = ", ".join(ems_sd.METHODS)
            raise ValueError(f"--methods: {method!r} is none of {known}")
    if options.plot is not None and ems_sd.GREEDY not in methods:
        raise ValueError(f"--plot shows speed-ups: --methods must name {ems_sd.GREEDY}")
    check_plot(options.plot)
    check_writable("--output", options.output)
    rates = rates_of(options)
    make, subject = (scripted if options.model is None else texts)(options)
    settings = {
        **subject,
        "device": profile_store.device(),
        "draft": options.draft,
        "max_new_tokens": options.max_new_tokens,
        "methods": list(methods),
        "repeats": options.repeats,
        "rates": rates and rates.describe(),
    }
    results = begin(options, command, settings)
    ems_sd.run(
        make(),
        results,
        batch_sizes=options.batch_sizes or ems_sd.BATCH_SIZES,
        methods=methods,
        rates=rates,
        repeats=options.repeats,
        output=options.output,
        say=progress(),
    )
    console = make_console()
    console.print(speeds(results, "tokens_per_s", "Tokens per second, whole run"))
    console.print(speeds(results, "live_tokens_per_s", "Tokens per second, all samples live"))
    console.print(details(results))
    if options.plot is not None:
        plotting.ems_sd_figure(results).savefig(options.plot)
    return 0 if ems_sd.all_identical(results) else 1


def rates_of(options: argparse.Namespace) -> Rates | None:
    """The rates of the options, or those measured on such a device; None: unknown.

    Raises:
        ValueError: one rate was given without the other.
    """
    given = (options.read_rate, options.matmul_rate)
    if None not in given:
        return Rates(*(1e12 * rate for rate in given))
    if given != (None, None):
        raise ValueError("--read-rate and --matmul-rate need each other")
    return MEASURED_RATES.get(jax.local_devices()[0].device_kind)


def scripted(options: argparse.Namespace) -> tuple[Callable[[], Scripted], dict[str, Any]]:
    """A function that makes the scripted model, and its description for the settings.

    Raises:
        ValueError: an unknown shape, options of other models, or a parameter out of range.
    """
    check_absent(options, OF_TRAINED, "--model")
    draft_shape = check_shapes(options.shape, options.draft_shape)
    drafts, profile, own = OF_DRAFT[options.draft]
    given = parameters(options)
    for name in given:
        if name not in own:
            raise ValueError(f"{flag(name)} is not a parameter of --draft {options.draft}")
    profile = dataclasses.replace(profile, **given)
    models = ScriptedModels(options.shape, draft_shape, **number_formats(options))
    subject = {**models.describe, **models.numbers.settings}
    workload = Workload(drafts, options.max_new_tokens, profile)
    return lambda: Scripted(models, workload), subject | {"acceptance": dataclasses.asdict(profile)}


def texts(options: argparse.Namespace) -> tuple[Callable[[], Texts], dict[str, Any]]:
    """A function that loads the trained model, and its description for the settings.

    Raises:
        ValueError: bad records, options of scripted models, or prompts unsuitable for the model.
    """
    others = [name for name in parameters(options) if name != "draft_tokens"]
    check_absent(options, ("draft_shape", *others), "--shape")
    if (options.draft_model is None) == (options.draft == "draft-model"):
        raise ValueError("--draft draft-model and --draft-model need each other")
    largest_batch = max(options.batch_sizes or ems_sd.BATCH_SIZES)
    found = read_trained(options, options.max_prompts, largest_batch)

    def make() -> Texts:
        model = found.models.load()
        if options.draft == "self":
            numbers, name = NumberFormats.of(model), (options.model, options.revision)
            copy = narrow_copy(model, lambda of: load(numbers._replace(quantize=of), *name))
            drafter = SelfDraft(copy, options.draft_tokens or 4)
        elif found.models.load_draft is None:
            drafter = PromptLookup(max_draft_tokens=options.draft_tokens or 7)
        else:
            drafter = DraftModel(found.models.load_draft(), options.draft_tokens or 4)
        return Texts(model, drafter, found.prompts, options.max_new_tokens)

    return make, {**found.describe, "draft_tokens": options.draft_tokens}


def parameters(options: argparse.Namespace) -> dict[str, Any]:
    """The parameters of acceptance that were given."""
    known = dict.fromkeys(name for *_, names in OF_DRAFT.values() for name in names)
    return {name: getattr(options, name) for name in known if getattr(options, name) is not None}


def speeds(results: Mapping[str, Any], which: str, title: str) -> Table:
    """A table like the paper's table 2: a row per batch size, a column per method."""
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
    """A table of steps: acceptance, padding, times, memory and compilation."""
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
                "" if of["of_floor"] is None else f"{of['of_floor']:.2f}",
                "" if of["utilisation"] is None else f"{of['utilisation']:.1%}",
                "" if memory is None else f"{memory / 2**30:.1f}",
                f"{of['compile_s']:.0f}",
            )
    return table


if __name__ == "__main__":
    sys.exit(BENCHMARKS["ems-sd"].main())
