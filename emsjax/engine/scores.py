"""Scores given tokens: log-probabilities of tokens that are known already, over packed rows.

Axis legend: see `emsjax.decode.pack`; n = rows of a block that gets logits.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

import pallas_kernels
from emsjax.decode.base import ModelOutput
from emsjax.decode.cache import KVCache
from emsjax.decode.kernels import Kernels
from emsjax.decode.pack import AcceptedPath, PackedRows, pack
from emsjax.engine.forest import Forest, Shape
from emsjax.engine.memory import LOGIT_ROWS
from emsjax.values import pytree
from pallas_kernels.common.indexing import take

# Static row counts of a call of the model. Larger ones compute hardly faster, and the last call of
# a group has more padding.
CHUNKS = (64, 256, 512)
# Static bounds of a sample's rows in one call. Up to 64, attention in XLA serves all samples at
# once, at the cost of the bound for each; above, one after the other, which is slower.
ROW_BOUNDS = (16, 32, 64)


@pytree
class Scores:
    """The scores of tokens; entries of tokens that are not scored are 0 and False.

    Attributes:
        logprobs: log-probability of each token, given all tokens before it.
        is_greedy: whether the token is the likeliest one.
    """

    logprobs: Float[Array, "*tokens"]
    is_greedy: Bool[Array, "*tokens"]

    @classmethod
    def none(cls, shape: tuple[int, ...]) -> "Scores":
        """Scores of tokens of which none is scored yet."""
        return cls(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, bool))


def chunk_rows_for(num_rows: int) -> int:
    """Static rows of a call of the model, one of few, if `num_rows` are to be fed.

    It is the smallest that needs at most two calls, or the largest.
    """
    return next((rows for rows in CHUNKS if num_rows <= 2 * rows), CHUNKS[-1])


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


@functools.partial(jax.jit, static_argnames=("shape", "kernels"))
def score_forest(model: Any, forest: Forest, *, shape: Shape, kernels: Kernels) -> Scores:
    """Feeds whole trees in one call of the model, which neither reads nor writes a cache.

    Args:
        model: the model.
        forest: the trees.
        shape: the shape of the call.
        kernels: attention, one of this library's own.

    Returns:
        The scores of the forest's targets.
    """
    num_rows = shape.num_bins * shape.bin_rows
    cache = model.init_cache(shape.num_bins, 0)
    rows = pack(cache.lengths, forest.counts, num_rows)
    place = rows.within
    positions = forest.stems - forest.roots + place - forest.starts
    rows = dataclasses.replace(rows, positions=jnp.maximum(positions, 0))
    other = jnp.arange(shape.bin_rows)
    between = lambda first, end: (other >= first[:, None]) & (other < end[:, None])
    ancestors = between(forest.roots, forest.stems) | between(forest.starts, place + 1)
    attention = functools.partial(kernels.attention, ancestors=ancestors)
    options = {"attention": attention, "max_rows_per_sample": shape.bin_rows}
    hidden = model(forest.tokens, rows, cache, **options).hidden
    size = min(LOGIT_ROWS, num_rows)

    def add(block: Int32[Array, ""], scores: Scores) -> Scores:
        part = lambda x: lax.dynamic_slice_in_dim(x, block * size, size)
        found = _scores_of(model, take(hidden, part(forest.sources)), part(forest.targets))
        put = lambda old, new: lax.dynamic_update_slice_in_dim(old, new, block * size, 0)
        return jax.tree.map(put, scores, found)

    # Whole blocks, so that none is moved.
    num_blocks = -(-forest.num_targets // size)
    return lax.fori_loop(0, num_blocks, add, Scores.none(forest.targets.shape))


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
        targets = take(tokens, take(rows.samples, chosen), take(following, chosen))
        found = _scores_of(model, take(hidden, chosen), targets)
        place = take(samples, chosen), take(following, chosen)
        put = lambda old, new: old.at[place].set(new, mode="drop", wrap_negative_indices=False)
        return jax.tree.map(put, scores, found)

    num_blocks = -(-jnp.sum(scored, dtype=jnp.int32) // size)
    return lax.fori_loop(0, num_blocks, add, scores)


def _scores_of(model: Any, hidden: Float[Array, "n e"], targets: Int32[Array, "n"]) -> Scores:
    """Scores of tokens after the tokens with these final hidden states."""
    logits = model.logits(hidden)  # [n, v]
    at_target = jnp.take_along_axis(logits, targets[:, None], axis=1)
    # The target is the first of the largest ones: in one pass, which argmax is not.
    earlier = jnp.arange(logits.shape[1]) < targets[:, None]
    is_greedy = jnp.all(jnp.where(earlier, logits < at_target, logits <= at_target), axis=1)
    return Scores(at_target[:, 0] - pallas_kernels.log_sum_exp(logits), is_greedy)
