"""Mixed drafters whose sources draft trees: the merged draft, what is known of it, and output."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_trees import SAMPLED, another_model, path_to, random_parents, repetitive
from toy import shallow_model

import emsjax
from emsjax.decode.base import Drafter
from emsjax.decode.row_counts import chunk_rows
from emsjax.drafters.choice import Offers, Records, hoped_tokens
from emsjax.drafters.draft_model import CATCH_UP_ROWS
from emsjax.drafters.offers import agreement, expected_offer, no_draft
from emsjax.drafters.prices import Prices, prices_of_step

NEW, BATCH, WIDTH, K = 16, 48, 40, 6
COSTS = emsjax.StepCosts.of({1: 1.0, 64: 2.0}, 0.0, 0.1)
MIXED = {
    "tree and model": lambda: (
        emsjax.SuffixDrafter(6, branches=2),
        emsjax.DraftModel(another_model(), 3),
    ),
    "tree and chain": lambda: (
        emsjax.PromptLookup(1, 7, search_generated=True, branches=3),
        emsjax.SuffixDrafter(4),
    ),
    "chain and tree of a model": lambda: (
        emsjax.SuffixDrafter(5),
        emsjax.DraftModel(another_model(), 6, branches=2),
    ),
}


@functools.cache
def plain(sampled):
    options = SAMPLED if sampled else {}
    return emsjax.generate(shallow_model(), repetitive(), max_new_tokens=NEW, **options)


@pytest.mark.parametrize(
    ("name", "sampled", "policy"),
    [
        ("tree and model", False, emsjax.FixedLength(3)),
        ("tree and chain", True, emsjax.Goodput(COSTS)),
        ("chain and tree of a model", True, None),
    ],
)
def test_tokens_are_those_of_plain_decoding(name, sampled, policy):
    """In refilled slots; with one layer no keys depend on what other rows see."""
    options = {"max_new_tokens": NEW, "draft_length": policy} | (SAMPLED if sampled else {})
    drafter = emsjax.Mixed(*MIXED[name](), draft_cost=0.01)
    found = emsjax.stream(shallow_model(), repetitive(), drafter, batch_size=4, **options)
    found = sorted(found, key=lambda completion: completion.prompt)
    expected = plain(sampled)
    for completion, own, length in zip(found, expected.tokens, expected.lengths, strict=True):
        assert completion.tokens.tolist() == own[:length].tolist()
    assert sum(completion.num_accepted for completion in found) > 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Given(Drafter):
    """Drafts the first tokens of these trees."""

    draft: emsjax.Draft
    max_draft_tokens: int = dataclasses.field(default=K, metadata={"static": True})
    free = True

    def init(self, prompts, prompt_lengths, max_len):
        return ()

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        counts = jnp.minimum(self.draft.counts, draft_lengths)
        return dataclasses.replace(self.draft, counts=counts), state


def texts(seed):
    """Random texts of three tokens, how much of each is known, and trees of which many tokens are
    right."""
    rng = np.random.default_rng(seed)
    tokens, lengths = rng.integers(0, 3, (BATCH, WIDTH)), rng.integers(8, 28, BATCH)
    parents, drafted = random_parents(rng, BATCH, K), rng.integers(0, 3, (BATCH, K))
    for s, j in np.argwhere(rng.random((BATCH, K)) < 0.5):
        drafted[s, j] = tokens[s, lengths[s] + len(path_to(parents[s], j)) - 1]
    as_ints = lambda x: jnp.asarray(x, jnp.int32)
    counts = as_ints(rng.integers(0, K + 1, BATCH))
    draft = emsjax.Draft(as_ints(drafted), counts, parents=as_ints(parents))
    return rng, as_ints(tokens), as_ints(lengths), Given(draft)


@functools.partial(jax.jit, static_argnums=0)
def proposed(method, drafter, state, tokens, lengths, limits):
    return method(drafter, state, tokens, lengths, limits, None, None)


def begun(drafter, tokens, lengths):
    return drafter.init(tokens, lengths, tokens.shape[1])


def paths_of(draft, s):
    """The tokens on the path to each of a sample's draft tokens."""
    tokens, count = np.asarray(draft.tokens[s]), int(draft.counts[s])
    parents = np.arange(-1, len(tokens) - 1) if draft.parents is None else draft.parents[s]
    return [tuple(tokens[path_to(np.asarray(parents), j)].tolist()) for j in range(count)]


