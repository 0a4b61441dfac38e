"""Models, prompts and drafts of benchmarks: the embedded pair, or scripted models."""

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from emsjax.benchmarks.acceptance import (
    CandidateAcceptance,
    CopyAcceptance,
    Mixed,
    Profile,
    TokenAcceptance,
)
from emsjax.benchmarks.runs import random_model
from emsjax.benchmarks.scripted import FIRST_TOKEN, replay, script, scripted_model
from emsjax.benchmarks.shapes import MODELS
from emsjax.drafters import DraftModel, PromptLookup
from emsjax.drafters.self_draft import SelfDraft, narrow_copy
from emsjax.embedded import DRAFT, PROMPTS, TARGET
from emsjax.models.config import DecoderConfig
from emsjax.models.decoder import Decoder
from emsjax.models.numbers import NumberFormats
from emsjax.models.pretrained import from_pretrained

MOST_TOKENS = 8192  # of a script: models may have positions for far more
PROMPT_TOKENS = (700, 1100)  # length of scripted models' prompts: 900 on average
CALIBRATION_SEED, CALIBRATION_DRAWS = 2**31, 4096


@dataclasses.dataclass(frozen=True)
class Workload:
    """A way to draft, and how often the drafts are accepted.

    Attributes:
        source: the drafter that does its work: "prompt-lookup", "model" or "self" (a narrow copy of
            the target).
        max_new_tokens: new tokens of every sample.
        profile: the acceptance of the drafts; None: the source's own drafts are used.
        live: whether runs are timed until the first sample has finished instead of the last.
    """

    source: str
    max_new_tokens: int
    profile: Profile | None = None
    live: bool = False


SCRIPTED = {
    "llma": Workload("prompt-lookup", 128, CopyAcceptance()),
    "poor": Workload("prompt-lookup", 128, TokenAcceptance(0.2, 16)),
    # Half of the samples have bad drafts, and they alone would determine the time of a whole run.
    # The runs are longer than others, so that all samples are live for a while.
    "mixed": Workload(
        "prompt-lookup",
        256,
        Mixed(TokenAcceptance(0.95, 16), TokenAcceptance(0.1, 16)),
        live=True,
    ),
    "draft-model": Workload("model", 128, TokenAcceptance(0.8, 16)),
    "poor-draft-model": Workload("model", 128, TokenAcceptance(0.2, 16)),
    # Trees, and what remains of them if only the first candidate for each token is drafted.
    "candidates": Workload("prompt-lookup", 128, CandidateAcceptance((0.6, 0.2, 0.08), 16)),
    "first-candidates": Workload("prompt-lookup", 128, TokenAcceptance(0.6, 16)),
}
EMBEDDED_WORKLOADS = {
    "prompt-lookup": Workload("prompt-lookup", 64),
    "model": Workload("model", 64),
}


