"""Which draft tokens are accepted: pure functions of the draft and the target's output.

Tokens that were not drawn (greedy decoding, deterministic drafters) are accepted if they
equal the target's own: the likeliest token, or the one drawn from the row's key. The emitted
tokens are then those of plain decoding. Tokens drawn from a draft distribution q are
verified by rejection sampling against the target's p: a token is accepted with probability
min(1, p/q), and a rejected one is replaced by a token drawn from the residual. The emitted
tokens then have distribution p exactly (arXiv 2211.17192, theorem 1; arXiv 2302.01318).
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

SUM_TOLERANCE = 1e-3


def acceptance_probability(
    target_probs: Float[Array, "*n v"], draft_probs: Float[Array, "*n v"]
) -> Float[Array, "*n v"]:
    """min(1, p/q) of every token: the probability that it is accepted if it was drafted.

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

    If q is at least p everywhere, nothing is ever rejected, and p itself is returned.

    >>> p, q = jnp.array([0.5, 0.5, 0.0]), jnp.array([0.25, 0.5, 0.25])
    >>> print(residual_distribution(p, q))
    [1. 0. 0.]
    """
    excess = jnp.maximum(target_probs - draft_probs, 0)
    total = jnp.sum(excess, axis=-1, keepdims=True)
    return jnp.where(total > 0, excess / jnp.where(total > 0, total, 1), target_probs)


def is_distribution(probs: Float[Array, "*n v"]) -> Bool[Array, "*n"]:
    """Whether the numbers are probabilities: none is negative, and they sum to 1.

    The sum may be off by `SUM_TOLERANCE`, which covers probabilities that were rounded. NaN and
    infinite numbers are not probabilities.

    >>> print(is_distribution(jnp.array([[0.5, 0.5], [0.5, 0.4], [1.5, -0.5]])))
    [ True False False]
    """
    total = jnp.sum(probs, axis=-1, dtype=jnp.float32)
    return (jnp.min(probs, axis=-1) >= 0) & (jnp.abs(total - 1) <= SUM_TOLERANCE)


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
