"""`emsjax bench first-call`: seconds until the first call of a process returns.

One process decodes a batch twice with an empty compilation cache; a second process does the same
with the cache that the first one has filled. Weights are random and bfloat16; the time to create
them is left out.

The JSON file has, under `cold` and `warm`, the seconds of both calls of `emsjax.generate`
(`calls_s`).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.results import write_results
from emsjax.benchmarks.runs import random_model
from emsjax.benchmarks.shapes import MODELS
from emsjax.drafters import DraftModel, PromptLookup
from emsjax.generation import generate
from emsjax.records.writing import to_json
from emsjax.terminal.options import flag
from emsjax.terminal.surroundings import surroundings

PROMPT_TOKENS, NEW_TOKENS = 900, 128


def decode_twice(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each call, and this process's versions and hardware."""
    model = random_model(MODELS[options.model])
    drafter = None
    if options.drafter == "prompt-lookup":
        drafter = PromptLookup()
    elif options.drafter == "model":
        drafter = DraftModel(random_model(MODELS[options.draft_model]))
    jax.block_until_ready((model, drafter))
    tokens = min(PROMPT_TOKENS, model.config.max_position_embeddings - NEW_TOKENS)
    shape = (options.batch_size, tokens)
    prompts = list(np.random.default_rng(0).integers(5, model.config.vocab_size, shape))
    calls = []
    for _ in range(2):
        begin = time.perf_counter()
        generate(model, prompts, drafter, max_new_tokens=NEW_TOKENS, eos_token_ids=())
        calls.append(time.perf_counter() - begin)
    return {"calls_s": calls, "surroundings": surroundings(options.commit)}


def in_new_process(arguments: Sequence[str], cache: str) -> dict[str, Any]:
    """The result of `decode_twice` in a new process with this compilation cache."""
    command = [sys.executable, "-m", "emsjax.benchmarks.first_call", *arguments, "--in-process"]
    settings = {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    found = subprocess.run(command, env=os.environ | settings, stdout=subprocess.PIPE, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def run(options: argparse.Namespace, command: str) -> int:
    if options.in_process:
        print(to_json(decode_twice(options)))
        return 0
    # This process leaves the device to the others, which report versions and hardware.
    results: dict[str, Any] = {"command": command}
    names = ("model", "draft_model", "drafter", "batch_size")
    settings = {name: getattr(options, name) for name in names}
    given = [word for name in names for word in (flag(name), str(settings[name]))]
    if options.commit is not None:
        given += ["--commit", options.commit]
    with tempfile.TemporaryDirectory() as cache:
        for state in ("cold", "warm"):
            found = in_new_process(given, cache)
            results |= found.pop("surroundings") | {"settings": settings}
            results[state] = found
            first, second = found["calls_s"]
            print(f"{state}: first call {first:.1f} s, second {second:.1f} s", flush=True)
    write_results(results, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(BENCHMARKS["first-call"].main())
