"""With a draft model the output has the target's greedy tokens or exactly its distribution."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from toy import VOCAB, ragged_prompts, tiny_model

import emsjax
from emsjax.engine import group
from emsjax.sampling import Purpose, position_keys, residual, warp
from emsjax.verification import acceptance_probability, residual_distribution

PROMPTS = ragged_prompts([5, 12, 2, 9])
weights = hnp.arrays(np.float64, 6, elements=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0, 7.0]))


def small_model(**overrides):
    return tiny_model(num_hidden_layers=1, hidden_size=16, **overrides)


def normalised(weights):
    return jnp.asarray(weights / max(weights.sum(), 1e-300), jnp.float32)


@settings(max_examples=200)
@given(p=weights.filter(lambda w: w.any()), q=weights)
def test_accepted_and_residual_mass_add_up_to_the_target(p, q):
    p, q = normalised(p), normalised(q)  # q is zero if nothing was drafted
    accepted = q * acceptance_probability(p, q)
    emitted = accepted + (1 - accepted.sum()) * residual_distribution(p, q)
    np.testing.assert_allclose(emitted, p, atol=1e-6)
    assert (accepted <= p + 1e-6).all()
    assert (acceptance_probability(p, q)[p == 0] == 0).all()


@pytest.mark.parametrize(
    ("max_draft_tokens", "dtype"), [(1, jnp.bfloat16), (4, jnp.float32)], ids=["1", "4"]
)
def test_greedy_tokens_equal_plain_decoding(max_draft_tokens, dtype):
    model = tiny_model()
    plain = emsjax.generate(model, PROMPTS, max_new_tokens=20)
    small = emsjax.OPT(small_model().config, rngs=nnx.Rngs(1), dtype=dtype)
    for draft_model, accepts in ((model, 1.0), (small, None)):
        drafter = emsjax.DraftModel(draft_model, max_draft_tokens)
        out = emsjax.generate(model, PROMPTS, drafter=drafter, max_new_tokens=20)
        np.testing.assert_array_equal(out.tokens, plain.tokens)
        np.testing.assert_allclose(out.logprobs, plain.logprobs, atol=1e-4)
        assert accepts is None or out.stats.acceptance_rate == accepts


@pytest.mark.parametrize(("temperature", "top_p"), [(0.3, 1.0), (1.0, 0.8), (3.0, 1.0)])
def test_drafts_of_the_target_itself_are_accepted(temperature, top_p):
    model = tiny_model()
    sampling = emsjax.Sampling(temperature, top_p=top_p)
    out = emsjax.generate(
        model,
        PROMPTS,
        drafter=emsjax.DraftModel(model),
        max_new_tokens=40,
        sampling=sampling,
        key=jax.random.key(0),
    )
    assert out.stats.num_drafted.sum() > 100
    assert out.stats.acceptance_rate >= 0.99


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pause:
    """A policy that drafts nothing from the third step to the eighth."""

    def init(self, batch, max_draft_tokens):
        return jnp.zeros((), jnp.int32)

    def lengths(self, state, view):
        return jnp.full(view.active.shape, jnp.where((state >= 2) & (state < 8), 0, 4), jnp.int32)

    def update(self, state, view, num_drafted, num_accepted):
        return state + 1


def test_a_sample_that_paused_is_caught_up_before_it_drafts_again():
    model = tiny_model()
    out = emsjax.generate(
        model,
        PROMPTS,
        drafter=emsjax.DraftModel(model),
        draft_length=Pause(),
        max_new_tokens=40,
    )
    plain = emsjax.generate(model, PROMPTS, max_new_tokens=40)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert (out.stats.accepted_histogram[:, 0] >= 6).all()
    assert out.stats.acceptance_rate == 1  # gaps in the cache would change drafts


def test_the_draft_cache_after_ragged_acceptance_equals_a_fresh_prefill():
    draft_model = tiny_model()  # sometimes right: the scale of the target's weights differs
    model = tiny_model(init_std=0.28)
    drafter = emsjax.DraftModel(draft_model, 3)
    state = emsjax.init_state(model, drafter, PROMPTS, max_new_tokens=30)
    step = jax.jit(emsjax.step)
    accepted = []
    for _ in range(6):
        state, info = step(model, drafter, state)
        accepted.append(info.num_accepted)
    assert len({tuple(counts.tolist()) for counts in accepted}) > 1
    cache = state.drafter_state
    assert (cache.lengths >= state.lengths - emsjax.drafters.draft_model.CATCH_UP_ROWS).all()
    fresh = drafter.init(state.tokens, cache.lengths + 1, state.tokens.shape[1])
    real = np.arange(state.tokens.shape[1]) < np.asarray(cache.lengths)[:, None]
    for got, expected in zip(
        jax.tree.leaves(cache.layers), jax.tree.leaves(fresh.layers), strict=True
    ):
        np.testing.assert_allclose(got[real], expected[real], atol=1e-4)


def test_a_sequence_does_not_depend_on_the_rest_of_the_batch():
    model, drafter = tiny_model(), emsjax.DraftModel(small_model(), 3)
    keys = jax.random.split(jax.random.key(5), len(PROMPTS))
    options = {"max_new_tokens": 16, "drafter": drafter, "sampling": emsjax.Sampling(1.0)}
    together = emsjax.generate(model, PROMPTS, key=keys, **options)
    order = [2, 0, 3, 1]
    shuffled = emsjax.generate(
        model, [PROMPTS[i] for i in order], key=keys[jnp.array(order)], **options
    )
    np.testing.assert_array_equal(shuffled.tokens, together.tokens[order])
    for index, prompt in enumerate(PROMPTS):
        alone = emsjax.generate(model, [prompt], key=keys[index : index + 1], **options)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[index])
        np.testing.assert_allclose(alone.logprobs[0], together.logprobs[index], atol=1e-4)


def test_a_prompt_of_several_sequences_is_prefilled_once(monkeypatch):
    prompts, sampling = ragged_prompts([9, 2, 30]), emsjax.Sampling(temperature=0.9)
    generate = functools.partial(
        emsjax.generate,
        tiny_model(),
        prompts,
        max_new_tokens=12,
        sampling=sampling,
        num_sequences=4,
        key=jax.random.key(1),
    )
    seen = []

    def init(self, prompts, *rest, init=emsjax.DraftModel.init):
        seen.append(prompts.shape[0])
        return init(self, prompts, *rest)

    monkeypatch.setattr(emsjax.DraftModel, "init", init)
    drafter = emsjax.DraftModel(small_model(), 3)
    once = generate(drafter=drafter)
    monkeypatch.delattr(emsjax.DraftModel, "fork")
    group._begun.clear_cache()
    each = generate(drafter=drafter)
    assert seen == [3, 12]
    np.testing.assert_array_equal(once.tokens, each.tokens)
    np.testing.assert_array_equal(once.stats.num_accepted, each.stats.num_accepted)


def test_padded_vocabularies_share_their_prefix():
    model, draft_model = tiny_model(), small_model(vocab_size=VOCAB + 3)
    drafter = emsjax.DraftModel(draft_model, vocab_size=VOCAB - 2)
    plain = emsjax.generate(model, PROMPTS, max_new_tokens=12)
    out = emsjax.generate(model, PROMPTS, drafter=drafter, max_new_tokens=12)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    options = {"sampling": emsjax.Sampling(2.0), "key": jax.random.key(1)}
    out = emsjax.generate(model, PROMPTS, drafter=drafter, max_new_tokens=12, **options)
    assert out.stats.num_drafted.sum() > 0
    assert out.tokens.max() < VOCAB


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: emsjax.DraftModel(small_model(), 0), "max_draft_tokens must be at least 1"),
        (lambda: emsjax.DraftModel(small_model(), vocab_size=0), "vocab_size must be at least 1"),
        (
            lambda: emsjax.DraftModel(small_model(), vocab_size=VOCAB + 1),
            f"at most the draft model's {VOCAB}, not {VOCAB + 1}",
        ),
        (
            lambda: emsjax.DraftModel(small_model(vocab_size=VOCAB + 3)),
            f"has {VOCAB + 3} ids and the target's {VOCAB}",
        ),
        (
            lambda: emsjax.DraftModel(small_model(vocab_size=VOCAB + 3), vocab_size=VOCAB + 2),
            f"at most the target's {VOCAB}, not {VOCAB + 2}",
        ),
        (
            lambda: emsjax.DraftModel(small_model(max_position_embeddings=20)),
            "has 20 positions, but 21 are needed",
        ),
    ],
)
def test_an_incompatible_draft_model_is_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        emsjax.generate(tiny_model(), PROMPTS, drafter=make(), max_new_tokens=10)


SEQUENCES, TOKENS, CELLS = 50_000, 3, 4  # a vocabulary of four: 64 joint outcomes
AT_ONCE = 250
SAMPLING = emsjax.Sampling(0.9, top_p=0.95)


def four_tokens(seed):
    config = emsjax.OPTConfig(
        vocab_size=CELLS,
        pad_token_id=None,  # all four are text
        hidden_size=8,
        num_hidden_layers=1,
        ffn_dim=8,
        num_attention_heads=2,
        max_position_embeddings=16,
        init_std=0.8,
        eos_token_id=None,
    )
    return emsjax.OPT(config, rngs=nnx.Rngs(seed), dtype=jnp.float32)


@jax.jit
def probabilities(model, texts, sampling):
    """The model's probabilities [b, t, v] after every prefix of the texts, under `sampling`."""
    batch, length = texts.shape
    rows = emsjax.decode.pack.pack(
        jnp.zeros(batch, jnp.int32), jnp.full(batch, length, jnp.int32), texts.size
    )
    out = model(texts.reshape(-1), rows, model.init_cache(batch, 16))
    return jax.nn.softmax(warp(model.logits(out.hidden), sampling)).reshape(batch, length, -1)


