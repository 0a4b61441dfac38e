"""`emsjax bench peers`: the same prompts through `emsjax.generate` and through other libraries.

Both decode greedily with the same weights, and draft in the same way: by prompt lookup of up to 7
tokens after a match of 2, and with the same draft model, 4 tokens at a time. transformers does not
draft for more than one sample, so larger batches are decoded plainly there. vLLM and SGLang run in
processes of their own before: see `emsjax.benchmarks.engines`. Figures are of whole calls, with the
host's work; the time of a call for one token is subtracted as prefill.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from emsjax.benchmarks.results import add_entry
from emsjax.benchmarks.scripted import miscopied, scripted_model
from emsjax.benchmarks.workloads import ScriptedModels
from emsjax.drafters import DraftModel, PromptLookup
from emsjax.generation import generate
from emsjax.models.decoder import Decoder
from emsjax.models.families import family_of
from emsjax.models.parameters import weights_of
from emsjax.models.saving import stored_tensors

LOOKUP_TOKENS, MATCH_LENGTH, DRAFT_TOKENS = 7, 2, 4
MISCOPIED = 0.2  # share of wrong tokens in scripted prompts and scripted draft models
METHODS = ("plain", "prompt-lookup", "draft-model")
Decode = Callable[[str, Sequence[np.ndarray], int], list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Subject:
    """Models and prompts of a comparison.

    Attributes:
        prompts: the prompts for a batch size.
        expected: the expected tokens for given prompts, [b, n]; None: those of plain decoding.
        end_token_ids: None: the model's own.
    """

    model: Decoder
    draft_model: Decoder | None
    prompts: Callable[[int], Sequence[np.ndarray]]
    new_tokens: int
    expected: Callable[[Sequence[np.ndarray]], np.ndarray | None] = lambda prompts: None
    end_token_ids: tuple[int, ...] | None = None

    @property
    def methods(self) -> tuple[str, ...]:
        return METHODS if self.draft_model is not None else METHODS[:-1]


class Calls(NamedTuple):
    """The calls of a library that has decoded a batch in another process.

    Attributes:
        seconds: of each call, by number of new tokens, which are 1 and the most.
        tokens: the new tokens of each sequence.
    """

    library: str
    method: str
    seconds: Mapping[int, Sequence[float]]
    tokens: Sequence[Sequence[int]]


def scripted_subject(shape: str, draft_shape: str, new_tokens: int) -> Subject:
    """Models of random weights, scripted to output nearly the same text, which the prompts contain.

    Both drafters therefore really find their drafts, and one token in five of these is wrong.
    """
    models = ScriptedModels(shape, draft_shape)
    vocab = models.config.vocab_size
    expected = lambda prompts: models.expected(np.array([len(p) for p in prompts]), new_tokens)

    def prompts(batch: int) -> list[np.ndarray]:
        found = models.prompts(batch, new_tokens)
        copies = miscopied(expected(found), MISCOPIED, vocab, seed=3)
        for prompt, copy in zip(found, copies, strict=True):
            place = max(0, (len(prompt) - len(copy)) // 2)
            room = len(prompt[place : place + len(copy)])
            prompt[place : place + room] = copy[:room]
        return found

    draft_text = miscopied(models.text, MISCOPIED, vocab, seed=4)
    draft = scripted_model(models.draft_config, draft_text, numbers=models.numbers)
    return Subject(models.model, draft, prompts, new_tokens, expected, end_token_ids=())


def ours(subject: Subject) -> Decode:
    """`emsjax.generate`."""
    drafters = {
        "plain": None,
        "prompt-lookup": PromptLookup(MATCH_LENGTH, LOOKUP_TOKENS, search_generated=True),
    }
    if subject.draft_model is not None:
        drafters["draft-model"] = DraftModel(subject.draft_model, DRAFT_TOKENS)

    def decode(method: str, prompts: Sequence[np.ndarray], new_tokens: int):
        out = generate(
            subject.model,
            prompts,
            drafters[method],
            max_new_tokens=new_tokens,
            eos_token_ids=subject.end_token_ids,
        )
        return [row[:length] for row, length in zip(out.tokens, out.lengths, strict=True)]

    return decode


def torch_device() -> str:
    """The name in torch of the device that JAX uses.

    Raises:
        ImportError: torch is missing or cannot use that device.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError("torch is not installed") from error
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ImportError("torch is installed without support for this GPU")
    return device


