"""Which draft tokens are accepted: pure functions of the draft and the target's output.

Tokens that were not drawn (greedy decoding, deterministic drafters) are accepted if they
equal the target's own: the likeliest token, or the one drawn from the row's key. The emitted
tokens are then those of plain decoding.

Tokens x_1 ... x_n that were drawn from draft distributions q are verified as one block against
the target's p, each conditioned on the tokens before:

    w_0 = 1,  w_i = min(1, w_{i-1} p(x_i) / q(x_i))
    m_i = sum over x of max(0, w_i p(x) - q(x)), where q = 0 after the last draft token
    h_i = m_i / (m_i + 1 - w_i)

The draft is accepted up to the last i at which a uniform number is below h_i, and the next token
is drawn in proportion to max(0, w_i p - q). Given x_1 ... x_i, at least i tokens are accepted with
probability w_i: this holds for i = n, where h_n = w_n, and then for each i before, as a draft that
goes on is accepted beyond i with probability w_i - m_i, and w_i - m_i + (1 - w_i + m_i) h_i = w_i.
So a token y follows the first i emitted ones with a probability in proportion to
q(y) w_{i+1} + max(0, w_i p(y) - q(y)) = w_i p(y): the emitted tokens have distribution p exactly,
and as a step says nothing about the tokens after its own, so have those of several steps.

On average no other exact verification of a block accepts more (arXiv 2403.10444); a block of one
token is accepted with probability min(1, p/q), as every token is in arXiv 2211.17192.

A draft's length may depend on its own tokens, if it ends after a token because of this one and
those before it: w_i and h_i of the places before stay as they are. A draft that is cut because of
the tokens that it loses biases the output, as it does if every token is verified by itself.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

SUM_TOLERANCE = 1e-3
UNROLLED = 16  # draft tokens for which no loop is compiled


def acceptance_probability(
    target_probs: Float[Array, "*n v"], draft_probs: Float[Array, "*n v"]
) -> Float[Array, "*n v"]:
    """min(1, p/q) of every token: the probability that it is accepted if it was drafted alone.

    >>> p, q = jnp.array([0.5, 0.5, 0.0]), jnp.array([0.25, 0.5, 0.25])
    >>> print(acceptance_probability(p, q))
    [1. 1. 0.]
    """
    drafted = draft_probs > 0
    ratio = target_probs / jnp.where(drafted, draft_probs, 1)
    return jnp.where(drafted, jnp.minimum(ratio, 1), (target_probs > 0).astype(ratio.dtype))


def residual_distribution(
    target_probs: Float[Array, "*n v"], draft_probs: Float[Array, "*n v"]
) -> Float[Array, "*n v"]:
    """max(0, p - q), normalised: the distribution of the token that replaces a rejected one.

    p may be a distribution times w_i, as after i tokens of a block. If q is at least p everywhere,
    nothing is ever rejected, and p itself is returned.

    >>> p, q = jnp.array([0.5, 0.5, 0.0]), jnp.array([0.25, 0.5, 0.25])
    >>> print(residual_distribution(p, q))
    [1. 0. 0.]
    """
    excess = jnp.maximum(target_probs - draft_probs, 0)
    total = jnp.sum(excess, axis=-1, keepdims=True)
    return jnp.where(total > 0, excess / jnp.where(total > 0, total, 1), target_probs)


def prefix_probabilities(
    target_probs: Float[Array, "b k"], draft_probs: Float[Array, "b k"]
) -> Float[Array, "b k1"]:
    """w_0 ... w_k: the probability that at least the first i tokens of a draft are accepted.

    Args:
        target_probs, draft_probs: p and q of the draft's tokens, given those before.

    >>> print(prefix_probabilities(jnp.array([[0.25, 0.5]]), jnp.array([[0.5, 0.25]])))
    [[1.  0.5 1. ]]
    """

    # Products stay finite: 0 times infinity would not be a number.
    ratios = target_probs / jnp.maximum(draft_probs, jnp.finfo(target_probs.dtype).tiny)

    def longer(before, ratio):
        after = jnp.minimum(before * ratio, 1)
        return after, after

    whole = jnp.ones_like(ratios, shape=ratios.shape[:1])
    _, after = lax.scan(longer, whole, ratios.T, unroll=UNROLLED)
    return jnp.pad(after.T, ((0, 0), (1, 0)), constant_values=1)


def stopping_probabilities(
    prefix_probs: Float[Array, "b k1"], residual_masses: Float[Array, "b k1"]
) -> Float[Array, "b k1"]:
    """h_0 ... h_k: the probability that i draft tokens are accepted if no more are.

    Args:
        prefix_probs: w_i, see `prefix_probabilities`.
        residual_masses: m_i, the sum of max(0, w_i p - q) after i draft tokens; NaN where the
            target has no distribution, so that the draft ends there.
    """
    total = residual_masses + 1 - prefix_probs
    # If nothing remains, all that follows is accepted.
    share = jnp.where(total > 0, residual_masses / jnp.where(total > 0, total, 1), 1)
    return jnp.where(jnp.isnan(residual_masses), prefix_probs, share)


def is_distribution(probs: Float[Array, "*n v"]) -> Bool[Array, "*n"]:
    """Whether the numbers are probabilities: none is negative, and they sum to 1.

    The sum may be off by `SUM_TOLERANCE`, which covers probabilities that were rounded. NaN and
    infinite numbers are not probabilities.

    >>> print(is_distribution(jnp.array([[0.5, 0.5], [0.5, 0.4], [1.5, -0.5]])))
    [ True False False]
    """
    total = jnp.sum(probs, axis=-1, dtype=jnp.float32)
    return (jnp.min(probs, axis=-1) >= 0) & (jnp.abs(total - 1) <= SUM_TOLERANCE)


def block_counts(
    prefix_probs: Float[Array, "b k1"],
    residual_masses: Float[Array, "b k1"],
    uniforms: Float[Array, "b k1"],
    draft_counts: Int32[Array, "b"],
) -> Int32[Array, "b"]:
    """Number of accepted tokens of each draft, verified as a block.

    Args:
        prefix_probs, residual_masses: see `stopping_probabilities`.
        uniforms: independent uniform numbers in [0, 1), used for no other block.
        draft_counts: tokens of each sample's draft; places behind them are ignored.
    """
    stops = uniforms < stopping_probabilities(prefix_probs, residual_masses)
    index = jnp.arange(stops.shape[1], dtype=jnp.int32)
    return jnp.max(jnp.where(stops & (index <= draft_counts[:, None]), index, 0), axis=1)


def accepted_counts(
    accepted: Bool[Array, "b k"], draft_counts: Int32[Array, "b"]
) -> Int32[Array, "b"]:
    """Number of accepted tokens before each sample's first rejected one, within its draft."""
    return leading(accepted & (jnp.arange(accepted.shape[1]) < draft_counts[:, None]))