def test_each_sample_has_the_tree_of_its_source():
    """Of free sources, a limit is one of tokens; a chain's paths are its beginnings."""
    rng, tokens, lengths, trees = texts(0)
    suffix = emsjax.SuffixDrafter(3)
    drafter = emsjax.Mixed(trees, suffix)
    limits = jnp.asarray(rng.integers(1, K + 1, BATCH), jnp.int32)
    state = begun(drafter, tokens, lengths)
    draft, state = proposed(emsjax.Mixed.propose, drafter, state, tokens, lengths, limits)
    chain = proposed(type(suffix).propose, suffix, (), tokens, lengths, limits)[0]
    own = (trees.draft, chain)
    chosen, branched = np.asarray(state.choice.source), 0
    for s in range(BATCH):
        expected = [] if chosen[s] < 0 else paths_of(own[chosen[s]], s)[: int(limits[s])]
        assert paths_of(draft, s) == expected
        assert state.choice.depths[s] == max(map(len, expected), default=0)
        branched += len(expected) > max(map(len, expected), default=0)
    assert branched >= 3
    assert {0, 1} <= set(chosen.tolist())


def test_a_length_limits_the_depth_of_trees_beside_a_model():
    """The model drafts its own tree of that depth, whose steps are paid for, not its tokens."""
    rng, tokens, lengths, trees = texts(1)
    model = emsjax.DraftModel(another_model(), 6, branches=2)
    drafter = emsjax.Mixed(trees, model, draft_cost=1e-3)
    limits = jnp.asarray(rng.integers(1, K + 1, BATCH), jnp.int32)
    before = begun(drafter, tokens, lengths)
    draft, state = proposed(emsjax.Mixed.propose, drafter, before, tokens, lengths, limits)
    chosen = np.asarray(state.choice.source)
    asked = jnp.where(chosen == 1, jnp.minimum(limits, model.max_depth), 0)
    held = before.sources[1]
    by_model, _ = proposed(emsjax.DraftModel.propose, model, held, tokens, lengths, asked)
    sizes, cut = expected_offer(model, limits), 0
    for s in range(BATCH):
        expected = []
        if chosen[s] == 0:
            paths = paths_of(trees.draft, s)
            expected = [path for path in paths if len(path) <= limits[s]]
            cut += expected != paths[: len(expected)]
        elif chosen[s] == 1:
            expected = paths_of(by_model, s)
            assert len(expected) == sizes.rows[s] > sizes.usable[s]
        assert paths_of(draft, s) == expected
        assert state.choice.depths[s] == max(map(len, expected), default=0)
    assert cut > 0
    assert {0, 1} <= set(chosen.tolist())
    unread = np.where(chosen == 1, np.maximum(lengths - CATCH_UP_ROWS, 0), 0).sum()
    draft_steps = int(asked.max()) + unread / chunk_rows(*tokens.shape)
    np.testing.assert_allclose(state.choice.time, 1 + 1e-3 * draft_steps, rtol=1e-6)


def test_a_chunk_of_prompt_costs_a_draft_step_of_as_many_samples():
    costs = emsjax.StepCosts.of({1: 1.0, 64: 2.0}, draft_ms={1: 0.1, 1000: 100.0})
    tokens, lengths = jnp.zeros((2, WIDTH), jnp.int32), jnp.array([9, 9], jnp.int32)
    limits, drafted = jnp.array([4, 4]), jnp.array([[0, 4], [0, 4]], jnp.int32)
    prices = prices_of_step(costs, None, [True, False], tokens, lengths, limits, drafted)
    chunk = chunk_rows(*tokens.shape)
    assert prices.draft.tolist() == pytest.approx([0, float(costs.draft_step_ms(2))])
    of_row = float(costs.draft_step_ms(chunk)) / chunk
    assert prices.catch_up.tolist() == pytest.approx([0, of_row])
    assert costs.draft_step_ms(2 * chunk) != costs.draft_step_ms(chunk)


def test_rows_are_paid_by_token_and_draft_steps_by_depth():
    two = lambda *values: jnp.array([values], jnp.int32)
    records = Records.init(1, 2, 16)
    prices = lambda row: Prices(jnp.float32(1), jnp.float32(row), jnp.array([0, 0.1]), jnp.zeros(2))
    choose = lambda row, *sizes: records.choose(
        Offers(*sizes), jnp.array([True]), prices(row), (True, False), two(0, 0)
    )
    of_trees = two(3, 4), two(3, 4), two(3, 12)  # the second one is a tree
    choice = choose(0.01, *of_trees)
    assert choice.source == 1
    np.testing.assert_allclose(choice.time, 1 + 12 * 0.01 + 4 * 0.1, rtol=1e-6)
    assert choose(0.2, *of_trees).source == 0
    # Nothing is hoped from many tokens on short paths.
    assert choose(0, two(3, 2), two(3, 2), two(3, 16)).source == 0


