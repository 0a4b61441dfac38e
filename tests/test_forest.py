"""Trees of prompts and continuations fill the calls of a model."""

import itertools

import numpy as np
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from toy import VOCAB

from emsjax.engine import forest


def random_given(rng, count, longest):
    """Prompts, each with one to nine continuations."""
    places, prompts, given = itertools.count(), [], []
    for prompt in range(count):
        prompts.append(rng.integers(0, VOCAB, rng.integers(1, longest)).astype(np.int32))
        given.append(
            [
                forest.Continuation(
                    next(places),
                    prompt,
                    rng.integers(0, VOCAB, rng.integers(1, longest)).astype(np.int32),
                )
                for _ in range(rng.integers(1, 10))
            ]
        )
    return prompts, given


def grow_all(prompts, given, at_once=64):
    """The trees of all prompts."""
    pairs = zip(prompts, given, strict=True)
    return [tree for pair in pairs for tree in forest.grow(*pair, forest.MOST_ROWS, at_once)]


@settings(max_examples=20)
@drawn(
    seed=st.integers(0, 999),
    count=st.integers(1, 40),
    longest=st.sampled_from([2, 20, 120, 400]),
    at_once=st.sampled_from([1, 3, 64, 1000]),
)
def test_trees_hold_every_continuation_once_and_fill_calls_without_exceeding_them(
    seed, count, longest, at_once
):
    prompts, given = random_given(np.random.default_rng(seed), count, longest)
    trees = grow_all(prompts, given, at_once)
    calls = list(forest.plant(trees, at_once))
    planted = [tree for _, bins in calls for own in bins for tree in own]
    found = sorted((one.place, one.prompt) for tree in planted for one in tree.branches)
    assert found == [(one.place, one.prompt) for own in given for one in own]
    assert all(tree.prompt is prompts[one.prompt] for tree in planted for one in tree.branches)
    for shape, bins in calls:
        assert len(bins) <= shape.num_bins
        assert all(sum(tree.rows for tree in own) <= shape.bin_rows for own in bins)
        assert sum(len(tree.branches) for own in bins for tree in own) <= at_once
        laid = forest.lay_out(shape, bins)
        assert laid.counts.sum() == sum(tree.rows for own in bins for tree in own)
        assert laid.num_targets <= len(laid.targets)
    assert len({shape for shape, _ in calls}) <= 4


def test_short_trees_leave_few_rows_empty():
    rng = np.random.default_rng(0)
    prompts, given = random_given(rng, 200, 40)
    trees = grow_all(prompts, given)
    calls = list(forest.plant(trees, 64))
    rows = sum(shape.num_bins * shape.bin_rows for shape, _ in calls)
    assert rows < 1.1 * sum(tree.rows for tree in trees)
    # Each prompt is fed once, unless its continuations fill a call by themselves.
    assert len(trees) < 1.05 * len(prompts)


def test_a_row_of_a_forest_sees_its_prompt_and_its_own_continuation():
    rng = np.random.default_rng(0)
    prompts, given = random_given(rng, 12, 30)
    trees = grow_all(prompts, given)
    for shape, bins in forest.plant(trees, 64):
        laid, row, target = forest.lay_out(shape, bins), 0, 0
        for own in bins:
            first = row
            for tree in own:
                stem = list(range(row, row + len(tree.prompt)))
                paths = [stem[: place + 1] for place in range(len(stem))]
                row += len(stem)
                for one in tree.branches:
                    branch = list(range(row, row + len(one.tokens) - 1))
                    paths += [stem + branch[: place + 1] for place in range(len(branch))]
                    row += len(branch)
                    assert laid.sources[target:][: len(one.tokens)].tolist() == stem[-1:] + branch
                    np.testing.assert_array_equal(
                        laid.targets[target:][: len(one.tokens)], one.tokens
                    )
                    np.testing.assert_array_equal(
                        laid.tokens[stem + branch], [*tree.prompt, *one.tokens[:-1]]
                    )
                    target += len(one.tokens)
                for path in paths:
                    last, place = path[-1], np.arange(row) - first
                    sees = (laid.roots[last] <= place) & (place < laid.stems[last])
                    sees |= (laid.starts[last] <= place) & (place <= last - first)
                    np.testing.assert_array_equal(np.flatnonzero(sees), path)
        assert laid.num_targets == target
