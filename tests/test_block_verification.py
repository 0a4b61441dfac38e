"""Block verification is exact and accepts as much as any exact verification can.

The functions of the library are evaluated in float64 for every possible draft, so that
distributions of emitted tokens are computed and not sampled.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize, sparse
from toy import shallow_model

import emsjax
from emsjax.decode.base import Draft
from emsjax.decode.pack import pack
from emsjax.decode.verify import judge
from emsjax.sampling import Purpose, position_keys, random_bits
from emsjax.testing import assert_same_distribution
from emsjax.verification import (
    acceptance_probability,
    accepted_counts,
    leading,
    prefix_probabilities,
    residual_distribution,
    stopping_probabilities,
)


class Drafts(NamedTuple):
    """Every draft [n] after one text, with probabilities of its tokens and of all others."""

    tokens: np.ndarray  # [n, k]
    weights: np.ndarray  # [n]: probability that the draft is drawn
    counts: np.ndarray  # [n]: tokens that are verified
    target: np.ndarray  # [n, k + 1, v]
    draft: np.ndarray  # [n, k + 1, v], 0 from `counts` on

    def of_tokens(self, probs):
        """The probability of each draft token [n, k]."""
        return np.take_along_axis(probs[:, :-1], self.tokens[..., None], axis=2)[..., 0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def stops_and_residuals(prefix_of, stops_of, drafted, target, draft):
    prefix = prefix_of(*drafted)
    scaled = prefix[..., None] * target
    masses = jnp.maximum(scaled - draft, 0).sum(axis=2)
    return stops_of(prefix, masses), residual_distribution(scaled, draft)


def stops_of(drafts: Drafts, functions=(prefix_probabilities, stopping_probabilities)):
    """The probability to stop at each place if no later one is reached, and residuals."""
    drafted = drafts.of_tokens(drafts.target), drafts.of_tokens(drafts.draft)
    stops, residual = stops_and_residuals(*functions, drafted, drafts.target, drafts.draft)
    stops = np.array(stops, np.float64)
    stops[:, 0] = 1
    stops[np.arange(stops.shape[1]) > drafts.counts[:, None]] = 0
    return stops, np.asarray(residual)


def by_block(drafts: Drafts, *functions):
    """The probability of each accepted length [n, k + 1], and residual distributions."""
    stops, residual = stops_of(drafts, *functions)
    no_later = np.cumprod(1 - stops[:, :0:-1], axis=1)[:, ::-1]
    return stops * np.pad(no_later, ((0, 0), (0, 1)), constant_values=1), residual


def token_by_token(drafts: Drafts):
    """As `by_block`, for the verification of arXiv 2211.17192."""
    pairs = drafts.of_tokens(drafts.target), drafts.of_tokens(drafts.draft)
    rate = np.array(acceptance_probability(*map(jnp.asarray, pairs)))
    rate[np.arange(rate.shape[1]) >= drafts.counts[:, None]] = 0
    accepted = np.pad(np.cumprod(rate, axis=1), ((0, 0), (1, 0)), constant_values=1)
    last = accepted - np.pad(accepted[:, 1:], ((0, 0), (0, 1)))
    residual = residual_distribution(jnp.asarray(drafts.target), jnp.asarray(drafts.draft))
    return last, np.asarray(residual)


@dataclasses.dataclass
class Tables:
    """Distributions p and q over a small vocabulary, random for every text."""

    seed: int
    vocab: int = 3
    zeros: float = 0.0  # share of tokens that have no probability
    tilt: float = 1.0  # how much q differs from p: p^(1 - tilt) times random numbers ^ tilt
    dtype: type = np.float64

    def __post_init__(self):
        self.known = {}

    def __call__(self, text: tuple[int, ...]):
        if text not in self.known:
            rng = np.random.default_rng([self.seed, len(text), *text])
            p, other = rng.dirichlet(np.ones(self.vocab), 2)
            q = p ** (1 - self.tilt) * other**self.tilt
            for probs in (p, q):
                probs[1:][rng.random(self.vocab - 1) < self.zeros] = 0
            self.known[text] = tuple((x / x.sum()).astype(self.dtype) for x in (p, q))
        return self.known[text]

    def drafts(self, text: tuple[int, ...], k: int, length: Callable) -> Drafts:
        """Every draft of k tokens after a text, of which length(tokens) are verified."""
        every = list(itertools.product(range(self.vocab), repeat=k))
        probs = np.array([[self(text + x[:i]) for i in range(k + 1)] for x in every])
        target, draft = probs[:, :, 0], probs[:, :, 1]
        tokens = np.array(every, int).reshape(len(every), k)
        drawn = np.take_along_axis(draft[:, :k], tokens[..., None], axis=2)[..., 0]
        counts = np.array([min(k, length(x)) for x in every])
        beyond = np.arange(k + 1) >= counts[:, None]
        weights = np.prod(drawn.astype(np.float64), axis=1)
        return Drafts(tokens, weights, counts, target, np.where(beyond[..., None], 0, draft))

    def joint(self, text: tuple[int, ...], n: int) -> np.ndarray:
        """The target's distribution of the next n tokens."""
        if n == 0:
            return np.ones(())
        p = self(text)[0].astype(np.float64)
        return np.stack([p[x] * self.joint((*text, x), n - 1) for x in range(self.vocab)])


