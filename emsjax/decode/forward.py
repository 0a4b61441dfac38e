"""What a step feeds the target: drafts that it verifies, and beside them prompts not cached yet.

A sample whose prompt is cached but for the last token is `ready`: it drafts and emits. Of the
others the prompts' next tokens are fed, those that wait longest first, as far as the step's rows
reach: of the static row counts the largest that they fill. Where all samples are ready the step is
one of verification alone.

Axis legend: see `emsjax.decode.pack`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from emsjax.decode.cache import BRANCHES_COMMIT, FreshRows, KeysValues
from emsjax.decode.kernels import Kernels
from emsjax.decode.layout import Layout
from emsjax.decode.pack import PackedRows, pack
from emsjax.decode.row_counts import prompt_row_counts, smallest_bucket
from emsjax.decode.verify import Verdict, judge, random_bits
from emsjax.drafters import Draft
from pallas_kernels.common.indexing import take, take_in_rows


class Fed(NamedTuple):
    """What came of a step's rows.

    Attributes:
        settled: what `settle` returned.
        prompt_counts: rows of each sample that hold its prompt.
        num_rows: of the bucket, padding included.
    """

    settled: Any
    prompt_counts: Int32[Array, "b"]
    num_rows: Int32[Array, ""]


class Settle(Protocol):
    """What becomes of the verdict and of the rows' keys and values; to be traced."""

    def __call__(
        self,
        verdict: Verdict,  # the target's, on every drafted token, [b, k1]
        fresh: KeysValues | FreshRows,
        rows: PackedRows,  # where these belong
        prompt_counts: Int32[Array, "b"],  # rows of each sample that hold its prompt
    ) -> Any: ...


def is_ready(state) -> Bool[Array, "b"]:
    """The active samples whose prompts are cached."""
    return state.active & (state.cache.lengths == state.lengths - 1)


def feed(
    model,
    state,
    draft: Draft,
    counts: Int32[Array, "b"],
    kernels: Kernels,
    layout: Layout,
    settle: Settle,
    *,
    num_sequences: Int32[Array, ""] | None,
) -> Fed:
    """One forward of the target, and what `settle` makes of it.

    Args:
        state: a `DecodeState`.
        draft: of the ready samples.
        counts: rows of each that verify its draft: one more than it has tokens; 0: not ready.
        settle: called in every branch where branches may write a cache; it commits.
        num_sequences: of each prompt, where prompts may be left to feed; None: they are cached.
    """
    batch, k = draft.tokens.shape
    last = take_in_rows(state.tokens, state.lengths[:, None] - 1)  # no prompt is empty
    block = jnp.concatenate([last, draft.tokens], axis=1)  # [b, k1]
    bits = random_bits(state.keys, state.lengths, draft, state.sampling)
    buckets = layout.row_counts(batch, k + 1)
    bucket = layout.smallest(buckets, counts)
    sizes, most, shares = buckets, buckets[-1], jnp.zeros_like(counts)
    if num_sequences is not None:
        more = prompt_row_counts(batch, k + 1, state.tokens.shape[1])
        sizes, most = buckets + more, max(buckets[-1], more[-1])
        unread, verifying = unread_prompts(state, num_sequences), jnp.sum(counts)
        size = prompt_bucket(more, verifying, jnp.sum(unread))
        shares = prompt_shares(unread, state.sequence_ids, take(jnp.array(more), size) - verifying)
        bucket = jnp.where(jnp.any(unread > 0), len(buckets) + size, bucket)

    def verify(num_rows: int):
        rows = layout.pack(state.cache.lengths, counts, num_rows, num_rows)
        hidden, fresh = run(rows.gather(block), rows, max_rows_per_sample=k + 1)
        verdict = judge(model.logits(hidden), rows, draft, bits, state.sampling)
        return rows.scatter(verdict, k + 1), fresh, rows

    def verify_and_fill(num_rows: int):
        rows = pack(state.cache.lengths, counts + shares, num_rows)
        of_prompt = take(state.tokens, rows.samples, rows.positions)
        token_ids = jnp.where(take(shares, rows.samples) > 0, of_prompt, rows.gather(block))
        hidden, fresh = run(token_ids, rows, max_rows_per_sample=None)
        # Of prompts nobody asks what comes next.
        verified = pack(state.cache.lengths, counts, buckets[-1])
        moved = take(rows.offsets - verified.offsets, verified.samples)
        hidden = take(hidden, jnp.clip(jnp.arange(buckets[-1]) + moved, 0, num_rows - 1))
        verdict = judge(model.logits(hidden), verified, draft, bits, state.sampling)
        return verified.scatter(verdict, k + 1), fresh, rows

    def run(token_ids, rows: PackedRows, max_rows_per_sample: int | None):
        return model(
            token_ids,
            rows,
            state.cache,
            attention=kernels.attention,
            max_rows_per_sample=max_rows_per_sample,
        )

    forwards: list[Callable] = [functools.partial(verify, size) for size in buckets]
    if num_sequences is not None:
        forwards += [functools.partial(verify_and_fill, size) for size in more]
    num_rows = take(jnp.asarray(sizes, jnp.int32), bucket)

    def settled(forward: Callable):
        return settle(*forward(), shares)

    def of_one_shape(forward: Callable) -> tuple[Verdict, KeysValues]:
        verdict, fresh, _ = forward()
        return verdict, fresh.keys_values(most)  # a copy

    if BRANCHES_COMMIT or len(sizes) == 1:
        branches = [functools.partial(settled, forward) for forward in forwards]
        return Fed(lax.switch(bucket, branches), shares, num_rows)
    branches = [functools.partial(of_one_shape, forward) for forward in forwards]
    verdict, fresh = lax.switch(bucket, branches)
    rows = layout.pack(state.cache.lengths, counts + shares, most, num_rows)
    return Fed(settle(verdict, fresh, rows, shares), shares, num_rows)


