"""Packs prompts and their continuations into calls of the model, as trees of tokens.

A prompt and its continuations are a tree: the prompt is fed once, and each continuation is a branch
that attends to the prompt and to itself. A bin is a row of whole trees side by side, for which
attention computes one matrix; a call of the model has a static number of bins. Whatever the
lengths, few rows are padding, and few programs are compiled.
"""

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32

MOST_AT_ONCE = 64  # continuations scored at a time by default
CALL_ROWS = 512  # rows of a call, unless a tree has more; larger ones compute hardly faster
MOST_ROWS = 4096  # most rows of a tree
# Static rows of a bin. A row attends to its whole bin, most of which is masked.
BINS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
COSTLY_KEYS = 1024  # about as many keys cost a small model as much as the rest of a row


class Continuation(NamedTuple):
    """A continuation to score.

    Attributes:
        place: its index in the output.
        prompt: index of its prompt.
        tokens: its tokens.
    """

    place: int
    prompt: int
    tokens: Int32[np.ndarray, "n"]


class Scored(NamedTuple):
    """The scores of a continuation.

    Attributes:
        place: its index in the output.
        logprobs: log-probability of each of its tokens.
        is_greedy: whether each is the likeliest one.
    """

    place: int
    logprobs: Float32[np.ndarray, "n"]
    is_greedy: Bool[np.ndarray, "n"]


class Tree(NamedTuple):
    """A prompt with some of its continuations.

    Attributes:
        prompt: the prompt's tokens.
        branches: the continuations, each of which is fed without its last token.
    """

    prompt: Int32[np.ndarray, "n"]
    branches: Sequence[Continuation]

    @property
    def rows(self) -> int:
        """Tokens that are fed."""
        return len(self.prompt) + sum(len(one.tokens) - 1 for one in self.branches)


class Forest(NamedTuple):
    """The arguments of one call of the model, whose rows are those of all its bins together.

    A row at place i of its bin sees the places from `roots` to before `stems` and those from
    `starts` to i.

    Attributes:
        counts: rows of each bin.
        tokens: token of each row.
        roots: place in the bin at which each row's tree begins.
        stems: place at which the prompt ends that a continuation's row sees; `roots` for the
            rows of prompts.
        starts: place at which each row's continuation, or its prompt, begins.
        sources: for each token that is scored the row that predicts it.
        targets: these tokens.
        num_targets: how many there are; further ones are padding.
    """

    counts: Int32[np.ndarray, "b"]
    tokens: Int32[np.ndarray, "r"]
    roots: Int32[np.ndarray, "r"]
    stems: Int32[np.ndarray, "r"]
    starts: Int32[np.ndarray, "r"]
    sources: Int32[np.ndarray, "p"]
    targets: Int32[np.ndarray, "p"]
    num_targets: Int32[np.ndarray, ""]


class Shape(NamedTuple):
    """The static shape of a call.

    Attributes:
        num_bins: its bins.
        bin_rows: rows of a bin.
    """

    num_bins: int
    bin_rows: int


def grow(
    prompt: Int32[np.ndarray, "n"], own: Sequence[Continuation], most: int, at_once: int
) -> Iterator[Tree]:
    """Yields trees of a prompt's continuations, together or, if they are too many, in parts.

    Args:
        most: most rows of a tree, at least those of the prompt and any continuation.
        at_once: most continuations of a tree.
    """
    at_once = min(at_once, BINS[0])  # so that those of a tree fit into any bin
    longest = max(len(one.tokens) for one in own)
    # A tree that is cut has at least as many rows of continuations as of the prompt.
    most = min(most, max(CALL_ROWS, 2 * len(prompt) + longest))
    branches: list[Continuation] = []
    for one in sorted(own, key=lambda one: len(one.tokens), reverse=True):
        if branches and (len(branches) == at_once or Tree(prompt, [*branches, one]).rows > most):
            yield Tree(prompt, branches)
            branches = []
        branches.append(one)
    yield Tree(prompt, branches)