def emitted(tables: Tables, n: int, drafter: Callable, verify=by_block):
    """The distribution of the first n tokens that steps emit.

    Args:
        drafter: drafter(text, accepted) is k and `length` of the next step's drafts, of which
            the last step accepted `accepted`.
    """
    known = {}

    def after(text, accepted, n):
        if (key := (text, accepted, n)) in known or n == 0:
            return known.get(key, np.ones(()))
        k, length = drafter(text, accepted)
        drafts = tables.drafts(text, k, length)
        last, residual = verify(drafts)
        total = np.zeros((tables.vocab,) * n)
        for x, weight, stops, rest in zip(
            drafts.tokens, drafts.weights, last, residual, strict=True
        ):
            for i in np.flatnonzero(stops * weight > 0):
                stop = weight * stops[i]
                if i >= n:
                    total[tuple(x[:n])] += stop
                    continue
                start = tuple(int(token) for token in x[:i])
                for y in np.flatnonzero(rest[i]):
                    rest_of_it = after((*text, *start, int(y)), int(i), n - i - 1)
                    total[(*start, y)] += stop * float(rest[i, y]) * rest_of_it
        known[key] = total
        return total

    return after((), 0, n)


def error(tables: Tables, n: int, drafter: Callable, verify=by_block) -> float:
    return float(np.abs(emitted(tables, n, drafter, verify) - tables.joint((), n)).max())


def always(k: int, length: Callable | None = None):
    """A drafter of k tokens, of which length(tokens) are verified."""
    return lambda text, accepted: (k, length or (lambda x: k))


def through_first(token: int):
    """Ends drafts behind the first such token, as behind an end token."""
    return lambda x: x.index(token) + 1 if token in x else len(x)


def before_first(token: int):
    """A fault: ends drafts before the first such token."""
    return lambda x: x.index(token) if token in x else len(x)


DRAFTERS = {
    "none": always(0),
    "1": always(1),
    "3": always(3),
    "by acceptance": lambda text, accepted: (2 - min(accepted, 2), lambda x: 2),
    "by text": lambda text, accepted: (3 - len(text) % 3, lambda x: 3 - len(text) % 3),
    "through an end token": always(3, through_first(0)),
    "not after token 1": always(3, through_first(1)),
    "by the first token": always(3, lambda x: 1 + x[0]),
}
KINDS = {
    "random": {},
    "zeros": {"zeros": 0.4},
    "similar": {"tilt": 0.2},
    "equal": {"tilt": 0.0},
    "two tokens": {"vocab": 2},
}


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", KINDS)
def test_emitted_tokens_have_exactly_the_targets_joint_distribution(kind):
    for seed, drafter in enumerate(DRAFTERS.values()):
        assert error(Tables(seed, **KINDS[kind]), 4, drafter) < 1e-14


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("verify", [by_block, token_by_token])
def test_drafts_that_are_cut_because_of_the_tokens_they_lose_bias_the_output(verify):
    for length in (before_first(0), lambda x: 1 + (x[1] == 2)):
        assert max(error(Tables(seed), 3, always(2, length), verify) for seed in range(3)) > 0.01


