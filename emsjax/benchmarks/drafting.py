"""`emsjax bench drafting`: what each drafter adds to a decoding step of a known shape.

Steps in which a drafter does all its work, whose tokens are then replaced by rejected ones, take
turns with steps whose drafts cost nothing. Both feed the same rows to the target. Weights are
random: of the target, of the draft model, and of the drafters that read hidden states, whose layers
have the target's sizes. `--draft-quantize` makes the weights of drafters narrow. The sources are:

- `suffix`: the suffix drafter, 8 tokens;
- `model`: a draft model, 4 tokens;
- `eagle3`: one layer and a draft vocabulary of 32,000 tokens, 4 tokens;
- `block`: one draft layer, a block of 7 tokens from the same draft vocabulary;
- `observed`: the same EAGLE-3 drafter while nothing is drafted, beside steps without a drafter: the
  cost of hidden states that are read and of keys and values computed from them;
- `tree`: no drafter, but rejected trees beside rejected chains of as many rows, 8 of each sample.

The JSON file has one of the `entries` for each source and batch size: rows of each sample, times of
both sides in ms, the `ratio` of their best times, and on a GPU the profiles of both sides.
"""

import argparse
import functools
import sys
from typing import Any

import jax.numpy as jnp
from flax import nnx

from emsjax.benchmarks.overheads import compare
from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.results import add_entry, begin
from emsjax.benchmarks.runs import REPETITIONS, StepRun, random_model
from emsjax.benchmarks.shapes import MODELS
from emsjax.distillation.eagle3 import DRAFT_VOCABULARY
from emsjax.distillation.fresh import evenly_spaced_taps, layer_config
from emsjax.drafters import BlockDrafter, DraftModel, Eagle3, SuffixDrafter
from emsjax.drafters.block_network import BlockConfig, BlockNetwork
from emsjax.drafters.eagle3_network import Eagle3Config, Eagle3Network
from emsjax.drafters.feature_network import FeatureConfig
from emsjax.models.decoder import Decoder
from emsjax.models.numbers import NumberFormats
from emsjax.policies.lengths import FixedLength
from emsjax.terminal.options import number_formats

SUFFIX, MODEL, EAGLE3, BLOCK, OBSERVED, TREE = SOURCES = (
    "suffix",
    "model",
    "eagle3",
    "block",
    "observed",
    "tree",
)
DRAFT_TOKENS = {SUFFIX: 8, MODEL: 4, EAGLE3: 4, BLOCK: 7, OBSERVED: 0, TREE: 7}
TREE_BRANCHES = 2
TAPS = 3


class Sources:
    """Drafters for a target.

    Args:
        model: the target.
        draft_model: name of the draft model's shape.
        attention: as for `generate`.
        quantize: the format of the drafters' layers; None: bfloat16.
    """

    def __init__(self, model: Decoder, draft_model: str, attention, quantize: str | None = None):
        self.model, self.draft_model, self.attention = model, draft_model, attention
        self.quantize = quantize

    def make(self, name: str) -> Any:
        """The drafter of a source."""
        count, options = DRAFT_TOKENS[name], {"attention_implementation": self.attention}
        if name == SUFFIX:
            return SuffixDrafter(count)
        if name == MODEL:
            numbers = NumberFormats(quantize=self.quantize)
            return DraftModel(random_model(MODELS[self.draft_model], numbers), count, **options)
        if name == BLOCK:
            mask = self.model.config.vocab_size - 1
            sizes = self.config(BlockConfig, block_size=count + 1, mask_token_id=mask)
            network, drafter = BlockNetwork, BlockDrafter
        else:
            sizes = self.config(Eagle3Config)
            network, drafter = Eagle3Network, Eagle3
        made = network(sizes, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
        made = made if self.quantize is None else made.quantize(self.quantize)
        ids = jnp.arange(sizes.draft_vocab_size, dtype=jnp.int32)
        return drafter(made, ids, **options)

    def config(self, kind: type[FeatureConfig], **fields) -> FeatureConfig:
        """The config of a network whose one layer has the target's sizes."""
        a = self.model.config.architecture
        return kind(
            layers=layer_config(a, 1),
            taps=evenly_spaced_taps(len(a.layers), TAPS),
            draft_vocab_size=min(DRAFT_VOCABULARY, a.vocab_size),
            **fields,
        )


def measure(sources: Sources, name: str, batch: int, context: int) -> dict[str, Any]:
    """The entry of a source at a batch size."""
    count = DRAFT_TOKENS[name]
    start = functools.partial(StepRun, sources.model, context=context, attention=sources.attention)
    shape = (batch, count + 1)
    source = {} if name == TREE else {"source": sources.make(name)}
    if name == TREE:
        runs = {"chain": start(shape), "tree": start(shape, drafts={"branches": TREE_BRANCHES})}
    elif name == OBSERVED:
        observed = start((batch, 2), drafts=source, draft_length=FixedLength(0))
        observed.feed(1)
        runs = {"alone": start(shape), "observed": observed}
    else:
        runs = {"given": start(shape), "drafted": start(shape, drafts=source)}
    base = next(iter(runs))
    entry = {"source": name, "batch": batch, "rows_per_sample": count + 1} | compare(base, runs)
    return entry | {"fed": {name: run.fed() for name, run in runs.items()}}


def run(options: argparse.Namespace, command: str) -> int:
    """Measure and print every source at every batch size; the JSON file grows with each.

    Raises:
        ValueError: an unknown source, or the library refuses the model, context or batch size.
    """
    for name in options.sources:
        if name not in SOURCES:
            raise ValueError(f"--sources: {name!r} is none of {', '.join(SOURCES)}")
    numbers = NumberFormats(jnp.bfloat16, **number_formats(options))
    settings = {
        "model": options.model,
        "draft_model": options.draft_model,
        **numbers.settings,
        "context": options.context,
        "repetitions": REPETITIONS,
    }
    for name in ("draft_quantize", "layers", "attention"):
        if getattr(options, name) is not None:
            settings[name] = getattr(options, name)
    results = begin(options, command, settings)
    config = MODELS[options.model]
    if options.layers is not None:
        config = config.resized(layers=options.layers)
    drafters = (options.draft_model, options.attention, options.draft_quantize)
    sources = Sources(random_model(config, numbers), *drafters)
    done = {(entry["batch"], entry["source"]) for entry in results["entries"]}
    for batch in options.batch_sizes:
        for name in options.sources:
            if (batch, name) in done:
                continue
            entry = measure(sources, name, batch, options.context)
            times = ", ".join(f"{of} {t['best_ms']:.3f} ms" for of, t in entry["times"].items())
            shape = f"{batch}x{entry['rows_per_sample']}"
            print(f"{name:>9}  {shape}  {times}, ratio {entry['ratio']:.3f}", flush=True)
            add_entry(entry, results, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(BENCHMARKS["drafting"].main())
