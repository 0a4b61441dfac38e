"""Scores given tokens: log-probabilities of tokens that are known already, over packed rows.

Axis legend: see `emsjax.decode.pack`; n = rows of a block that gets logits.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from emsjax.decode.base import ModelOutput
from emsjax.decode.cache import KVCache
from emsjax.decode.kernels import Kernels
from emsjax.decode.pack import AcceptedPath, PackedRows, pack
from emsjax.decode.row_counts import round_up_length
from emsjax.values import pytree
from pallas_kernels.common.indexing import take

LOGIT_ROWS = 256  # most rows whose logits exist at a time
# Static row counts of a call of the model. Larger ones compute hardly faster, and the last call of
# a group has more padding.
CHUNKS = (64, 256, 512)
MOST_WHOLE = 4096  # most rows of a call that feeds whole samples, which needs no cache
# Static bounds of a sample's rows in one call. Up to 64, attention in XLA serves all samples at
# once, at the cost of the bound for each; above, one after the other, which is slower.
ROW_BOUNDS = (16, 32, 64)
WHOLE_BOUNDS = (64, 128, 256, 512)  # of calls that feed whole samples


@pytree
class Scores:
    """The scores of samples' tokens; entries of tokens that are not scored are 0 and False.

    Attributes:
        logprobs: log-probability of each token, given all tokens before it.
        is_greedy: whether the token is the likeliest one.
    """

    logprobs: Float[Array, "b t"]
    is_greedy: Bool[Array, "b t"]

    @classmethod
    def none(cls, shape: tuple[int, int]) -> "Scores":
        """Scores of tokens of which none is scored yet."""
        return cls(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, bool))


def chunk_rows_for(num_rows: int) -> int:
    """Static rows of a call of the model, one of few, if `num_rows` are to be fed.

    It is the smallest that needs at most two calls, or the largest.
    """
    return next((rows for rows in CHUNKS if num_rows <= 2 * rows), CHUNKS[-1])


def whole_rows_for(longest: int) -> int | None:
    """Static rows of a call that feeds whole samples, one of few; None: the longest has too many.

    Args:
        longest: rows of the longest sample.
    """
    rows = max(CHUNKS[-1], round_up_length(longest))
    return rows if rows <= MOST_WHOLE else None


def whole_bound_for(longest: int) -> int | None:
    """Static bound of a sample's rows in a call that feeds whole samples; None: no bound."""
    return next((bound for bound in WHOLE_BOUNDS if longest <= bound), None)


