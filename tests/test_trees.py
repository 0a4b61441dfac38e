"""Trees of draft tokens: their structure against loops, and output against plain decoding."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_controls import MIXED, NoTokenTwice
from test_generation import stepped
from toy import (
    VOCAB,
    ScriptedTrees,
    compiled_step,
    ragged_prompts,
    script_of,
    shallow_model,
    tiny_model,
)

import emsjax
from emsjax import vanilla
from emsjax.decode.base import StepView
from emsjax.drafters import suffix
from emsjax.policies import goodput
from emsjax.policies.goodput import Goodput
from emsjax.testing import assert_lossless
from emsjax.trees import Tree, merged, most_likely, reordered, usable_nodes

K, NEW = 6, 20
SAMPLED = {"sampling": emsjax.Sampling(0.8, top_k=9), "key": jax.random.key(5)}


class Verdict(NamedTuple):
    tokens: jax.Array
    logprobs: jax.Array


tree_of, paths_of, product_of = map(jax.jit, (Tree.of, Tree.paths, Tree.product))
merged_rows = jax.jit(merged, static_argnums=(2, 3))


@jax.jit
def accepted_path(draft, verdict):
    return Tree.of(draft.parents).accepted(draft, verdict)


def random_parents(rng, batch, k):
    return np.array([[rng.integers(-1, j) if j else -1 for j in range(k)] for _ in range(batch)])


def path_to(parents, j):
    """The draft tokens from the root to token j, which is the last."""
    return [] if j < 0 else [*path_to(parents, parents[j]), j]


@pytest.mark.parametrize("k", [1, 2, 5, 9, 33])
def test_the_structure_of_a_tree_is_that_of_its_paths(k):
    rng = np.random.default_rng(k)
    parents = random_parents(rng, 4, k)
    tree = tree_of(jnp.asarray(parents, jnp.int32))
    tokens, factors = rng.integers(0, 99, (4, k)), rng.uniform(0.5, 1, (4, k)).astype(np.float32)
    paths = paths_of(tree, jnp.asarray(tokens, jnp.int32))
    products = product_of(tree, jnp.asarray(factors))
    for s in range(4):
        assert tree.parents[s].tolist() == [p + 1 for p in parents[s]]
        for j in range(-1, k):
            path = path_to(parents[s], j)
            assert tree.depths[s, j + 1] == len(path)
            seen = np.flatnonzero(tree.ancestors[s, j + 1]).tolist()
            assert seen == [0, *(i + 1 for i in path)]
            assert paths[s, j + 1, : len(path)].tolist() == tokens[s, path].tolist()
            if j >= 0:
                np.testing.assert_allclose(products[s, j], np.prod(factors[s, path]), rtol=1e-6)
                assert tree.places[s, j] == np.sum(parents[s, :j] == parents[s, j])


@pytest.mark.parametrize("seed", range(4))
def test_the_accepted_path_is_the_longest_that_the_target_emits(seed):
    rng = np.random.default_rng(seed)
    batch, k = 16, 7
    parents, tokens = random_parents(rng, batch, k), rng.integers(0, 3, (batch, k))
    emitted, counts = rng.integers(0, 3, (batch, k + 1)), rng.integers(0, k + 1, batch)
    logprobs = np.where(rng.random((batch, k + 1)) < 0.1, np.nan, -1).astype(np.float32)
    as_ints = lambda x: jnp.asarray(x, jnp.int32)
    draft = emsjax.Draft(as_ints(tokens), as_ints(counts), parents=as_ints(parents))
    verdict = Verdict(as_ints(emitted), jnp.asarray(logprobs))
    found, num_accepted, ranks = accepted_path(draft, verdict)
    for s in range(batch):
        path, row = [0], 0
        while not np.isnan(logprobs[s, row]):
            right = lambda j, row=row, s=s: (
                parents[s, j] + 1 == row and tokens[s, j] == emitted[s, row]
            )
            following = [j for j in range(counts[s]) if right(j)]
            if not len(following):
                break
            path.append(row := following[0] + 1)
        assert num_accepted[s] == len(path) - 1
        assert ranks[s].tolist() == [path.index(i) if i in path else -1 for i in range(k + 1)]
        np.testing.assert_array_equal(found.tokens[s, : len(path)], emitted[s, path])
        np.testing.assert_array_equal(found.logprobs[s, : len(path)], logprobs[s, path])


def test_chosen_nodes_keep_their_parents():
    rng = np.random.default_rng(1)
    parents, tokens = random_parents(rng, 8, 9), np.tile(np.arange(9), (8, 1))
    scores = np.zeros((8, 9))
    for s in range(8):
        for j in range(9):
            above = 1 if parents[s, j] < 0 else scores[s, parents[s, j]]
            scores[s, j] = above * rng.choice([0, 0.5, 0.9, 1])
    as_ints = lambda x: jnp.asarray(x, jnp.int32)
    kept_first = jnp.argsort(jnp.asarray(scores <= 0.4), axis=1, stable=True)
    kept = reordered(kept_first, as_ints(tokens), as_ints(parents))
    likely = most_likely(jnp.asarray(scores), as_ints(tokens), as_ints(parents), 5)
    for s in range(8):
        expected = [j for j in range(9) if scores[s, j] > 0.4]
        best = sorted((j for j in range(9) if scores[s, j] > 0), key=lambda j: -scores[s, j])[:5]
        assert likely[2][s] == len(best)
        for nodes, (found, above, *_) in ((expected, kept), (best, likely)):
            assert found[s, : len(nodes)].tolist() == nodes
            mapped = [nodes.index(p) if (p := parents[s, j]) >= 0 else -1 for j in nodes]
            assert above[s, : len(nodes)].tolist() == mapped


def test_a_tree_is_cut_before_what_cannot_be_verified():
    tokens = jnp.array([[3, 4, 5], [3, 9, 5], [3, 4, 5], [3, 4, 5], [3, 4, 5]])
    parents = jnp.array([[-1, 0, 0], [-1, 0, 0], [-1, 0, 2], [-1, -2, 0], [-1, 0, 0]])
    draft = emsjax.Draft(tokens, jnp.array([9, 3, 3, 3, 3]), parents=parents)
    usable = usable_nodes(draft, jnp.array([3, 3, 3, 3, 1]), vocab_size=9)
    assert usable.tolist() == [3, 1, 2, 1, 1]


def scripted(model, prompts, **options) -> ScriptedTrees:
    plain = emsjax.generate(model, prompts, **{"max_new_tokens": NEW} | options)
    return ScriptedTrees(script_of(prompts, plain), K)


@pytest.mark.parametrize("sampled", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("attention", [None, "reference"])
def test_tokens_equal_plain_decoding(sampled, attention):
    model, prompts = tiny_model(), ragged_prompts([17, 1, 30, 6])
    drafter = scripted(model, prompts, **sampled)
    options = {"max_new_tokens": NEW, **sampled}
    out = assert_lossless(model, drafter, prompts, attention, **options).output
    assert out.stats.num_accepted.sum() > 30
    assert out.stats.num_accepted.sum() < out.stats.num_drafted.sum()


@pytest.mark.parametrize("policy", [None, emsjax.FixedLength(K)], ids=["none", "fixed"])
def test_the_longest_right_path_of_a_tree_is_accepted(policy):
    model, prompts = tiny_model(), ragged_prompts([17, 1, 30, 6])
    drafter = scripted(model, prompts)
    state = emsjax.init_state(model, drafter, prompts, max_new_tokens=NEW, draft_length=policy)
    script, branched, propose = np.asarray(drafter.script), 0, jax.jit(ScriptedTrees.propose)
    while bool(state.active.any()):
        lengths, active = np.asarray(state.lengths), np.asarray(state.active)
        limits = np.minimum(np.asarray(state.length_limits) - lengths - 1, K)
        proposed, _ = propose(drafter, (), state.tokens, state.lengths, limits, None, None)
        state, info = compiled_step(model, drafter, state, policy)
        for s in np.flatnonzero(active):
            parents = np.asarray(proposed.parents[s])
            count = min(int(proposed.counts[s]), limits[s])
            assert info.num_drafted[s] == count
            path = [-1]
            while True:
                right = np.asarray(proposed.tokens[s]) == script[s, lengths[s] + len(path) - 1]
                following = np.flatnonzero(right[:count] & (parents[:count] == path[-1]))
                if not len(following):
                    break
                path.append(following[0])
            assert info.num_accepted[s] == len(path) - 1
            branched += path != list(range(-1, len(path) - 1))
    assert branched >= 3  # paths that are not the first tokens of the draft


def test_the_cache_after_branching_paths_equals_a_fresh_prefill():
    model, prompts = tiny_model(), ragged_prompts([17, 1, 30, 6])
    drafter = scripted(model, prompts)
    state = emsjax.init_state(model, drafter, prompts, max_new_tokens=NEW)
    state = stepped(model, drafter, state, 5, poison=True)
    assert state.counters.num_accepted.sum() > 12
    lengths = np.asarray(state.lengths)
    grown = [row[:length] for row, length in zip(np.asarray(state.tokens), lengths, strict=True)]
    fresh = emsjax.init_state(model, None, grown, max_new_tokens=1)
    layers = (jax.tree.leaves(one.cache.layers) for one in (state, fresh))
    for old, new in zip(*layers, strict=True):
        for i, length in enumerate(lengths):
            np.testing.assert_allclose(old[i, : length - 1], new[i, : length - 1], atol=5e-5)


def test_settings_and_processors_see_the_path_to_each_row():
    model, prompts = shallow_model(), ragged_prompts([5, 1, 9, 20])
    options = {"sampling": emsjax.Sampling(**MIXED), "processors": [NoTokenTwice(4)]}
    drafter = scripted(model, prompts, **options)
    options |= {"max_new_tokens": NEW, "top_logprobs": 2}
    out = assert_lossless(model, drafter, prompts, **options).output
    assert out.stats.num_accepted.sum() > 30
    plain = emsjax.generate(model, prompts, **options)
    np.testing.assert_array_equal(out.top_logprobs.tokens, plain.top_logprobs.tokens)
    np.testing.assert_allclose(out.logprobs, plain.logprobs, atol=1e-4)


def test_sequences_end_where_plain_decoding_ends():
    model, prompts = shallow_model(), ragged_prompts([5, 1, 9, 20])
    plain = emsjax.generate(model, prompts, max_new_tokens=NEW)
    for ends in (
        {"eos_token_ids": plain.tokens[:2, 7].tolist()},
        {"stop": [plain.tokens[2, 5:8].tolist(), plain.tokens[3, 9:10].tolist()]},
    ):
        drafter = scripted(model, prompts)
        out = assert_lossless(model, drafter, prompts, max_new_tokens=NEW, **ends).output
        assert len(set(out.lengths.tolist())) > 1


@pytest.mark.parametrize("unpad_inputs", [False, True])
@pytest.mark.parametrize("unpad_kv_cache", [False, True])
def test_padded_methods_verify_trees(unpad_inputs, unpad_kv_cache):
    model, prompts = shallow_model(), ragged_prompts([17, 1, 30, 6])
    method = {"unpad_inputs": unpad_inputs, "unpad_kv_cache": unpad_kv_cache}
    drafter, plain = scripted(model, prompts), emsjax.generate(model, prompts, max_new_tokens=NEW)
    out = vanilla.generate(model, prompts, drafter, max_new_tokens=NEW, **method)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert out.stats.num_accepted.sum() > 30


@pytest.mark.parametrize("free", [False, True])
def test_a_length_limits_the_depth_of_a_tree(free):
    model, prompts = shallow_model(), ragged_prompts([17, 1, 30, 6])
    drafter = dataclasses.replace(scripted(model, prompts), free=free)
    options = {"max_new_tokens": NEW, "draft_length": emsjax.FixedLength(2)}
    out = assert_lossless(model, drafter, prompts, **options).output
    histogram = out.stats.accepted_histogram.sum(axis=0)
    assert histogram[2] > 3
    assert not histogram[3:].any()
    assert np.any(out.stats.num_drafted > 2 * out.stats.num_steps) or not free


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Faulty(ScriptedTrees):
    fault: str = dataclasses.field(default="", metadata={"static": True})

    def propose(self, *arguments):
        draft, state = super().propose(*arguments)
        wide = jnp.zeros((4, K + 1), jnp.int32)
        value = {"parents": wide, "probs": jnp.full((4, K, VOCAB), 1 / VOCAB)}[self.fault]
        object.__setattr__(draft, self.fault, value)  # past the tests' checks of types
        return draft, state


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("parents", r"Draft\.parents must be None, or integers \[b, k\] = \(4, 6\)"),
        ("probs", "a Draft with parents cannot have probs"),
    ],
)
def test_trees_that_are_wrong_are_errors(fault, message):
    model, prompts = shallow_model(), ragged_prompts([17, 1, 30, 6])
    drafter = Faulty(scripted(model, prompts).script, K, fault=fault)
    with pytest.raises(ValueError, match=message):
        emsjax.generate(model, prompts, drafter, max_new_tokens=NEW)


def test_invariant_numerics_refuse_trees():
    model, prompts = shallow_model(), ragged_prompts([17, 1, 30, 6])
    options = {"max_new_tokens": 2, "numerics": "invariant"}
    with pytest.raises(ValueError, match="verifies chains only"):
        emsjax.generate(model, prompts, scripted(model, prompts), **options)


def trie_of(rows, branches, k):
    """The paths of the most frequent beginnings of `rows`, by the rule of `merged`."""
    votes, first = {}, {}
    for index, row in enumerate(rows):
        for end in range(1, len(row) + 1):
            votes[row[:end]] = votes.get(row[:end], 0) + 1
            first.setdefault(row[:end], index)
    rank = lambda path: (-votes[path], first[path])
    kept = []
    for path in sorted(votes, key=len):
        same = [other for other in votes if other[:-1] == path[:-1] and len(other) == len(path)]
        if not (path[:-1] and path[:-1] not in kept):
            kept += [path] if sorted(same, key=rank).index(path) < branches else []
    return sorted(kept, key=lambda path: (-votes[path], len(path), first[path]))[:k], votes


@pytest.mark.parametrize("branches", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_continuations_that_begin_alike_are_merged(seed, branches):
    rng = np.random.default_rng(seed)
    b, o, n, k = 12, 5, 4, 7
    tokens, counts = rng.integers(0, 3, (b, o, n)), rng.integers(0, n + 1, (b, o))
    as_ints = lambda x: jnp.asarray(x, jnp.int32)
    found = merged_rows(as_ints(tokens), as_ints(counts), branches, k)
    for s in range(b):
        rows = [tuple(row[:count]) for row, count in zip(tokens[s], counts[s], strict=True)]
        expected, votes = trie_of(rows, branches, k)
        drafted, parents, number, on_rows = (np.asarray(x[s]) for x in found)
        paths = [tuple(drafted[path_to(parents, j)].tolist()) for j in range(number)]
        assert paths == [tuple(map(int, path)) for path in expected]
        assert on_rows[:number].tolist() == [votes[path] for path in expected]
    if branches == 1:
        full = as_ints(np.full((b, o), n))
        drafted, parents, number, _ = merged_rows(as_ints(tokens), full, 1, n)
        np.testing.assert_array_equal(drafted, suffix.vote(as_ints(tokens), full > 0)[0])
        np.testing.assert_array_equal(parents, np.tile(np.arange(-1, n - 1), (b, 1)))
        assert number.tolist() == [n] * b


def another_model():
    """A model whose tokens are often, but not always, those of `tiny_model`."""
    model = jax.tree.map(jnp.copy, tiny_model())
    kernel = model.layers[0].out_proj.kernel
    kernel[...] = kernel[...] * 0.7
    return model


DRAFTERS = {
    "lookup": lambda: emsjax.PromptLookup(1, 7, search_generated=True, branches=3),
    "suffix": lambda: emsjax.SuffixDrafter(8, branches=2),
    "model": lambda: emsjax.DraftModel(another_model(), 6, branches=2),
    "self": lambda: emsjax.SelfDraft(another_model(), 6, branches=3),
}
POLICIES = {
    "all": lambda: None,
    "fixed": lambda: emsjax.FixedLength(2),
    "bass": emsjax.BassHeuristic,
    "goodput": lambda: Goodput(emsjax.StepCosts.of({1: 1.0, 64: 2.0}, 0.0, 0.1)),
}
LENGTHS = [9, 1, 20, 6, 3, 14]
SEVERAL = {**SAMPLED, "num_sequences": 2}


@pytest.mark.parametrize(
    ("name", "policy"),
    [(name, "all") for name in DRAFTERS]
    + [("lookup", "fixed"), ("suffix", "bass"), ("model", "goodput")],
)
def test_every_drafter_of_trees_is_lossless(name, policy):
    """All at once, and in refilled slots: those hold several sampled sequences of each prompt where
    no policy cuts a tree, and greedy ones otherwise.
    """
    # With one layer no keys depend on what other rows see, nor on a policy.
    model, run = tiny_model() if policy == "all" else shallow_model(), {"max_new_tokens": NEW}
    refilled = SEVERAL | {"batch_size": 4} if policy == "all" else {"batch_size": 2}
    drafter, run["draft_length"] = DRAFTERS[name](), POLICIES[policy]()
    for more in ({}, refilled):
        out = emsjax.generate(model, repetitive(), drafter, **run, **more)
        expected = plain(model, several="num_sequences" in more)
        np.testing.assert_array_equal(out.tokens, expected.tokens)
        np.testing.assert_array_equal(out.lengths, expected.lengths)
        assert out.stats.num_accepted.sum() > 0


def repetitive():
    return [np.tile(prompt[:4], 5)[: len(prompt)] for prompt in ragged_prompts(LENGTHS)]


@functools.cache
def plain(model, several: bool):
    more = SEVERAL if several else {}
    return emsjax.generate(model, repetitive(), max_new_tokens=NEW, **more)


def test_a_draft_model_proposes_what_it_would_after_a_fresh_prefill():
    """So that no keys and values of rejected candidates remain in its cache."""
    model, prompts = tiny_model(), ragged_prompts(LENGTHS[:4])
    drafter, beside = DRAFTERS["model"](), 0
    state = emsjax.init_state(model, drafter, prompts, max_new_tokens=NEW)
    propose = jax.jit(emsjax.DraftModel.propose)
    while bool(state.active.all()):
        limits = jnp.minimum(state.length_limits - state.lengths - 1, 3)
        arguments = (state.tokens, state.lengths, limits, None, None)
        kept, _ = propose(drafter, state.drafter_state, *arguments)
        fresh = drafter.init(state.tokens, state.lengths, state.tokens.shape[1])
        expected, _ = propose(drafter, fresh, *arguments)
        for s, count in enumerate(expected.counts):
            for name in ("tokens", "parents"):
                mine, theirs = (np.asarray(getattr(x, name)[s, :count]) for x in (kept, expected))
                np.testing.assert_array_equal(mine, theirs)
        state, info = compiled_step(model, drafter, state)
        # The candidate beside the likeliest token was accepted: its keys and values are missing.
        chain = np.asarray(expected.tokens[:, 0])
        beside += int(np.sum((np.asarray(info.num_accepted) > 0) & (info.tokens[:, 0] != chain)))
    assert beside > 0


def test_candidates_raise_acceptance_at_the_same_depth():
    model, prompts = tiny_model(), ragged_prompts(LENGTHS)
    chain = emsjax.generate(
        model, prompts, emsjax.DraftModel(another_model(), 3), max_new_tokens=NEW
    )
    drafter = emsjax.DraftModel(another_model(), 6, branches=2)
    tree = emsjax.generate(model, prompts, drafter, max_new_tokens=NEW)
    lengths = [out.stats.mean_acceptance_length for out in (chain, tree)]
    assert lengths[1] > lengths[0] + 0.1


def test_goodput_chooses_the_nodes_with_the_highest_value(monkeypatch):
    """Compared with all sets of nodes that hold their parents, in steps of several row counts."""
    rng, sizes = np.random.default_rng(3), np.array([2, 4, 6, 10])
    monkeypatch.setattr(goodput, "row_buckets", lambda batch, k1: tuple(sizes.tolist()))

    @jax.jit
    def choose(policy, state, active, lengths, counts, tree):
        return policy.nodes(state, StepView(active, lengths, counts, True, tree))

    for seed in range(4):
        parents = random_parents(rng, 2, 4)
        tree = tree_of(jnp.asarray(parents, jnp.int32))
        costs = emsjax.StepCosts.of({2: 1.0, 4: 1.1, 10: float(rng.uniform(1.2, 3))}, 0.0, 0.0)
        policy, active = Goodput(costs, least_gain=0.0), jnp.array([True, True])
        state = policy.init(2, 4)
        trials = jnp.asarray(rng.integers(0, 20, (2, 4)), jnp.float32)
        state = state._replace(trials=trials, hits=trials * float(rng.uniform(0.2, 1)))
        counts = jnp.array([4, 3])
        chosen = np.asarray(choose(policy, state, active, jnp.array([5, 9]), counts, tree))
        survival = np.asarray(state.survival(policy.prior_rate, policy.prior_weight, tree))
        step_ms = np.asarray(costs.step_ms(jnp.float32(sizes), jnp.float32(0)))

        def value(taken, survival=survival, step_ms=step_ms):
            return (2 + survival[taken].sum()) / step_ms[np.searchsorted(sizes, 2 + taken.sum())]

        best = 0
        for bits in itertools.product([False, True], repeat=8):
            taken = np.array(bits).reshape(2, 4)
            whole = all(parents[s, j] < 0 or taken[s, parents[s, j]] for s, j in np.argwhere(taken))
            if whole and not taken[1, 3]:
                best = max(best, value(taken))
        assert not chosen[1, 3], seed
        assert value(chosen) == pytest.approx(best, rel=1e-5)


def test_a_policy_expects_no_deeper_draft_than_a_tree_can_be():
    """Drafting is priced by depth: six tokens of two branches take three calls of the model."""
    asked = []

    @jax.tree_util.register_static
    class Told(emsjax.DraftLength):
        def lengths(self, state, view):
            jax.debug.callback(lambda counts: asked.append(counts.tolist()), view.available)
            return jnp.zeros_like(view.available)

        def nodes(self, state, view):
            return jnp.zeros(view.tree.parents.shape, bool)

    model, prompts = shallow_model(), ragged_prompts([17, 1])
    drafter = emsjax.DraftModel(shallow_model(), 6, branches=2)
    state = emsjax.init_state(model, drafter, prompts, draft_length=Told(), max_new_tokens=9)
    compiled_step(model, drafter, state, Told())
    jax.effects_barrier()
    assert asked == [[3, 3]]