def plant(trees: Iterable[Tree], at_once: int) -> Iterator[tuple[Shape, list[list[Tree]]]]:
    """Divides trees into calls: yields the shape of each and the trees in its bins.

    Args:
        trees: what `grow` returned.
        at_once: most continuations of a call.
    """
    classes: dict[int, list[Tree]] = {}  # so that short trees do not pay for the longest one
    for tree in sorted(trees, key=lambda tree: tree.rows, reverse=True):
        size = max(CALL_ROWS, 1 << (tree.rows - 1).bit_length())
        classes.setdefault(size, []).append(tree)
    for size, members in classes.items():
        plans = {}
        for bin_rows in BINS:
            if members[0].rows <= bin_rows <= size:
                shape = Shape(max(1, CALL_ROWS // bin_rows), bin_rows)
                bins = _fill(members, bin_rows, min(at_once, bin_rows))
                plans[shape] = list(_calls(bins, shape.num_bins, at_once))
        shape = min(plans, key=lambda shape: len(plans[shape]) * _cost(shape))
        yield from ((shape, bins) for bins in plans[shape])


def _cost(shape: Shape) -> int:
    """The relative cost of a call."""
    return shape.num_bins * shape.bin_rows * (COSTLY_KEYS + shape.bin_rows)


def _calls(
    bins: Sequence[Sequence[Tree]], num_bins: int, at_once: int
) -> Iterator[list[Sequence[Tree]]]:
    """Yields the bins of each call: up to `num_bins`, with up to `at_once` continuations."""
    call: list[Sequence[Tree]] = []
    room = at_once
    for trees in bins:
        count = sum(len(tree.branches) for tree in trees)
        if call and (len(call) == num_bins or count > room):
            yield call
            call, room = [], at_once
        call.append(trees)
        room -= count
    yield call


def _fill(trees: Sequence[Tree], size: int, at_once: int) -> list[list[Tree]]:
    """Puts trees, the longest first, into the fullest bin with enough room, or into a new one."""
    bins: list[list[Tree]] = []
    branches: list[int] = []  # continuations of each bin
    rooms: list[tuple[int, int]] = []  # room and index of each bin, ascending
    for tree in trees:
        place = bisect.bisect_left(rooms, (tree.rows, 0))
        while place < len(rooms) and branches[rooms[place][1]] + len(tree.branches) > at_once:
            place += 1
        if place < len(rooms):
            room, index = rooms.pop(place)
        else:
            room, index = size, len(bins)
            bins.append([])
            branches.append(0)
        bins[index].append(tree)
        branches[index] += len(tree.branches)
        bisect.insort(rooms, (room - tree.rows, index))
    return bins


def lay_out(shape: Shape, bins: Sequence[Sequence[Tree]]) -> Forest:
    """Returns the arguments of a call with these trees in its bins."""
    rows: list[list[np.ndarray]] = [[], [], [], []]  # tokens, roots, stems, starts
    sources, targets = [], []
    counts = np.zeros(shape.num_bins, np.int32)
    before = 0  # rows of earlier bins
    for index, trees in enumerate(bins):
        root = 0
        for prompt, branches in trees:
            stem = root + len(prompt)
            parts = [(prompt, root, root)]  # tokens, end of the stem, start
            start = stem
            for one in branches:
                parts.append((one.tokens[:-1], stem, start))
                fed = np.arange(before + start, before + start + len(one.tokens) - 1)
                sources += [[before + stem - 1], fed]
                targets.append(one.tokens)
                start += len(one.tokens) - 1
            for tokens, end, begin in parts:
                of_row = lambda value, tokens=tokens: np.full(len(tokens), value, np.int32)
                for list_of, values in zip(
                    rows, (tokens, of_row(root), of_row(end), of_row(begin)), strict=True
                ):
                    list_of.append(values)
            root = start
        counts[index] = root
        before += root
    num_rows = shape.num_bins * shape.bin_rows
    num_targets = sum(map(len, targets))
    return Forest(
        counts,
        *(_padded(values, num_rows) for values in rows),
        # A bin has no more continuations than rows, and each adds a target to those of its rows.
        *(_padded(values, 2 * num_rows) for values in (sources, targets)),
        np.int32(num_targets),
    )


def _padded(values: Sequence[Sequence[int]], size: int) -> Int32[np.ndarray, "n"]:
    """Concatenates arrays, followed by zeros."""
    whole = np.zeros(size, np.int32)
    joined = np.concatenate(values)
    whole[: len(joined)] = joined
    return whole