def exact_distribution(model, prompt):
    """The joint distribution [4, 4, 4] of the first TOKENS tokens, from the model's probabilities
    after every prefix.
    """
    endings = list(itertools.product(range(CELLS), repeat=TOKENS - 1))
    texts = np.array([[*prompt, *ending] for ending in endings], np.int32)
    every = lambda value, dtype: np.full(texts.size, value, dtype)
    sampling = emsjax.Sampling(
        every(SAMPLING.temperature, "float32"), every(0, "int32"), every(SAMPLING.top_p, "float32")
    )
    probs = np.asarray(probabilities(model, texts, sampling), np.float64)[:, len(prompt) - 1 :]
    joint = np.zeros((CELLS,) * TOKENS)
    for (first, second), (p, q, r) in zip(endings, probs, strict=True):
        joint[first, second] = p[first] * q[second] * r
    return joint


def chi_square(model, drafter, sequences=SEQUENCES):
    """Statistic and bound of the emitted tokens against the exact distribution."""
    prompt = [1, 3, 0, 2, 1, 3]
    observed = np.zeros((CELLS,) * TOKENS)
    for key in jax.random.split(jax.random.key(11), sequences // AT_ONCE):
        out = emsjax.generate(
            model,
            [prompt],
            drafter=drafter,
            max_new_tokens=TOKENS,
            sampling=SAMPLING,
            num_sequences=AT_ONCE,
            key=key,
        )
        np.add.at(observed, tuple(out.tokens.T), 1)
    return statistic_and_bound(observed, sequences * exact_distribution(model, prompt))


def statistic_and_bound(observed, expected):
    """The chi-square statistic of counts, and a bound that fewer than one seed in 1,000 exceeds."""
    possible = expected > 0
    assert observed[~possible].sum() == 0
    statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1  # the statistic's mean; its variance is twice as large
    return statistic, freedom + 3.5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("drafter", ["model", "prompt lookup", None])
def test_the_first_tokens_have_exactly_the_targets_distribution(drafter):
    model = four_tokens(0)
    drafters = {
        "model": emsjax.DraftModel(four_tokens(1), 2),
        "prompt lookup": emsjax.PromptLookup(match_length=1, max_draft_tokens=2),
    }
    statistic, bound = chi_square(model, drafters.get(drafter))
    assert statistic < bound


@jax.tree_util.register_static
class HalfEnds:
    """A drafter that draws the end token or token 0, each with probability one half."""

    max_draft_tokens = 3
    probs = (0.5, 0.0, 0.0, 0.5)

    def init(self, prompts, prompt_lengths, max_len):
        return ()

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        of_each = jax.vmap(lambda key: jax.random.choice(key, CELLS, p=jnp.array(self.probs)))
        drawn = [of_each(position_keys(keys, lengths + i, Purpose.DRAFT)) for i in range(3)]
        probs = jnp.broadcast_to(jnp.array(self.probs), (len(lengths), 3, CELLS))
        return emsjax.Draft(jnp.stack(drawn, 1).astype(jnp.int32), draft_lengths, probs), state

    def commit(self, state, lengths):
        return state


@jax.tree_util.register_static
class AfterWholeDrafts:
    """A policy that first drafts 3 tokens, then 1 if the last draft was not cut, otherwise none."""

    def init(self, batch, max_draft_tokens):
        return jnp.full(batch, -1, jnp.int32)

    def lengths(self, state, view):
        return jnp.where(state < 0, 3, jnp.where(state == 3, 1, 0))

    def update(self, state, view, num_drafted, num_accepted):
        return num_drafted


def test_a_policy_learns_nothing_about_the_next_token_from_a_rejected_draft():
    model, prompt, sequences = four_tokens(0), [1, 3, 0, 2, 1, 3], SEQUENCES // 10
    drafter, policy = HalfEnds(), AfterWholeDrafts()  # new instances would be traced again
    observed = np.zeros((CELLS, CELLS))
    for key in jax.random.split(jax.random.key(5), sequences // AT_ONCE):
        out = emsjax.generate(
            model,
            [prompt],
            drafter,
            policy,
            max_new_tokens=5,
            eos_token_ids=[3],
            sampling=SAMPLING,
            num_sequences=AT_ONCE,
            key=key,
        )
        np.add.at(observed, tuple(np.where(out.tokens[:, :1] == 3, 3, out.tokens[:, :2]).T), 1)
    expected = sequences * exact_distribution(model, prompt).sum(axis=2)
    expected[3] = expected[3].sum() * (np.arange(CELLS) == 3)  # nothing follows the end token
    statistic, bound = statistic_and_bound(observed, expected)
    assert statistic < bound


def test_the_chi_square_test_rejects_a_verifier_without_the_residual(monkeypatch):
    fault = lambda p, q: (jnp.log(p), residual(p, q)[1])
    monkeypatch.setattr("emsjax.decode.verify.residual", fault)
    drafter = emsjax.DraftModel(four_tokens(1), 1)  # not compiled by another test
    statistic, bound = chi_square(four_tokens(0), drafter, SEQUENCES // 5)
    assert statistic > 2 * bound


@pytest.mark.usefixtures("unchecked_annotations")
def test_an_object_that_is_not_a_draft_model_is_named():
    with pytest.raises(ValueError, match=r"^draft_model must be a model, .*, not str$"):
        emsjax.DraftModel("path")
