"""One step of speculative decoding, and the device loop around it.

state -> draft -> feed (cache is read-only) -> verify -> commit -> state
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Key

from emsjax.decode.base import (
    check_state,
    is_free,
    proposed,
    state_after_commit,
    with_policys_limit,
)
from emsjax.decode.cache import Cache
from emsjax.decode.forward import feed, is_ready
from emsjax.decode.kernels import resolve_kernels
from emsjax.decode.layout import UNPADDED, Layout
from emsjax.decode.verify import Verdict
from emsjax.drafters import Draft, Drafter
from emsjax.models.opt import OPT, check_is_model
from emsjax.policies.lengths import DraftLength, StepView, available_lengths
from emsjax.sampling import Purpose, Sampling, position_keys
from emsjax.verification import accepted_counts, first_end, usable_counts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counters:
    """What has happened so far; everything but the row totals is per sample."""

    num_steps: Int32[Array, "b"]  # steps the sample took part in
    num_drafted: Int32[Array, "b"]  # draft tokens fed to the target
    num_accepted: Int32[Array, "b"]
    accepted_histogram: Int32[Array, "b k1"]  # steps by number of accepted tokens, 0..k
    model_calls: Int32[Array, ""]
    real_rows: Int32[Array, ""]
    padding_rows: Int32[Array, ""]

    @classmethod
    def init(cls, batch: int, max_draft_tokens: int) -> "Counters":
        per_sample = lambda: jnp.zeros(batch, jnp.int32)
        total = lambda: jnp.zeros((), jnp.int32)
        histogram = jnp.zeros((batch, max_draft_tokens + 1), jnp.int32)
        return cls(per_sample(), per_sample(), per_sample(), histogram, total(), total(), total())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything the next step needs. `cache` holds `lengths - 1` tokens of a sample, or fewer of
    one whose prompt is still to be fed.

    Attributes:
        tokens: prompt and emitted tokens; arbitrary from `lengths` on.
        logprobs: of the emitted tokens, at the same places; arbitrary elsewhere.
        lengths: tokens of each sample so far, prompt included.
        prompt_lengths: tokens of each prompt.
        length_limits: the length at which a sample stops.
        active: samples that still decode.
        ended: samples that emitted an end token.
        sequence_ids: the sequence each slot serves; -1 for an idle slot.
        end_token_ids: tokens that end a sequence.
        keys: the random key of each slot's sequence.
        sampling: one value per slot, or None when all decode greedily.
        cache: the target model's committed K/V.
        drafter_state: whatever the drafter keeps.
        policy_state: whatever the draft-length policy keeps.
        counters: statistics.
    """

    tokens: Int32[Array, "b t"]
    logprobs: Float[Array, "b t"]
    lengths: Int32[Array, "b"]
    prompt_lengths: Int32[Array, "b"]
    length_limits: Int32[Array, "b"]
    active: Bool[Array, "b"]
    ended: Bool[Array, "b"]
    sequence_ids: Int32[Array, "b"]
    end_token_ids: Int32[Array, "m"]
    keys: Key[Array, "b"]
    sampling: Sampling | None
    cache: Cache
    drafter_state: Any
    policy_state: Any
    counters: Counters


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInfo:
    """What one step did: diagnostics, not needed by the next step.

    Attributes:
        tokens: the first `num_emitted` of each row were emitted; the others are arbitrary.
        num_drafted: draft tokens that were fed, per sample.
        num_accepted: those of them that stood.
        num_emitted: new tokens of each sample; 0 of those that had finished.
        num_rows: of the bucket, padding included.
    """

    tokens: Int32[Array, "b k1"]
    num_drafted: Int32[Array, "b"]
    num_accepted: Int32[Array, "b"]
    num_emitted: Int32[Array, "b"]
    num_rows: Int32[Array, ""]