@pytest.mark.parametrize("tilt", [0.0, 1e-7, 1e-3, 1.0, 40.0])
def test_float32_changes_probabilities_by_rounding_alone(tilt):
    """At the largest tilt q is as small as 1e-30 where p is not."""
    for seed in range(2):
        tables = Tables(seed, vocab=4, tilt=tilt, dtype=np.float32)
        assert error(tables, 3, always(3)) < 2e-6


def expected_length(drafts: Drafts, verify) -> float:
    last, _ = verify(drafts)
    return float(drafts.weights @ last @ np.arange(last.shape[1]))


def best_length(tables: Tables, k: int) -> float:
    """The largest mean number of accepted tokens of any exact verification, by linear programming.

    The variables are the probabilities that a draft is drawn, i of its tokens are accepted, and
    token y follows. If tokens of the target follow these, all k + 1 must have its distribution.
    """
    drafts, vocab = tables.drafts((), k, lambda x: k), range(tables.vocab)
    joint = tables.joint((), k + 1)
    names = list(itertools.product(range(len(drafts.tokens)), range(k + 1), vocab))
    equations = sparse.lil_matrix((len(drafts.tokens) + joint.size, len(names)))
    place = lambda text: np.ravel_multi_index(text, joint.shape)
    for column, (draft, i, y) in enumerate(names):
        equations[draft, column] = 1
        start = (*map(int, drafts.tokens[draft, :i]), y)
        following = tables.joint(start, k - i)
        for rest in itertools.product(vocab, repeat=k - i):
            equations[len(drafts.tokens) + place(start + rest), column] += following[rest]
    gains = np.array([i for _, i, _ in names])
    right = np.concatenate([drafts.weights, joint.ravel()])
    found = optimize.linprog(-gains, A_eq=equations.tocsr(), b_eq=right, method="highs")
    assert found.success
    return -found.fun


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("kind", KINDS)
def test_no_exact_verification_accepts_more(kind):
    tables = Tables(5, **KINDS[kind])
    drafts = tables.drafts((), 2, lambda x: 2)
    assert expected_length(drafts, by_block) == pytest.approx(best_length(tables, 2), abs=1e-9)
    for k in (1, 3):
        drafts = tables.drafts((), k, len)
        gain = expected_length(drafts, by_block) - expected_length(drafts, token_by_token)
        assert gain == pytest.approx(0, abs=1e-12) if k == 1 else gain > -1e-12


@pytest.mark.usefixtures("float64")
def test_longer_drafts_accept_their_first_tokens_as_often():
    """So acceptance of long drafts tells that of shorter ones, as policies take it to do."""
    tables = Tables(6)
    shares = []
    for k in (3, 2):
        drafts = tables.drafts((), k, len)
        at_least = np.cumsum(by_block(drafts)[0][:, ::-1], axis=1)[:, ::-1]
        shares.append(drafts.weights @ at_least)
    np.testing.assert_allclose(shares[0][:3], shares[1], rtol=1e-12)


@pytest.mark.usefixtures("float64")
def test_the_gain_over_single_tokens_is_that_of_the_papers_example():
    tables = Tables(0, vocab=2)
    tables.known = {
        text: (np.array([1, 2]) / 3, np.array([2, 1]) / 3) for text in [(), (0,), (1,)]
    } | {text: (np.ones(2) / 2,) * 2 for text in itertools.product((0, 1), repeat=2)}
    drafts = tables.drafts((), 2, lambda x: 2)
    assert expected_length(drafts, token_by_token) == pytest.approx(10 / 9)
    assert expected_length(drafts, by_block) == pytest.approx(11 / 9)


def unscaled(drafts: Drafts):
    """A fault: the residual of p, not of w_i p."""
    residual = residual_distribution(jnp.asarray(drafts.target), jnp.asarray(drafts.draft))
    return by_block(drafts)[0], np.asarray(residual)


def first_stop(drafts: Drafts):
    """A fault: the tokens before the first place that fails are accepted."""
    stops, residual = stops_of(drafts)
    accepted = np.cumprod(stops, axis=1)
    return accepted - np.pad(accepted[:, 1:], ((0, 0), (0, 1))), residual