def leading(true: Bool[Array, "b n"]) -> Int32[Array, "b"]:
    """Number of values before each row's first false one."""
    n = true.shape[1]
    return jnp.min(jnp.where(true, n, jnp.arange(n)), axis=1, initial=n).astype(jnp.int32)


def first_end(
    tokens: Int32[Array, "b n"], counts: Int32[Array, "b"], end_token_ids: Int32[Array, "m"]
) -> tuple[Int32[Array, "b"], Bool[Array, "b"]]:
    """Cut each sample's first counts[s] tokens after the first end token.

    Returns:
        The remaining counts, including the end token, and whether there is one.
    """
    index = jnp.arange(tokens.shape[1])
    is_end = jnp.any(tokens[..., None] == end_token_ids, axis=-1)
    is_end &= index < counts[:, None]
    through = jnp.min(jnp.where(is_end, index + 1, tokens.shape[1] + 1), axis=1, initial=2**30)
    ended = through <= counts
    return jnp.where(ended, through, counts).astype(jnp.int32), ended


def usable_counts(
    tokens: Int32[Array, "b k"],
    counts: Int32[Array, "b"],
    limits: Int32[Array, "b"],
    end_token_ids: Int32[Array, "m"],
    vocab_size: int,
) -> Int32[Array, "b"]:
    """Number of draft tokens to verify per sample.

    Drafts are cut at `limits`, before the first id outside the vocabulary, and after the
    first end token.
    """
    valid_counts = leading((tokens >= 0) & (tokens < vocab_size))
    counts = jnp.minimum(jnp.minimum(counts, limits), valid_counts)
    return first_end(tokens, jnp.maximum(counts, 0), end_token_ids)[0]
