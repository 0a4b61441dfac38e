"""Which draft tokens stand: pure functions of what was drafted and what the target says.

The target's own token is found for every row (the likeliest, or the one drawn
from the row's key), and a draft token is accepted if it is that token. Whatever
the drafter proposes, the emitted tokens are then the target's own: greedy
decoding and plain sampling under the same keys, token for token.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32


def accepted_counts(
    target_tokens: Int32[Array, "b k1"],
    draft_tokens: Int32[Array, "b k"],
    draft_counts: Int32[Array, "b"],
) -> Int32[Array, "b"]:
    """Length of each sample's longest drafted prefix that equals the target's tokens.

    target_tokens[s, i] is the target's choice after i draft tokens, so k1 = k + 1.
    """
    k = draft_tokens.shape[1]
    equal = draft_tokens == target_tokens[:, :k]
    equal &= jnp.arange(k) < draft_counts[:, None]
    return jnp.sum(jnp.cumprod(equal, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)


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
    valid = (tokens >= 0) & (tokens < vocab_size)
    valid_counts = jnp.sum(jnp.cumprod(valid, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    counts = jnp.minimum(jnp.minimum(counts, limits), valid_counts)
    return first_end(tokens, jnp.maximum(counts, 0), end_token_ids)[0]