def unread_prompts(state, num_sequences: Int32[Array, ""]) -> Int32[Array, "b"]:
    """Tokens of each prompt that are still to be cached.

    Of a prompt's sequences the first is fed; the others are to copy its cache.
    """
    unread = jnp.where(state.active, state.lengths - 1 - state.cache.lengths, 0)
    prompts, ids = state.sequence_ids // num_sequences, state.sequence_ids
    earlier = (ids < ids[:, None]) & (prompts == prompts[:, None]) & (unread > 0)
    return jnp.where(jnp.any(earlier, axis=1), 0, unread)


def prompt_bucket(
    sizes: tuple[int, ...], verifying: Int32[Array, ""], unread: Int32[Array, ""]
) -> Int32[Array, ""]:
    """Which of `sizes` a step has that feeds prompts beside so many rows of drafts.

    The smallest that holds all `unread` tokens, or the last. Rather than pad it a step takes the
    one before, and leaves the rest to the next, which has more to feed then; unless that would
    be most: of what waits a quarter is fed at least.
    """
    size = jnp.minimum(smallest_bucket(sizes, verifying + unread), len(sizes) - 1)
    rows = jnp.array(sizes, jnp.int32)
    before = jnp.maximum(size - 1, 0)
    padded = take(rows, size) > verifying + unread
    return jnp.where(padded & (4 * (take(rows, before) - verifying) >= unread), before, size)


def prompt_shares(
    unread: Int32[Array, "b"], sequence_ids: Int32[Array, "b"], room: Int32[Array, ""]
) -> Int32[Array, "b"]:
    """Tokens of each prompt to feed: `room` in all, the earliest sequences' first."""
    earlier = sequence_ids < sequence_ids[:, None]  # [b, b]
    before = jnp.sum(jnp.where(earlier, unread, 0), axis=1, dtype=jnp.int32)
    return jnp.clip(room - before, 0, unread)
