"""Replayed drafts are accepted as drawn, and the work of their source is done."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_scripted import LENGTHS, NEW_TOKENS, assert_outputs_text, generate, model_of_text, text_of
from toy import POSITIONS, VOCAB, ragged_prompts, shallow_model

import emsjax
from emsjax.benchmarks.acceptance import (
    PROFILES,
    CandidateAcceptance,
    CopyAcceptance,
    Mixed,
    TokenAcceptance,
)
from emsjax.benchmarks.scripted import replay
from emsjax.decode.step import decode_loop
from emsjax.drafters.replay import Replay
from emsjax.engine.adapt import make_run

BATCH = len(LENGTHS)


def drafter_of(profile, **options) -> Replay:
    return replay(profile, text_of(), BATCH, **({"vocab_size": VOCAB, "seed": 5} | options))


def simulate(drafter, sample) -> dict:
    """The sample's counts as they follow from the drawn numbers alone."""
    counts, right = np.asarray(drafter.counts)[sample], np.asarray(drafter.right)[sample]
    position, end = LENGTHS[sample], LENGTHS[sample] + NEW_TOKENS[sample]
    found = {"num_steps": 0, "num_drafted": 0, "num_accepted": 0}
    histogram = np.zeros(drafter.max_draft_tokens + 1, int)
    while position < end:
        drafted = min(counts[position], end - position - 1)
        accepted = min(right[position], drafted)
        found["num_steps"] += 1
        found["num_drafted"] += drafted
        found["num_accepted"] += accepted
        histogram[accepted] += 1
        position += accepted + 1
    return found | {"accepted_histogram": histogram}


def assert_counts_as_simulated(stats, drafter):
    expected = [simulate(drafter, sample) for sample in range(BATCH)]
    for name in expected[0]:
        counted = getattr(stats, name)
        np.testing.assert_array_equal(counted, [one[name] for one in expected], err_msg=name)