def step(
    model: OPT,
    drafter: Drafter | None,
    state: DecodeState,
    *,
    draft_length: DraftLength | None = None,
    attention_implementation: str | Callable | None = None,
    layout: Layout = UNPADDED,
    num_sequences: Int32[Array, ""] | None = None,
) -> tuple[DecodeState, StepInfo]:
    """Draft, verify and commit once for every sample that decodes; pure, to be traced.

    Args:
        model: the target.
        drafter: the draft source; None: plain decoding.
        state: as `init_state` or an earlier step returned it.
        draft_length: a policy that limits drafting; None: the drafter's own limit.
        attention_implementation: as for `generate`.
        layout: what is padded, as it was for `init_state`.
        num_sequences: of each prompt, where prompts may be left to cache: the step then feeds
            of those, too. None: all are cached.

    Returns:
        The next state, and what the step did.

    Raises:
        ValueError: no model, an unknown attention, a `free` drafter that draws its tokens, or
            attention, a drafter or a policy that does not return what it should.
    """
    check_is_model("model", model)
    kernels = resolve_kernels(attention_implementation)
    drafter = with_policys_limit(drafter, draft_length)
    ready = state.active if num_sequences is None else is_ready(state)
    draft, drafter_state, view = _propose(model, drafter, state, draft_length, ready)
    draft_rows = jnp.where(ready, draft.counts, 0)
    counts = jnp.where(ready, draft_rows + 1, 0)
    k = draft.tokens.shape[1]

    def settle(verdict: Verdict, fresh, rows, prompt_counts) -> tuple[Emitted, Cache]:
        num_accepted = accepted_counts(verdict.accepted[:, :k], draft_rows)
        num_emitted = jnp.where(ready, num_accepted + 1, 0)
        num_emitted, ended = first_end(verdict.tokens, num_emitted, state.end_token_ids)
        # As many rows as are emitted, and prompts' own; rejected rows leave no trace.
        committed = num_emitted + prompt_counts
        cache = state.cache.commit(fresh, rows, committed, kernels.update)
        emitted = Emitted(verdict.tokens, verdict.logprobs, num_accepted, num_emitted, ended)
        return emitted, cache

    fed = feed(model, state, draft, counts, kernels, layout, settle, num_sequences=num_sequences)
    (tokens, logprobs, num_accepted, num_emitted, ended), cache = fed.settled
    lengths = state.lengths + num_emitted
    if drafter is not None:
        drafter_state = state_after_commit(drafter, drafter_state, lengths)
    policy_state = state.policy_state
    if draft_length is not None:
        after = draft_length.update(policy_state, view, draft_rows, num_accepted)
        check_state("the policy's", "update", policy_state, after)
        policy_state = after

    info = StepInfo(tokens, draft_rows, num_accepted, num_emitted, fed.num_rows)
    new_state = dataclasses.replace(
        state,
        tokens=_append(state.tokens, tokens, state.lengths, num_emitted),
        logprobs=_append(state.logprobs, logprobs, state.lengths, num_emitted),
        lengths=lengths,
        active=state.active & ~ended & (lengths < state.length_limits),
        ended=state.ended | ended,
        cache=cache,
        drafter_state=drafter_state,
        policy_state=policy_state,
        counters=_count(state, info, ready, fed.prompt_counts),
    )
    return new_state, info


@functools.partial(
    jax.jit,
    static_argnames=("attention_implementation", "layout"),
    donate_argnames=("state",),
)
def decode_loop(
    model: "OPT | Flat",
    drafter: "Drafter | Flat | None",
    state: DecodeState,
    draft_length: DraftLength | None,
    max_steps: Int32[Array, ""],
    *,
    attention_implementation: str | Callable | None,
    layout: Layout = UNPADDED,
) -> DecodeState:
    """Steps until all samples have finished, `max_steps` at most: one compiled call."""
    model, drafter = (x.whole() if isinstance(x, Flat) else x for x in (model, drafter))
    last_call = state.counters.model_calls + max_steps

    def unfinished(state: DecodeState) -> Bool[Array, ""]:
        return jnp.any(state.active) & (state.counters.model_calls < last_call)

    def advance(state: DecodeState) -> DecodeState:
        return step(
            model,
            drafter,
            state,
            draft_length=draft_length,
            attention_implementation=attention_implementation,
            layout=layout,
        )[0]

    return lax.while_loop(unfinished, advance, state)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Flat:
    """A pytree taken apart, for several calls of a compiled function.

    Each call takes its arguments apart, and of a model's Python objects that needs milliseconds
    in which the device has nothing to do.
    """

    leaves: list[Any]
    structure: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, tree: Any) -> "Flat":
        return cls(*jax.tree.flatten(tree))

    def whole(self) -> Any:
        return jax.tree.unflatten(self.structure, self.leaves)


