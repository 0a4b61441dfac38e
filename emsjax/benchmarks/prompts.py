"""`emsjax bench prompts`: draft sources on prompt files of the field, by category.

The prompts of a category (see `emsjax.benchmarks.questions`) are decoded in batches in the order
of the file, plainly and with each drafter in turn, several times. The last batch is filled up with
the category's first prompts, so that all batches have the same size; these fillers count in the
speed only.

The JSON file has one of the `entries` for each batch size and category, and `overall` for each
batch size, all categories together. Both have the `drafters` by name. Counts are those of one run:
`emitted` tokens, `steps` of each sample, `drafted` and `accepted` tokens, `accepted_histogram` (how
many steps accepted 0, 1, ... draft tokens), and `tokens`, which fillers emitted as well. `seconds`
and `first_token_s` are the times of each repeat over all batches. From these follow

- `tokens_per_step`, the mean acceptance length;
- `acceptance_rate`, accepted tokens per drafted one;
- `by_position`, the share of all steps that accepted a draft token at each position;
- `first_token_ms`, the mean time until a batch has its first tokens: prefill, also that of a draft
  model, and one step;
- `tokens_per_s`, of whole calls, prefill included;
- `speed`, the ratio to plain decoding's, the median of the ratios within a repeat.

`identical` tells whether all tokens are those of plain decoding. It is None for drafters that draw
their tokens where tokens are sampled: only the distribution is then the same.
"""

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from emsjax.benchmarks.drafters import PLAIN
from emsjax.benchmarks.questions import Prompt
from emsjax.decode.step import decode_loop
from emsjax.engine.adapt import make_run
from emsjax.engine.output import GenerateOutput
from emsjax.generation import generate, init_state
from emsjax.models.decoder import Decoder
from emsjax.sampling import Sampling

COUNTS = ("emitted", "steps", "drafted", "accepted")  # fields of `Stats`, after "num_"
ADDED = ("tokens", "batches", "seconds", "first_token_s", *COUNTS, "accepted_histogram")
Batches = Sequence[Sequence[Sequence[int]]]


@dataclasses.dataclass(frozen=True)
class Subject:
    """What decodes the prompts.

    Attributes:
        drafters: by name; None: plain decoding, which comes first.
        new_tokens: the most new tokens of each turn.
        temperature: 0: greedy.
        seed: of sampled tokens.
    """

    model: Decoder
    drafters: Mapping[str, Any]
    new_tokens: int
    temperature: float = 0.0
    seed: int = 0

    def options(self, batch: int) -> dict[str, Any]:
        """Arguments of `emsjax.generate` for a batch of this number."""
        options: dict[str, Any] = {"max_new_tokens": self.new_tokens}
        if self.temperature:
            options["sampling"] = Sampling(temperature=self.temperature)
            options["key"] = jax.random.fold_in(jax.random.key(self.seed), batch)
        return options

    def answers(self, prompts: Sequence[Sequence[int]], batch: int, tokenizer: Any) -> list[str]:
        """The texts with which plain decoding answers the prompts, `batch` at a time."""
        out = generate(self.model, prompts, batch_size=batch, **self.options(0))
        new = [row[:length] for row, length in zip(out.tokens, out.lengths, strict=True)]
        return tokenizer.batch_decode(new, skip_special_tokens=True)

    def decode(self, name: str, batches: Batches) -> tuple[float, list[GenerateOutput]]:
        """Seconds of decoding all batches, and their outputs."""
        start = time.perf_counter()
        outputs = [
            generate(self.model, prompts, self.drafters[name], **self.options(i))
            for i, prompts in enumerate(batches)
        ]
        return time.perf_counter() - start, outputs

    def first_tokens(self, name: str, batches: Batches) -> float:
        """Seconds until each batch has its first tokens, all together."""
        drafter = self.drafters[name]
        run = make_run(self.model, drafter).flat()
        start = time.perf_counter()
        for i, prompts in enumerate(batches):
            state = init_state(self.model, drafter, prompts, **self.options(i))
            jax.block_until_ready(decode_loop(run, state, 1))
        return time.perf_counter() - start

    def is_comparable(self, name: str) -> bool:
        """Whether the tokens must be those of plain decoding."""
        drafter = self.drafters[name]
        return not self.temperature or not getattr(drafter, "drawn_vocab_size", 0)


