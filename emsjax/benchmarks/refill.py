"""`emsjax bench refill`: slots that refill beside static batches.

The same prompts of 500 to 1500 tokens are completed by 128 tokens each: in batches that end with
their last sequence, and in the same number of slots that refill. The model is a scripted one with
random bfloat16 weights, prompt lookup does its work, the drafts follow the acceptance profile
`llma`, and all tokens are compared with the script. The sides take turns, and both include
prefill. The part that no schedule can save is timed as well: the same prompts in batches, with one
new token each.

The JSON file has `runs` of each side (`static`, `refilled`, `prompts`): `seconds`, `tokens_per_s`,
`model_calls`, `identical` (whether all tokens are those of the script), and for refilled slots the
`idle_share`. `speedup` is the ratio of the best times of both sides, and `prompt_share` the time of
the prompts over that of static batches.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from emsjax.benchmarks.acceptance import CopyAcceptance
from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.results import add_entry, begin, write_results
from emsjax.benchmarks.scripted import replay, scripted_model
from emsjax.benchmarks.shapes import MODELS
from emsjax.drafters import PromptLookup
from emsjax.engine.adapt import make_run
from emsjax.engine.output import assemble
from emsjax.engine.preparation import check
from emsjax.engine.slots import Slots, sequences_of, stacked
from emsjax.generation import in_groups

PROFILE = CopyAcceptance()


class Bench:
    """Prompts of the scripted model, and both ways to decode them."""

    def __init__(self, shape: str, prompts: int, tokens: tuple[int, int], new: int, batch: int):
        config = MODELS[shape]
        rng = np.random.default_rng(1)
        text = rng.integers(5, config.vocab_size, config.max_position_embeddings)
        lengths = rng.integers(*tokens, prompts, endpoint=True)
        self.prompts = [rng.integers(5, config.vocab_size, length) for length in lengths]
        self.expected = text[lengths[:, None] + np.arange(new)]
        self.model, self.batch = scripted_model(config, text), batch
        k = PROFILE.max_draft_tokens
        source = PromptLookup(max_draft_tokens=k)
        sizes = {"vocab_size": config.vocab_size, "seed": 0, "source": source}
        self.drafter = replay(PROFILE, text, batch, **sizes)
        self.options = {"max_new_tokens": new, "eos_token_ids": ()}

    def prompts_alone(self, prompts: Sequence[np.ndarray]) -> tuple[np.ndarray, dict[str, Any]]:
        return self.static(prompts, max_new_tokens=1)

    def static(
        self, prompts: Sequence[np.ndarray], **other: int
    ) -> tuple[np.ndarray, dict[str, Any]]:
        options = self.options | other
        run, requests = check(make_run(self.model, self.drafter), prompts, **options)
        batches = in_groups(run, requests, self.batch, None)
        out = assemble(batches, requests, pad_token_id=0)
        return out.tokens, {"model_calls": out.stats.model_calls}

    def refilled(self, prompts: Sequence[np.ndarray]) -> tuple[np.ndarray, dict[str, Any]]:
        run, requests = check(make_run(self.model, self.drafter), prompts, **self.options)
        slots = Slots(run, requests, self.batch)
        rows = sorted(slots.serve(sequences_of(requests)), key=lambda row: row["sequence_ids"])
        out = assemble([stacked(rows) | slots.counts()], requests, pad_token_id=0)
        return out.tokens, slots.counts() | {"idle_share": slots.idle_share}

    def run(self, side: str) -> dict[str, Any]:
        """Decode all prompts."""
        start = time.perf_counter()
        tokens, counted = SIDES[side](self, self.prompts)
        seconds = time.perf_counter() - start
        identical = bool((tokens == self.expected[:, : tokens.shape[1]]).all())
        speed = {"seconds": seconds, "tokens_per_s": tokens.size / seconds}
        return {"side": side, **speed, **counted, "identical": identical}


SIDES = {"static": Bench.static, "refilled": Bench.refilled, "prompts": Bench.prompts_alone}


def run(options: argparse.Namespace, command: str) -> int:
    names = ("model", "prompts", "shortest", "longest", "max_new_tokens", "batch_size", "repeats")
    settings = {name: getattr(options, name) for name in names} | {"dtype": "bfloat16"}
    results = begin(options, command, settings, entries="runs")
    tokens = (options.shortest, options.longest)
    sizes = (options.max_new_tokens, options.batch_size)
    bench = Bench(options.model, options.prompts, tokens, *sizes)
    for decode in SIDES.values():
        decode(bench, bench.prompts[: 2 * options.batch_size])  # compiles
    best: dict[str, float] = {}
    for _ in range(options.repeats):
        for side in SIDES:
            entry = bench.run(side)
            add_entry(entry, results, options.output, "runs")
            best[side] = min(best.get(side, entry["seconds"]), entry["seconds"])
            print(entry, flush=True)
        results["speedup"] = best["static"] / best["refilled"]
        results["prompt_share"] = best["prompts"] / best["static"]
        write_results(results, options.output)
    print(f"prompts: {results['prompt_share']:.2f} of the time of static batches")
    print(f"refilled slots: {results['speedup']:.3f} x static batches", flush=True)
    return 0 if all(of["identical"] for of in results["runs"]) else 1


if __name__ == "__main__":
    sys.exit(BENCHMARKS["refill"].main())
