"""Models and prompts of `emsjax bench ems-sd`: scripted, or trained with a file of texts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from emsjax.benchmarks.workloads import ScriptedModels, Workload
from emsjax.models.decoder import Decoder

SEQUENCES_PER_ROUND = 8  # at least, as acceptance is drawn for each


@dataclasses.dataclass(frozen=True)
class Task:
    """One batch to decode: its prompts, drafts and expected tokens."""

    prompts: Sequence[np.ndarray]
    drafter: Any
    expected: np.ndarray | None = None  # [b, n]; None: those of plain decoding


class Scripted:
    """Prompts of a scripted model; acceptance is drawn anew for each round."""

    end_token_ids = ()

    def __init__(self, models: ScriptedModels, workload: Workload):
        self.models, self.workload = models, workload
        self.new_tokens = workload.max_new_tokens

    @property
    def model(self) -> Decoder:
        return self.models.model

    def rounds(self, batch: int, count: int) -> list[list[Task]]:
        """Rounds of batches with the same prompts; acceptance is drawn anew for each batch."""
        prompts = self.models.prompts(batch, self.new_tokens)
        lengths = np.array([len(prompt) for prompt in prompts])
        expected = self.models.expected(lengths, self.new_tokens)
        k = self.workload.profile.max_draft_tokens
        batches = -(-SEQUENCES_PER_ROUND // batch)
        drafters = self.models.drafters(self.workload, batch, k, count * batches)
        tasks = [Task(prompts, drafter, expected) for drafter in drafters]
        return [tasks[i : i + batches] for i in range(0, len(tasks), batches)]


@dataclasses.dataclass(frozen=True)
class Texts:
    """Prompts from a file; every round decodes the same full batches of them."""

    model: Decoder
    drafter: Any
    prompts: Sequence[Sequence[int]]
    new_tokens: int
    end_token_ids = None  # the model's own

    def rounds(self, batch: int, count: int) -> list[list[Task]]:
        """Full batches in the order of the prompts; a last, smaller batch is left out.

        Raises:
            ValueError: the prompts do not fill a batch.
        """
        starts = range(0, len(self.prompts) - batch + 1, batch)
        if not starts:
            raise ValueError(f"a batch of {batch} is more than the {len(self.prompts)} prompts")
        tasks = [
            Task([np.asarray(ids, np.int32) for ids in self.prompts[i : i + batch]], self.drafter)
            for i in starts
        ]
        return [tasks] * count


Source = Scripted | Texts
