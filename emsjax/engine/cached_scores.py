"""Scores continuations over a cache: those that are too long for one call of the model.

Other attention than this library's own is used here too, as it need not know trees of rows.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from emsjax.decode.cache import KVCache
from emsjax.decode.row_counts import round_up_length
from emsjax.decode.run import Run
from emsjax.engine.forest import MOST_AT_ONCE, Continuation, Scored
from emsjax.engine.memory import check_fits
from emsjax.engine.preparation import device_of
from emsjax.engine.scores import (
    LOGIT_ROWS,
    Scores,
    chunk_rows_for,
    empty_cache,
    fork_cache,
    row_bound_for,
    score_tokens,
)


class Plan(NamedTuple):
    """How the continuations are divided.

    Attributes:
        groups: continuations that are scored at the same time.
        slots: slots of a group, at least its number of continuations.
        prompt_slots: slots in which a group's prompts are prefilled; None: every continuation
            feeds its prompt by itself.
    """

    groups: list[list[Continuation]]
    slots: int
    prompt_slots: int | None


def plan_groups(
    run: Run,
    prompts: Sequence[np.ndarray],
    given: Sequence[Sequence[Continuation]],
    batch_size: int | None,
) -> Plan:
    """Divides continuations into groups that fit into memory.

    Raises:
        ValueError: groups of `batch_size`, or of one continuation if that is None, do not fit.
    """
    total = sum(map(len, given))
    longest = max(len(prompts[one.prompt]) + len(one.tokens) for own in given for one in own)
    slots = min(batch_size or MOST_AT_ONCE, _power_of_two(total))
    weights = jax.tree.leaves(run.model)
    while True:
        groups = list(_groups(prompts, given, slots))
        # Prompts are shared if this saves at least half of their prefill.
        held = _power_of_two(max(len({one.prompt for one in group}) for group in groups))
        shares = 2 * held <= slots
        try:
            check_fits(
                run.model,
                slots=slots,
                prompt_slots=held if shares else slots,
                device=device_of(weights),
                weights=weights,
                max_len=round_up_length(longest),
                max_draft_tokens=-(-LOGIT_ROWS // slots) - 1,  # as many rows get logits
            )
        except ValueError:
            if batch_size is not None or slots == 1:
                raise
            slots = -(-slots // 2)
        else:
            return Plan(groups, slots, held if shares else None)


def _power_of_two(count: int) -> int:
    """Returns the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


def _groups(
    prompts: Sequence[np.ndarray], given: Sequence[Sequence[Continuation]], slots: int
) -> Iterator[list[Continuation]]:
    """Yields groups of up to `slots` continuations, the longest first, so that shapes repeat.

    A prompt's continuations are in one group, unless there are more than `slots`.
    """
    length = lambda own: len(prompts[own[0].prompt]) + max(len(one.tokens) for one in own)
    group: list[Continuation] = []
    for own in sorted(given, key=length, reverse=True):
        if len(group) + len(own) > slots and group:
            yield group
            group = []
        own = sorted(own, key=lambda one: len(one.tokens), reverse=True)
        whole = len(own) - len(own) % slots if len(own) > slots else 0
        yield from (list(own[first : first + slots]) for first in range(0, whole, slots))
        group = [*group, *own[whole:]]
    if group:
        yield group


def score_group(
    run: Run, prompts: Sequence[np.ndarray], group: Sequence[Continuation], plan: Plan
) -> Iterator[Scored]:
    """Scores one group."""
    sequences = [np.concatenate([prompts[one.prompt], one.tokens]) for one in group]
    first_scored = [len(prompts[one.prompt]) for one in group]
    longest = max(map(len, sequences))
    width = round_up_length(longest)
    if plan.prompt_slots is None:
        shared = None
    else:
        held = {
            prompt: row for row, prompt in enumerate(dict.fromkeys(one.prompt for one in group))
        }
        shared = _run(run, [prompts[prompt] for prompt in held], plan.prompt_slots, width)[1]
        samples = np.zeros(plan.slots, np.int32)
        samples[: len(group)] = [held[one.prompt] for one in group]
        shared = fork_cache(shared, samples)
    scores = _run(run, sequences, plan.slots, width, first_scored, shared)[0]
    logprobs, is_greedy = np.asarray(scores.logprobs), np.asarray(scores.is_greedy)
    for slot, (one, first) in enumerate(zip(group, first_scored, strict=True)):
        own = slice(first, first + len(one.tokens))
        yield Scored(one.place, logprobs[slot, own], is_greedy[slot, own])


def _run(
    run: Run,
    sequences: Sequence[np.ndarray],
    slots: int,
    width: int,
    first_scored: Sequence[int] | None = None,
    cache: KVCache | None = None,
) -> tuple[Scores, KVCache]:
    """Feeds sequences, one per slot, and scores their tokens.

    Args:
        width: static length of the slots.
        first_scored: index of the first token of each sequence to score; None: none is scored.
        cache: holds each prompt, the tokens before the first that is scored, except its last
            token; None: nothing is cached.
    """
    tokens = np.zeros((slots, width), np.int32)
    lengths, first = np.ones(slots, np.int32), np.ones(slots, np.int32)
    for slot, sequence in enumerate(sequences):
        tokens[slot, : len(sequence)], lengths[slot] = sequence, len(sequence)
    used = slice(len(sequences))
    first[used] = lengths[used] if first_scored is None else first_scored
    fed = lengths - (1 if cache is None else first)
    if cache is None:
        cache = empty_cache(run.model, batch=slots, max_len=width)
    num_rows = chunk_rows_for(int(fed.sum()))
    return score_tokens(
        run.model,
        cache,
        tokens,
        lengths,
        first,
        num_rows=num_rows,
        row_bound=row_bound_for(int(fed.max()), slots, num_rows),
        kernels=run.kernels,
    )
