"""The README.md in the folder of a trained drafter."""

from collections.abc import Mapping
from typing import Any

TEMPLATE = """---
library_name: emsjax
pipeline_tag: text-generation
tags: [speculative-decoding, {kind}, distillation]
---

# A {title} for {target}

{what} and {draft} parameters; its target has {of_target}.
It is trained to draft for that target, and is not a good language model by itself.
```python
import emsjax

target = emsjax.from_pretrained({target!r})
{loading}
out = emsjax.generate(target, prompts, drafter)
```

## Training
Training started from {start} and took {steps} steps of {batch} sequences of {length} tokens:
the user's texts (SHA-256 of the file {digest}){apart}, and {generations} of the
target's own continuations at temperature {temperature:g}. Losses: {losses}. Optimizer: AdamW
with peak learning rate {rate:g}, weight decay {decay:g}, {warm_up} warm-up steps and cosine decay.
Command:
```
{command}
```

## What it gains
The first halves of the {held_out} held-out texts were continued greedily by up to {new_tokens}
tokens each, with {draft_tokens} draft tokens per step, on {device} (jax {jax}). "Before" is the
drafter before training{compared}.

{table}
"""


def model_card(record: Mapping[str, Any]) -> str:
    """The model card of a finished run, from the record that `emsjax distil` writes."""
    settings, results = record["settings"], record["results"]
    parameters, drafter = results["parameters"], results["drafter"]
    apart = ", {held_out} of which were held out"
    if settings["held_out_data_sha256"] is not None:
        apart = ", with {held_out} held-out ones from another file ({held_out_data_sha256})"
    started = settings["draft_model"]
    if settings["start"] == "random":
        started = f"random weights (embeddings {settings['embeddings']})"
    elif settings["start"] is None:
        started = "random weights"
    compared = ""
    if settings["compare_with"] is not None:
        compared = f', and "compared" the draft model {settings["compare_with"]}'
    return TEMPLATE.format(
        target=settings["target"],
        kind=settings["kind"],
        title=drafter["title"],
        what=drafter["what"],
        loading="\n".join(drafter["loading"]),
        compared=compared,
        draft=f"{parameters['draft']:,}",
        of_target=f"{parameters['target']:,}",
        start=started or f"a part of its target (embeddings {settings['embeddings']})",
        steps=settings["steps"],
        batch=settings["batch_size"],
        length=settings["sequence_length"],
        digest=settings["data_sha256"],
        apart=apart.format(**settings),
        held_out=settings["held_out"],
        generations=settings["generations"],
        temperature=settings["temperature"],
        losses=", ".join(f"{name} {weight:g}" for name, weight in settings["losses"].items()),
        rate=settings["learning_rate"],
        decay=settings["weight_decay"],
        warm_up=settings["warm_up_steps"],
        command=record["command"],
        new_tokens=settings["max_new_tokens"],
        draft_tokens=settings["draft_tokens"],
        device=record["hardware"]["device"],
        jax=record["versions"]["jax"],
        table="\n".join(gains(results)),
    )


def gains(results: Mapping[str, Any]) -> list[str]:
    """Lines of a Markdown table: plain decoding, the drafter before and after training, and the
    draft model that it is compared with, if there is one."""
    names = [name for name in ("plain", "before", "after", "compared") if name in results]
    sides = [results[name] for name in names]
    speed = [f"{side['tokens_per_s']:.0f}" for side in sides]
    over = [f"{side['tokens_per_s'] / sides[0]['tokens_per_s']:.2f}" for side in sides]
    rows = [["held-out texts", *names], ["---"] * (1 + len(names))]
    rows += [["acceptance rate", "", *(f"{side['acceptance_rate']:.3f}" for side in sides[1:])]]
    for i in range(len(sides[1]["by_position"])):
        shares = (f"{side['by_position'][i]:.3f}" for side in sides[1:])
        rows.append([f"at draft position {i + 1}", "", *shares])
    lengths = (f"{side['mean_acceptance_length']:.2f}" for side in sides)
    rows += [["mean acceptance length", *lengths], ["tokens/s", *speed], ["speed-up", *over]]
    return [f"| {' | '.join(row)} |" for row in rows]
