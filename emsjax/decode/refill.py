"""Slots that refill on the device: finished sequences are stored, waiting ones take their slots.

The host puts prompts into a queue and takes finished sequences out of it, many at a time. Between
the host's calls the loop refills slots itself, in the step after a sequence's end. A sample is
*ready* if all of its prompt except the last token is cached; ready samples draft and emit. In the
same steps the other samples are fed the next tokens of their prompts, the longest-waiting samples
first.

Axis legend: see `emsjax.decode.pack`; q = waiting sequences, f = places for finished ones.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from emsjax.decode.row_counts import smallest_bucket
from emsjax.decode.run import Run
from emsjax.decode.state import DecodeState, Sequences, admit
from emsjax.values import pytree
from pallas_kernels.common.indexing import take

PER_SLOT = (
    *("tokens", "logprobs", "top_tokens", "top_logprobs"),
    *("lengths", "prompt_lengths", "end", "sequence_ids"),
)
COUNTED = ("num_steps", "num_drafted", "num_accepted", "num_invalid", "accepted_histogram")


@pytree
class Finished:
    """Sequences that have finished in a call of the loop, at places 0..count - 1.

    Attributes:
        tokens, logprobs, top_tokens, top_logprobs, lengths, prompt_lengths, end, sequence_ids: as
            in `DecodeState`.
        num_steps, num_drafted, num_accepted, num_invalid, accepted_histogram: as in `Counters`.
        count: number of finished sequences.
        stored: slots whose last sequence is or was stored here, or that had none.
        busy: slots that served a sequence, summed over all steps.
    """

    tokens: Int32[Array, "f t"]
    logprobs: Float[Array, "f t"]
    top_tokens: Int32[Array, "f t n"]
    top_logprobs: Float[Array, "f t n"]
    lengths: Int32[Array, "f"]
    prompt_lengths: Int32[Array, "f"]
    end: Int32[Array, "f"]
    sequence_ids: Int32[Array, "f"]
    num_steps: Int32[Array, "f"]
    num_drafted: Int32[Array, "f"]
    num_accepted: Int32[Array, "f"]
    num_invalid: Int32[Array, "f"]
    accepted_histogram: Int32[Array, "f k1"]
    count: Int32[Array, ""]
    stored: Bool[Array, "b"]
    busy: Int32[Array, ""]

    @classmethod
    def places(cls, count: int, state: DecodeState) -> "Finished":
        """Room for `count` sequences of such a state."""
        empty = lambda x: jnp.zeros((count, *x.shape[1:]), x.dtype)
        return cls(
            **jax.tree.map(empty, sequence_results(state)),
            count=jnp.zeros((), jnp.int32),
            stored=jnp.ones_like(state.active),
            busy=jnp.zeros((), jnp.int32),
        )


def sequence_results(state: DecodeState) -> dict[str, Array]:
    """The results of each slot's sequence; the first axis is the slots'."""
    results = {name: getattr(state, name) for name in PER_SLOT}
    return results | {name: getattr(state.counters, name) for name in COUNTED}


@pytree
class Queue:
    """Waiting and finished sequences.

    Attributes:
        sequences: the sequences in the order in which they enter.
        count: number of sequences in the queue.
        taken: number of sequences that have entered a slot.
        num_sequences: sequences per prompt.
        enough: number of idle slots at which the loop ends when no sequence waits.
        finished: has a place for every sequence that waits or decodes.
    """

    sequences: Sequences
    count: Int32[Array, ""]
    taken: Int32[Array, ""]
    num_sequences: Int32[Array, ""]
    enough: Int32[Array, ""]
    finished: Finished

    def emptied(self) -> "Queue":
        """The queue without the sequences that finished earlier."""
        none = jnp.zeros((), jnp.int32)
        finished = dataclasses.replace(self.finished, count=none, busy=none)
        return dataclasses.replace(self, finished=finished)

    def has_work(self, state: DecodeState) -> Bool[Array, ""]:
        """Whether a sequence waits, or too few slots are idle."""
        idle = jnp.sum(~state.active, dtype=jnp.int32)
        return (self.taken < self.count) | (idle < self.enough)


def turn_over(run: Run, state: DecodeState, queue: Queue) -> tuple[DecodeState, Queue]:
    """Stores finished sequences, admits waiting ones to their slots and shares cached prompts."""

    def turn(carry):
        before = carry[1]
        queue = put_aside(before, carry[2])
        state, queue = admit_waiting(run, before, queue)
        if _shares_prompts(run):
            state = share_prompts(before, state, queue)
        finished = dataclasses.replace(queue.finished, stored=~state.active)
        return jnp.array(False), state, dataclasses.replace(queue, finished=finished)

    # The loop runs at most once; a branch of `lax.cond` would copy the cache.
    start = (_has_turnover(run, state, queue), state, queue)
    _, state, queue = lax.while_loop(lambda carry: carry[0], turn, start)
    busy = queue.finished.busy + jnp.sum(state.active, dtype=jnp.int32)
    finished = dataclasses.replace(queue.finished, busy=busy)
    return state, dataclasses.replace(queue, finished=finished)


def _has_turnover(run: Run, state: DecodeState, queue: Queue) -> Bool[Array, ""]:
    """Whether `turn_over` would change anything."""
    enter = jnp.any(~state.active) & (queue.taken < queue.count)
    over = jnp.any(~state.active & ~queue.finished.stored)
    if not _shares_prompts(run):
        return over | enter
    return over | enter | jnp.any(slots_to_copy(state, state, queue.num_sequences)[1])


def put_aside(state: DecodeState, queue: Queue) -> Queue:
    """Stores the sequences that have finished and are not stored yet."""
    finished = queue.finished
    over = ~state.active & ~finished.stored
    places = finished.lengths.shape[0]
    at = jnp.where(over, finished.count + jnp.cumsum(over, dtype=jnp.int32) - 1, places)
    keep = lambda rows, new: rows.at[at].set(new, mode="drop", wrap_negative_indices=False)
    results = sequence_results(state)
    kept = {name: keep(getattr(finished, name), new) for name, new in results.items()}
    count = finished.count + jnp.sum(over, dtype=jnp.int32)
    finished = dataclasses.replace(finished, **kept, count=count, stored=~state.active)
    return dataclasses.replace(queue, finished=finished)


def admit_waiting(run: Run, state: DecodeState, queue: Queue) -> tuple[DecodeState, Queue]:
    """Admits the next waiting sequences to idle slots; none of their tokens are cached yet."""
    idle = ~state.active
    entry = queue.taken + jnp.cumsum(idle, dtype=jnp.int32) - 1
    fresh = idle & (entry < queue.count)
    entry = jnp.clip(entry, 0, queue.sequences.sequence_ids.shape[0] - 1)
    state = admit(run, state, queue.sequences.at(entry), fresh)
    taken = queue.taken + jnp.sum(fresh, dtype=jnp.int32)
    return state, dataclasses.replace(queue, taken=taken)


def _shares_prompts(run: Run) -> bool:
    """Whether a prompt's sequences copy its cache from each other.

    A drafter with `taps` has to see the rows of every slot's prompt.
    """
    return not run.taps


def share_prompts(before: DecodeState, state: DecodeState, queue: Queue) -> DecodeState:
    """Copies cached prompts to slots that lack theirs, from slots that held them `before`."""
    # No source slot is overwritten by another prompt first: a prompt whose sequences enter in this
    # turn comes before all prompts that are cached only in slots that decode.
    source, copied = slots_to_copy(before, state, queue.num_sequences)
    cache = state.cache.copy_slots(source, copied)
    lengths = jnp.where(copied, state.lengths - 1, cache.lengths)
    return dataclasses.replace(state, cache=dataclasses.replace(cache, lengths=lengths))


def slots_to_copy(before: DecodeState, state: DecodeState, num_sequences: Int32[Array, ""]):
    """For each slot, a slot that held its prompt `before`, and whether to copy it. [b], [b]"""
    prompt = lambda state: state.sequence_ids // num_sequences
    same = (prompt(state)[:, None] == prompt(before)) & has_prompt(before)  # [b, b]
    source = jnp.argmax(same, axis=1).astype(jnp.int32)
    return source, state.active & ~has_prompt(state) & jnp.any(same, axis=1)


def has_prompt(state: DecodeState) -> Bool[Array, "b"]:
    """The slots whose caches hold the prompt of their sequence, which may have finished."""
    return (state.sequence_ids >= 0) & (state.cache.lengths >= state.prompt_lengths - 1)


def unread_prompts(
    run: Run, state: DecodeState, num_sequences: Int32[Array, ""]
) -> Int32[Array, "b"]:
    """Tokens of each prompt that are still to be cached.

    The first of a prompt's sequences is fed; the others will copy its cache.
    """
    unread = jnp.where(state.active, state.lengths - 1 - state.cache.lengths, 0)
    if not _shares_prompts(run):
        return unread
    prompts, ids = state.sequence_ids // num_sequences, state.sequence_ids
    earlier = (ids < ids[:, None]) & (prompts == prompts[:, None]) & (unread > 0)
    return jnp.where(jnp.any(earlier, axis=1), 0, unread)


def prompt_bucket(
    sizes: tuple[int, ...], verifying: Int32[Array, ""], unread: Int32[Array, ""]
) -> Int32[Array, ""]:
    """Index of the row count of a step that feeds prompts in addition to `verifying` draft rows.

    It is the smallest that holds all `unread` tokens, or the last. If that would need padding, the
    step takes the next smaller one and leaves the rest to the next step, provided that at least a
    quarter of the unread tokens is fed.
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
