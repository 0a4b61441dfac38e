"""Other projects' engines in `emsjax bench peers`: vLLM and SGLang, each in processes of its own.

An engine takes most of a device's memory, and is made anew for each way to draft. So all of its
processes run before this one uses the device: a first process writes the models as folders and the
prompts as JSON, and ends; then each engine decodes them with each method. What an engine has done
otherwise than it was asked for is refused.
"""

import importlib.util
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from emsjax.benchmarks import engine_process, peers
from emsjax.records.writing import to_json

ENGINES = tuple(engine_process.ENGINES)
INPUTS = "inputs.json"
SPARE = 16  # positions beyond the last token, so that drafts are not shortened before the end
Result = TypeVar("Result")


class Outputs(NamedTuple):
    """What the engines did.

    Attributes:
        calls: by batch size.
        versions: by engine.
        failed: why an engine did not end well, by its name and method.
    """

    calls: dict[int, list[peers.Calls]]
    versions: dict[str, str]
    failed: dict[str, str]


def missing(name: str) -> str | None:
    """Why an engine cannot be measured; None: it can."""
    found = importlib.util.find_spec(name)
    return f"{name} is not installed" if found is None else None


def apart(function: Callable[..., Result], *arguments: Any) -> Result:
    """The function's value or error, from a process that ends, and so frees the device."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def write_inputs(
    subject: peers.Subject, batch_sizes: Iterable[int], repeats: int, folder: Path
) -> None:
    """Write the models, and what the engines are asked for, into a folder.

    `inputs.json` has the folders `model` and `draft_model` (or null); `dtype` and `device`, by
    their names; `batches`, the prompts of each; `new_tokens` of each sequence, `repeats`, the
    limits of drafts, and `max_len`, tokens of the longest sequence.
    """
    config, models = subject.model.config, {"model": subject.model}
    if subject.draft_model is not None:
        models["draft_model"] = subject.draft_model
    for name, model in models.items():
        model.save_pretrained(folder / name)
    batches = [[prompt.tolist() for prompt in subject.prompts(size)] for size in batch_sizes]
    longest = max(len(prompt) for prompts in batches for prompt in prompts) + subject.new_tokens
    inputs = {
        "draft_model": None,
        **{name: str(folder / name) for name in models},
        "dtype": jax.numpy.dtype(subject.model.dtype).name,
        "device": jax.local_devices()[0].device_kind,
        "batches": batches,
        "new_tokens": subject.new_tokens,
        "repeats": repeats,
        "max_len": min(longest + SPARE, config.max_position_embeddings),
        "lookup_tokens": peers.LOOKUP_TOKENS,
        "match_length": peers.MATCH_LENGTH,
        "draft_tokens": peers.DRAFT_TOKENS,
    }
    (folder / INPUTS).write_text(to_json(inputs))


def decode_all(folder: Path, engines: Sequence[str], say: Callable[[str], None]) -> Outputs:
    """Decode the inputs of a folder with each engine and method.

    Raises:
        ValueError: an engine did not do what it was asked for; the message says what differs.
    """
    inputs = json.loads((folder / INPUTS).read_bytes())
    found = Outputs({len(prompts): [] for prompts in inputs["batches"]}, {}, {})
    for engine in engines:
        for method in peers.METHODS[: 2 + (inputs["draft_model"] is not None)]:
            name = f"{engine}, {method}"
            say(f"{name}: starts")
            outputs = decode(folder, engine, method)
            if isinstance(outputs, str):
                found.failed[name] = outputs
                say(f"{name} is left out: {outputs}")
                continue
            check_comparable(name, inputs, outputs)
            found.versions[engine] = outputs["version"]
            for batch in outputs["batches"]:
                seconds = {int(count): times for count, times in batch["seconds"].items()}
                calls = peers.Calls(engine, method, seconds, batch["tokens"])
                found.calls[len(batch["tokens"])].append(calls)
    return found


def decode(folder: Path, engine: str, method: str) -> dict[str, Any] | str:
    """Decode the inputs in a process; returns its outputs, or why there are none."""
    output, log = folder / f"{engine}-{method}.json", folder / f"{engine}-{method}.log"
    words = [engine, method, str(folder / INPUTS), str(output)]
    with log.open("wb") as file:
        # -P: modules beside the program are not found by names that others use too.
        command = [sys.executable, "-P", engine_process.__file__, *words]
        code = subprocess.run(command, stdout=file, stderr=file, check=False).returncode
    if code:
        lines = log.read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"exit code {code}: {last}"
    return json.loads(output.read_bytes())


def check_comparable(name: str, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
    """Checks that an engine did what it was asked for.

    Raises:
        ValueError: it did not; the message has all that differs.
    """
    differ = [
        f"{what} is {outputs[what]}, not {inputs[what]}"
        for what in ("dtype", "device")
        if outputs[what] != inputs[what]
    ]
    if len(outputs["batches"]) != len(inputs["batches"]):
        differ.append(f"{len(outputs['batches'])} batches, not {len(inputs['batches'])}")
    for prompts, batch in zip(inputs["batches"], outputs["batches"], strict=False):
        size = len(prompts)
        counts = list(map(len, batch["tokens"]))
        if counts != [inputs["new_tokens"]] * size:
            expected = f"{inputs['new_tokens']} in each of {size} sequences"
            differ.append(f"batch {size} has {counts} new tokens, not {expected}")
        lengths = list(map(len, prompts))
        if batch["prompt_lengths"] != lengths:
            differ.append(f"batch {size} has prompts of {batch['prompt_lengths']}, not {lengths}")
        elif batch["prompts"] not in (None, prompts):
            differ.append(f"batch {size} has other prompts")
    if differ:
        raise ValueError(f"{name} cannot be compared: {'; '.join(differ)}")
