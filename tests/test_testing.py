"""The public checks: what passes, what fails, and how failures are explained."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import ragged_prompts, shallow_model

import emsjax
import pallas_kernels
from emsjax.sampling import Purpose, position_keys
from emsjax.testing import assert_lossless, assert_same_distribution, distribution, lossless
from emsjax.testing.divergence import Divergence, first_divergences

OPTIONS = {"max_new_tokens": 12, "eos_token_ids": ()}
LOOKUP = emsjax.PromptLookup(1, 4, search_generated=True)


@pytest.fixture(scope="module")
def model():
    return shallow_model()


@pytest.fixture(scope="module")
def prompts():
    return ragged_prompts((30, 9, 3))


class LastToken:
    """Proposes the last token again."""

    max_draft_tokens = 3

    def init(self, prompts, prompt_lengths, max_len):
        return ()

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
        return emsjax.Draft(jnp.repeat(last, self.max_draft_tokens, axis=1), draft_lengths), state

    def commit(self, state, lengths):
        return state


def forgetful(query, key, value, keys, values, segment_ids, positions, lengths, **options):
    """A fault: rows of a draft do not attend to each other."""
    first = jnp.concatenate([jnp.ones(1, bool), segment_ids[1:] != segment_ids[:-1]])
    alone = jnp.where(first | (positions < 4), segment_ids, keys.shape[0])
    return pallas_kernels.reference.ragged_attention(
        query, key, value, keys, values, alone, positions, lengths, **options
    )


def short_sighted(*arrays, **options):
    """A fault: the last token of every cache is ignored."""
    *others, lengths = arrays
    return own_attention(*others, jnp.maximum(lengths - 1, 0), **options)


def own_attention(*arrays, **options):
    return pallas_kernels.reference.ragged_attention(*arrays, **options)


@pytest.mark.parametrize("drafter", [None, LOOKUP, LastToken()], ids=["none", "lookup", "own"])
def test_correct_drafters_and_attention_pass(model, prompts, drafter):
    found = assert_lossless(model, drafter, prompts, own_attention, **OPTIONS)
    assert found.near_ties == ()
    assert found.output.tokens.shape == (3, 12)
    assert (found.output.stats.num_drafted.sum() > 0) == (drafter is not None)


def test_attention_that_ignores_rows_is_detected_and_explained(model, prompts):
    with pytest.raises(AssertionError) as caught:
        assert_lossless(model, LOOKUP, prompts, forgetful, **OPTIONS)
    count, where, margins, likeliest = str(caught.value).splitlines()[:4]
    assert "of 3 sequences are not those of plain decoding" in count
    plain = emsjax.generate(model, prompts, **OPTIONS)
    wrong = emsjax.generate(model, prompts, LOOKUP, attention_implementation=forgetful, **OPTIONS)
    differs = plain.tokens != wrong.tokens
    sequence = np.flatnonzero(differs.any(axis=1))[0]
    new = differs[sequence].argmax()
    position = len(prompts[sequence]) + new
    pair = f"{wrong.tokens[sequence, new]} instead of {plain.tokens[sequence, new]}"
    assert f"sequence {sequence}, position {new} of the new tokens ({position} with the" in where
    assert where.endswith(pair)
    assert margins.endswith("no difference is allowed: this is a defect and not rounding.")
    assert f"are {plain.tokens[sequence, new]} and" in likeliest
    assert likeliest.endswith(
        "float32 agrees with plain decoding: check what the other run's attention reads."
    )


def test_attention_that_reads_undefined_values_is_detected_by_nan(model, prompts):
    poisoned = lambda query, *arrays, **options: jnp.full_like(query, jnp.nan)
    with pytest.raises(AssertionError, match="3 of 3 sequences") as caught:
        assert_lossless(model, LOOKUP, prompts, poisoned, **OPTIONS)
    assert str(caught.value).count("logits are not finite there") == 3
    with pytest.raises(AssertionError) as caught:
        assert_lossless(model, LOOKUP, prompts, forgetful, **OPTIONS)
    assert "finite" not in str(caught.value)


def test_sampled_tokens_are_compared_under_one_key(model, prompts):
    sampling = emsjax.Sampling(temperature=[0.9, 0.0, 1.2])
    options = {**OPTIONS, "sampling": sampling, "key": jax.random.key(3), "num_sequences": 2}
    found = assert_lossless(model, LOOKUP, prompts, **options)
    assert found.output.tokens.shape == (6, 12)
    with pytest.raises(AssertionError, match="drawn under the same key"):
        assert_lossless(model, LOOKUP, prompts, short_sighted, **options)


def test_runs_that_cannot_be_compared_are_rejected(model, prompts):
    options = {**OPTIONS, "sampling": emsjax.Sampling(1.0), "key": jax.random.key(0)}
    with pytest.raises(ValueError, match="not its tokens"):
        assert_lossless(model, emsjax.DraftModel(model), prompts, **options)
    with pytest.raises(ValueError, match="in float32 only, not bfloat16"):
        assert_lossless(model.astype(jnp.bfloat16), LOOKUP, prompts, **options)
    with pytest.raises(ValueError, match="no two runs stop at the same token"):
        assert_lossless(model, LOOKUP, prompts, **OPTIONS, time_budget_s=1e-6)


def test_sampled_tokens_of_a_drafter_with_references_are_compared(model, prompts):
    drafter = emsjax.PromptLookup(match_length=1, references=[[3, 4, 5]] * len(prompts))
    options = {**OPTIONS, "sampling": emsjax.Sampling(1.0), "key": jax.random.key(0)}
    found = assert_lossless(model, drafter, prompts, num_sequences=2, **options)
    assert found.output.tokens.shape == (2 * len(prompts), 12)


def test_invalid_arguments_are_rejected_before_any_work(model, prompts, monkeypatch):
    monkeypatch.setattr(lossless, "generate", None)
    with pytest.raises(ValueError, match=r"sampling must be emsjax\.Sampling"):
        assert_lossless(model, LOOKUP, prompts, **OPTIONS, sampling=0.8)
    with pytest.raises(ValueError, match="'str' has none"):
        assert_lossless(model, "prompt-lookup", prompts, **OPTIONS)


def test_sixteen_bit_types_may_differ_only_at_near_ties(model, prompts, monkeypatch):
    narrow = model.astype(jnp.bfloat16)
    found = assert_lossless(narrow, LOOKUP, prompts, **OPTIONS)
    assert all(one.is_near_tie for one in found.near_ties)
    with pytest.raises(AssertionError, match="not those of plain decoding") as caught:
        assert_lossless(narrow, LOOKUP, prompts, forgetful, **OPTIONS)
    assert "Up to 1.56% is a near-tie" in str(caught.value)

    tie = Divergence(1, 2, 5, 6, margin=0.1, largest=6.4, likeliest=(6, 5), lead=0.1)
    monkeypatch.setattr(lossless, "first_divergences", lambda *arguments: [tie])
    assert assert_lossless(narrow, LOOKUP, prompts, **OPTIONS).near_ties == (tie,)
    with pytest.raises(AssertionError, match="plain decoding is the one that is wrong"):
        assert_lossless(model, LOOKUP, prompts, **OPTIONS)
    far = dataclasses.replace(tie, margin=0.11, likeliest=(7, 5))
    monkeypatch.setattr(lossless, "first_divergences", lambda *arguments: [far] * 6)
    with pytest.raises(AssertionError, match="neither run is right") as caught:
        assert_lossless(narrow, LOOKUP, prompts, **OPTIONS)
    message = str(caught.value)
    assert "6 of 3 sequences" in message
    assert message.count("instead of") == 4
    assert message.endswith("...")


# Distributions


DRAWN = jnp.array([0.5, 0.3, 0.2])  # probabilities of tokens 3, 4 and 5


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
    """Draws token 3, 4 or 5 and returns the claimed probabilities."""

    claimed: jax.Array  # [k, 3]
    drawn: jax.Array = dataclasses.field(default_factory=lambda: DRAWN)  # [3]

    @property
    def max_draft_tokens(self):
        return len(self.claimed)

    def init(self, prompts, prompt_lengths, max_len):
        return ()

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        of_each = jax.vmap(lambda key: 3 + jax.random.choice(key, 3, p=self.drawn))
        drawn = [of_each(position_keys(keys, lengths + i, Purpose.DRAFT)) for i in range(2)]
        probs = jnp.zeros((2, 8)).at[:, 3:6].set(self.claimed)
        probs = jnp.broadcast_to(probs, (len(lengths), *probs.shape))
        return emsjax.Draft(jnp.stack(drawn, 1).astype(jnp.int32), draft_lengths, probs), state


RIGHT, UNIFORM, REVERSED = DRAWN, jnp.full(3, 1 / 3), DRAWN[::-1]
SAMPLED = {"sampling": emsjax.Sampling(0.9, top_k=7), "key": jax.random.key(3)}
SAMPLED |= {"samples": 1024, "batch_size": 1024}  # refilled slots take longer to compile


@pytest.fixture(scope="module")
def few_tokens():
    return shallow_model(vocab_size=8, init_std=0.1)


@pytest.mark.parametrize(
    "drafter", [Draws(jnp.stack([RIGHT, RIGHT])), LOOKUP, None], ids=["draws", "lookup", "none"]
)
def test_correct_drafters_keep_the_distribution(few_tokens, drafter):
    out = assert_same_distribution(few_tokens, drafter, [5, 6, 5], **SAMPLED)
    assert out.tokens.shape == (1024, 3)
    assert len(np.unique(out.tokens, axis=0)) > 100


@pytest.mark.parametrize(
    "claimed",
    [(UNIFORM, RIGHT), (REVERSED, RIGHT), (RIGHT, REVERSED)],
    ids=["uniform", "reversed", "later"],
)
def test_probabilities_other_than_those_of_the_draws_are_detected(few_tokens, claimed):
    """Those of a later token too change how much of a block is accepted."""
    more = SAMPLED | {"samples": 4096, "batch_size": 4096}
    with pytest.raises(AssertionError, match="position 0 of the new tokens has ano") as caught:
        assert_same_distribution(few_tokens, Draws(jnp.stack(claimed)), [5, 6, 5], **more)
    assert any(f"token {token}:" in str(caught.value) for token in (3, 4, 5))


@pytest.mark.parametrize("tail", [1e-5, 1e-4, 0.02])
def test_correct_counts_are_rarely_rejected(tail):
    """At this level one in 10,000 is rejected, however rare some tokens are."""
    probs = np.r_[0.6, 0.39, np.full(50, tail / 50)] / (0.99 + tail)
    rng, refused = np.random.default_rng(0), 0
    for _ in range(1000):
        try:
            distribution._check_counts(rng.multinomial(1000, probs), 1000 * probs, 0, 1e-4)
        except AssertionError:
            refused += 1
    assert refused < 3


@pytest.mark.parametrize("probability", [1 - 1e-3, 0.995])
def test_one_likely_token_beside_rare_ones_is_compared(probability):
    """All rare tokens together are too few to count, so an exact binomial test is used."""
    expected = 1000 * np.r_[probability, np.full(20, (1 - probability) / 20)]
    observed = np.r_[990, np.full(10, 1), np.zeros(10, int)]
    level = 1e-3
    if probability == 0.995:
        distribution._check_counts(observed, expected, 0, level)  # 10 where 5 are expected: 3 %
        return
    with pytest.raises(AssertionError, match="another distribution"):
        distribution._check_counts(observed, expected, 0, level)
    with pytest.raises(AssertionError, match="another distribution"):
        distribution._check_counts(observed[::-1], expected, 0, level)


def test_too_few_samples_to_compare_are_rejected(few_tokens):
    few = SAMPLED | {"samples": 12, "batch_size": 12}
    with pytest.raises(ValueError, match="samples must be at least") as caught:
        assert_same_distribution(few_tokens, LOOKUP, [5, 6, 5], **few)
    enough = int(str(caught.value).split("at least ")[1].split(",")[0])
    assert 12 < enough <= 8 * 8


def test_the_number_of_samples_suffices_to_detect_probabilities_that_are_not_warped(few_tokens):
    """Draws have a temperature of 0.5, and the claimed probabilities a temperature of 1."""
    warped = DRAWN**2 / jnp.sum(DRAWN**2)
    drafter = Draws(jnp.stack([DRAWN, DRAWN]), warped)
    options = SAMPLED | {"samples": None}
    assert_same_distribution(few_tokens, Draws(jnp.stack([warped, warped]), warped), [5], **options)
    with pytest.raises(AssertionError, match="position 0 of the new tokens has another distrib"):
        assert_same_distribution(few_tokens, drafter, [5], **options)


def test_the_number_of_samples_detects_the_distance_it_is_chosen_for():
    probs = np.random.default_rng(0).dirichlet(np.ones(20))
    wrong = probs.copy()
    half = np.cumsum(probs) < 0.5
    wrong[half] *= 1 - 0.05 / probs[half].sum()
    wrong[~half] *= 1 + 0.05 / probs[~half].sum()  # the distance is 0.05, spread evenly
    level = 1e-3
    samples = distribution.samples_to_detect(0.05, probs, level)
    assert distribution.samples_to_detect(0.025, probs, level) > 3.9 * samples
    rng, refused = np.random.default_rng(1), {"right": 0, "wrong": 0}
    for name, of in (("right", probs), ("wrong", wrong)):
        for _ in range(200):
            try:
                observed = rng.multinomial(samples, of)
                distribution._check_counts(observed, samples * probs, 0, level)
            except AssertionError:
                refused[name] += 1
    assert refused["right"] <= 2
    assert refused["wrong"] >= 194


def test_a_drafter_whose_drafts_are_not_verified_or_accepted_is_not_judged(few_tokens):
    drafter = Draws(jnp.stack([RIGHT, RIGHT]))
    nothing = {"draft_length": emsjax.FixedLength(0)}
    with pytest.raises(ValueError, match="nothing was drafted, so the drafter cannot be judged"):
        assert_same_distribution(few_tokens, drafter, [5, 6, 5], **SAMPLED, **nothing)
    # Only the likeliest token is sampled, after a prompt where that is not one of the drafts'.
    likeliest = SAMPLED | {"sampling": emsjax.Sampling(0.9, top_k=1), "samples": 64}
    prompts = [[i, j] for i in range(8) for j in range(8)]
    mask = [[1, 1]] * len(prompts)  # the padding token is one of them
    greedy = emsjax.generate(few_tokens, prompts, max_new_tokens=3, attention_mask=mask).tokens
    prompt = prompts[np.flatnonzero(~np.isin(greedy, (3, 4, 5)).any(axis=1))[0]]
    with pytest.raises(ValueError, match=r"none of [0-9]+ draft tokens was accepted"):
        assert_same_distribution(few_tokens, drafter, prompt, **likeliest)


@pytest.mark.parametrize("factor", [0.5, 1.01, jnp.nan, -1.0])
def test_numbers_that_are_not_a_distribution_are_named(few_tokens, factor):
    drafter = Draws(jnp.stack([RIGHT, RIGHT * factor]))
    with pytest.raises(
        AssertionError, match=r"draft tokens were dropped, .* sum to 1 within 0\.001"
    ):
        assert_same_distribution(few_tokens, drafter, [5, 6, 5], **SAMPLED)


def test_a_run_that_ends_earlier_differs_even_if_padding_looks_like_its_tokens(model, prompts):
    plain = emsjax.generate(model, prompts, **OPTIONS)
    zeros = np.zeros_like(plain.tokens)
    expected = dataclasses.replace(plain, tokens=zeros)
    actual = dataclasses.replace(expected, lengths=plain.lengths - np.array([0, 2, 0], np.int32))
    (found,) = first_divergences(model, prompts, expected, actual)
    assert (found.sequence, found.position) == (1, 10)
    assert not found.is_near_tie


def test_distributions_in_16_bit_types_are_not_compared(model):
    with pytest.raises(ValueError, match="in float32 only, not bfloat16"):
        assert_same_distribution(model.astype("bfloat16"), None, [5], **SAMPLED)


def test_a_token_that_is_impossible_for_the_target_is_detected():
    expected, observed = np.array([500.0, 500.0, 0.0]), np.array([500, 499, 1])
    with pytest.raises(AssertionError, match=r"token 2: 1 times, expected 0\.0"):
        distribution._check_counts(observed, expected, 0, 1e-6)


def test_greedy_tokens_have_no_distribution_to_compare(model):
    greedy = SAMPLED | {"sampling": emsjax.Sampling()}
    with pytest.raises(ValueError, match="temperature above 0: see assert_lossless"):
        assert_same_distribution(model, None, [5], **greedy)
