"""The command `emsjax bench peers`: see `emsjax.benchmarks.peers`."""

import argparse
import dataclasses
import functools
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from rich.table import Table

from emsjax.benchmarks import engines, peers
from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.results import begin
from emsjax.benchmarks.subjects import OF_TRAINED, check_absent, check_shapes, read_trained
from emsjax.benchmarks.workloads import ScriptedModels
from emsjax.policies import profiles as profile_store
from emsjax.terminal.reporting import check_writable, line, make_console, make_table, progress

BATCH_SIZES = (1, 8, 24)
OWN, TRANSFORMERS = "emsjax", "transformers"
LIBRARIES = (TRANSFORMERS, *engines.ENGINES)  # others than this one
Make = Callable[[], peers.Subject]


class Comparison(NamedTuple):
    """What is compared, before any weights are read.

    Attributes:
        make: makes the models and prompts.
        results: as they are in the file.
        missing: the batch sizes that they lack.
        left_out: why a library is not compared, by its name.
    """

    make: Make
    results: dict[str, Any]
    missing: list[int]
    left_out: dict[str, str]


def run(options: argparse.Namespace, command: str) -> int:
    """Compare the libraries; exit code 1 unless all of them ran and all tokens are identical.

    Where a library is not installed or cannot run, a message and the results give the reason, and
    the others are compared.

    Raises:
        ValueError: an unknown shape or library, options that do not go together, results of another
            run, a file that cannot be written, sequences that do not fit, or an engine that did not
            do what it was asked for.
        ImportError: a library that was asked for by name is not installed or cannot run.
    """
    check_writable("--output", options.output)
    check_libraries(options.libraries)
    say, others = progress(), engines.Outputs({}, {}, {})
    with tempfile.TemporaryDirectory() as folder:
        # Nothing here may use the device before these processes have ended.
        found = [name for name in asked(options, engines.ENGINES) if not engines.missing(name)]
        if found and engines.apart(prepare, options, command, Path(folder)):
            others = engines.decode_all(Path(folder), found, say)
    comparison = set_up(options, command)
    results, left_out = comparison.results, {**comparison.left_out, **others.failed}
    for name in comparison.left_out:
        say(f"{name} is left out: {left_out[name]}")
    if left_out:
        results["left_out"] = left_out
    results["versions"] |= others.versions
    subject = comparison.make()
    kinds = {OWN: peers.ours, TRANSFORMERS: peers.theirs}
    peers.run(
        subject,
        {name: of(subject) for name, of in kinds.items() if name in libraries_of(results)},
        results,
        batch_sizes=comparison.missing,
        repeats=options.repeats,
        output=options.output,
        say=say,
        others=others.calls,
    )
    console = make_console()
    console.print(speeds(results))
    if not (same := peers.all_identical(results)):
        line(console, "Not all tokens are identical.")
    return 0 if same and all_ran(results) else 1


