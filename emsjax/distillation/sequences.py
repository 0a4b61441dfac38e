"""Training sequences packed from documents, none of which attends to another."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from emsjax.checks import INT32_MAX, check_at_least

MIN_TOKENS = 2  # in a document: one to read, one to predict


class Batch(NamedTuple):
    """Sequences of equal length.

    Attributes:
        tokens: the input tokens; each predicts the next one if that has the same segment.
        segment_ids: the document of each token, numbered within its sequence.
        positions: the position of each token within its piece of a document.
    """

    tokens: Int32[np.ndarray, "b t"]
    segment_ids: Int32[np.ndarray, "b t"]
    positions: Int32[np.ndarray, "b t"]


class PackedSequences:
    """Batches of sequences packed from documents, without padding.

    Each epoch shuffles the documents, joins them and cuts the result into sequences, also in the
    middle of a document; an incomplete last sequence is dropped. A batch depends only on its
    number, so training can resume at any step.

    Args:
        documents: token ids of each text, with an end token if the model should learn it.
        length: tokens of a sequence.
        batch: sequences of a batch.
        seed: seed of the shuffles.

    Raises:
        ValueError: a number is out of range, there are no documents, one has fewer than two
            tokens, or all of them together are shorter than a sequence.
    """

    def __init__(self, documents: Sequence[np.ndarray], length: int, batch: int, seed: int = 0):
        batch = check_at_least("batch", batch, 1, INT32_MAX // MIN_TOKENS)
        seed = check_at_least("seed", seed, 0)
        if not len(documents):
            raise ValueError("there are no texts")
        self.lengths = np.array([len(document) for document in documents])
        for index in np.flatnonzero(self.lengths < MIN_TOKENS):
            raise ValueError(
                f"text {index} is too short: {self.lengths[index]} tokens, not {MIN_TOKENS}"
            )
        length = check_at_least("length", length, MIN_TOKENS)
        self.documents, self.length, self.batch, self.seed = documents, length, batch, seed
        self.per_epoch = int(self.lengths.sum()) // length
        if not self.per_epoch:
            raise ValueError(
                f"the texts have {self.lengths.sum()} tokens together, fewer than one sequence "
                f"of {length}, the length"
            )
        self._epoch: tuple[int, Batch] | None = None

    def __getitem__(self, step: int) -> Batch:
        """The batch of a training step, counted from 0; there is no last one."""
        first = step * self.batch
        rows = [self._row(index) for index in range(first, first + self.batch)]
        return Batch(*map(np.stack, zip(*rows, strict=True)))

    def _row(self, index: int) -> tuple[np.ndarray, ...]:
        epoch, row = divmod(index, self.per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self._pack(np.random.default_rng([self.seed, epoch])))
        return tuple(values[row] for values in self._epoch[1])

    def _pack(self, rng: np.random.Generator) -> Batch:
        order = rng.permutation(len(self.documents))
        shape, size = (self.per_epoch, self.length), self.per_epoch * self.length
        tokens = np.concatenate([self.documents[i] for i in order])[:size].reshape(shape)
        documents = np.repeat(np.arange(len(order)), self.lengths[order])[:size].reshape(shape)
        place = np.arange(self.length)
        begins = np.diff(documents, axis=1, prepend=-1) != 0
        positions = place - np.maximum.accumulate(np.where(begins, place, 0), axis=1)
        segments = documents - documents[:, :1]
        # Shuffled, so that pieces of a long document are not adjacent in a batch.
        rows = rng.permutation(self.per_epoch)
        return Batch(*(x[rows].astype(np.int32) for x in (tokens, segments, positions)))