class ScriptedModels:
    """Models of random weights; the target is scripted to output a known text.

    Args:
        dtype: None: bfloat16.
        prompt_tokens: the least and the most tokens of a prompt; None: 700 and 1100.
        narrow: `quantize` and `kv_dtype` of the target: see `NumberFormats`.
    """

    workloads = SCRIPTED
    batch_sizes = (1, 8, 24, 64)
    dtype = jnp.bfloat16

    def __init__(self, shape: str, draft_shape: str, dtype=None, prompt_tokens=None, **narrow: Any):
        self.numbers = NumberFormats(self.dtype if dtype is None else dtype, **narrow)
        self.prompt_tokens = prompt_tokens or PROMPT_TOKENS
        self.config, self.draft_config = MODELS[shape], MODELS[draft_shape]
        self.describe = {"shape": shape, "draft_shape": draft_shape}

    @functools.cached_property
    def text(self) -> np.ndarray:
        return script(self.config, min(self.config.max_position_embeddings, MOST_TOKENS), seed=1)

    @functools.cached_property
    def model(self) -> Decoder:
        return scripted_model(self.config, self.text, numbers=self.numbers)

    @functools.cached_property
    def draft_model(self) -> Decoder:
        return random_model(self.draft_config, self.numbers.of_draft_model)

    @functools.cached_property
    def narrow_copy(self) -> Decoder:
        """The target's copy that drafts for it."""
        made = lambda numbers: scripted_model(self.config, self.text, numbers=numbers)
        return narrow_copy(self.model, lambda of: made(self.numbers._replace(quantize=of)))

    def prompts(self, batch: int, max_new_tokens: int) -> list[np.ndarray]:
        positions = len(self.text)
        room = positions - max_new_tokens
        if room < 1:
            raise ValueError(
                f"--max-new-tokens {max_new_tokens} leaves no room in {positions} positions"
            )
        low, high = (min(length, room) for length in self.prompt_tokens)
        rng = np.random.default_rng(2)
        lengths = (
            rng.integers(low, high, batch, endpoint=True) if batch > 1 else [(low + high) // 2]
        )
        prompts = [rng.integers(FIRST_TOKEN, self.config.vocab_size, n) for n in lengths]
        for prompt in prompts:
            prompt[-1] = self.text[len(prompt) - 1]  # see `scripted_model`
        return prompts

    def drafters(self, workload: Workload, batch: int, k: int, repeats: int) -> Sequence[Any]:
        """One drafter per repeat, with acceptance drawn anew for each."""
        source = source_of(workload, k, self)
        vocab = self.config.vocab_size
        return [
            replay(
                workload.profile,
                self.text,
                batch,
                vocab_size=vocab,
                max_draft_tokens=k,
                seed=seed,
                source=source,
            )
            for seed in range(repeats)
        ]

    def expected(self, lengths: np.ndarray, max_new_tokens: int) -> np.ndarray:
        """The new tokens of each sample, [b, n]."""
        return self.text[lengths[:, None] + np.arange(max_new_tokens)]

    def acceptance(self, workload: Workload, batch: int, k: int):
        """Mean accepted and drafted tokens by draft length 0..k, from separate draws."""
        rng = np.random.default_rng(CALIBRATION_SEED)
        counts, right = workload.profile.draw(rng, batch, max(1, CALIBRATION_DRAWS // batch))
        mean = lambda values: np.array([np.minimum(values, n).mean() for n in range(k + 1)])
        return mean(np.minimum(right, counts)), mean(counts)


class EmbeddedModels:
    """The trained pair that comes with the library, and its prompts, repeated to fill a batch."""

    workloads = EMBEDDED_WORKLOADS
    batch_sizes = (1, 8)
    numbers = NumberFormats(jnp.float32)

    def __init__(self):
        self.describe = {"shape": "embedded", "draft_shape": "embedded"}

    @functools.cached_property
    def model(self) -> Decoder:
        return from_pretrained(TARGET, dtype=self.numbers.dtype)

    @functools.cached_property
    def draft_model(self) -> Decoder:
        return from_pretrained(DRAFT, dtype=self.numbers.dtype)

    @property
    def config(self) -> DecoderConfig:
        return self.model.config

    @property
    def draft_config(self) -> DecoderConfig:
        return self.draft_model.config

    def prompts(self, batch: int, max_new_tokens: int) -> list[list[int]]:
        from transformers import AutoTokenizer

        texts = [prompt["prompt"] for prompt in json.loads(PROMPTS.read_text())]
        ids = AutoTokenizer.from_pretrained(TARGET)(texts).input_ids
        return [ids[i % len(ids)] for i in range(batch)]

    def drafters(self, workload: Workload, batch: int, k: int, repeats: int) -> Sequence[Any]:
        return [source_of(workload, k, self)] * repeats  # nothing is random

    def expected(self, lengths, max_new_tokens) -> None:
        """None: unknown before plain decoding."""

    def acceptance(self, workload, batch, k) -> None:
        """None: unknown before a run."""


def source_of(workload: Workload, k: int, models) -> Any:
    """The drafter that does the workload's work."""
    if workload.source == "prompt-lookup":
        return PromptLookup(max_draft_tokens=k)
    if workload.source == "self":
        return SelfDraft(models.narrow_copy, k)
    return DraftModel(models.draft_model, k)
