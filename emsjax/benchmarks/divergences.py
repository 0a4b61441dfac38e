"""`emsjax bench divergences`: where 16-bit speculative decoding differs from plain decoding.

Models with real margins between tokens decode greedily in bfloat16: the embedded pair, and random
weights of a model's shape, whose tokens are often nearly tied. With invariant numerics no token may
differ. With fast ones the benchmark lists the first difference of each sequence from plain
decoding, with the margin between the two tokens in float32. The exit code is 1 if a token differs
with invariant numerics, or if a difference is more than a near-tie (see
`emsjax.testing.divergence`).

Plain decoding completes all prompts of the largest batch size. Smaller batches have the first ones.
There are three drafters: prompt lookup, a draft model, and a replay of plain decoding's own tokens
with wrong ones among them, which has many drafts accepted where the two others find nothing. Prompt
lookup decodes in refilled slots as well.

The JSON file has one of the `entries` for each model, kind of numerics, batch size and drafter: the
number of `tokens`, the mean acceptance length and the `divergences`, each with its `share` of the
largest margin of a near-tie.
"""

import argparse
import collections
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from emsjax.benchmarks.acceptance import CopyAcceptance
from emsjax.benchmarks.options import EMBEDDED
from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.results import add_entry, begin
from emsjax.benchmarks.runs import at_once, random_model
from emsjax.benchmarks.scripted import replay
from emsjax.benchmarks.workloads import EmbeddedModels, ScriptedModels
from emsjax.drafters import DraftModel, PromptLookup
from emsjax.engine.output import GenerateOutput
from emsjax.generation import generate
from emsjax.models.decoder import Decoder
from emsjax.models.numbers import NumberFormats
from emsjax.streaming import stream
from emsjax.terminal.options import NUMERICS
from emsjax.testing.divergence import NEAR_TIE, first_divergences

DTYPE = jnp.bfloat16
LOOKUP, DRAFT, OWN, REFILLED = DRAFTERS = (
    "prompt-lookup",
    "draft-model",
    "own-tokens",
    "prompt-lookup, refilled slots",
)
SAMPLES_AT_ONCE = 64  # in the caches of all runs together, if one has no more
SLOTS_OF = 3  # sequences for each slot, where slots are refilled


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
        configs, numbers = (models.config, models.draft_config), NumberFormats(DTYPE)
        model, draft = (random_model(config, numbers) for config in configs)
    return ModelPair(model, draft, lambda batch: models.prompts(batch, new_tokens))


class Bench:
    """All drafters beside plain decoding, with one kind of numerics.

    Args:
        pair: the models and prompts.
        most: the largest batch size.
        new_tokens: of each sequence.
        numerics: see `pallas_kernels.numerics`.
    """

    def __init__(self, pair: ModelPair, most: int, new_tokens: int, numerics: str):
        self.pair, self.numerics = pair, numerics
        self.prompts, self.new_tokens = pair.prompts(most), new_tokens
        self.options = {"max_new_tokens": new_tokens, "eos_token_ids": (), "numerics": numerics}
        self.plain = generate(pair.model, self.prompts, **self.options)

    def measure(self, batch: int, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        """Yields the entry of each drafter. Several decode at once."""
        prompts = self.prompts[:batch]
        fields = {name: getattr(self.plain, name)[:batch] for name in ("tokens", "lengths")}
        plain = dataclasses.replace(self.plain, **fields)
        runs = {
            name: functools.partial(generate, self.pair.model, prompts, drafter, **self.options)
            for name, drafter in self.drafters(prompts, plain).items()
        }
        runs[REFILLED] = functools.partial(self.refilled, prompts, plain)
        outs = at_once(lambda run: run(), runs.values(), max(1, SAMPLES_AT_ONCE // batch))
        for name, out in zip(runs, outs, strict=True):
            entry = self.compare(batch, name, plain, out, say)
            # Refilled slots have the statistics of plain decoding, which say nothing of their own.
            yield entry | ({"mean_acceptance_length": None} if name == REFILLED else {})

    def refilled(self, prompts, plain: GenerateOutput) -> GenerateOutput:
        """The tokens of prompt lookup in slots that are refilled, with plain decoding's rest."""
        found = stream(
            self.pair.model,
            prompts,
            PromptLookup(search_generated=True),
            batch_size=max(1, len(prompts) // SLOTS_OF),
            **self.options,
        )
        tokens = {one.prompt: one.tokens for one in found}
        tokens = np.stack([tokens[i] for i in range(len(prompts))])
        return dataclasses.replace(plain, tokens=tokens)

    def drafters(self, prompts, plain: GenerateOutput) -> dict[str, Any]:
        """The drafters by name."""
        outputs = [np.concatenate([p, of]) for p, of in zip(prompts, plain.tokens, strict=True)]
        width = max(map(len, outputs))
        texts = [np.pad(text, (0, width - len(text))) for text in outputs]
        vocab = self.pair.model.config.vocab_size
        own = replay(CopyAcceptance(), texts, len(prompts), vocab_size=vocab, seed=0)
        return {
            LOOKUP: PromptLookup(search_generated=True),
            DRAFT: DraftModel(self.pair.draft_model),
            OWN: own,
        }

    def compare(self, batch: int, name: str, plain, out, say) -> dict[str, Any]:
        """The entry of one run."""
        found = first_divergences(self.pair.model, self.prompts[:batch], plain, out)
        divergences = [
            dataclasses.asdict(one) | {"share": one.margin / (NEAR_TIE * one.largest)}
            for one in found
        ]
        worst = max((of["share"] for of in divergences), default=0)
        say(
            f"{self.numerics}, batch {batch}, {name}: {len(found)} of {batch} sequences diverge, "
            f"at margins up to {worst:.2f} of a near-tie's"
        )
        return {
            "numerics": self.numerics,
            "batch": batch,
            "drafter": name,
            "tokens": batch * self.new_tokens,
            "mean_acceptance_length": out.stats.mean_acceptance_length,
            "near_ties_alone": all(one.is_near_tie for one in found),
            "divergences": divergences,
        }


def run(options: argparse.Namespace, command: str) -> int:
    settings = {
        "dtype": jnp.dtype(DTYPE).name,
        "max_new_tokens": options.max_new_tokens,
        "draft_shape": options.draft_shape,
    }
    results = begin(options, command, settings)
    key = lambda entry: tuple(entry[of] for of in ("model", "numerics", "batch"))
    for name in options.models:
        pair = find_pair(name, options.draft_shape, options.max_new_tokens)
        for numerics in NUMERICS[::-1]:
            known = collections.Counter(map(key, results["entries"]))
            sizes = [n for n in options.batch_sizes if known[name, numerics, n] < len(DRAFTERS)]
            if not sizes:
                continue
            bench = Bench(pair, max(options.batch_sizes), options.max_new_tokens, numerics)
            print(f"{name}:")
            for batch in sizes:
                # Entries that an interrupted run has written for a part of the drafters.
                part = (name, numerics, batch)
                results["entries"] = [of for of in results["entries"] if key(of) != part]
                for entry in bench.measure(batch, print):
                    add_entry({"model": name, **entry}, results, options.output)
    return 0 if all(map(is_right, results["entries"])) else 1


def is_right(entry: dict[str, Any]) -> bool:
    """Whether an entry has no differences that it must not have."""
    if entry["numerics"] == "invariant":
        return not entry["divergences"]
    return entry["near_ties_alone"]


if __name__ == "__main__":
    sys.exit(BENCHMARKS["divergences"].main())