def path_of(draft, s, text):
    """The tokens of a sample's tree that agree with a text, and those with what may follow."""
    tokens, parents = (np.asarray(x[s]) for x in (draft.tokens, draft.parents))
    count, path = int(draft.counts[s]), [-1]
    for token in text:
        right = (tokens[:count] == token) & (parents[:count] == path[-1])
        if not right.any():
            break
        path.append(int(np.argmax(right)))
    every = [[-1, *path_to(parents, j)] for j in range(-1, count)]
    return len(path) - 1, max(len(one) - 1 for one in every if path[-1] in one)


def test_an_unused_tree_counts_the_path_that_the_text_took():
    rng, tokens, lengths, trees = texts(2)
    drafter = emsjax.Mixed(emsjax.DraftModel(another_model(), 2), trees, draft_cost=0.0)
    limits = jnp.asarray(rng.integers(0, K + 1, BATCH), jnp.int32)
    state = begun(drafter, tokens, lengths)
    _, first = proposed(emsjax.Mixed.propose, drafter, state, tokens, lengths, limits)
    tree = first.unused[1]
    emitted = jnp.asarray(rng.integers(0, 6, BATCH), jnp.int32)
    arguments = (tokens, lengths + emitted, limits)
    _, second = proposed(emsjax.Mixed.propose, drafter, first, *arguments)
    learnt = lambda name: np.asarray(
        getattr(second.records, name)[:, 1] - getattr(first.records, name)[:, 1]
    )
    accepted, steps = learnt("accepted"), learnt("steps")
    offered, kinds = np.asarray(first.depths[:, 1]), set()
    for s in range(BATCH):
        at, number = int(lengths[s]), int(emitted[s])
        right, most = path_of(tree, s, np.asarray(tokens[s, at : at + number]))
        compared = most > 0 and number > 0
        is_unused = first.choice.source[s] != 1
        assert compared == (is_unused and min(number, int(limits[s]), offered[s]) > 0)
        assert steps[s].sum() == compared
        if compared:
            size = int(offered[s]).bit_length() - 1
            more = hoped_tokens(np.array([2**size]))[0] if right == number else 0
            assert steps[s, size] == 1
            np.testing.assert_allclose(accepted[s].sum(), min(right + more, most), rtol=1e-6)
            kinds.add((right == number, right > 0))
    assert {(True, True), (False, True), (False, False)} <= kinds


def test_a_draft_agrees_with_a_text_as_far_as_one_of_its_paths():
    rng, tokens, lengths, trees = texts(3)
    emitted = jnp.asarray(rng.integers(0, 6, BATCH), jnp.int32)
    chains = dataclasses.replace(trees.draft, parents=no_draft(BATCH, K).parents)
    found = [
        [np.asarray(x) for x in agreement(draft, is_tree, tokens, lengths, emitted)]
        for draft, is_tree in ((trees.draft, True), (chains, True), (chains, False))
    ]
    dead_ends = 0
    for s in range(BATCH):
        at = int(lengths[s])
        text = np.asarray(tokens[s, at : at + int(emitted[s])])
        right, most = path_of(trees.draft, s, text)
        assert (right, most) == (found[0][0][s], found[0][1][s])
        dead_ends += 0 < right == most < max(map(len, paths_of(trees.draft, s)))
        right, _ = path_of(chains, s, text)
        for number, longest in found[1:]:
            assert number[s] == right
            assert longest[s] == chains.counts[s]
    assert dead_ends > 0


def test_the_depth_of_the_deepest_source_is_the_limit():
    tree = emsjax.DraftModel(another_model(), 12, branches=3)
    for chain, expected in ((3, 4), (5, 5), (12, None), (20, None)):
        assert emsjax.Mixed(emsjax.SuffixDrafter(chain), tree).max_depth == expected
    chain = emsjax.DraftModel(another_model(), 3)
    assert emsjax.Mixed(emsjax.SuffixDrafter(5), chain).max_depth is None


def test_drawn_tokens_and_trees_in_one_step_are_an_error():
    drafter = emsjax.Mixed(*MIXED["tree and model"]())
    message = r"drafters\[1\] draws its tokens .* drafters\[0\] drafts trees"
    with pytest.raises(ValueError, match=message):
        emsjax.generate(shallow_model(), repetitive(), drafter, max_new_tokens=NEW, **SAMPLED)


def test_invariant_numerics_refuse_trees_of_a_source():
    drafter = emsjax.Mixed(*MIXED["tree and chain"]())
    options = {"max_new_tokens": 2, "numerics": "invariant"}
    with pytest.raises(ValueError, match="verifies chains only"):
        emsjax.generate(shallow_model(), repetitive(), drafter, **options)
