"""A memory of earlier outputs, and its suffix array, which is searched inside the device loop.

A suffix array finds the longest match of any length in a fixed number of rounds, and takes four
bytes for each token. A hash of contexts would need a table for each length of a match.
"""

import os
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from emsjax.checks import MOST, as_token_ids, check_at_least, check_list
from emsjax.records.writing import replacing
from emsjax.values import pytree
from pallas_kernels.common.indexing import take

CONTEXT = 16  # tokens before an occurrence that are compared: the longest match
# Entries that each round of a search compares: 3 rounds find one of 4 million. On a GPU a round is
# a few launches, whatever it compares.
BRANCHES = 160
TOKEN_BYTES = 8  # a token, and its place in the suffix array
SEPARATOR = -1  # before and behind each sequence
LEAST_SIZE = 1024  # tokens of the smallest arrays
MAX_BYTES = 1 << 24


@pytree
class SuffixIndex:
    """The suffix array of a memory.

    Attributes:
        text: `CONTEXT` separators, then all sequences, oldest first, with a separator behind each,
            and padding.
        order: the places in the text of tokens that follow another token of their sequence, sorted
            by the `CONTEXT` tokens before them, the nearest one first, and padding.
        size: entries of `order` without the padding.
    """

    text: Int32[Array, "n"]
    order: Int32[Array, "m"]
    size: Int32[Array, ""]

    def find(
        self, suffix: Int32[Array, "b w"], max_occurrences: int
    ) -> tuple[Int32[Array, "b"], Int32[Array, "b o"]]:
        """Finds the places in the text before which the longest part of `suffix` stands.

        Args:
            suffix: the last `CONTEXT` tokens of each sample, the last one first.

        Returns:
            The number of tokens that match, and up to `max_occurrences` of the places, evenly
            spaced in the suffix array, the latest first; -1 where there are fewer.
        """
        whole = jnp.full((len(suffix), 1), CONTEXT)
        after = self._count_before(suffix, whole, through=jnp.array([False]))
        neighbours = after[..., None] + jnp.array([-1, 0])
        exists = (neighbours >= 0) & (neighbours < self.size)
        shared, _ = self._compare(suffix, whole, neighbours)
        matched = jnp.max(jnp.where(exists, shared, 0), axis=(1, 2))

        twice = jnp.stack([matched, matched], axis=1)
        bounds = self._count_before(suffix, twice, through=jnp.array([False, True]))
        first, number = bounds[:, :1], bounds[:, 1:] - bounds[:, :1]
        chosen = jnp.arange(max_occurrences)
        offset = jnp.where(number > max_occurrences, chosen * number // max_occurrences, chosen)
        places = take(self.order, jnp.minimum(first + offset, len(self.order) - 1))
        exists = (offset < number) & (matched[:, None] > 0)
        return matched, lax.top_k(jnp.where(exists, places, -1), max_occurrences)[0]

    def continuations(self, places: Int32[Array, "b o"], k: int) -> Int32[Array, "b o k"]:
        """The k tokens from each place on; what follows the end of its sequence is undefined."""
        at = jnp.maximum(places, 0)[..., None] + jnp.arange(k)
        return take(self.text, jnp.minimum(at, len(self.text) - 1))

    def _compare(
        self,
        suffix: Int32[Array, "b w"],
        depths: Int32[Array, "b q"],
        entries: Int32[Array, "b q n"],
    ) -> tuple[Int32[Array, "b q n"], Bool[Array, "b q n"]]:
        """Compares the tokens before the places of entries with the first depths[s, i] of `suffix`.

        Returns:
            How many are the same before the first one that differs, and whether that one is less
            in the text.
        """
        distance = jnp.arange(CONTEXT)
        places = take(self.order, jnp.clip(entries, 0, len(self.order) - 1))[..., None]
        before = take(self.text, places - 1 - distance)
        wanted = suffix[:, None, None]
        differs = (before != wanted) & (distance < depths[..., None, None])
        # The distance of the first difference, twice, so that one reduction finds its sign too.
        code = 2 * distance + (before > wanted).astype(jnp.int32)
        code = jnp.where(differs, code, 2 * CONTEXT + 1)
        code = jnp.min(code, axis=3)
        return jnp.minimum(code // 2, depths[..., None]), code % 2 == 0

    def _count_before(
        self,
        suffix: Int32[Array, "b w"],
        depths: Int32[Array, "b q"],
        *,
        through: Bool[Array, " q"],
    ) -> Int32[Array, "b q"]:
        """Counts the entries that are less than the first depths[s, i] tokens of `suffix`.

        Args:
            through: whether entries that are equal to them count as well.
        """
        count = jnp.zeros(depths.shape, jnp.int32)
        step = 1
        while step * BRANCHES <= len(self.order):
            step *= BRANCHES
        while step:
            entries = count[..., None] + step * jnp.arange(1, BRANCHES) - 1
            shared, less = self._compare(suffix, depths, entries)
            before = less | (shared == depths[..., None]) & through[:, None]
            before &= entries < self.size
            count += step * jnp.sum(before, axis=2, dtype=jnp.int32)
            step //= BRANCHES
        return count


class SuffixMemory:
    """Token sequences of earlier outputs, from which `emsjax.SuffixDrafter` drafts.

    Sequences enter it by `add` alone, between calls, and the oldest leave first. A drafter reads
    what the memory holds when the drafter is made.

    Args:
        max_bytes: limit of its arrays on the device, which take 8 bytes for each token and for
            each sequence.

    Raises:
        ValueError: `max_bytes` is not an integer of at least 1024.
    """

    def __init__(self, max_bytes: int = MAX_BYTES):
        self.max_bytes = check_at_least("max_bytes", max_bytes, 1024, MOST)
        self._sequences: deque[np.ndarray] = deque()
        self._num_tokens = 0  # separators included
        self._index: SuffixIndex | None = None

    @property
    def sequences(self) -> list[np.ndarray]:
        """The sequences that it holds, oldest first, each int32 [n]."""
        return list(self._sequences)

    def add(self, sequences: Sequence[Any]) -> None:
        """Adds sequences of token ids, and drops the oldest ones beyond `max_bytes`.

        Sequences without tokens are ignored, and one that is too long keeps its last tokens.

        Args:
            sequences: such as `out.tokens[i, : out.lengths[i]]` for each sequence i of an output,
                each 1-D.

        Raises:
            ValueError: they are not sequences of token ids; none is added.
        """
        check_list("sequences", sequences, "list of token-id sequences")
        named = [(f"sequences[{i}]", one) for i, one in enumerate(sequences)]
        self._add([as_token_ids(name, one) for name, one in named if not _is_empty(one)])

    def _add(self, sequences: Iterable[np.ndarray]) -> None:
        most = self.max_bytes // TOKEN_BYTES - CONTEXT
        for one in sequences:
            kept = one[-(most - 1) :].copy()
            kept.setflags(write=False)
            self._sequences.append(kept)
            self._num_tokens += len(kept) + 1
            while self._num_tokens > most:
                self._num_tokens -= len(self._sequences.popleft()) + 1
            self._index = None

    def save(self, path: str | os.PathLike) -> None:
        """Writes the sequences and the limit to a file, which is complete or absent after a crash.

        Raises:
            OSError: the file cannot be written.
        """
        path = Path(path)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            with replacing(path, unfinished), unfinished.open("wb") as file:
                np.savez(
                    file,
                    tokens=np.concatenate([np.zeros(0, np.int32), *self._sequences]),
                    lengths=np.array(list(map(len, self._sequences)), np.int32),
                    max_bytes=np.int64(self.max_bytes),
                )
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike, max_bytes: int | None = None) -> "SuffixMemory":
        """Reads a memory that `save` has written.

        Args:
            max_bytes: the limit; None: that of the memory that was saved.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is damaged, or no memory.
        """
        with Path(path).open("rb") as file:
            try:
                with np.load(file, allow_pickle=False) as arrays:
                    tokens, lengths = arrays["tokens"], arrays["lengths"]
                    saved = int(arrays["max_bytes"])
                sequences = _split(tokens, lengths)
                memory = cls(saved)
            except Exception as error:  # a damaged archive may raise anything
                raise ValueError(f"{path} is damaged, or no memory: {error}") from error
        if max_bytes is not None:
            memory = cls(max_bytes)
        memory._add(sequences)
        return memory

    @property
    def index(self) -> SuffixIndex:
        """The suffix array of the present sequences; it is built when it is first needed."""
        if self._index is None:
            self._index = _build(self._sequences, self.max_bytes // TOKEN_BYTES)
        return self._index


def _is_empty(sequence: Any) -> bool:
    if isinstance(sequence, list | tuple):
        return not sequence
    return getattr(sequence, "size", None) == 0


def _split(tokens: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """The sequences in a file's arrays.

    Raises:
        ValueError: the arrays do not fit together.
    """
    kinds = {(array.dtype.kind, array.ndim) for array in (tokens, lengths)}
    if kinds != {("i", 1)} or (lengths < 1).any() or lengths.sum() != len(tokens):
        raise ValueError("its arrays do not fit together")
    if not len(lengths):
        return []
    tokens = as_token_ids("tokens", tokens)
    return np.split(tokens, np.cumsum(lengths)[:-1])


def _build(sequences: Iterable[np.ndarray], capacity: int) -> SuffixIndex:
    """The suffix array of sequences whose text takes at most `capacity` places."""
    end = np.array([SEPARATOR], np.int32)
    parts = [np.full(CONTEXT, SEPARATOR, np.int32), *(x for one in sequences for x in (one, end))]
    text = np.concatenate(parts)
    order = _sorted_places(text)
    # Few sizes, as each is compiled by itself.
    width = min(max(LEAST_SIZE, 1 << (len(text) - 1).bit_length()), capacity)
    padded = lambda x, value: np.pad(x, (0, width - len(x)), constant_values=value)
    with jax.ensure_compile_time_eval():  # the arrays outlive a trace in which a drafter is made
        return SuffixIndex(
            jnp.asarray(padded(text, SEPARATOR)),
            jnp.asarray(padded(order, CONTEXT).astype(np.int32)),  # a place, as any may be read
            jnp.int32(len(order)),
        )


def _sorted_places(text: np.ndarray) -> np.ndarray:
    """The `order` of a `SuffixIndex`, by prefix doubling."""
    # The rank of the last 1, 2, 4, ... tokens up to each place, the last token first.
    rank, length = np.unique(text, return_inverse=True)[1].astype(np.int64), 1
    while length < CONTEXT:
        earlier = np.concatenate([np.zeros(length, np.int64), rank[:-length]])
        pairs = rank * (rank.max() + 1) + earlier
        rank, length = np.unique(pairs, return_inverse=True)[1], 2 * length
    places = np.flatnonzero((text[1:] != SEPARATOR) & (text[:-1] != SEPARATOR)) + 1
    return places[np.argsort(rank[places - 1], kind="stable")]