class Emitted(NamedTuple):
    """What a step adds to each sample."""

    tokens: Int32[Array, "b k1"]  # arbitrary from `num_emitted` on
    logprobs: Float[Array, "b k1"]
    num_accepted: Int32[Array, "b"]
    num_emitted: Int32[Array, "b"]
    ended: Bool[Array, "b"]  # by a token that does


class _Proposal(NamedTuple):
    """What a step verifies, the drafter's new state, and what the policy saw."""

    draft: Draft
    drafter_state: Any
    view: StepView


def _propose(model, drafter, state, draft_length, ready) -> _Proposal:
    """The step's draft, cut to what can be used."""
    batch = state.lengths.shape[0]
    k = state.counters.accepted_histogram.shape[1] - 1
    remaining = state.length_limits - state.lengths
    limits = jnp.where(ready, jnp.minimum(remaining - 1, k), 0)
    view = StepView(ready, state.lengths, limits, drafted=is_free(drafter))
    if drafter is None:
        draft = Draft(jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32))
        return _Proposal(draft, (), view)

    def chosen(view: StepView):
        if draft_length is None:
            return view.available
        return available_lengths(draft_length, state.policy_state, view)

    if not view.drafted:
        limits = chosen(view)
    # Of a draft that is cut short a policy may learn more than what stood. No later step may draw
    # from the same bits again: whether it drafts could depend on what it would draw.
    keys = position_keys(state.keys, state.lengths, Purpose.STEP)
    arguments = (state.tokens, state.lengths, limits, keys, state.sampling)
    draft, drafter_state = proposed(
        drafter, state.drafter_state, *arguments, vocab_size=model.config.vocab_size
    )
    counts = usable_counts(
        draft.tokens, draft.counts, limits, state.end_token_ids, model.config.vocab_size
    )
    if view.drafted:
        if draft.probs is not None:
            # What is left of a draft must not depend on which tokens were drawn.
            raise ValueError("a drafter that draws its tokens (Draft.probs) cannot be `free`")
        view = view._replace(available=counts)
        counts = chosen(view)
    return _Proposal(dataclasses.replace(draft, counts=counts), drafter_state, view)


def _append(buffer, block, lengths, counts):
    """Write block[s, :counts[s]] into buffer[s] from lengths[s] on."""
    index = jnp.arange(block.shape[1])
    # Distinct out-of-range places keep the promise of unique indices.
    at = jnp.where(index < counts[:, None], lengths[:, None] + index, buffer.shape[1] + index)
    sample = jnp.arange(buffer.shape[0])[:, None]
    return buffer.at[sample, at].set(
        block, mode="drop", unique_indices=True, wrap_negative_indices=False
    )


def _count(state: DecodeState, info: StepInfo, ready, prompt_counts) -> Counters:
    old, decoding = state.counters, ready.astype(jnp.int32)
    k1 = old.accepted_histogram.shape[1]
    hit = (jnp.arange(k1) == info.num_accepted[:, None]) & ready[:, None]
    real_rows = jnp.sum(info.num_drafted + decoding + prompt_counts)
    return Counters(
        num_steps=old.num_steps + decoding,
        num_drafted=old.num_drafted + info.num_drafted,
        num_accepted=old.num_accepted + info.num_accepted,
        accepted_histogram=old.accepted_histogram + hit.astype(jnp.int32),
        model_calls=old.model_calls + 1,
        real_rows=old.real_rows + real_rows,
        padding_rows=old.padding_rows + info.num_rows - real_rows,
    )
