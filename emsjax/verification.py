"""Which draft tokens stand: pure functions of what was drafted and what the target says.

Tokens that were not drawn (greedy decoding, deterministic drafters) are accepted if they
are the target's own: the likeliest, or the one drawn from the row's key. The emitted
tokens are then those of plain decoding. Tokens drawn from a draft distribution q are
accepted by rejection sampling against the target's p: with probability min(1, p/q), and
what takes the place of a rejected one is drawn from the residual, so that what is emitted
has distribution p exactly (arXiv 2211.17192, theorem 1; arXiv 2302.01318).
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32


def acceptance_probability(
    target_probs: Float[Array, "*n v"], draft_probs: Float[Array, "*n v"]
) -> Float[Array, "*n v"]:
    """min(1, p/q) of every token: how likely it stands if it was drafted.

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
    """max(0, p - q), normalised: the distribution of what replaces a rejected token.

    Nothing is ever rejected where q covers p; p itself stands there.

    >>> p, q = jnp.array([0.5, 0.5, 0.0]), jnp.array([0.25, 0.5, 0.25])
    >>> print(residual_distribution(p, q))
    [1. 0. 0.]
    """
    excess = jnp.maximum(target_probs - draft_probs, 0)
    total = jnp.sum(excess, axis=-1, keepdims=True)
    return jnp.where(total > 0, excess / jnp.where(total > 0, total, 1), target_probs)


def accepted_counts(
    accepted: Bool[Array, "b k"], draft_counts: Int32[Array, "b"]
) -> Int32[Array, "b"]:
    """Length of each sample's longest drafted prefix of accepted tokens."""
    return leading(accepted & (jnp.arange(accepted.shape[1]) < draft_counts[:, None]))


def leading(true: Bool[Array, "b n"]) -> Int32[Array, "b"]:
    """How many values come before each row's first false one."""
    n = true.shape[1]
    return jnp.min(jnp.where(true, n, jnp.arange(n)), axis=1, initial=n).astype(jnp.int32)


def first_end(
    tokens: Int32[Array, "b n"], counts: Int32[Array, "b"], end_token_ids: Int32[Array, "m"]
) -> tuple[Int32[Array, "b"], Bool[Array, "b"]]:
    """Cut each sample's first counts[s] tokens behind the first end token.

    Returns:
        The remaining counts, the end token included, and whether there is one.
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
    """How much of a draft is worth verifying.

    Cut at `limits`, before the first id outside the vocabulary, and behind the
    first end token.
    """
    valid_counts = leading((tokens >= 0) & (tokens < vocab_size))
    counts = jnp.minimum(jnp.minimum(counts, limits), valid_counts)
    return first_end(tokens, jnp.maximum(counts, 0), end_token_ids)[0]
