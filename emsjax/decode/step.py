"""One step of speculative decoding, and the device loop around it.

    state -> draft -> pack -> forward (the cache is only read) -> verify -> commit -> state

Axis legend: see `emsjax.decode.pack`.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from emsjax.decode import refill
from emsjax.decode.base import ObservedRows
from emsjax.decode.draft import propose
from emsjax.decode.pack import pack
from emsjax.decode.row_counts import prompt_row_counts
from emsjax.decode.run import Run
from emsjax.decode.state import Counters, DecodeState, StepInfo, is_ready
from emsjax.decode.verify import End, verify
from emsjax.returned import check_state
from emsjax.sampling import random_bits
from emsjax.trees import Tree
from pallas_kernels.common.indexing import take, take_in_rows


def advance(
    run: Run, state: DecodeState, num_sequences: Int32[Array, ""] | None = None
) -> tuple[DecodeState, StepInfo]:
    """Draft, verify and commit once for every sample that decodes.

    Args:
        num_sequences: sequences per prompt, if slots are refilled and prompts may not be cached
            yet; None: all prompts are cached.
    """
    k = state.counters.max_draft_tokens

    # Draft: each sample has its own number of tokens, 0 allowed.
    ready = state.active if num_sequences is None else is_ready(state)
    process = state.processing(run)
    draft, drafter_state, cached, view, num_invalid = propose(run, state, ready, process)
    tree, bits = None if draft.parents is None else Tree.of(draft.parents), None
    if state.sampling is not None:  # greedy decoding needs none
        positions = state.lengths[:, None] + (jnp.arange(k + 1) if tree is None else tree.depths)
        bits = random_bits(state.keys, positions, draft.counts, drawn=draft.probs is not None)
    counts = jnp.where(ready, draft.counts + 1, 0)
    last = take_in_rows(state.tokens, state.lengths[:, None] - 1)
    block = jnp.concatenate([last, draft.tokens], axis=1)  # [b, k1]
    plan = _plan_rows(run, state, counts, num_sequences)

    def body(num_rows: int, *, feeds_prompts: bool):
        # Pack: all rows lie on one axis. A sample verifies its draft or is fed its prompt.
        starts, prompt_counts = cached.lengths, plan.prompt_counts
        rows = run.layout.pack(starts, counts + prompt_counts, num_rows)
        if tree is not None:
            rows = tree.arrange(rows, prompt_counts if feeds_prompts else None)
        token_ids = rows.gather(block)
        if feeds_prompts:
            prompt_ids = take(state.tokens, rows.samples, rows.positions)
            token_ids = jnp.where(take(prompt_counts, rows.samples) > 0, prompt_ids, token_ids)

        # Forward: one call of the target for all rows, which reads the cache.
        out = run.model(
            token_ids,
            rows,
            cached,
            attention=run.kernels.attention,
            max_rows_per_sample=None if feeds_prompts else k + 1,
            taps=run.taps,
        )

        # Verify: how much of each draft is accepted, and the target's own next token.
        hidden, verified = out.hidden, rows
        if feeds_prompts:  # prompt rows need no logits: the others are packed once more
            verified = pack(starts, counts, plan.sizes[0][-1])
            moved = take(rows.offsets - verified.offsets, verified.samples)
            place = jnp.arange(verified.segment_ids.shape[0]) + moved
            hidden = take(hidden, jnp.clip(place, 0, num_rows - 1))
        verdict = verify(run, state, draft, bits, hidden, verified, process, tree)

        # Commit: only accepted rows are written, each sample at its own offset.
        path = verdict.path(rows, prompt_counts)
        cache = cached.commit(out.fresh, rows, path, run.kernels.update)
        if not run.taps:  # the drafter's state stays out of branches that do not change it
            return verdict, cache
        seen = ObservedRows(token_ids, path.segment_ids(rows), rows.positions)
        observed = run.drafter.observe(drafter_state, seen, out.taps)
        check_state("the drafter's", "observe", drafter_state, observed)
        return verdict, cache, observed

    verify_sizes, prompt_sizes = plan.sizes
    bodies = [functools.partial(body, n, feeds_prompts=False) for n in verify_sizes]
    bodies += [functools.partial(body, n, feeds_prompts=True) for n in prompt_sizes]
    verdict, cache, *observed = lax.switch(plan.index, bodies)

    # The drafter, the policy and the processors learn what was accepted.
    lengths = state.lengths + verdict.num_emitted
    if run.drafter is not None:
        drafter_state = observed[0] if run.taps else drafter_state
        committed = run.drafter.commit(drafter_state, lengths)
        check_state("the drafter's", "commit", drafter_state, committed)
        drafter_state = committed
    policy_state = state.policy_state
    if run.policy is not None:
        view = view._replace(tree=tree, on_path=None if tree is None else verdict.ranks >= 0)
        updated = run.policy.update(policy_state, view, draft.counts, verdict.num_accepted)
        check_state("the policy's", "update", policy_state, updated)
        policy_state = updated
    processor_states = process.advance(verdict.tokens, verdict.num_emitted)
    num_rows = take(jnp.asarray((*verify_sizes, *prompt_sizes), jnp.int32), plan.index)
    emitted = verdict.num_emitted
    info = StepInfo(verdict.tokens, draft.counts, verdict.num_accepted, emitted, num_rows)
    new_state = dataclasses.replace(
        state,
        **{
            name: _append(getattr(state, name), getattr(verdict, name), state.lengths, emitted)
            for name in ("tokens", "logprobs", "top_tokens", "top_logprobs")
        },
        lengths=lengths,
        active=state.active & (verdict.end == End.NONE) & (lengths < state.length_limits),
        end=jnp.where(ready, verdict.end, state.end),
        stop_states=verdict.stop_states,
        cache=cache,
        drafter_state=drafter_state,
        policy_state=policy_state,
        processor_states=processor_states,
        counters=_count(state.counters, info, ready, plan.prompt_counts, num_invalid),
    )
    return new_state, info


@functools.partial(jax.jit, donate_argnames=("state", "queue"))
def decode_loop(
    run: Run,
    state: DecodeState,
    max_steps: Int32[Array, ""],
    queue: refill.Queue | None = None,
) -> tuple[DecodeState, refill.Queue | None]:
    """Take steps until all samples have finished, `max_steps` at most: one compiled call.

    Args:
        run: the run, flat or not.
        state: the state to continue from.
        max_steps: maximum number of steps in this call.
        queue: sequences that wait for a slot. Finished sequences are then stored in the queue
            and waiting ones take their slots, until none waits and `queue.enough` slots are idle.

    Returns:
        The state and the queue after the last step.
    """
    run = run.whole()
    first_call = state.counters.model_calls
    queue = None if queue is None else queue.emptied()

    def unfinished(carry) -> Bool[Array, ""]:
        state, queue = carry
        more = jnp.any(state.active) if queue is None else queue.has_work(state)
        return more & (state.counters.model_calls - first_call < max_steps)

    def next_step(carry):
        state, queue = carry
        if queue is None:
            return advance(run, state)[0], None
        state, queue = refill.turn_over(run, state, queue)
        return advance(run, state, queue.num_sequences)[0], queue

    state, queue = lax.while_loop(unfinished, next_step, (state, queue))
    return state, None if queue is None else refill.put_aside(state, queue)


class _RowPlan(NamedTuple):
    """Which body of the step runs.

    Attributes:
        sizes: static row counts of bodies that only verify, and of bodies that feed prompts.
        index: index of the body to run in both lists joined.
        prompt_counts: prompt tokens to feed for each sample.
    """

    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    index: Int32[Array, ""]
    prompt_counts: Int32[Array, "b"]


def _plan_rows(run: Run, state: DecodeState, counts, num_sequences) -> _RowPlan:
    """Chooses the smallest row count that holds all rows, and the prompt tokens to feed."""
    batch, k1 = counts.shape[0], state.counters.max_draft_tokens + 1
    sizes = run.layout.row_counts(batch, k1)
    index = run.layout.smallest(sizes, counts)
    if num_sequences is None:
        return _RowPlan((sizes, ()), index, jnp.zeros_like(counts))
    prompt_sizes = prompt_row_counts(batch, k1, state.tokens.shape[1])
    unread, verifying = refill.unread_prompts(run, state, num_sequences), jnp.sum(counts)
    size = refill.prompt_bucket(prompt_sizes, verifying, jnp.sum(unread))
    room = take(jnp.array(prompt_sizes), size) - verifying
    index = jnp.where(jnp.any(unread > 0), len(sizes) + size, index)
    shares = refill.prompt_shares(unread, state.sequence_ids, room)
    return _RowPlan((sizes, prompt_sizes), index, shares)


def _append(buffer, block, lengths, counts):
    """Write block[s, :counts[s]] into buffer[s] from lengths[s] on."""
    index = jnp.arange(block.shape[1])
    # Out-of-range places are distinct, as `unique_indices` promises.
    at = jnp.where(index < counts[:, None], lengths[:, None] + index, buffer.shape[1] + index)
    sample = jnp.arange(buffer.shape[0])[:, None]
    return buffer.at[sample, at].set(
        block, mode="drop", unique_indices=True, wrap_negative_indices=False
    )


def _count(old: Counters, info: StepInfo, ready, prompt_counts, num_invalid) -> Counters:
    """The counters after a step."""
    decoding = ready.astype(jnp.int32)
    k1 = old.accepted_histogram.shape[1]
    hit = (jnp.arange(k1) == info.num_accepted[:, None]) & ready[:, None]
    real_rows = jnp.sum(info.num_drafted + decoding + prompt_counts)
    return Counters(
        num_steps=old.num_steps + decoding,
        num_drafted=old.num_drafted + info.num_drafted,
        num_accepted=old.num_accepted + info.num_accepted,
        num_invalid=old.num_invalid + num_invalid,
        accepted_histogram=old.accepted_histogram + hit.astype(jnp.int32),
        model_calls=old.model_calls + 1,
        real_rows=old.real_rows + real_rows,
        padding_rows=old.padding_rows + info.num_rows - real_rows,
    )
