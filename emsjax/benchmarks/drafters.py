"""`emsjax bench drafters`: draft sources, alone and mixed, on the same prompts.

All sources of a batch size decode the same prompts in turn, several times, with `emsjax.generate`:
times include prefill, also that of a draft model. The share of drafting is what remains of a run's
time without it: the same drafts are decoded once more from a record, as `replay`, which makes the
target's work the same. All tokens are compared with those of plain decoding.

The JSON file has one of the `entries` for each batch size, with the `drafters` by name: `seconds`
of each repeat; and of the median repeat `tokens_per_s`, `step_ms`, `drafting_ms` (of each step,
None for plain decoding) and `of_best`, the speed relative to the fastest source alone, as the
median of the ratios within a repeat. The counts of a run are `steps`, `tokens_per_step` of each
sample and `acceptance_rate`.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.table import Table

from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.results import add_entry, begin
from emsjax.benchmarks.runs import LoopRun
from emsjax.benchmarks.subjects import OF_TRAINED, check_absent, read_trained
from emsjax.benchmarks.workloads import EmbeddedModels
from emsjax.decode.base import Drafter
from emsjax.drafters import DraftModel, Mixed, PromptLookup, SuffixDrafter
from emsjax.drafters.replay import Replay
from emsjax.engine.output import GenerateOutput
from emsjax.generation import generate, init_state
from emsjax.models.decoder import Decoder
from emsjax.policies import profiles as profile_store
from emsjax.policies.costs import StepCosts
from emsjax.terminal.reporting import check_writable, make_console, make_table, progress

PLAIN, MIXED = "plain", "mixed"
NUMBER_FORMATS = ("quantize", "kv_dtype", "tensor_parallel")
EMBEDDED_PROMPTS = 8  # all that there are
Batches, Outputs = Sequence[Sequence[Sequence[int]]], list[GenerateOutput]


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is decoded, with what.

    Attributes:
        prompts: token ids of each prompt; they are repeated to fill a batch.
        end_token_ids: None: the model's own.
    """

    model: Decoder
    drafters: Mapping[str, Any]
    prompts: Sequence[Sequence[int]]
    new_tokens: int
    end_token_ids: tuple[int, ...] | None = None

    def batches(self, batch: int) -> Batches:
        """Full batches in the order of the prompts; those of a last, smaller batch are left out."""
        prompts = list(self.prompts)
        prompts = (prompts * -(-batch // len(prompts)))[: max(batch, len(prompts))]
        return [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]

    def decode(self, drafters: Sequence[Any], batches: Batches) -> tuple[float, Outputs]:
        """Seconds of decoding all batches, each with its drafter, and their outputs."""
        options = {"max_new_tokens": self.new_tokens, "eos_token_ids": self.end_token_ids}
        start = time.perf_counter()
        outputs = [
            generate(self.model, prompts, drafter, **options)
            for prompts, drafter in zip(batches, drafters, strict=True)
        ]
        return time.perf_counter() - start, outputs

    def replay(self, drafter: Any, prompts: Sequence[Sequence[int]]) -> Replay:
        """A drafter that repeats what this one drafts after each token, at no cost."""
        options = {"max_new_tokens": self.new_tokens, "eos_token_ids": self.end_token_ids}
        state = init_state(self.model, drafter, prompts, **options)
        run = LoopRun(self.model, drafter, state, None)
        counts = np.zeros(run.state.tokens.shape, np.int32)
        right = np.zeros_like(counts)
        told = lambda: [
            np.array(x)
            for x in (
                run.state.lengths,
                run.state.counters.num_drafted,
                run.state.counters.num_accepted,
            )
        ]
        (lengths, *before), samples = told(), np.arange(len(prompts))
        while bool(np.asarray(run.state.active).any()):
            run.state = run.decode(1)
            after_lengths, *after = told()
            at = np.minimum(lengths, counts.shape[1] - 1)
            moved = after_lengths > lengths
            for record, new, old in zip((counts, right), after, before, strict=True):
                record[samples[moved], at[moved]] = (new - old)[moved]
            lengths, before = after_lengths, after
        vocab, k = self.model.config.vocab_size, run.drafter.max_draft_tokens
        arrays = map(jnp.asarray, (np.asarray(run.state.tokens), counts, right))
        return Replay(*arrays, vocab_size=vocab, max_draft_tokens=k)


def measure(subject: Subject, batch: int, repeats: int) -> dict[str, Any]:
    """The entry of a batch size."""
    batches = subject.batches(batch)
    each = {name: [drafter] * len(batches) for name, drafter in subject.drafters.items()}
    replays = {
        name: [subject.replay(subject.drafters[name], prompts) for prompts in batches]
        for name in each
        if name != PLAIN
    }
    runs = each | {f"{name}, replayed": of for name, of in replays.items()}
    outputs = {name: subject.decode(of, batches)[1] for name, of in runs.items()}  # compiles
    seconds = {name: [] for name in runs}
    for _ in range(repeats):
        for name, of in runs.items():
            seconds[name].append(subject.decode(of, batches)[0])
    tokens = sum(int(out.lengths.sum()) for out in outputs[PLAIN])
    alone = np.min([seconds[name] for name in each if name not in (PLAIN, MIXED)], axis=0)
    figures = {}
    for name in each:
        stats = [out.stats for out in outputs[name]]
        total = lambda field: sum(int(np.sum(getattr(of, field))) for of in stats)  # noqa: B023
        steps, median = total("model_calls"), float(np.median(seconds[name]))
        replayed = seconds.get(f"{name}, replayed")
        drafting = replayed and np.median(np.subtract(seconds[name], replayed))
        figures[name] = {
            "seconds": seconds[name],
            "tokens_per_s": tokens / median,
            "of_best": float(np.median(alone / seconds[name])),
            "steps": steps,
            "step_ms": 1e3 * median / steps,
            "drafting_ms": None if drafting is None else 1e3 * float(drafting) / steps,
            "tokens_per_step": total("num_emitted") / total("num_steps"),
            "acceptance_rate": total("num_accepted") / max(total("num_drafted"), 1),
            "identical": all(
                np.array_equal(mine.tokens, plain.tokens)
                for mine, plain in zip(outputs[name], outputs[PLAIN], strict=True)
            ),
        }
    return {"batch": batch, "batches": len(batches), "tokens": tokens, "drafters": figures}


def run(options: argparse.Namespace, command: str) -> int:
    """Compare the sources; exit code 1 unless all tokens are identical.

    Raises:
        ValueError: unknown names, options that do not go together, results of another run, a
            profile of other models, or a file that cannot be written.
    """
    check_writable("--output", options.output)
    make, settings = subject_of(options)
    settings |= {
        "device": profile_store.device(),
        "max_new_tokens": options.max_new_tokens,
        "draft_tokens": options.draft_tokens,
        "draft_cost": options.draft_cost,
        "profile": None if options.profile is None else str(options.profile),
        "repeats": options.repeats,
    }
    results, say = begin(options, command, settings), progress()
    done = {entry["batch"] for entry in results["entries"]}
    missing = [batch for batch in options.batch_sizes if batch not in done]
    subject = make() if missing else None
    for batch in missing:
        say(f"batch {batch}")
        add_entry(measure(subject, batch, options.repeats), results, options.output)
    console = make_console()
    for entry in results["entries"]:
        console.print(table(entry))
    every = [of for entry in results["entries"] for of in entry["drafters"].values()]
    return 0 if all(of["identical"] for of in every) else 1


def subject_of(options: argparse.Namespace) -> tuple[Callable[[], Subject], dict[str, Any]]:
    """A function that loads the models, and their description for the settings."""
    mixed = costs_of_mixed(options)
    if options.model is None:
        check_absent(options, (*OF_TRAINED, *NUMBER_FORMATS), "--model")
        models, new = EmbeddedModels(), options.max_new_tokens

        def embedded() -> Subject:
            found = sources(DraftModel(models.draft_model, options.draft_tokens), **mixed)
            prompts = models.prompts(EMBEDDED_PROMPTS, new)
            return Subject(models.model, found, prompts, new, ())

        return embedded, {**models.describe, **models.numbers.settings}
    trained = read_trained(options, options.max_prompts, max(options.batch_sizes), features=True)

    def load() -> Subject:
        model = trained.models.load()
        own = trained.models.own_drafter(model, options.draft_tokens)
        return Subject(model, sources(own, **mixed), trained.prompts, options.max_new_tokens)

    return load, trained.describe


def costs_of_mixed(options: argparse.Namespace) -> dict[str, Any]:
    """The costs that `--draft-cost` or `--profile` gives `mixed`."""
    if options.profile is not None and options.draft_cost is not None:
        raise ValueError("--draft-cost and --profile exclude each other")
    costs = None if options.profile is None else StepCosts.from_profile(options.profile)
    return {"costs": costs, "draft_cost": options.draft_cost}


def sources(own: Drafter | None, **mixed: Any) -> dict[str, Any]:
    """The drafters by name; without one that is not free the free ones are mixed."""
    suffix, lookup = SuffixDrafter(), PromptLookup(search_generated=True)
    found = {PLAIN: None, "prompt lookup": lookup, "suffix": suffix}
    behind = lookup
    if own is not None:
        behind = found["model"] = own
    return found | {MIXED: Mixed(suffix, behind, **mixed)}


def table(entry: Mapping[str, Any]) -> Table:
    """A row for each drafter."""
    columns = ["", "tokens/s", "of best\nalone", "tokens\nper step", "accepted", "step\nms"]
    found = make_table(f"Batch {entry['batch']}", [*columns, "of which\ndrafting"])
    for name, of in entry["drafters"].items():
        drafting = of["drafting_ms"]
        found.add_row(
            name + ("" if of["identical"] else " (OTHER TOKENS)"),
            f"{of['tokens_per_s']:.0f}",
            f"{of['of_best']:.3f}",
            f"{of['tokens_per_step']:.2f}",
            f"{of['acceptance_rate']:.1%}",
            f"{of['step_ms']:.3f}",
            "" if drafting is None else f"{drafting:.3f}",
        )
    return found


if __name__ == "__main__":
    sys.exit(BENCHMARKS["drafters"].main())
