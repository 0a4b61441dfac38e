"""The command `emsjax bench peers`: see `emsjax.benchmarks.peers`."""

import argparse
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.table import Table

from emsjax.benchmarks import peers
from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.results import begin
from emsjax.benchmarks.subjects import OF_TRAINED, check_absent, check_shapes, read_trained
from emsjax.benchmarks.workloads import ScriptedModels
from emsjax.policies import profiles as profile_store
from emsjax.terminal.reporting import check_writable, line, make_console, make_table, progress

BATCH_SIZES = (1, 8, 24)
Make = Callable[[], peers.Subject]


def run(options: argparse.Namespace, command: str) -> int:
    """Compare the libraries; exit code 1 unless all tokens are identical.

    Where transformers cannot run, a message gives the reason, and only this library is measured.

    Raises:
        ValueError: an unknown shape, options that do not go together, results of another run, a
            file that cannot be written, or sequences that do not fit.
    """
    check_writable("--output", options.output)
    batch_sizes, say = options.batch_sizes or BATCH_SIZES, progress()
    make, describe = (scripted if options.model is None else trained)(options, max(batch_sizes))
    libraries, missing = {"emsjax": peers.ours, "transformers": peers.theirs}, None
    try:
        peers.torch_device()
    except ImportError as error:
        missing = error
        del libraries["transformers"]
    settings = {
        **describe,
        "device": profile_store.device(),
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
        "libraries": list(libraries),
    }
    versions = ("transformers", "torch") if "transformers" in libraries else ()
    results = begin(options, command, settings, packages=versions)
    if missing is not None:
        say(f"transformers is left out: {missing}")
    subject = make()
    peers.run(
        subject,
        {name: generate_of(subject) for name, generate_of in libraries.items()},
        results,
        batch_sizes=batch_sizes,
        repeats=options.repeats,
        output=options.output,
        say=say,
    )
    console = make_console()
    console.print(speeds(results))
    if not (same := peers.all_identical(results)):
        line(console, "Not all tokens are identical.")
    return 0 if same else 1


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
    libraries = results["settings"]["libraries"]
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
