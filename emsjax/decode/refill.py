"""Slots that refill on the device: who finishes is put aside, and the next prompt takes its place.

The host stages prompts and takes what has finished, many at a time; between that the loop turns
slots over by itself, in the step after a sequence's end. Prompts are fed beside the drafts of the
other slots: see `emsjax.decode.forward`.

Axis legend: see `emsjax.decode.pack`; q = sequences that wait, f = places for finished ones.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Key

from emsjax.decode.base import admitted, choose
from emsjax.decode.step import DecodeState, Flat, step
from emsjax.drafters import Drafter
from emsjax.models.opt import OPT
from emsjax.policies.lengths import DraftLength, admitted_by_policy
from emsjax.sampling import Sampling
from pallas_kernels.common.indexing import take


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Waiting:
    """Sequences that wait for a slot, in the order in which they enter.

    Attributes:
        tokens: prompts, padded.
        prompt_lengths: their tokens.
        max_new_tokens: tokens that each may emit.
        sequence_ids: sequence i continues prompt i // num_sequences.
        num_sequences: sequences of each prompt.
        keys: random keys.
        sampling: one value for each, or None when all decode greedily.
        count: sequences that there are.
        taken: those of them that have entered.
    """

    tokens: Int32[Array, "q t"]
    prompt_lengths: Int32[Array, "q"]
    max_new_tokens: Int32[Array, "q"]
    sequence_ids: Int32[Array, "q"]
    num_sequences: Int32[Array, ""]
    keys: Key[Array, "q"]
    sampling: Sampling | None
    count: Int32[Array, ""]
    taken: Int32[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Finished:
    """Sequences that have finished in a call of the loop: places 0..count - 1.

    Attributes:
        tokens, logprobs, lengths, prompt_lengths, ended, sequence_ids: as in `DecodeState`.
        num_steps, num_drafted, num_accepted, accepted_histogram: as in `Counters`.
        count: how many there are.
        stored: slots whose last sequence is or was among them, or that had none.
        busy: slots that served a sequence, of all steps together.
    """

    tokens: Int32[Array, "f t"]
    logprobs: Float[Array, "f t"]
    lengths: Int32[Array, "f"]
    prompt_lengths: Int32[Array, "f"]
    ended: Bool[Array, "f"]
    sequence_ids: Int32[Array, "f"]
    num_steps: Int32[Array, "f"]
    num_drafted: Int32[Array, "f"]
    num_accepted: Int32[Array, "f"]
    accepted_histogram: Int32[Array, "f k1"]
    count: Int32[Array, ""]
    stored: Bool[Array, "b"]
    busy: Int32[Array, ""]

    @classmethod
    def places(cls, count: int, state: DecodeState) -> "Finished":
        """Room for `count` sequences of such a state."""
        empty = lambda x: jnp.zeros((count, *x.shape[1:]), x.dtype)
        return cls(
            **jax.tree.map(empty, rows_of(state)),
            count=jnp.zeros((), jnp.int32),
            stored=jnp.ones_like(state.active),
            busy=jnp.zeros((), jnp.int32),
        )


PER_SLOT = ("tokens", "logprobs", "lengths", "prompt_lengths", "ended", "sequence_ids")
COUNTED = ("num_steps", "num_drafted", "num_accepted", "accepted_histogram")


def rows_of(state: DecodeState) -> dict[str, Array]:
    """What is kept of each slot's sequence."""
    rows = {name: getattr(state, name) for name in PER_SLOT}
    return rows | {name: getattr(state.counters, name) for name in COUNTED}


@functools.partial(
    jax.jit,
    static_argnames=("attention_implementation",),
    donate_argnames=("state", "waiting", "finished"),
)
def refill_loop(
    model: "OPT | Flat",
    drafter: "Drafter | Flat | None",
    state: DecodeState,
    waiting: Waiting,
    finished: Finished,
    draft_length: DraftLength | None,
    max_steps: Int32[Array, ""],
    enough: Int32[Array, ""],
    *,
    attention_implementation: str | Callable | None,
) -> tuple[DecodeState, Waiting, Finished]:
    """Steps until nobody waits and `enough` slots are idle, `max_steps` at most.

    `finished` must have a place for every sequence that waits or decodes; what it held is lost.
    """
    model, drafter = (x.whole() if isinstance(x, Flat) else x for x in (model, drafter))
    first_call = state.counters.model_calls
    none = jnp.zeros((), jnp.int32)
    finished = dataclasses.replace(finished, count=none, busy=none)

    def unfinished(carry) -> Bool[Array, ""]:
        state, waiting, _ = carry
        idle = jnp.sum(~state.active, dtype=jnp.int32)
        more = (waiting.taken < waiting.count) | (idle < enough)
        return more & (state.counters.model_calls - first_call < max_steps)

    def turn(carry):
        return jnp.array(False), *turn_over(drafter, draft_length, *carry[1:])

    def advance(carry):
        # Once, or not at all; as a branch of `lax.cond` the cache would be copied.
        state, waiting, finished = carry
        start = (has_work(*carry), *carry)
        _, state, waiting, finished = lax.while_loop(lambda carry: carry[0], turn, start)
        busy = finished.busy + jnp.sum(state.active, dtype=jnp.int32)
        finished = dataclasses.replace(finished, busy=busy)
        state, _ = step(
            model,
            drafter,
            state,
            draft_length=draft_length,
            attention_implementation=attention_implementation,
            num_sequences=waiting.num_sequences,
        )
        return state, waiting, finished

    state, waiting, finished = lax.while_loop(unfinished, advance, (state, waiting, finished))
    return state, waiting, put_aside(state, finished)


