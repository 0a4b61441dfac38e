"""`python -m emsjax.benchmarks.first_call`: seconds until the first call of a process returns.

One process decodes a batch twice with an empty compilation cache, another one does the same
with what the first has left there. Weights are random, bfloat16; making them is not counted.

The JSON file holds `command`, `hardware`, `versions`, `commit`, `settings`, and of `cold` and
`warm` the seconds of either call of `emsjax.generate` (`calls_s`).
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import emsjax
from emsjax.benchmarks import save, surroundings
from emsjax.benchmarks.runs import MODELS, random_model
from emsjax.cli.types import positive_int

PROMPT_TOKENS, NEW_TOKENS = 900, 128
DRAFTERS = ("none", "prompt-lookup", "model")


def decode_twice(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each call, and where they were spent."""
    model = random_model(MODELS[options.model])
    drafter = None
    if options.drafter == "prompt-lookup":
        drafter = emsjax.PromptLookup()
    elif options.drafter == "model":
        drafter = emsjax.DraftModel(random_model(MODELS[options.draft_model]))
    jax.block_until_ready((model, drafter))
    tokens = min(PROMPT_TOKENS, model.config.max_position_embeddings - NEW_TOKENS)
    shape = (options.batch_size, tokens)
    prompts = list(np.random.default_rng(0).integers(5, model.config.vocab_size, shape))
    calls = []
    for _ in range(2):
        begin = time.perf_counter()
        emsjax.generate(model, prompts, drafter, max_new_tokens=NEW_TOKENS, eos_token_ids=())
        calls.append(time.perf_counter() - begin)
    return {"calls_s": calls, "surroundings": surroundings(options.commit)}


def in_new_process(arguments: Sequence[str], cache: str) -> dict[str, Any]:
    """What `decode_twice` says in a process with this compilation cache."""
    command = [sys.executable, "-m", "emsjax.benchmarks.first_call", *arguments, "--in-process"]
    settings = {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    found = subprocess.run(command, env=os.environ | settings, stdout=subprocess.PIPE, check=True)
    return json.loads(found.stdout.splitlines()[-1])


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m emsjax.benchmarks.first_call",
        description="Seconds of a process's first call, without and with a compilation cache.",
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="opt-6.7b", help="default: %(default)s")
    add("--draft-model", choices=MODELS, default="opt-125m", help="default: %(default)s")
    add("--drafter", choices=DRAFTERS, default="prompt-lookup", help="default: %(default)s")
    add("--batch-size", type=positive_int, default=24, metavar="N", help="default: %(default)s")
    add("--output", type=Path, metavar="FILE", help="JSON file")
    add("--commit", help="of the measured code (default: the checkout's)")
    add("--in-process", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = make_parser().parse_args(arguments)
    if options.in_process:
        print(json.dumps(decode_twice(options)))
        return
    results = {"command": shlex.join(["python", "-m", "emsjax.benchmarks.first_call", *arguments])}
    names = ("model", "draft_model", "drafter", "batch_size")
    settings = {name: getattr(options, name) for name in names}
    with tempfile.TemporaryDirectory() as cache:
        for state in ("cold", "warm"):
            found = in_new_process(arguments, cache)
            results |= found.pop("surroundings") | {"settings": settings}
            results[state] = found
            first, second = found["calls_s"]
            print(f"{state}: first call {first:.1f} s, second {second:.1f} s", flush=True)
    save(results, options.output)


if __name__ == "__main__":
    main()
