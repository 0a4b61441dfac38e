"""`emsjax bench groups`: all devices as groups, each with a replica, at one batch size altogether.

The same prompts are completed by as many groups as there are devices for, once for each size of a
group; a group's model is split over its devices, and the slots of all groups together are the same.
The model is a scripted one with random weights, prompt lookup does its work, the drafts follow the
acceptance profile `llma`, and all tokens are compared with the script. Times include prefill.

The JSON file has an entry of `entries` for each size: its `groups`, the `slots` of each, the runs'
seconds (`runs_s`), the tokens per second of all groups together (`tokens_per_s`: least, median and
most), and `identical`, whether all tokens were those of the script.
"""

import argparse
import itertools
import sys
import time
from typing import Any

import jax
import numpy as np

from emsjax.benchmarks.ems_sd import spread
from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.results import add_entry, begin
from emsjax.benchmarks.scripted import replay
from emsjax.benchmarks.subjects import check_shapes
from emsjax.benchmarks.workloads import SCRIPTED, ScriptedModels
from emsjax.drafters import PromptLookup
from emsjax.engine.adapt import make_run
from emsjax.engine.preparation import check
from emsjax.engine.replicas import make_slots, reopen, rows_of_all
from emsjax.engine.slots import sequences_of
from emsjax.tensor_parallel import meshes

PROFILE = SCRIPTED["llma"].profile


class Bench:
    """The scripted model, and the prompts that all groups share.

    Args:
        prompts: number of prompts.
    """

    def __init__(self, models: ScriptedModels, prompts: int, max_new_tokens: int):
        self.models, self.new_tokens = models, max_new_tokens
        self.prompts = models.prompts(prompts, max_new_tokens)
        lengths = np.array([len(prompt) for prompt in self.prompts])
        self.expected = models.expected(lengths, max_new_tokens)

    def measure(self, size: int, batch: int, repeats: int) -> dict[str, Any]:
        """The entry of groups of `size` devices with `batch` slots altogether."""
        places = jax.local_devices() if size == 1 else meshes(size)
        slots = batch // len(places)
        run = make_run(self.models.model, self.drafter(slots))
        options = {"max_new_tokens": self.new_tokens, "eos_token_ids": ()}
        run, requests = check(run, self.prompts, **options)
        groups = make_slots(run, requests, slots, places)
        seconds, identical = [], True
        for _ in range(1 + repeats):  # the first one compiles
            reopen(groups, requests)
            start = time.perf_counter()
            rows = list(rows_of_all(groups, sequences_of(requests)))
            seconds.append(time.perf_counter() - start)
            identical &= all(map(self.is_expected, rows)) and len(rows) == len(self.prompts)
        tokens = self.expected.size
        return {
            "size": size,
            "groups": len(places),
            "slots": slots,
            "runs_s": seconds[1:],
            "tokens_per_s": spread([tokens / one for one in seconds[1:]]),
            "identical": identical,
        }

    def drafter(self, slots: int) -> Any:
        sizes = {"vocab_size": self.models.config.vocab_size, "seed": 0}
        source = PromptLookup(max_draft_tokens=PROFILE.max_draft_tokens)
        return replay(PROFILE, self.models.text, slots, **sizes, source=source)

    def is_expected(self, row: dict[str, np.ndarray]) -> bool:
        new = row["tokens"][row["prompt_lengths"] : row["lengths"]]
        return np.array_equal(new, self.expected[row["sequence_ids"]])


def sizes_of(devices: int, batch: int, asked: tuple[int, ...] | None) -> tuple[int, ...]:
    """The sizes of groups to measure; None: all that are possible.

    Raises:
        ValueError: a size does not divide the devices, or its groups not the batch.
    """
    possible = [
        n for n in range(1, devices + 1) if devices % n == 0 and batch % (devices // n) == 0
    ]
    if wrong := [n for n in asked or () if n not in possible]:
        raise ValueError(
            f"--sizes: {devices} devices with {batch} slots make groups of "
            f"{', '.join(map(str, possible))}, not {', '.join(map(str, wrong))}"
        )
    return asked or tuple(possible)


def run(options: argparse.Namespace, command: str) -> int:
    """Measure all sizes; exit code 1 unless all tokens are those of the script.

    Raises:
        ValueError: an unknown shape, an impossible size, or more slots than prompts.
    """
    devices, batch = jax.local_device_count(), options.batch_size
    sizes = sizes_of(devices, batch, options.sizes)
    if options.prompts < batch:
        raise ValueError(f"--prompts must be at least --batch-size {batch}, not {options.prompts}")
    models = ScriptedModels(options.shape, check_shapes(options.shape, None))
    named = ("shape", "batch_size", "prompts", "max_new_tokens", "repeats")
    settings = {name: getattr(options, name) for name in named}
    results = begin(options, command, settings | {"devices": devices} | models.numbers.settings)
    done = {entry["size"] for entry in results["entries"]}
    bench = Bench(models, options.prompts, options.max_new_tokens)
    for size in itertools.filterfalse(done.__contains__, sizes):
        entry = bench.measure(size, batch, options.repeats)
        add_entry(entry, results, options.output)
        print(
            f"{entry['groups']} groups of {size} devices: "
            f"{entry['tokens_per_s']['median']:.0f} tokens/s",
            flush=True,
        )
    return 0 if all(entry["identical"] for entry in results["entries"]) else 1


if __name__ == "__main__":
    sys.exit(BENCHMARKS["groups"].main())