def has_work(state: DecodeState, waiting: Waiting, finished: Finished) -> Bool[Array, ""]:
    """Whether `turn_over` may change anything."""
    enter = jnp.any(~state.active) & (waiting.taken < waiting.count)
    over = jnp.any(~state.active & ~finished.stored)
    return over | enter | jnp.any(slots_to_copy(state, waiting, state)[1])


def turn_over(
    drafter: Drafter | None,
    draft_length: DraftLength | None,
    state: DecodeState,
    waiting: Waiting,
    finished: Finished,
) -> tuple[DecodeState, Waiting, Finished]:
    """Finished sequences put aside, the next ones in their slots, cached prompts shared."""
    finished, before = put_aside(state, finished), state
    state, waiting = admit(drafter, draft_length, state, waiting)
    state = share_prompts(before, state, waiting)
    return state, waiting, dataclasses.replace(finished, stored=~state.active)


def put_aside(state: DecodeState, finished: Finished) -> Finished:
    """With what has finished and is not stored yet."""
    over = ~state.active & ~finished.stored
    places = finished.lengths.shape[0]
    at = jnp.where(over, finished.count + jnp.cumsum(over, dtype=jnp.int32) - 1, places)
    keep = lambda rows, of_slots: rows.at[at].set(
        of_slots, mode="drop", wrap_negative_indices=False
    )
    kept = {name: keep(getattr(finished, name), rows) for name, rows in rows_of(state).items()}
    count = finished.count + jnp.sum(over, dtype=jnp.int32)
    return dataclasses.replace(finished, **kept, count=count, stored=~state.active)


def admit(
    drafter: Drafter | None, draft_length: DraftLength | None, state: DecodeState, waiting: Waiting
) -> tuple[DecodeState, Waiting]:
    """The next sequences in idle slots, at their beginning, nothing of them cached."""
    idle = ~state.active
    entry = waiting.taken + jnp.cumsum(idle, dtype=jnp.int32) - 1
    fresh = idle & (entry < waiting.count)
    entry = jnp.clip(entry, 0, len(waiting.sequence_ids) - 1)

    def merge(rows, old):
        return jax.tree.map(lambda new, old: choose(fresh, take(new, entry), old), rows, old)

    tokens = merge(waiting.tokens, state.tokens)
    lengths = merge(waiting.prompt_lengths, state.lengths)
    drafter_state, policy_state = state.drafter_state, state.policy_state
    if drafter is not None:
        drafter_state = admitted(drafter, drafter_state, tokens, lengths, fresh)
    if draft_length is not None:
        k = state.counters.accepted_histogram.shape[1] - 1
        policy_state = admitted_by_policy(draft_length, policy_state, fresh, k)
    old = state.counters
    counters = {
        name: choose(fresh, jnp.zeros_like(x), x) for name, x in vars(old).items() if x.ndim
    }
    state = dataclasses.replace(
        state,
        tokens=tokens,
        lengths=lengths,
        prompt_lengths=merge(waiting.prompt_lengths, state.prompt_lengths),
        length_limits=merge(waiting.prompt_lengths + waiting.max_new_tokens, state.length_limits),
        active=state.active | fresh,
        ended=state.ended & ~fresh,
        sequence_ids=merge(waiting.sequence_ids, state.sequence_ids),
        keys=merge(waiting.keys, state.keys),
        sampling=merge(waiting.sampling, state.sampling),
        cache=dataclasses.replace(state.cache, lengths=jnp.where(fresh, 0, state.cache.lengths)),
        drafter_state=drafter_state,
        policy_state=policy_state,
        counters=dataclasses.replace(old, **counters),
    )
    taken = waiting.taken + jnp.sum(fresh, dtype=jnp.int32)
    return state, dataclasses.replace(waiting, taken=taken)


def share_prompts(before: DecodeState, state: DecodeState, waiting: Waiting) -> DecodeState:
    """The prompts of slots that have none copied from those that held them `before`."""
    # No slot that is copied from takes a copy of another prompt first: a prompt whose sequences
    # enter in this turn comes before all that are cached nowhere but in slots that decode.
    source, copied = slots_to_copy(before, waiting, state)
    cache = state.cache.copy_slots(source, copied)
    lengths = jnp.where(copied, state.lengths - 1, cache.lengths)
    return dataclasses.replace(state, cache=dataclasses.replace(cache, lengths=lengths))


def slots_to_copy(before: DecodeState, waiting: Waiting, state: DecodeState):
    """For each slot one that held its prompt `before`, and whether it is to be copied. [b], [b]"""
    prompt = lambda state: state.sequence_ids // waiting.num_sequences
    same = (prompt(state)[:, None] == prompt(before)) & has_prompt(before)  # [b, b]
    source = jnp.argmax(same, axis=1).astype(jnp.int32)
    return source, state.active & ~has_prompt(state) & jnp.any(same, axis=1)


def has_prompt(state: DecodeState) -> Bool[Array, "b"]:
    """The slots whose caches hold the prompt of their sequence, which may have finished."""
    return (state.sequence_ids >= 0) & (state.cache.lengths >= state.prompt_lengths - 1)
