"""`emsjax bench quality`: what narrow weights and caches cost the embedded target.

Bits per byte are those of passages of the running Python's library, for every format of weights and
of caches. They are of modules that the target was not trained on: all of them are in the library of
Python 3.11.7, and others have other versions of most. The second part decodes the embedded prompts
with draft models: copies of the target with narrow weights, with a cache of their own or in the
target's, and the embedded one.

The JSON file has one of the `entries` for each format, with `bits_per_byte` and their `ratio` to
those of wide numbers, and for each drafter, with the `acceptance_rate` of its draft tokens and the
`mean_acceptance_length`.
"""

import argparse
import math
import sys

import numpy as np
from transformers import AutoTokenizer

from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.results import add_entry, begin
from emsjax.benchmarks.workloads import EmbeddedModels
from emsjax.decode.base import Drafter
from emsjax.demo import corpus
from emsjax.drafters import DraftModel, SelfDraft
from emsjax.embedded import TARGET
from emsjax.generation import generate
from emsjax.models.decoder import Decoder
from emsjax.scoring import score
from emsjax.terminal.options import KV_DTYPES, WEIGHT_FORMATS

DRAFT_TOKENS, NEW_TOKENS, PROMPTS = 4, 96, 8
COPIES = ("int4", "int8")  # formats of weights of the target's copies that draft


class Texts:
    """Passages of modules that are held out, as tokens.

    Args:
        count: passages, spread over all that there are.
        tokens: the most tokens of one.

    Raises:
        ValueError: the running Python has none of the modules.
    """

    def __init__(self, count: int, tokens: int):
        library = corpus.read_library()
        self.modules = corpus.embedded_held_out(library)
        found = [text for name in self.modules for text in corpus.passages(library[name])]
        tokenizer = AutoTokenizer.from_pretrained(TARGET)
        chosen = (found[i] for i in np.linspace(0, len(found) - 1, count).astype(int))
        self.ids = tokenizer(list(chosen), truncation=True, max_length=tokens).input_ids
        # The first token is given.
        self.bytes = sum(len(tokenizer.decode(ids[1:]).encode()) for ids in self.ids)

    def bits_per_byte(self, model: Decoder) -> float:
        """What the model needs for each byte of the texts."""
        firsts, rests = zip(*((ids[:1], ids[1:]) for ids in self.ids), strict=True)
        nats = -score(model, firsts, rests).totals.sum()
        return float(nats / math.log(2) / self.bytes)


def drafters(models: EmbeddedModels) -> dict[str, Drafter]:
    """The drafters by name."""
    found = {}
    for quantize in COPIES:
        copy = models.model.quantize(quantize)
        found[f"self, {quantize}"] = SelfDraft(copy, DRAFT_TOKENS)
        found[f"a copy, {quantize}"] = DraftModel(copy, DRAFT_TOKENS)
    return found | {"the embedded draft model": DraftModel(models.draft_model, DRAFT_TOKENS)}


def run(options: argparse.Namespace, command: str) -> int:
    """Measure and print every format and drafter; the JSON file grows with each."""
    models, texts = EmbeddedModels(), Texts(options.passages, options.tokens)
    settings = {
        **models.describe,
        **models.numbers.settings,
        "passages": options.passages,
        "tokens": options.tokens,
        "modules": len(texts.modules),
        "bytes": texts.bytes,
        "draft_tokens": DRAFT_TOKENS,
        "max_new_tokens": NEW_TOKENS,
    }
    results, model = begin(options, command, settings), models.model
    wide = texts.bits_per_byte(model)
    narrow = {f"weights in {name}": model.quantize(name) for name in WEIGHT_FORMATS}
    narrow |= {f"caches in {name}": model.with_kv_dtype(name) for name in KV_DTYPES}
    for name, one in {"wide": model, **narrow}.items():
        bits = texts.bits_per_byte(one)
        entry = {"format": name, "bits_per_byte": bits, "ratio": bits / wide}
        add_entry(entry, results, options.output)
        print(f"{name}: {bits:.4f} bits per byte, {bits / wide - 1:+.2%}", flush=True)
    prompts = models.prompts(PROMPTS, NEW_TOKENS)
    for name, drafter in drafters(models).items():
        out = generate(model, prompts, drafter, max_new_tokens=NEW_TOKENS, eos_token_ids=())
        accepted = ("acceptance_rate", "mean_acceptance_length")
        entry = {"drafter": name, **{of: float(getattr(out.stats, of)) for of in accepted}}
        add_entry(entry, results, options.output)
        shown = (
            "{drafter}: {acceptance_rate:.1%} accepted, {mean_acceptance_length:.2f} tokens a step"
        )
        print(shown.format(**entry), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(BENCHMARKS["quality"].main())
