"""`emsjax bench divergences`: where 16-bit speculative decoding differs from plain decoding.

Models with real margins between tokens decode greedily in bfloat16: the embedded pair, and random
weights of a model's shape, whose tokens are often nearly tied. The benchmark lists the first
difference of each sequence from plain decoding, with the margin between the two tokens in float32.
The exit code is 1 if one of them is more than a near-tie (see `emsjax.testing.divergence`).

There are three drafters: prompt lookup, a draft model, and a replay of plain decoding's own tokens
with wrong ones among them, which has many drafts accepted where the two others find nothing.

The JSON file has one of the `entries` for each model, batch size and drafter: the mean acceptance
length and the `divergences`, each with its `share` of the largest margin of a near-tie.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from emsjax.benchmarks.options import EMBEDDED
from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.results import add_entry, begin
from emsjax.benchmarks.runs import random_model
from emsjax.benchmarks.scripted import CopyAcceptance, replay
from emsjax.benchmarks.workloads import EmbeddedModels, ScriptedModels
from emsjax.drafters import DraftModel, PromptLookup
from emsjax.generation import generate
from emsjax.models.decoder import Decoder
from emsjax.testing.divergence import NEAR_TIE, first_divergences

DTYPE = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class ModelPair:
    """The models that decode, and the prompts for a batch size."""

    model: Decoder
    draft_model: Decoder
    prompts: Callable[[int], Sequence[Sequence[int]]]


def find_pair(name: str, draft_shape: str, new_tokens: int) -> ModelPair:
    """The embedded pair, or models of random weights."""
    if name == EMBEDDED:
        models = EmbeddedModels()
        model, draft = (one.astype(DTYPE) for one in (models.model, models.draft_model))
    else:
        models = ScriptedModels(name, draft_shape)
        model, draft = random_model(models.config, DTYPE), random_model(models.draft_config, DTYPE)
    return ModelPair(model, draft, lambda batch: models.prompts(batch, new_tokens))


def measure(pair: ModelPair, batch: int, new_tokens: int, say) -> list[dict[str, Any]]:
    """Measure the entry of each drafter."""
    model, prompts = pair.model, pair.prompts(batch)
    decode = lambda drafter: generate(
        model, prompts, drafter, max_new_tokens=new_tokens, eos_token_ids=()
    )
    plain = decode(None)
    outputs = [np.concatenate([p, of]) for p, of in zip(prompts, plain.tokens, strict=True)]
    width = max(map(len, outputs))
    texts = [np.pad(text, (0, width - len(text))) for text in outputs]
    vocab = model.config.vocab_size
    drafters = {
        "prompt-lookup": PromptLookup(search_generated=True),
        "draft-model": DraftModel(pair.draft_model),
        "own-tokens": replay(CopyAcceptance(), texts, batch, vocab_size=vocab, seed=0),
    }
    entries = []
    for name, drafter in drafters.items():
        out = decode(drafter)
        found = first_divergences(model, prompts, plain, out)
        divergences = [
            dataclasses.asdict(one) | {"share": one.margin / (NEAR_TIE * one.largest)}
            for one in found
        ]
        entry = {
            "batch": batch,
            "drafter": name,
            "mean_acceptance_length": out.stats.mean_acceptance_length,
            "near_ties_alone": all(one.is_near_tie for one in found),
            "divergences": divergences,
        }
        entries.append(entry)
        worst = max((of["share"] for of in divergences), default=0)
        say(
            f"batch {batch}, {name}: {len(found)} sequences diverge, at margins up to "
            f"{worst:.2f} of a near-tie's; mean acceptance length "
            f"{entry['mean_acceptance_length']:.2f}"
        )
    return entries


def run(options: argparse.Namespace, command: str) -> int:
    settings = {"dtype": jnp.dtype(DTYPE).name, "max_new_tokens": options.max_new_tokens}
    results = begin(options, command, settings)
    for name in options.models:
        pair = find_pair(name, options.draft_shape, options.max_new_tokens)
        for batch in options.batch_sizes:
            print(f"{name}:")
            for entry in measure(pair, batch, options.max_new_tokens, print):
                add_entry({"model": name, **entry}, results, options.output)
    return 0 if all(entry["near_ties_alone"] for entry in results["entries"]) else 1


if __name__ == "__main__":
    sys.exit(BENCHMARKS["divergences"].main())