def row_bound_for(most: int, slots: int, num_rows: int) -> int | None:
    """Static bound of a sample's rows in one call, one of few; None: no bound.

    Args:
        most: the most rows that a sample has in all calls together.
        slots: number of samples.
        num_rows: rows of a call, which half of the samples can fill within the bound.
    """
    if most > ROW_BOUNDS[-1] and slots * ROW_BOUNDS[-1] < num_rows:
        return None
    wanted = min(most, 2 * num_rows // slots)
    return next((bound for bound in ROW_BOUNDS if wanted <= bound), ROW_BOUNDS[-1])


@functools.partial(jax.jit, static_argnames=("batch", "max_len"))
def empty_cache(model: Any, *, batch: int, max_len: int) -> KVCache:
    """Returns the model's empty cache, made in one program."""
    return model.init_cache(batch, max_len)


@jax.jit
def fork_cache(cache: KVCache, samples: Int32[Array, "n"]) -> KVCache:
    """Returns the cache whose slot i starts as a copy of slot samples[i]."""
    return cache.fork(samples)


@functools.partial(
    jax.jit,
    static_argnames=("num_rows", "row_bound", "kernels"),
    donate_argnames=("cache",),
)
def score_tokens(
    model: Any,
    cache: KVCache,
    tokens: Int32[Array, "b t"],
    lengths: Int32[Array, "b"],
    first_scored: Int32[Array, "b"],
    *,
    num_rows: int,
    row_bound: int | None,
    kernels: Kernels,
) -> tuple[Scores, KVCache]:
    """Feeds tokens[s, cache.lengths[s] : lengths[s] - 1] and scores the tokens that they predict.

    Args:
        model: the model.
        cache: committed tokens of every sample, whose memory is reused.
        tokens: all tokens of each sample.
        lengths: number of tokens of each sample; 1: the slot is idle. The last token is scored
            and not fed.
        first_scored: index of the first token of each sample to score, above cache.lengths[s];
            lengths[s]: none, which computes no logits.
        num_rows: static rows of one call of the model.
        row_bound: static bound of a sample's rows in one call; None: no bound.
        kernels: attention and cache update.

    Returns:
        The scores, and the cache with the tokens that were fed.
    """
    ends = lengths - 1

    def advance(carry: tuple[Scores, KVCache]) -> tuple[Scores, KVCache]:
        scores, cache = carry
        # An idle slot's cache may hold tokens.
        left = jnp.clip(ends - cache.lengths, 0, row_bound)
        rows = pack(cache.lengths, left, num_rows)
        out = _feed(model, cache, tokens, rows, row_bound, kernels)
        scores = _add_scores(scores, model, out.hidden, rows, tokens, first_scored)
        path = AcceptedPath.prefix(rows, rows.counts)
        return scores, cache.commit(out.fresh, rows, path, kernels.update)

    unfinished = lambda carry: jnp.any(carry[1].lengths < ends)
    return lax.while_loop(unfinished, advance, (Scores.none(tokens.shape), cache))


@functools.partial(jax.jit, static_argnames=("num_rows", "row_bound", "kernels"))
def score_whole(
    model: Any,
    cache: KVCache,
    tokens: Int32[Array, "b t"],
    lengths: Int32[Array, "b"],
    first_scored: Int32[Array, "b"],
    *,
    num_rows: int,
    row_bound: int | None,
    kernels: Kernels,
) -> Scores:
    """Feeds whole samples in one call of the model, which neither reads nor writes a cache.

    Args:
        cache: an empty cache of any length, for which attention asks.
        tokens, lengths, first_scored, row_bound, kernels: as for `score_tokens`.
        num_rows: static rows of the call, at least those of all samples together.
    """
    rows = pack(cache.lengths, lengths - 1, num_rows)
    out = _feed(model, cache, tokens, rows, row_bound, kernels)
    return _add_scores(Scores.none(tokens.shape), model, out.hidden, rows, tokens, first_scored)


def _feed(
    model: Any,
    cache: KVCache,
    tokens: Int32[Array, "b t"],
    rows: PackedRows,
    row_bound: int | None,
    kernels: Kernels,
) -> ModelOutput:
    """Calls the model for the tokens at the places of these rows."""
    token_ids = take(tokens, rows.samples, rows.positions)
    options = {"attention": kernels.attention, "max_rows_per_sample": row_bound}
    return model(token_ids, rows, cache, **options)


def _add_scores(
    scores: Scores,
    model: Any,
    hidden: Float[Array, "r e"],
    rows: PackedRows,
    tokens: Int32[Array, "b t"],
    first_scored: Int32[Array, "b"],
) -> Scores:
    """Adds the scores of the tokens that follow these rows' tokens, a block of rows at a time."""
    batch, num_rows = tokens.shape[0], hidden.shape[0]
    size = min(LOGIT_ROWS, num_rows)
    following = rows.positions + 1
    scored = (rows.segment_ids < batch) & (following >= take(first_scored, rows.samples))
    order = jnp.argsort(~scored, stable=True)  # the scored rows first
    samples = jnp.where(scored, rows.segment_ids, batch)

    def add(block: Int32[Array, ""], scores: Scores) -> Scores:
        # The last block may begin earlier, to stay inside the array, and repeat some rows.
        chosen = lax.dynamic_slice_in_dim(order, block * size, size)
        logits = model.logits(take(hidden, chosen))  # [n, v]
        targets = take(tokens, take(rows.samples, chosen), take(following, chosen))
        at_target = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        logprobs = at_target - jax.nn.logsumexp(logits, axis=1)
        is_greedy = jnp.argmax(logits, axis=1) == targets
        place = take(samples, chosen), take(following, chosen)
        put = lambda old, new: old.at[place].set(new, mode="drop", wrap_negative_indices=False)
        return Scores(put(scores.logprobs, logprobs), put(scores.is_greedy, is_greedy))

    num_blocks = -(-jnp.sum(scored, dtype=jnp.int32) // size)
    return lax.fori_loop(0, num_blocks, add, scores)
