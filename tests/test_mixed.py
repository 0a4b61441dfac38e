"""Mixed drafters: output, which source each sample gets, and what a source is fed meanwhile."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toy import (
    CARELESS,
    NEARLY_GREEDY,
    VOCAB,
    compiled_step,
    ragged_prompts,
    script_of,
    shallow_model,
)

import emsjax
from emsjax.decode.base import Drafter
from emsjax.drafters.block_network import BlockConfig, BlockNetwork
from emsjax.drafters.choice import NONE, Offers, Records, hoped_tokens
from emsjax.drafters.eagle3_network import Eagle3Config, Eagle3Network
from emsjax.drafters.prices import Prices
from emsjax.sampling import Purpose, position_keys
from emsjax.testing import assert_lossless, assert_same_distribution

PROMPTS = ragged_prompts([5, 12, 2, 9])
NEW = 24


def tapped(**fields):
    return dataclasses.field(metadata={"static": True}, **fields)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scripted(Drafter):
    """Drafts script[s, position], right for the samples in `right` only.

    Its state is the number of tokens it was asked for, which `asked` gathers outside.
    """

    script: jax.Array  # [b, t]
    right: jax.Array  # [b]
    max_draft_tokens: int = tapped(default=3)
    free: bool = tapped(default=True)

    def init(self, prompts, prompt_lengths, max_len):
        return jnp.zeros(len(prompts), jnp.int32)

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        at = lengths[:, None] + jnp.arange(self.max_draft_tokens)
        found = jnp.take_along_axis(self.script, jnp.minimum(at, self.script.shape[1] - 1), axis=1)
        found = (found + jnp.where(self.right[:, None], 0, 1)) % VOCAB
        return emsjax.Draft(found, draft_lengths), state + draft_lengths


@functools.cache
def script(new=40):
    return script_of(PROMPTS, emsjax.generate(shallow_model(), PROMPTS, max_new_tokens=new))


def scripted(*right, **options):
    """A source that is right for these samples."""
    return Scripted(script(), jnp.array([i in right for i in range(len(PROMPTS))]), **options)


@functools.cache
def small_model():
    config = dataclasses.replace(shallow_model().config, hidden_size=16)
    return emsjax.OPT(config, rngs=nnx.Rngs(1), dtype=jnp.float32)


@functools.cache
def lookup_and_model(**options):
    lookup = emsjax.PromptLookup(1, 5, search_generated=True)
    return emsjax.Mixed(lookup, emsjax.DraftModel(small_model()), **options)


POLICIES = {
    "none": None,
    "fixed": emsjax.FixedLength(2),
    "bass": emsjax.BassHeuristic(),
    "goodput": emsjax.Goodput(emsjax.StepCosts.of({1: 1.0, 64: 2.0}, draft_ms=0.05)),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_greedy_tokens_are_those_of_plain_decoding(policy):
    found = assert_lossless(
        shallow_model(), lookup_and_model(), PROMPTS, draft_length=policy, max_new_tokens=NEW
    )
    assert found.output.stats.num_accepted.sum() > 0


def test_sequences_that_begin_later_are_lossless():
    found = assert_lossless(
        shallow_model(), lookup_and_model(), PROMPTS, max_new_tokens=NEW, batch_size=2
    )
    assert found.output.stats.num_accepted.sum() > 0


def test_a_slot_that_begins_a_sequence_forgets_the_last_one_in_all_sources():
    """The target drafts for itself: keys and values of another sequence would show."""
    drafter = emsjax.Mixed(emsjax.PromptLookup(9, 1), emsjax.DraftModel(shallow_model()))
    out = emsjax.generate(shallow_model(), PROMPTS, drafter, max_new_tokens=NEW, batch_size=2)
    assert out.stats.num_drafted.sum() > NEW
    assert out.stats.acceptance_rate == 1


@pytest.mark.parametrize("batch_size", [None, 4])
def test_several_sequences_of_a_prompt_are_lossless(batch_size):
    """One source forks its state, and the other has the default."""
    expected = emsjax.generate(shallow_model(), PROMPTS, max_new_tokens=NEW).tokens
    options = {"num_sequences": 2, "batch_size": batch_size, **NEARLY_GREEDY}
    drafter = lookup_and_model()
    out = emsjax.generate(shallow_model(), PROMPTS, drafter, max_new_tokens=NEW, **options)
    np.testing.assert_array_equal(out.tokens, np.repeat(expected, 2, axis=0))
    assert out.stats.num_accepted.sum() > 0


def test_sampled_tokens_are_those_of_plain_decoding_if_no_source_draws():
    drafter = emsjax.Mixed(emsjax.SuffixDrafter(4), CARELESS, emsjax.PromptLookup(1, 2))
    options = {"sampling": emsjax.Sampling(0.3), "key": jax.random.key(0), "max_new_tokens": NEW}
    found = assert_lossless(shallow_model(), drafter, PROMPTS, **options)
    assert found.output.stats.num_accepted.sum() > 0


def run(*sources, steps=None, policy=None, **options):
    """The accepted tokens [steps, b], the drafted ones and the states after each step."""
    drafter, model = emsjax.Mixed(*sources, **options), shallow_model()
    state = emsjax.init_state(
        model, drafter, PROMPTS, max_new_tokens=40, draft_length=policy, eos_token_ids=()
    )
    step = jax.jit(functools.partial(emsjax.step, draft_length=policy))
    infos, states = [], []
    for _ in range(steps or 9):
        state, info = step(model, drafter, state)
        infos.append(info)
        states.append(state.drafter_state)
    each = lambda name: np.array([getattr(info, name) for info in infos])
    return each("num_accepted"), each("num_drafted"), states


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first", "second"])
def test_each_sample_gets_the_source_that_is_right_for_it(order):
    sources = [scripted(0, 2), scripted(1, 3)]
    accepted, _, states = run(*(sources[i] for i in order))
    chosen = np.array([state.choice.source for state in states])
    expected = np.array([order.index(i) for i in (0, 1, 0, 1)])
    assert (chosen[-6:] == expected).all()
    assert (accepted[-6:] == 3).all()  # as an oracle's


def test_a_source_that_fails_the_whole_batch_is_left_after_a_step():
    accepted, _, _ = run(scripted(), scripted(0, 1, 2, 3))
    assert (accepted[1:] == 3).all()


def choose(records, lengths, limit, prices, free, behind=None):
    """The choice among chains of these lengths."""
    usable = jnp.minimum(lengths, limit)
    active = jnp.full(len(lengths), limit > 0)
    behind = jnp.zeros_like(lengths) if behind is None else behind
    return records.choose(Offers(lengths, usable, usable), active, prices, free, behind)


def test_an_offer_is_worth_what_offers_of_its_length_brought():
    records = Records.init(2, 2, 16)
    free = (True, True)
    prices = Prices(jnp.float32(1), jnp.float32(0), jnp.zeros(2), jnp.zeros(2))
    long, short = jnp.array([[16, 3], [16, 3]]), jnp.array([[2, 3], [2, 3]])
    for _ in range(5):  # whole long offers of the first source are right, short ones wrong
        choice = choose(records, long.at[:, 1].set(0), 16, prices, free)
        records = records.update(choice, jnp.full(2, 17))
        choice = choose(records, short.at[:, 1].set(0), 16, prices, free)
        records = records.update(choice, jnp.full(2, 1))
        choice = choose(records, long.at[:, 0].set(0), 16, prices, free)
        records = records.update(choice, jnp.full(2, 3))
    assert choose(records, long, 16, prices, free).source.tolist() == [0, 0]
    assert choose(records, short, 16, prices, free).source.tolist() == [1, 1]


def test_a_free_source_is_judged_by_drafts_that_were_not_used():
    """The first is right at first and fails later, when the second, which failed, is right."""
    late = jnp.arange(script().shape[1]) >= 17
    wrong = (script() + 1) % VOCAB
    first = dataclasses.replace(scripted(0, 1, 2, 3), script=jnp.where(late, wrong, script()))
    second = dataclasses.replace(scripted(0, 1, 2, 3), script=jnp.where(late, script(), wrong))
    accepted, _, states = run(first, second, steps=12)
    assert (accepted[0] == 3).all()
    assert (np.array(states[-1].choice.source) == 1).all()
    records = states[-1].records
    used = [np.asarray(state.choice.source) == 1 for state in states]
    assert (np.asarray(records.steps[:, 1].sum(axis=1)) > np.sum(used, axis=0)).all()


def test_unused_offers_count_what_is_known_of_them():
    records = Records.init(4, 1, 4)
    two = lambda *values: jnp.array(values, jnp.int32)
    offers = two(4, 4, 4, 0)
    learnt = records.learn(0, offers, offers, two(1, 2, 3, 0), two(3, 2, 0, 2))
    mean = hoped_tokens(np.array([4]))[0]
    expected = [1, min(2 + mean, 4), 0, 0]  # one differs, one is cut, two say nothing
    np.testing.assert_allclose(learnt.accepted[:, 0, 2], expected, rtol=1e-6)
    assert learnt.steps[:, 0, 2].tolist() == [1, 1, 0, 0]
    np.testing.assert_allclose(learnt.all_accepted[0, 2], sum(expected), rtol=1e-6)


def test_rows_that_cost_more_than_they_bring_are_not_drafted():
    records, offers = Records.init(3, 2, 8), jnp.array([[8, 2], [8, 0], [0, 0]])
    prices = lambda row: Prices(jnp.float32(1), jnp.float32(row), jnp.zeros(2), jnp.zeros(2))
    at = lambda row: choose(records, offers, 8, prices(row), (True, True))
    assert at(0).source.tolist() == [0, 0, NONE]
    # Tokens of long offers are less likely to be accepted, here only those of the short one pay.
    rate, (two, eight) = 3, hoped_tokens(np.array([2, 8]))
    between = (eight / 8 + two / 2) / 2 / rate
    assert at(between).source.tolist() == [1, NONE, NONE]


def test_a_model_that_does_not_pay_is_switched_off_and_tried_again():
    """It is right for one of four samples: of 4 tokens that a step emits without it, 3 more."""
    good = scripted(0, 1, 2, free=False)
    one = scripted(0, free=False)
    cheap, dear = {"draft_cost": 0.02}, {"draft_cost": 0.5}
    accepted, drafted, _ = run(good, emsjax.PromptLookup(9, 1), **cheap)
    assert (accepted[:, :3] == 3).all()
    _, drafted, states = run(one, emsjax.PromptLookup(9, 1), steps=9, **dear)
    assert drafted[0].any()
    assert not drafted[-4:].any()
    asked = np.array([state.sources[0] for state in states])
    assert (asked[-1] == asked[-4]).all()  # not even its `propose` is asked for tokens
    records, again = states[-1].records, jax.jit(choose, static_argnums=(2, 4))
    prices = Prices(*map(jnp.float32, (1.0, 0.0)), jnp.array([0.5, 0]), jnp.array([0.5, 0]))
    nothing = jax.jit(lambda r, c: r.update(c, jnp.ones(4, jnp.int32)))
    offers, tries = jnp.array([[3, 0]] * 4), []
    for step in range(3000):
        choice = again(records, offers, 3, prices, (False, True))
        if choice.asked.any():
            tries.append(step)
        records = nothing(records, choice)
    assert 2 <= len(tries) < 60
    pauses = np.diff(tries)
    assert pauses[-1] > 20


def test_a_model_runs_if_its_gain_over_the_whole_batch_is_worth_its_time():
    """It adds less than a token to each sample."""
    prices = Prices(jnp.float32(1), jnp.float32(0), jnp.array([0, 0.5]), jnp.array([0, 0.5]))
    gain = np.diff(hoped_tokens(np.array([2, 4])))[0]
    for batch, expected in ((1, 0), (2, 1), (8, 1)):
        records = Records.init(batch, 2, 4)
        # A step's time is worth one token of each of two samples, whatever the batch.
        records = dataclasses.replace(records, tokens=jnp.float32(1e6), time=jnp.float32(1e6))
        offers = jnp.tile(jnp.array([[2, 4]]), (batch, 1))
        choice = choose(records, offers, 4, prices, (True, False))
        assert (batch * gain > 4 * 0.5) == expected
        assert choice.source.tolist() == [expected] * batch


def test_a_sample_catches_up_once_it_has_missed_as_much_as_that_costs():
    """The first sample is 100 tokens behind, the second one 10: 5 and 0.5 steps of reading."""
    free, offers = (False, True), jnp.array([[3, 0], [3, 0]])
    prices = Prices(*map(jnp.float32, (1.0, 0.0)), jnp.zeros(2), jnp.array([0.05, 0]))
    records, behind = Records.init(2, 2, 3), jnp.array([[100, 0], [10, 0]])
    of = lambda records, behind: choose(records, offers, 3, prices, free, behind)
    missed, steps = [], 0
    while not (choice := of(records, behind)).asked[0, 0]:
        steps += 1
        assert steps < 20  # it would never catch up
        assert choice.asked[:, 0].tolist() == [False, True]
        # Twice as many tokens as there are samples, in steps that cost 1, or 1.5 with reading.
        records = dataclasses.replace(
            records.update(choice, jnp.full(2, 2)), tokens=jnp.float32(2), time=jnp.float32(1)
        )
        missed.append(float(records.missed[0, 0]))
        assert records.missed[1, 0] == 0
        assert choice.time == (1.5 if steps == 1 else 1)
        behind = behind.at[1, 0].set(0)
    rate, hoped = (2 + 2) / (1 + 1), hoped_tokens(np.array([2]))[0]
    assert missed[0] == pytest.approx(min(hoped, 3), rel=1e-6)
    assert missed[-1] + hoped > rate * 5 > missed[-1] > 0
    assert of(records, behind).missed[0, 0] == 0
    assert of(records.admit(jnp.array([True, False])), behind).asked[:, 0].tolist() == [False, True]


def test_prompts_are_read_for_the_samples_that_use_the_model_only():
    lookup, model = scripted(0, 1, max_draft_tokens=5), emsjax.DraftModel(shallow_model(), 3)
    _, drafted, states = run(lookup, model, steps=6, draft_cost=0.01)
    asked = np.array([state.choice.asked[:, 1] for state in states])
    read = np.array([state.sources[1].lengths for state in states])
    assert (drafted > 0).all()
    assert asked.any(axis=0).tolist() == [False, False, True, True]
    assert (read[:, :2] == 0).all()
    assert (read[-1, 2:] > 0).all()


class Now(Scripted):
    """Drafts at every other ten positions."""

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        counts = jnp.where(lengths % 20 < 10, draft_lengths, 0)
        return super().propose(state, tokens, lengths, counts, keys, sampling)


jax.tree_util.register_dataclass(Now)


def test_a_draft_model_is_fed_nothing_while_it_is_not_chosen_and_caught_up():
    """The target drafts for itself after a pause: a gap in its cache would show."""
    lookup = Now(script(), jnp.ones(4, bool), max_draft_tokens=5)
    model = emsjax.DraftModel(shallow_model(), 3)
    paused = 0
    accepted, drafted, states = run(lookup, model, steps=9, draft_cost=0.0)
    for before, after in itertools.pairwise(states):
        asked = np.asarray(after.choice.asked[:, 1])
        old, new = (np.asarray(state.sources[1].lengths) for state in (before, after))
        assert (new[~asked] == old[~asked]).all()
        behind = np.asarray(before.lengths) - old > 2
        paused += (asked & behind).sum()
    assert paused > 0
    by_model = np.array([state.choice.source == 1 for state in states])
    assert by_model.sum() > 5
    assert (~by_model).sum() > 5
    np.testing.assert_array_equal(accepted[by_model], drafted[by_model])


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Observing(Drafter):
    """Sums the hidden states of each layer that it observes, and drafts nothing."""

    taps: tuple[int, ...]
    max_draft_tokens: int = 2
    free: bool = True

    def init(self, prompts, prompt_lengths, max_len):
        return tuple(jnp.zeros((), jnp.float32) for _ in self.taps)

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        return emsjax.Draft(jnp.zeros((len(tokens), 2), jnp.int32), 0 * lengths), state

    def observe(self, state, rows, taps):
        real = rows.segment_ids < len(PROMPTS)
        total = lambda x: jnp.sum(jnp.where(real[:, None], jnp.abs(x), 0))
        return tuple(old + total(x) for old, x in zip(state, taps, strict=True))


def test_each_source_observes_its_own_layers_in_its_own_order():
    first, second = Observing((1, 0)), Observing((0,))
    _, _, states = run(first, emsjax.PromptLookup(), second, steps=3)
    (one, zero), _, (alone,) = states[-1].sources
    assert zero == alone
    assert not np.isclose(one, zero)
    model = shallow_model()
    own = emsjax.init_state(model, first, PROMPTS, max_new_tokens=40, eos_token_ids=())
    for _ in range(3):
        own, _ = compiled_step(model, first, own)
    np.testing.assert_allclose(own.drafter_state, (one, zero), rtol=1e-4)
    assert emsjax.Mixed(first, second).taps == (0, 1)


# Sampling: a vocabulary of four, one prompt, and sources that draw or do not.
CELLS, PROMPT = 4, [1, 3, 0, 2, 1, 3]
SAMPLED = {"sampling": emsjax.Sampling(0.9), "samples": 10_000, "batch_size": 500}


@functools.cache
def four_tokens():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "ffn_dim": 8, "num_attention_heads": 2}
    config = emsjax.OPTConfig(
        vocab_size=CELLS, pad_token_id=None, eos_token_id=None, init_std=0.8,
        max_position_embeddings=16, **sizes,
    )  # fmt: skip
    return emsjax.OPT(config, rngs=nnx.Rngs(0), dtype=jnp.float32)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Drawing(Drafter):
    """Draws every token from the same distribution."""

    probs: tuple[float, ...]
    max_draft_tokens: int = 2

    def init(self, prompts, prompt_lengths, max_len):
        return ()

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        of_each = jax.vmap(lambda key: jax.random.choice(key, CELLS, p=jnp.array(self.probs)))
        k = self.max_draft_tokens
        drawn = [of_each(position_keys(keys, lengths + i, Purpose.DRAFT)) for i in range(k)]
        probs = jnp.broadcast_to(jnp.array(self.probs), (len(lengths), k, CELLS))
        return emsjax.Draft(jnp.stack(drawn, 1).astype(jnp.int32), draft_lengths, probs), state


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Constant(Drafter):
    """Drafts token 2 where the last token is odd."""

    max_draft_tokens: int = 1
    free: bool = True

    def init(self, prompts, prompt_lengths, max_len):
        return ()

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)[:, 0]
        draft = jnp.full((len(tokens), 1), 2, jnp.int32)
        return emsjax.Draft(
            draft, jnp.where(last % 2 == 1, jnp.minimum(draft_lengths, 1), 0)
        ), state


LEFT, RIGHT = Drawing((0.7, 0.1, 0.1, 0.1)), Drawing((0.1, 0.1, 0.1, 0.7))
SOURCES = {"a free one": (Constant(), LEFT), "two that draw": (LEFT, RIGHT, Constant())}


@pytest.mark.parametrize("sources", SOURCES.values(), ids=SOURCES)
def test_sampled_tokens_have_the_targets_distribution(sources):
    drafter = emsjax.Mixed(*sources, draft_cost=0.01)
    assert_same_distribution(four_tokens(), drafter, PROMPT, key=jax.random.key(3), **SAMPLED)


@jax.tree_util.register_pytree_node_class
class Peeking(emsjax.Mixed):
    """Drops the draft of a sample if its first token, which was drawn, is not a likely one."""

    def propose(self, *arguments):
        draft, state = super().propose(*arguments)
        unlikely = (state.choice.source == 0) & (draft.tokens[:, 0] != 0)
        return dataclasses.replace(draft, counts=jnp.where(unlikely, 0, draft.counts)), state


def test_a_choice_that_looks_at_drawn_tokens_is_found():
    with pytest.raises(AssertionError, match="another distribution"):
        assert_same_distribution(
            four_tokens(), Peeking(LEFT, RIGHT, draft_cost=0.01), PROMPT,
            key=jax.random.key(3), **SAMPLED,
        )  # fmt: skip


def test_a_token_beyond_a_drawing_sources_vocabulary_ends_the_draft():
    """Its one-hot distribution could not be told."""
    narrow = emsjax.DraftModel(small_model(), 2, vocab_size=VOCAB - 20)
    options = {"sampling": emsjax.Sampling(0.5), "key": jax.random.key(0), "max_new_tokens": NEW}
    drafter = emsjax.Mixed(scripted(0, 1, 2, 3), narrow)
    out = emsjax.generate(shallow_model(), PROMPTS, drafter, **options)
    assert out.stats.num_invalid.sum() == 0
    assert out.stats.num_drafted.sum() > 0


def test_a_source_may_be_any_object_of_the_protocol():
    drafter = emsjax.Mixed(CARELESS, emsjax.SuffixDrafter(3))
    assert (drafter.max_draft_tokens, drafter.free, drafter.fork) == (5, False, None)
    found = assert_lossless(shallow_model(), drafter, PROMPTS, max_new_tokens=NEW, batch_size=2)
    assert found.output.stats.num_drafted.sum() > 0


@pytest.mark.usefixtures("unchecked_annotations")
def test_limits_references_and_processing_reach_the_sources():
    model = emsjax.DraftModel(small_model())
    lookup = emsjax.PromptLookup(1, 2, references=[[1, 2], [3, 4]])
    drafter = emsjax.Mixed(lookup, model)
    assert drafter.with_limit(9).max_draft_tokens == 9
    assert drafter.with_limit(model.max_draft_tokens).max_draft_tokens == 4
    chosen = drafter.for_prompts(np.array([1, 0, 1]), 2).sources[0]
    np.testing.assert_array_equal(chosen.references[:, 0], [3, 1, 3])
    assert drafter.with_processing("some").sources[1].process == "some"
    assert drafter.state_bytes(64) > model.state_bytes(64)
    with pytest.raises(ValueError, match="one sequence per prompt"):
        drafter.for_prompts(np.array([0]), 3)
    wrong = emsjax.DraftModel(small_model(), vocab_size=VOCAB)
    wrong.vocab_size = VOCAB + 9
    with pytest.raises(ValueError, match="at most the target's"):
        emsjax.generate(shallow_model(), PROMPTS, emsjax.Mixed(lookup, wrong), max_new_tokens=3)


def feature_drafter(kind, network_kind, config_kind, **options):
    """An untrained drafter that reads hidden states, with a vocabulary of its own."""
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    layers = emsjax.LlamaConfig(vocab_size=VOCAB, num_attention_heads=2, **sizes)
    config = config_kind(layers=layers, taps=(1,), **options)
    return kind(network_kind(config, rngs=nnx.Rngs(0), dtype="float32"))


DRAWING = {
    "model": lambda: emsjax.DraftModel(small_model(), 2),
    "fewer ids": lambda: emsjax.DraftModel(small_model(), 2, vocab_size=VOCAB - 9),
    "eagle3": lambda: feature_drafter(emsjax.Eagle3, Eagle3Network, Eagle3Config),
    "block": lambda: feature_drafter(
        emsjax.BlockDrafter, BlockNetwork, BlockConfig, block_size=4, mask_token_id=0
    ),
    "tree": lambda: emsjax.DraftModel(small_model(), 4, branches=2),
}


@pytest.mark.parametrize("kind", DRAWING)
def test_the_memory_plan_has_the_merged_distributions(kind):
    source, lookup = DRAWING[kind](), emsjax.PromptLookup(1, 9)
    tokens, lengths = jnp.zeros((2, 20), jnp.int32), jnp.full(2, 5)
    sampling = jax.tree.map(lambda x: jnp.full(2, x), emsjax.Sampling(0.9))
    keys = jax.random.split(jax.random.key(0), 2)
    arguments = (tokens, lengths, lengths, keys, sampling)
    drafted = lambda: source.propose(source.init(tokens, lengths, 20), *arguments)[0].probs
    probs = jax.eval_shape(drafted)
    width = 0 if probs is None else probs.shape[2]
    assert source.drawn_vocab_size == width
    mixed = emsjax.Mixed(lookup, source, emsjax.PromptLookup(1, 2))
    assert mixed.drawn_vocab_size == width
    more = mixed.state_bytes(20) - source.state_bytes(20)
    merged = mixed.max_draft_tokens * width * 4
    assert merged <= more <= 2 * merged + 200  # and the records


PLAIN = emsjax.PromptLookup()
INVALID = {
    "one": (lambda: emsjax.Mixed(PLAIN), "two or more drafters, not 1"),
    "none": (lambda: emsjax.Mixed(PLAIN, None), "not None"),
    "no drafter": (lambda: emsjax.Mixed(PLAIN, "model"), "'str' has none"),
    "a class": (lambda: emsjax.Mixed(PLAIN, emsjax.PromptLookup), "not the class PromptLookup"),
    "shares": (
        lambda: emsjax.Mixed(PLAIN, emsjax.SelfDraft(small_model())),
        r"drafters\[1\] must not share .* SelfDraft",
    ),
    "models": (lambda: emsjax.Mixed(*[CARELESS] * 5), "at most 4 .* free, not 5"),
    "profile": (lambda: emsjax.Mixed(PLAIN, PLAIN, costs={}), "costs must be emsjax.StepCosts"),
    "negative": (lambda: emsjax.Mixed(PLAIN, PLAIN, draft_cost=-1), "draft_cost must be at least"),
    "text": (lambda: emsjax.Mixed(PLAIN, PLAIN, draft_cost="1"), "draft_cost must be"),
    "costs": (
        lambda: emsjax.Mixed(PLAIN, PLAIN, draft_cost=[1, 2, 3]),
        "each of 2 drafters, not 3",
    ),
}


@pytest.mark.usefixtures("unchecked_annotations")
@pytest.mark.parametrize(("make", "message"), INVALID.values(), ids=INVALID)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.usefixtures("unchecked_annotations")
def test_sources_that_break_the_protocol_are_named():
    generate = lambda *sources, **options: emsjax.generate(
        shallow_model(), PROMPTS, emsjax.Mixed(*sources), max_new_tokens=4, **options
    )

    class Free(Drawing):
        free = True

    class Changing(Scripted):
        def commit(self, state, lengths):
            return state[:1]

    jax.tree_util.register_static(Free)
    jax.tree_util.register_dataclass(Changing)
    with pytest.raises(ValueError, match=r"drafters\[0\] draws its tokens .* cannot be `free`"):
        generate(Free((0.7, 0.1, 0.1, 0.1)), PLAIN)
    with pytest.raises(ValueError, match=r"drafters\[1\]'s state must keep .* commit returned"):
        generate(PLAIN, Changing(script(), jnp.ones(4, bool)))