def batches_of(prompts: Sequence[Prompt], batch: int) -> Batches:
    """Batches of the same size; the last one is filled up with the first prompts."""
    count = -(-len(prompts) // batch)
    tokens = [prompts[i % len(prompts)].tokens for i in range(count * batch)]
    return [tokens[i * batch : (i + 1) * batch] for i in range(count)]


def measure(
    subject: Subject, prompts: Sequence[Prompt], batch: int, repeats: int
) -> dict[str, Any]:
    """The entry of a batch size and of the category that these prompts belong to."""
    batches, names = batches_of(prompts, batch), list(subject.drafters)
    outputs = {name: subject.decode(name, batches)[1] for name in names}  # compiles
    for name in names:
        subject.first_tokens(name, batches)
    times = {name: {"seconds": [], "first_token_s": []} for name in names}
    for _ in range(repeats):
        for name in names:
            times[name]["seconds"].append(subject.decode(name, batches)[0])
            times[name]["first_token_s"].append(subject.first_tokens(name, batches))
    found = {}
    for name, outs in outputs.items():
        same = all(map(same_tokens, outs, outputs[PLAIN])) if subject.is_comparable(name) else None
        found[name] = {**counts(outs, len(prompts)), **times[name], "identical": same}
    return {
        "batch": batch,
        "category": prompts[0].question.category,
        "questions": len({prompt.question.line for prompt in prompts}),
        "prompts": len(prompts),
        "truncated": sum(prompt.truncated for prompt in prompts),
        "prompt_tokens": sum(len(prompt.tokens) for prompt in prompts),
        "drafters": with_figures(found),
    }


def same_tokens(one: GenerateOutput, other: GenerateOutput) -> bool:
    return np.array_equal(one.tokens, other.tokens) and np.array_equal(one.lengths, other.lengths)


def counts(outputs: Sequence[GenerateOutput], prompts: int) -> dict[str, Any]:
    """The counts of a run; fillers follow after the prompts, and count in `tokens` only."""
    of = lambda name: np.concatenate([getattr(out.stats, name) for out in outputs])
    return {
        "tokens": int(of("num_emitted").sum()),
        "batches": len(outputs),
        **{name: int(of(f"num_{name}")[:prompts].sum()) for name in COUNTS},
        "accepted_histogram": of("accepted_histogram")[:prompts].sum(axis=0).tolist(),
    }


def with_figures(drafters: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The drafters' counts and times, with the figures that follow."""
    speeds = {name: of["tokens"] / np.array(of["seconds"]) for name, of in drafters.items()}
    found = {}
    for name, of in drafters.items():
        histogram = np.array(of["accepted_histogram"])
        at_least = np.cumsum(histogram[::-1])[::-1]
        figures = {
            "tokens_per_step": of["emitted"] / max(of["steps"], 1),
            "acceptance_rate": of["accepted"] / max(of["drafted"], 1),
            "by_position": (at_least[1:] / max(at_least[0], 1)).tolist(),
            "first_token_ms": 1e3 * float(np.median(of["first_token_s"])) / of["batches"],
            "tokens_per_s": of["tokens"] / float(np.median(of["seconds"])),
            "speed": float(np.median(speeds[name] / speeds[PLAIN])),
        }
        found[name] = {**of, **figures}
    return found


def together(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One entry of all categories of a batch size."""
    total = lambda name: sum(entry[name] for entry in entries)
    drafters = {}
    for name in entries[0]["drafters"]:
        each = [entry["drafters"][name] for entry in entries]
        drafters[name] = {field: np.sum([of[field] for of in each], axis=0) for field in ADDED}
        drafters[name] = {field: of.tolist() for field, of in drafters[name].items()}
        same = [of["identical"] for of in each]
        drafters[name]["identical"] = None if None in same else all(same)
    return {
        "batch": entries[0]["batch"],
        **{name: total(name) for name in ("questions", "prompts", "truncated", "prompt_tokens")},
        "drafters": with_figures(drafters),
    }


def overall(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each batch size."""
    by_batch: dict[int, list[Mapping[str, Any]]] = {}
    for entry in entries:
        by_batch.setdefault(entry["batch"], []).append(entry)
    return [together(of) for of in by_batch.values()]


def all_identical(results: Mapping[str, Any]) -> bool:
    every = [of for entry in results["entries"] for of in entry["drafters"].values()]
    return all(of["identical"] is not False for of in every)
