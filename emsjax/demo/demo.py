"""`emsjax demo`: complete the same prompts by plain and by speculative decoding, and compare."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from transformers import AutoTokenizer

from emsjax.drafters import DraftModel, Eagle3, PromptLookup
from emsjax.embedded import DRAFT, EAGLE3, PROMPTS, TARGET
from emsjax.generation import generate
from emsjax.models.pretrained import from_pretrained
from emsjax.sampling import Sampling

MAX_NEW_TOKENS = 128
SAMPLED_PROMPTS, MAX_SAMPLED_TOKENS = 4, 32  # few, to keep the demo short
SHOWN_PROMPT_LINES = 6


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to decode, which is a row of the table.

    Attributes:
        name: its name in the table.
        drafter: makes the drafter for a target.
        options: makes the other options of `emsjax.generate`.
        expected: the name of the method above whose tokens it must produce; None: this method is
            a reference itself.
        num_prompts: number of prompts to decode, from the first on; None: all.
    """

    name: str
    drafter: Callable[[Any], Any]
    options: Callable[[], Mapping[str, Any]]
    expected: str | None = None
    num_prompts: int | None = None


def no_drafter(target) -> None:
    return None


def prompt_lookup(target) -> PromptLookup:
    return PromptLookup()


def draft_model(target) -> DraftModel:
    return DraftModel(from_pretrained(DRAFT, dtype=jnp.float32))


def eagle3(target) -> Eagle3:
    return Eagle3.from_pretrained(EAGLE3, target)


def greedy() -> dict[str, Any]:
    return {"max_new_tokens": MAX_NEW_TOKENS}


def sampled() -> dict[str, Any]:
    return {
        "max_new_tokens": MAX_SAMPLED_TOKENS,
        "sampling": Sampling(temperature=0.8, top_p=0.95),
        "num_sequences": 4,
        "key": jax.random.key(0),
    }


METHODS = (
    Method("plain decoding", no_drafter, greedy),
    Method("prompt lookup", prompt_lookup, greedy, expected="plain decoding"),
    Method("draft model", draft_model, greedy, expected="plain decoding"),
    Method("EAGLE-3", eagle3, greedy, expected="plain decoding"),
    Method("plain, 4 samples", no_drafter, sampled, num_prompts=SAMPLED_PROMPTS),
    Method(
        "lookup, 4 samples",
        prompt_lookup,
        sampled,
        expected="plain, 4 samples",
        num_prompts=SAMPLED_PROMPTS,
    ),
)
SHOWN = "draft model"  # the method whose completions are printed


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A method's output, and the wall time of a second call, which does not compile."""

    generated: Any
    seconds: float


def run(console: Console) -> int:
    """Print completions and comparison; exit code 1 unless all tokens are identical."""
    prompts = json.loads(PROMPTS.read_text())
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    model = from_pretrained(TARGET, dtype=jnp.float32)
    prompt_ids = tokenizer([prompt["prompt"] for prompt in prompts]).input_ids
    outcomes = {}
    for method in METHODS:
        with console.status(f"{method.name}: compiling and decoding ..."):
            outcomes[method.name] = decode(model, prompt_ids, method)
    show_completions(console, prompts, tokenizer, outcomes[SHOWN].generated)
    console.print(comparison(outcomes))
    wrong = [m for m in METHODS if m.expected and not identical(m, outcomes)]
    return 1 if wrong else 0


def decode(model, prompt_ids: list[list[int]], method: Method) -> Outcome:
    drafter, options = method.drafter(model), method.options()
    for _ in range(2):  # the first call compiles
        started = time.perf_counter()
        generated = generate(model, prompt_ids[: method.num_prompts], drafter=drafter, **options)
        seconds = time.perf_counter() - started
    return Outcome(generated, seconds)


def identical(method: Method, outcomes: dict[str, Outcome]) -> bool:
    this, other = outcomes[method.name].generated, outcomes[method.expected].generated
    return np.array_equal(this.tokens, other.tokens) and np.array_equal(this.lengths, other.lengths)


def show_completions(console: Console, prompts: list[dict], tokenizer, generated) -> None:
    rows = zip(prompts, generated.tokens, generated.lengths, strict=True)
    for prompt, tokens, length in rows:
        completion = tokenizer.decode(tokens[:length], skip_special_tokens=True)
        console.print(Rule(prompt["module"], align="left"))
        console.print(Text.assemble((abbreviate(prompt["prompt"]), "dim"), (completion, "green")))


def abbreviate(prompt: str) -> str:
    """The last lines of a long prompt."""
    lines = prompt.split("\n")
    if len(lines) <= SHOWN_PROMPT_LINES:
        return prompt
    hidden = len(lines) - SHOWN_PROMPT_LINES
    return "\n".join([f"... (lines above: {hidden})", *lines[-SHOWN_PROMPT_LINES:]])


def comparison(outcomes: dict[str, Outcome]) -> Table:
    table = Table(
        caption="tokens/s: wall time of a second call, prefill included\n"
        f"4 samples: of the first {SAMPLED_PROMPTS} prompts, {MAX_SAMPLED_TOKENS} tokens each; "
        "temperature 0.8, top-p 0.95",
        box=SIMPLE_HEAD,
        pad_edge=False,  # all columns fit into 80 characters
        collapse_padding=True,
        show_edge=False,
    )
    table.add_column("")
    for heading in (
        "model\ncalls",
        "mean\nacceptance\nlength",
        "acceptance\nrate",
        "padding\nratio\n(inputs)",
        "tokens/s",
        "tokens",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for method in METHODS:
        outcome = outcomes[method.name]
        stats = outcome.generated.stats
        drafted = stats.num_drafted.sum() > 0
        verdict = Text("reference")
        if method.expected:
            same = identical(method, outcomes)
            verdict = Text("identical", "green") if same else Text("different", "bold red")
        table.add_row(
            method.name,
            str(stats.model_calls),
            f"{stats.mean_acceptance_length:.2f}",
            f"{stats.acceptance_rate:.2f}" if drafted else "-",
            f"{stats.padding_ratio.inputs:.2f}",
            f"{outcome.generated.lengths.sum() / outcome.seconds:.0f}",
            verdict,
        )
    return table