def widest(drafts: Drafts):
    """A fault: places behind short drafts count too."""
    return by_block(drafts._replace(counts=np.full_like(drafts.counts, drafts.tokens.shape[1])))


def unlimited(drafts: Drafts):
    """A fault: w_i without the minimum."""

    def prefix(p, q):
        ratios = jnp.cumprod(p / jnp.maximum(q, 1e-300), axis=1)
        return jnp.pad(ratios, ((0, 0), (1, 0)), constant_values=1)

    return by_block(drafts, (prefix, stopping_probabilities))


def unrelated(drafts: Drafts):
    """A fault: h_i without 1 - w_i."""
    stops = lambda prefix, masses: jnp.where(masses > 0, jnp.ones_like(prefix), 0)
    return by_block(drafts, (prefix_probabilities, stops))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("fault", [unscaled, first_stop, widest, unlimited, unrelated])
def test_faults_are_detected(fault):
    drafter = always(3, lambda x: 1 + x[0])
    assert max(error(Tables(seed), 3, drafter, fault) for seed in range(3)) > 1e-3


# The same in the step


SAMPLES, PLACES, VOCAB = 300, 4, 9


def step_inputs():
    """Random logits of samples with up to 3 draft tokens, which ids 0 to 6 can be."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1, (SAMPLES, PLACES, VOCAB)).astype(np.float32)
    draft_logits = logits[:, :-1, :-2] + rng.normal(0, 0.7, (SAMPLES, PLACES - 1, VOCAB - 2))
    probs = np.exp(draft_logits) / np.exp(draft_logits).sum(axis=2, keepdims=True)
    tokens = (probs.cumsum(axis=2) < rng.random((SAMPLES, PLACES - 1, 1))).sum(axis=2)
    counts = rng.integers(0, PLACES, SAMPLES)
    draft = Draft(*(jnp.asarray(x, jnp.int32) for x in (tokens, counts)), jnp.float32(probs))
    unlimited = dict.fromkeys(field.name for field in dataclasses.fields(emsjax.Sampling))
    temperature = jnp.asarray(rng.choice([0, 0.7, 1.0], SAMPLES), jnp.float32)
    return logits, draft, emsjax.Sampling(**unlimited | {"temperature": temperature})


def expected_verdict(logits, draft: Draft, s: int, temperature: float, bits):
    """The accepted tokens and the next one by the paper's formulas, in float64.

    None for the next one: two candidates are nearly tied.
    """
    tokens, count = np.asarray(draft.tokens[s]), int(draft.counts[s])
    if temperature == 0:
        likeliest = logits[s].argmax(axis=1)
        accepted = next((i for i in range(count) if tokens[i] != likeliest[i]), count)
        return accepted, likeliest[accepted]
    p = np.exp(np.float64(logits[s]) / temperature)
    p /= p.sum(axis=1, keepdims=True)
    q = np.pad(np.float64(draft.probs[s]), ((0, 1), (0, 2)))
    q[count:] = 0
    prefix, accepted, left = 1.0, 0, p[0] - q[0]
    for i in range(1, count + 1):
        prefix = min(1, prefix * p[i - 1, tokens[i - 1]] / q[i - 1, tokens[i - 1]])
        rest = prefix * p[i] - q[i]
        mass = np.maximum(rest, 0).sum()
        if bits.uniforms[s, i] < (prefix if i == count else mass / (mass + 1 - prefix)):
            accepted, left = i, rest
    noise = np.asarray(jax.random.gumbel(bits.keys[s, accepted], (VOCAB,)))
    scores = np.where(left > 0, np.log(np.maximum(left, 1e-30)) + noise, -np.inf)
    order = np.argsort(-scores)
    return accepted, order[0] if scores[order[0]] - scores[order[1]] > 1e-4 else None


def test_verdicts_of_a_step_are_those_of_the_papers_algorithm():
    logits, draft, sampling = step_inputs()
    positions = jnp.tile(jnp.arange(5, 5 + PLACES), (SAMPLES, 1))
    keys = jax.random.split(jax.random.key(0), SAMPLES)
    bits = random_bits(keys, positions, draft.counts, drawn=True)
    rows = pack(jnp.zeros(SAMPLES, jnp.int32), draft.counts + 1, SAMPLES * PLACES)
    packed = rows.gather(jnp.asarray(logits))
    found = jax.jit(judge)(packed, rows, draft, bits, sampling)
    found = rows.scatter(found, PLACES)
    lengths = accepted_counts(found.accepted[:, :-1], draft.counts)
    compared = 0
    for s in range(SAMPLES):
        expected = expected_verdict(logits, draft, s, float(sampling.temperature[s]), bits)
        assert int(lengths[s]) == expected[0]
        assert found.tokens[s, : lengths[s]].tolist() == draft.tokens[s, : lengths[s]].tolist()
        if expected[1] is not None:
            compared += 1
            assert int(found.tokens[s, lengths[s]]) == expected[1]
    assert compared > 0.9 * SAMPLES


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Uneven:
    """Draws tokens 0, 1 and 2 of four with these probabilities.

    Attributes:
        length: how many of the drawn tokens [b, k] are proposed; None: as many as asked for.
    """

    length: Callable | None = None
    max_draft_tokens = 3
    probs = (0.5, 0.3, 0.2)

    def init(self, prompts, prompt_lengths, max_len):
        return ()

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        probs = jnp.array(self.probs)
        of_each = jax.vmap(lambda key: jax.random.choice(key, len(probs), p=probs))
        drawn = [of_each(position_keys(keys, lengths + i, Purpose.DRAFT)) for i in range(3)]
        claimed = jnp.broadcast_to(probs, (len(lengths), 3, len(probs)))
        drawn = jnp.stack(drawn, 1).astype(jnp.int32)
        if self.length is not None:
            draft_lengths = jnp.minimum(draft_lengths, self.length(drawn))
        return emsjax.Draft(drawn, draft_lengths, claimed), state


def bits_of_positions(keys, positions, counts, *, drawn):
    """A fault: uniform numbers that belong to a position and not to a step."""
    bits = random_bits(keys, positions, counts, drawn=drawn)
    of_column = lambda at: jax.vmap(jax.random.uniform)(position_keys(keys, at, Purpose.ACCEPTANCE))
    return bits._replace(uniforms=jax.vmap(of_column, 1, 1)(positions))


def confidences(drawn):
    """The probability of each draft up to and including each token, as the drafter believes."""
    return jnp.cumprod(jnp.array(Uneven.probs)[drawn], axis=1)


def through_a_drop(drawn):
    """Drafts end behind the first token that is unlikely."""
    return 1 + leading(confidences(drawn) > 0.25)


def before_a_drop(drawn):
    """A fault: drafts end before the first token that is unlikely, which is drawn already."""
    return leading(confidences(drawn) > 0.25)


def by_rank(drawn):
    """A fault: the step verifies the likeliest tokens, as many as the batch has samples."""
    ranked = jnp.sort(confidences(drawn).ravel())[-len(drawn)]
    return jnp.sum(confidences(drawn) >= ranked, axis=1, dtype=jnp.int32)


def check(drafter):
    options = {"sampling": emsjax.Sampling(1.0), "key": jax.random.key(1), "new_tokens": 2}
    model = shallow_model(vocab_size=4, init_std=0.1, pad_token_id=None)
    assert_same_distribution(model, drafter, [1, 2, 1], **options, samples=4096, batch_size=4096)


@pytest.mark.parametrize("length", [through_a_drop, before_a_drop, by_rank])
def test_lengths_that_peek_at_the_tokens_they_cut_are_detected(length):
    """The confidence of a token may decide about the tokens behind it, not about itself."""
    if length is through_a_drop:
        check(Uneven(length))
        return
    with pytest.raises(AssertionError, match="position 0 of the new tokens has another distrib"):
        check(Uneven(length))


def test_bits_of_rejected_tokens_are_not_used_again(monkeypatch):
    """They are known to be large, so that few tokens would be accepted with them."""
    monkeypatch.setattr("emsjax.decode.step.random_bits", bits_of_positions)
    with pytest.raises(AssertionError, match="position 1 of the new tokens has another distrib"):
        check(Uneven(lambda drawn: 3))  # traced anew