SOURCES = {
    "none": lambda: None,
    "prompt lookup": lambda: emsjax.PromptLookup(match_length=1),
    "draft model": lambda: emsjax.DraftModel(shallow_model()),
    "self": lambda: emsjax.SelfDraft(model_of_text().quantize("int8")),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_replayed_drafts_are_accepted_as_drawn(source):
    drafter = drafter_of(Mixed(*PROFILES.values()), source=source())
    out = generate(drafter)
    assert_outputs_text(out)
    assert_counts_as_simulated(out.stats, drafter)
    assert out.stats.accepted_histogram[:, 1:].any()
    assert out.stats.accepted_histogram[:, 0].any()


def test_a_policys_limit_cuts_replayed_drafts():
    out = generate(drafter_of(CopyAcceptance(miss=0, whole=1)), draft_length=emsjax.FixedLength(2))
    assert_outputs_text(out)
    np.testing.assert_array_equal(out.stats.num_steps, np.ceil(np.divide(NEW_TOKENS, 3)))


def test_other_profiles_seeds_and_texts_are_not_compiled_again():
    before = decode_loop._cache_size()
    for profile, seed in [("llma", 0), ("llma", 1), ("draft-model", 0)]:
        drafter = drafter_of(PROFILES[profile], seed=seed, max_draft_tokens=7)
        out = generate(drafter)
        assert_outputs_text(out)
        assert_counts_as_simulated(out.stats, drafter)
    generate(dataclasses.replace(drafter, text=drafter.text[:, ::-1]))
    assert decode_loop._cache_size() - before <= 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CountingSource:
    """A source that drafts on the host. XLA removes the call if its result is not used."""

    calls: list = dataclasses.field(metadata={"static": True})
    max_draft_tokens: int = dataclasses.field(default=7, metadata={"static": True})

    def init(self, prompts, prompt_lengths, max_len):
        return jnp.zeros((), jnp.int32)

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        def on_host(step):
            self.calls.append(step)
            return np.zeros((BATCH, 9), np.int32)

        shape = jax.ShapeDtypeStruct((BATCH, 9), jnp.int32)
        return emsjax.Draft(jax.pure_callback(on_host, shape, state), draft_lengths), state

    def commit(self, state, lengths):
        return state + 1


class Calls(list):
    """A list that is hashable, as a static field must be."""

    __hash__ = object.__hash__


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WatchingSource(CountingSource):
    """A source that counts how often it observes the target."""

    taps = (1,)

    def observe(self, state, rows, taps):
        jax.debug.callback(lambda: self.calls.append(0))
        return state

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        return emsjax.Draft(tokens[:, :7], draft_lengths), state


def test_the_source_drafts_in_every_step():
    calls = Calls()
    out = generate(drafter_of(PROFILES["llma"], source=CountingSource(calls)))
    assert_outputs_text(out)
    assert [int(step) for step in calls] == list(range(out.stats.model_calls))


def compiled_loop(source) -> str:
    drafter = drafter_of(PROFILES["draft-model"], source=source)
    model, prompts = model_of_text(), ragged_prompts(LENGTHS)
    state = emsjax.init_state(model, drafter, prompts, max_new_tokens=9)
    # Lowering makes pytrees without arrays, which the annotations reject in tests.
    leaves, tree = jax.tree.flatten((make_run(model, drafter), state))
    run = jax.jit(lambda leaves: decode_loop(*tree.unflatten(leaves), 3))
    return run.lower(leaves).compile().as_text()


def test_the_compiled_loop_contains_the_sources_work():
    # No other operation has these shapes: a search of 128 positions and logits of 4 rows.
    search, logits = "pred[4,128]", "f32[4,61]"
    of_lookup = compiled_loop(emsjax.PromptLookup(references=[text_of(length=100)] * BATCH))
    assert search in of_lookup
    assert logits not in of_lookup
    of_model = compiled_loop(SOURCES["draft model"]())
    assert logits in of_model
    assert search not in of_model


def test_cost_compatibility_and_state_size_are_those_of_the_source():
    lookup, small = SOURCES["prompt lookup"](), SOURCES["draft model"]()
    bare, copied, drafted = (drafter_of(PROFILES["llma"], source=x) for x in (None, lookup, small))
    assert bare.free
    assert not drafted.free
    assert copied.free
    assert bare.state_bytes(64) == copied.state_bytes(64) == 0
    # The source has no limit of its own and takes the replay's.
    assert drafted.source.max_draft_tokens == 7
    assert drafted.state_bytes(64) == drafted.source.state_bytes(64) > 0
    other = emsjax.DraftModel(shallow_model(vocab_size=VOCAB + 1), 7)
    with pytest.raises(ValueError, match="vocabulary has 62 ids"):
        generate(drafter_of(PROFILES["llma"], source=other))


def test_a_source_observes_the_hidden_states_that_it_asks_for():
    out = generate(drafter_of(PROFILES["llma"], source=WatchingSource(seen := Calls())))
    jax.effects_barrier()
    assert_outputs_text(out)
    assert len(seen) == out.stats.model_calls + 1  # one chunk of prefill


def test_a_source_receives_the_references_of_its_prompts():
    references = [np.full(length, length) for length in (4, 5, 6)]
    drafter = drafter_of(PROFILES["llma"], source=emsjax.PromptLookup(references=references))
    served = drafter.for_prompts(np.array([2, 2, 1]), 3)
    np.testing.assert_array_equal(served.source.references[:, 0], [6, 6, 5])
    assert served.text is drafter.text
    bare = drafter_of(PROFILES["llma"])
    assert bare.for_prompts(np.array([0]), 1) is bare


def test_draws_differ_between_samples_positions_and_seeds():
    for profile in PROFILES.values():
        first, same, other = (drafter_of(profile, seed=seed).right for seed in (0, 0, 1))
        np.testing.assert_array_equal(first, same)
        assert (first != other).any()
        assert len(np.unique(first, axis=0)) == BATCH
        assert len(np.unique(first, axis=1).T) > BATCH


def test_longer_drafts_are_cut_to_the_limit():
    drafter = drafter_of(PROFILES["llma"], max_draft_tokens=3)
    assert drafter.max_draft_tokens == 3
    assert set(np.unique(drafter.counts)) == {0, 3}
    assert set(np.unique(drafter.right)) == {0, 1, 2, 3}


def test_proposals_at_every_position_of_user_texts():
    texts = np.stack([text_of(3, seed=seed) for seed in range(BATCH)])
    drafter = replay(PROFILES["llma"], texts, BATCH, vocab_size=3, seed=0)
    np.testing.assert_array_equal(drafter.text, texts)
    limits = np.array([7, 1, 0, 4])
    propose = jax.jit(drafter.propose)
    for length in range(1, POSITIONS + 9):
        draft, _ = propose((), None, jnp.full(BATCH, length), jnp.asarray(limits), None, None)
        at, after = min(length, POSITIONS), np.minimum(length + np.arange(7), POSITIONS)
        wrong = np.arange(7) == np.asarray(drafter.right)[:, [at]]
        expected = np.where(wrong, (texts[:, after] + 1) % 3, texts[:, after])
        np.testing.assert_array_equal(draft.tokens, expected)
        np.testing.assert_array_equal(draft.counts, np.minimum(drafter.counts[:, at], limits))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: drafter_of(TokenAcceptance(1, 0)), "max_draft_tokens must be at least 1, not 0"),
        (lambda: drafter_of(PROFILES["llma"], max_draft_tokens=0), "max_draft_tokens must be at"),
        (lambda: drafter_of(PROFILES["llma"], vocab_size=1), "vocab_size must be at least 2"),
        (lambda: drafter_of(PROFILES["llma"], vocab_size=9), r"text holds .* outside 0\.\.8"),
        (
            lambda: drafter_of(PROFILES["llma"], source=emsjax.PromptLookup(max_draft_tokens=6)),
            "the source drafts 6 tokens at most",
        ),
        (
            lambda: replay(PROFILES["llma"], [[1], [2]], 3, vocab_size=9, seed=0),
            "text must be one or 3, one per sample, not 2",
        ),
        (lambda: replay(PROFILES["llma"], [1], 0, vocab_size=9, seed=0), "batch must be at least"),
    ],
)
def test_invalid_arguments_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@jax.tree_util.register_static
class NothingDrafted:
    """A source with draft counts of zero and invalid token ids."""

    max_draft_tokens = 7
    free = True

    def init(self, prompts, prompt_lengths, max_len):
        return ()

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        none = jnp.zeros(BATCH, jnp.int32)
        return emsjax.Draft(jnp.full((BATCH, 7), -1, jnp.int32), none), state