def asked(options: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
    """Those of these libraries that `--libraries` names, or all."""
    return [name for name in names if options.libraries is None or name in options.libraries]


def check_libraries(names: tuple[str, ...] | None) -> None:
    """Checks `--libraries`, but for transformers, for which the device must be known.

    Raises:
        ValueError: a name is unknown.
        ImportError: an engine is not installed.
    """
    for name in names or ():
        if name not in (OWN, *LIBRARIES):
            raise ValueError(f"--libraries: {name!r} is none of {', '.join(LIBRARIES)}")
        if name in engines.ENGINES and (reason := engines.missing(name)):
            raise ImportError(f"--libraries: {reason}")


def missing_libraries(options: argparse.Namespace) -> dict[str, str]:
    """Why libraries are left out, by name.

    Raises:
        ImportError: one of them was asked for by name.
    """
    found = {name: engines.missing(name) for name in asked(options, engines.ENGINES)}
    if TRANSFORMERS in asked(options, LIBRARIES):
        try:
            peers.torch_device()
        except ImportError as error:
            if options.libraries is not None:
                raise ImportError(f"--libraries: {TRANSFORMERS}: {error}") from error
            found = {TRANSFORMERS: str(error), **found}
    return {name: reason for name, reason in found.items() if reason is not None}


def set_up(options: argparse.Namespace, command: str) -> Comparison:
    """What is compared, with the results of an earlier run; raises errors as `run` does."""
    batch_sizes = dict.fromkeys(options.batch_sizes or BATCH_SIZES)
    make, describe = (scripted if options.model is None else trained)(options, max(batch_sizes))
    left_out = missing_libraries(options)
    libraries = [OWN, *(name for name in asked(options, LIBRARIES) if name not in left_out)]
    settings = {
        **describe,
        "device": profile_store.device(),
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
        "libraries": libraries,
    }
    if set(libraries) & set(engines.ENGINES):
        settings["ignore_eos"] = True  # all have the same numbers of new tokens
        of_model = make
        make = lambda: dataclasses.replace(of_model(), end_token_ids=())
    versions = (TRANSFORMERS, "torch") if TRANSFORMERS in libraries else ()
    results = begin(options, command, settings, packages=versions)
    done = {entry["batch"] for entry in results["entries"]}
    return Comparison(make, results, [size for size in batch_sizes if size not in done], left_out)


def prepare(options: argparse.Namespace, command: str, folder: Path) -> bool:
    """Write the engines' inputs; returns False if nothing is left to do. It uses the device."""
    comparison = set_up(options, command)
    if comparison.missing:
        subject = comparison.make()
        engines.write_inputs(subject, comparison.missing, options.repeats, folder)
    return bool(comparison.missing)


def all_ran(results: Mapping[str, Any]) -> bool:
    """Whether each engine has decoded each batch with all of this library's methods."""
    names = set(libraries_of(results)) & set(engines.ENGINES)
    for entry in results["entries"]:
        ran = {(run["library"], run["method"]) for run in entry["runs"]}
        methods = [method for library, method in ran if library == OWN]
        if not ran >= {(name, method) for name in names for method in methods}:
            return False
    return True


def libraries_of(results: Mapping[str, Any]) -> list[str]:
    return results["settings"]["libraries"]


def scripted(options: argparse.Namespace, prompts: int) -> tuple[Make, dict[str, Any]]:
    """A function that makes the scripted models, and their description for the settings."""
    check_absent(options, OF_TRAINED, "--model")
    draft_shape = check_shapes(options.shape, options.draft_shape)
    describe = {
        "shape": options.shape,
        "draft_shape": draft_shape,
        "dtype": jnp.dtype(ScriptedModels.dtype).name,
        "miscopied": peers.MISCOPIED,
    }
    sizes = (options.shape, draft_shape, options.max_new_tokens)
    return functools.partial(peers.scripted_subject, *sizes), describe


def trained(options: argparse.Namespace, prompts: int) -> tuple[Make, dict[str, Any]]:
    """A function that loads the trained models, and their description for the settings.

    Args:
        prompts: number of prompts to read: the largest batch size.

    Raises:
        ValueError: see `read_trained`.
    """
    check_absent(options, ("draft_shape",), "--shape")
    found = read_trained(options, prompts, prompts)
    ids = [np.asarray(prompt, np.int32) for prompt in found.prompts]

    def make() -> peers.Subject:
        draft_model = None if found.models.load_draft is None else found.models.load_draft()
        return peers.Subject(
            found.models.load(), draft_model, lambda batch: ids[:batch], options.max_new_tokens
        )

    return make, found.describe


def speeds(results: Mapping[str, Any]) -> Table:
    """A table with a row per batch size and method, and a column per library."""
    libraries = libraries_of(results)
    table = make_table("Tokens per second, prefill excluded", ["batch", "drafts", *libraries])
    for entry in results["entries"]:
        found = {(run["library"], run["method"]): run["tokens_per_s"] for run in entry["runs"]}
        for method in dict.fromkeys(method for _, method in found):
            cells = []
            for library in libraries:
                speed = found.get((library, method))
                cells.append("-" if speed is None else f"{speed:.0f}")
            table.add_row(str(entry["batch"]), method, *cells)
    return table


if __name__ == "__main__":
    sys.exit(BENCHMARKS["peers"].main())
