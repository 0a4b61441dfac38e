"""The command `emsjax bench prompts`: see `emsjax.benchmarks.prompts`."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.box import MARKDOWN
from rich.table import Table

from emsjax import plotting
from emsjax.benchmarks import prompts
from emsjax.benchmarks.drafters import NUMBER_FORMATS, PLAIN, costs_of_mixed, sources
from emsjax.benchmarks.questions import Conversations, Question, Questions, chosen
from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.results import add_entry, begin, write_results
from emsjax.benchmarks.subjects import (
    OF_TRAINED,
    Models,
    check_absent,
    limits_of,
    trained_models,
)
from emsjax.benchmarks.workloads import EmbeddedModels
from emsjax.embedded import TARGET
from emsjax.policies import profiles as profile_store
from emsjax.records.input import survey
from emsjax.terminal.models import load_tokenizer
from emsjax.terminal.reporting import check_plot, check_writable, make_console, make_table, progress

DRAFTERS = ("prompt-lookup", "suffix", "model", "mixed")
SETTINGS = ("group_by", "per_category", "max_new_tokens", "temperature", "seed", "draft_tokens")
SETTINGS += ("draft_cost", "repeats")  # options that are settings of the results
SHOWN_POSITIONS = 4
COLUMNS = ("batch", "category", "prompts", "drafts", "tokens/step", "accepted at position")
COLUMNS += ("first token ms", "tokens/s", "speed")


def run(options: argparse.Namespace, command: str) -> int:
    """Compare draft sources; exit code 1 unless all tokens are identical.

    Raises:
        ValueError: a bad line, unknown names, options that do not go together, prompts that do not
            fit, results of another run, or a file that cannot be written.
        ImportError: a plot without matplotlib.
    """
    check_plot(options.plot)
    check_writable("--output", options.output)
    models, names = models_of(options), drafters_of(options)
    data = Questions(options.data, options.group_by)
    settings = {
        **models.describe,
        "data_sha256": survey(data).sha256,
        "device": profile_store.device(),
        "max_prompt_tokens": options.max_prompt_tokens,
        "profile": None if options.profile is None else str(options.profile),
        "drafters": names,
        **{name: getattr(options, name) for name in SETTINGS},
    }
    questions = chosen(data, options.per_category)
    conversations = conversations_of(options, models)
    results = begin(options, command, settings)
    done = {(entry["batch"], entry["category"]) for entry in results["entries"]}
    categories = dict.fromkeys(of.category for of in questions)
    asked = [(batch, category) for batch in options.batch_sizes for category in categories]
    if missing := [one for one in asked if one not in done]:
        bench = Bench(options, models, names)
        for entry in bench.entries(missing, conversations, questions):
            add_entry(entry, results, options.output)
    results["overall"] = prompts.overall(results["entries"])
    write_results(results, options.output)
    make_console().print(table(results))
    if options.plot is not None:
        plotting.prompts_figure(results).savefig(options.plot)
    return 0 if prompts.all_identical(results) else 1


class Bench:
    """The loaded models and what they draft with.

    Args:
        names: the drafters that are asked for: see `drafters_of`.
    """

    def __init__(self, options: argparse.Namespace, models: Models, names: list[str]):
        self.largest_batch, self.repeats = max(options.batch_sizes), options.repeats
        model = models.load()
        own = models.own_drafter(model, options.draft_tokens)
        known = {
            name.replace(" ", "-"): drafter
            for name, drafter in sources(own, **costs_of_mixed(options)).items()
        }
        self.subject = prompts.Subject(
            model,
            {name: known[name] for name in (PLAIN, *names)},
            options.max_new_tokens,
            options.temperature,
            options.seed,
        )
        self.say = progress()

    def entries(
        self,
        missing: Sequence[tuple[int, str]],
        conversations: Conversations,
        questions: Sequence[Question],
    ) -> Iterator[dict[str, Any]]:
        """Yields the entries of these batch sizes and categories as they are measured."""

        def answer(asked: list[list[int]]) -> list[str]:
            self.say(f"answers to {len(asked)} turns that others follow")
            return self.subject.answers(asked, self.largest_batch, conversations.tokenizer)

        found = conversations.prompts(questions, answer)
        for batch, category in missing:
            self.say(f"batch {batch}, {category}")
            mine = [prompt for prompt in found if prompt.question.category == category]
            yield prompts.measure(self.subject, mine, batch, self.repeats)


def drafters_of(options: argparse.Namespace) -> list[str]:
    """The drafters that `--drafters` names, or all that the models allow.

    Raises:
        ValueError: an unknown name, or "model" without a draft model.
    """
    has_model = options.model is None or options.draft_model is not None
    known = [name for name in DRAFTERS if has_model or name != "model"]
    for name in options.drafters or ():
        if name not in DRAFTERS:
            raise ValueError(f"--drafters: {name!r} is none of {', '.join(DRAFTERS)}")
        if name not in known:
            raise ValueError("--drafters: model needs --draft-model")
    return list(options.drafters or known)


def models_of(options: argparse.Namespace) -> Models:
    """The embedded pair, or the models that the options name."""
    costs_of_mixed(options)  # fails early if these options do not go together
    if options.model is not None:
        return trained_models(options, features=True)
    others = [name for name in OF_TRAINED if name != "data"]
    check_absent(options, (*others, *NUMBER_FORMATS), "--model")
    pair = EmbeddedModels()
    describe = {**pair.describe, **pair.numbers.settings}
    return Models(pair.config, describe, lambda: pair.model, lambda: pair.draft_model)


def conversations_of(options: argparse.Namespace, models: Models) -> Conversations:
    """What makes prompts of the questions."""
    tokenizer = load_tokenizer(options.model or str(TARGET), options.revision, keep="last")
    limits = limits_of(models.config, options.max_new_tokens)
    # The last token is emitted, never fed. Where no prompt fits, the limits tell so.
    room = max(limits.positions - limits.max_new_tokens + 1, 1)
    return Conversations(options.data, tokenizer, options.max_prompt_tokens or room, limits)


def table(results: Mapping[str, Any]) -> Table:
    """A table in Markdown: a row for each batch size, category and drafter."""
    found = make_table(None, COLUMNS, box=MARKDOWN)
    for row in rows(results):
        found.add_row(*row)
    return found


def rows(results: Mapping[str, Any]) -> Iterator[list[str]]:
    """The cells of the table; all categories together come last."""
    entries = list(results["entries"])
    if len({entry["category"] for entry in entries}) > 1:
        entries += [{**entry, "category": "overall"} for entry in results["overall"]]
    for entry in sorted(entries, key=lambda entry: entry["batch"]):
        for name, of in entry["drafters"].items():
            positions = [f"{share:.2f}" for share in of["by_position"]]
            more = " ..." if len(positions) > SHOWN_POSITIONS else ""
            yield [
                str(entry["batch"]),
                entry["category"],
                str(entry["prompts"]),
                name + (" (OTHER TOKENS)" if of["identical"] is False else ""),
                f"{of['tokens_per_step']:.2f}",
                " ".join(positions[:SHOWN_POSITIONS]) + more,
                f"{of['first_token_ms']:.1f}",
                f"{of['tokens_per_s']:.0f}",
                f"{of['speed']:.2f}",
            ]


if __name__ == "__main__":
    sys.exit(BENCHMARKS["prompts"].main())