def test_tokens_of_the_source_are_replaced():
    alone, over = (
        generate(drafter_of(PROFILES["llma"], source=source)) for source in (None, NothingDrafted())
    )
    assert_outputs_text(over)
    np.testing.assert_array_equal(alone.stats.num_steps, over.stats.num_steps)


def test_trees_are_accepted_where_a_candidate_is_right():
    drafter = drafter_of(CandidateAcceptance((0.5, 0.3, 0.1), 7))
    assert drafter.max_draft_tokens == 7
    out = generate(drafter)
    assert_outputs_text(out)
    right, branched = np.asarray(drafter.right), 0
    for sample in range(BATCH):
        position, end, steps, accepted = LENGTHS[sample], LENGTHS[sample] + NEW_TOKENS[sample], 0, 0
        while position < end:
            node, found, most = -1, 0, min(7, end - position - 1)
            while True:
                children = [i for i, p in enumerate(drafter.parents[:most]) if p == node]
                if right[sample, position + found] >= len(children):
                    break
                node, found = children[right[sample, position + found]], found + 1
                branched += node != found - 1
            position, steps, accepted = position + found + 1, steps + 1, accepted + found
        assert out.stats.num_steps[sample] == steps
        assert out.stats.num_accepted[sample] == accepted
    assert branched > 3


@pytest.mark.parametrize("rates", [(0.6, 0.2, 0.08), (0.9,), (0.4, 0.3)])
def test_the_tree_of_candidates_has_the_likeliest_paths(rates):
    def probability(parents, node):
        place = parents[:node].count(parents[node])
        return rates[place] * (probability(parents, parents[node]) if parents[node] >= 0 else 1)

    parents = CandidateAcceptance(rates, 9).parents(9)
    mine = [probability(parents, node) for node in range(9)]
    depths = [p for n in range(1, 10) for p in itertools.product(rates, repeat=n) if n < 7]
    best = sorted((np.prod(path) for path in depths), reverse=True)[:9]
    if len(rates) == 1:
        best = [rates[0] ** n for n in range(1, 10)]
    np.testing.assert_allclose(mine, best)
    assert np.isclose(mine, sorted(mine, reverse=True)).all()


@pytest.mark.parametrize("rates", [(0.2, 0.6), (0.9, 0.2), ()], ids=str)
def test_rates_of_candidates_are_checked(rates):
    with pytest.raises(ValueError, match="rates must"):
        CandidateAcceptance(rates, 4)