def theirs(subject: Subject) -> Decode:
    """`generate` of transformers, on the device that JAX uses.

    Raises:
        ImportError: see `torch_device`.
    """
    device = torch_device()
    import torch

    model = to_torch(subject.model, device)
    arguments: dict[str, dict[str, Any]] = {
        "plain": {},
        "prompt-lookup": {
            "prompt_lookup_num_tokens": LOOKUP_TOKENS,
            "max_matching_ngram_size": MATCH_LENGTH,
        },
    }
    if subject.draft_model is not None:
        assistant = to_torch(subject.draft_model, device)
        # By default the number of draft tokens changes as decoding proceeds.
        assistant.generation_config.num_assistant_tokens = DRAFT_TOKENS
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0
        arguments["draft-model"] = {"assistant_model": assistant}
    config = subject.model.config
    ends = config.eos_token_ids if subject.end_token_ids is None else subject.end_token_ids
    padding = config.pad_token_id or 0

    def decode(method: str, prompts: Sequence[np.ndarray], new_tokens: int):
        width = max(map(len, prompts))
        ids = np.full((len(prompts), width), padding, np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = prompt
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            out = model.generate(
                torch.from_numpy(ids).to(device),
                attention_mask=torch.from_numpy(mask).to(device),
                do_sample=False,
                max_new_tokens=new_tokens,
                eos_token_id=list(ends) or None,
                pad_token_id=padding,
                **arguments[method],
            )
        return [up_to_end(row[width:], ends) for row in out.cpu().numpy()]

    return decode


def to_torch(model: Decoder, device: str):
    """A model of transformers with the same weights, shared where torch can use them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    family = family_of(model.config)
    config = AutoConfig.for_model(family.model_type, **model.config.to_json())
    with torch.device("meta"):
        peer = AutoModelForCausalLM.from_config(config)
    weights = weights_of(model, family, torch_layout=True)
    tensors = {name: torch.from_dlpack(value) for name, value in stored_tensors(model, weights)}
    missing, unexpected = peer.load_state_dict(tensors, strict=False, assign=True)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise RuntimeError(f"transformers has other parameters: {missing}, {unexpected}")
    peer.tie_weights()
    peer.generation_config.eos_token_id = None
    return peer.to(device).eval()


def up_to_end(tokens: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    """Tokens up to and including the first end token."""
    found = np.flatnonzero(np.isin(tokens, ends))
    return tokens[: found[0] + 1] if found.size else tokens


def measure(
    subject: Subject,
    libraries: Mapping[str, Decode],
    batch: int,
    repeats: int,
    say: Callable[[str], None],
    others: Sequence[Calls] = (),
) -> dict[str, Any]:
    """Measure the entry of one batch size; libraries and methods take turns.

    Args:
        others: what was measured before, in other processes.
    """
    prompts = subject.prompts(batch)
    expected = subject.expected(prompts)
    runs = {
        (library, method): functools.partial(decode, method, prompts)
        for library, decode in libraries.items()
        for method in subject.methods
        if batch == 1 or method == "plain" or library == "emsjax"
    }
    seconds = {name: {1: [], subject.new_tokens: []} for name in runs}
    tokens, identical = {}, dict.fromkeys(runs, True)
    same = lambda new: all(map(np.array_equal, new, expected))
    for repeat in range(repeats + 1):
        for name, decode in runs.items():
            for count, times in seconds[name].items():
                begin = time.perf_counter()
                new = decode(count)
                if repeat:  # the first time includes compilation
                    times.append(time.perf_counter() - begin)
            if expected is None:
                expected = new
            identical[name] &= same(new)
            tokens[name] = sum(map(len, new))
    for calls in others:
        name = calls.library, calls.method
        seconds[name], identical[name] = calls.seconds, same(calls.tokens)
        tokens[name] = sum(map(len, calls.tokens))
    entry = {"batch": batch, "mean_prompt_tokens": float(np.mean([len(p) for p in prompts]))}
    entry["runs"] = []
    for (library, method), times in seconds.items():
        spent = np.median(times[subject.new_tokens]) - np.median(times[1])
        figures = {
            "library": library,
            "method": method,
            # None where the difference is within the noise of the clock.
            "tokens_per_s": (tokens[library, method] - batch) / spent if spent > 0 else None,
            "prefill_s": float(np.median(times[1])),
            "seconds": {str(count): of for count, of in times.items()},
            "identical": identical[library, method],
        }
        entry["runs"].append(figures)
        speed = figures["tokens_per_s"]
        shown = "too short to be timed" if speed is None else f"{speed:.0f} tokens/s"
        say(f"batch {batch}, {library}, {method}: {shown}")
    return entry


def run(
    subject: Subject,
    libraries: Mapping[str, Decode],
    results: dict[str, Any],
    *,
    batch_sizes: Sequence[int],
    repeats: int,
    output: Path | None,
    say: Callable[[str], None],
    others: Mapping[int, Sequence[Calls]] = MappingProxyType({}),
) -> None:
    """Measure the batch sizes that are missing in `results`, and write the file after each.

    Args:
        others: by batch size, what was measured before, in other processes.
    """
    done = {entry["batch"] for entry in results["entries"]}
    for batch in batch_sizes:
        if batch not in done:
            theirs = others.get(batch, ())
            add_entry(measure(subject, libraries, batch, repeats, say, theirs), results, output)


def all_identical(results: Mapping[str, Any]) -> bool:
    return all(run["identical"] for entry in results["entries"] for run in entry["runs"])
