"""`score`: log-probabilities of given continuations of prompts."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32

from emsjax.checks import NOT_TEXT, as_token_ids, check_at_least, check_list, is_per_prompt
from emsjax.configured import configured
from emsjax.decode.base import Model, ModelConfig
from emsjax.decode.cache import KVCache
from emsjax.decode.row_counts import round_up_length
from emsjax.decode.run import Run
from emsjax.engine.adapt import make_run
from emsjax.engine.memory import check_fits
from emsjax.engine.preparation import device_of
from emsjax.engine.requests import read_prompts
from emsjax.engine.scores import (
    LOGIT_ROWS,
    Scores,
    chunk_rows_for,
    empty_cache,
    fork_cache,
    row_bound_for,
    score_tokens,
    score_whole,
    whole_bound_for,
    whole_rows_for,
)
from emsjax.values import comparable

MOST_AT_ONCE = 64  # continuations scored at a time by default


@comparable
class ScoreOutput:
    """Scores of continuations in prompt-major order: s = continuations, p = prompts.

    Attributes:
        logprobs: for each continuation the log-probabilities of its tokens, float32 [tokens].
        totals: log-probability of each continuation, the sum of its tokens'.
        is_greedy: whether each token of the continuation is the likeliest one, so that greedy
            decoding would emit it.
        num_continuations: number of continuations of each prompt.
    """

    logprobs: list[Float32[np.ndarray, "n"]]
    totals: Float64[np.ndarray, "s"]
    is_greedy: Bool[np.ndarray, "s"]
    num_continuations: Int32[np.ndarray, "p"]


class Continuation(NamedTuple):
    """A continuation to score.

    Attributes:
        place: its index in the output.
        prompt: index of its prompt.
        tokens: its tokens.
    """

    place: int
    prompt: int
    tokens: Int32[np.ndarray, "n"]


class Plan(NamedTuple):
    """How the continuations are divided.

    Attributes:
        groups: continuations that are scored at the same time.
        slots: slots of a group, at least its number of continuations.
        prompt_slots: slots in which a group's prompts are prefilled; None: every continuation
            feeds its prompt by itself.
        whole: whether a group's prompts and continuations are fed in one call of the model.
    """

    groups: list[list[Continuation]]
    slots: int
    prompt_slots: int | None
    whole: bool


@configured
def score(
    model: Model,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int] | Sequence[Sequence[int]]],
    *,
    batch_size: int | None = None,
    attention_implementation: str | Callable | None = None,
) -> ScoreOutput:
    """Computes log-probabilities of given continuations, unpadded.

    They are those of the model's softmax at temperature 1, which `emsjax.generate` reports for
    greedy decoding. Continuations of a prompt that are scored at the same time share its prefill,
    unless most prompts have only one.

    Args:
        model: the model.
        prompts: 1-D integer token-id sequences of any lengths, or what a tokenizer returns, as
            for `emsjax.generate`. The first token of a continuation needs one before it, so no
            prompt is empty.
        continuations: for each prompt one token-id sequence, if its elements are integers, or
            several, if its elements are sequences.
        batch_size: number of continuations scored at a time; None: as many as fit into memory,
            at most 64.
        attention_implementation: as for `emsjax.generate`.

    Returns:
        A `ScoreOutput` in prompt-major order. Continuations whose logits are not finite have
        log-probabilities that are not finite.

    Raises:
        ValueError: an argument is of the wrong kind or out of range; the message names it. There
            is not one entry of continuations for each prompt, a prompt or a continuation is empty
            or holds ids outside the vocabulary, both together need more positions than the model
            has, the batch size is below 1, or the run does not fit into memory. The error comes
            before any work.
    """
    run = make_run(model, None, attention_implementation=attention_implementation)
    ids = read_prompts(model.config, prompts)
    given = read_continuations(model.config, ids, continuations)
    if batch_size is not None:
        batch_size = check_at_least("batch_size", batch_size, 1)
    plan = _plan(run, ids, given, batch_size)
    logprobs: list[Any] = [None] * sum(map(len, given))
    is_greedy = np.zeros(len(logprobs), bool)
    for group in plan.groups:
        of_tokens, greedy = _score_group(run, ids, group, plan)
        for slot, (place, prompt, tokens) in enumerate(group):
            own = slice(len(ids[prompt]), len(ids[prompt]) + len(tokens))
            logprobs[place] = of_tokens[slot, own].copy()
            is_greedy[place] = greedy[slot, own].all()
    return ScoreOutput(
        logprobs=logprobs,
        totals=np.array([one.sum(dtype=np.float64) for one in logprobs]),
        is_greedy=is_greedy,
        num_continuations=np.array([len(own) for own in given], np.int32),
    )


def read_continuations(
    config: ModelConfig, prompts: Sequence[np.ndarray], continuations: Any
) -> list[list[Continuation]]:
    """Reads the continuations of each prompt.

    Raises:
        ValueError: see `score`.
    """
    check_list("continuations", continuations, f"sequence with one entry per prompt: {NOT_TEXT}")
    if len(continuations) != len(prompts):
        raise ValueError(
            f"continuations must have one entry per prompt: got {len(continuations)} for "
            f"{len(prompts)} prompts"
        )
    places = itertools.count()
    read = []
    for i, (prompt, entry) in enumerate(zip(prompts, continuations, strict=True)):
        named = list(_sequences(f"continuations[{i}]", entry))
        own = [as_token_ids(name, tokens, config.vocab_size) for name, tokens in named]
        for (name, _), tokens in zip(named, own, strict=True):
            limit, needed = config.max_position_embeddings, len(prompt) + len(tokens) - 1
            if needed > limit:
                raise ValueError(
                    f"prompts[{i}] has {len(prompt)} tokens and {name} has {len(tokens)}: {needed} "
                    "positions are needed, but the model's limit max_position_embeddings is "
                    f"{limit}"
                )
        read.append([Continuation(next(places), i, tokens) for tokens in own])
    return read


def _sequences(name: str, entry: Any) -> Iterator[tuple[str, Any]]:
    """Yields the token-id sequences of one prompt's entry with their names; ids are unchecked."""
    check_list(name, entry, f"sequence of token ids or of such sequences: {NOT_TEXT}")
    nested = [is_per_prompt(one) for one in entry]
    if any(nested) and not all(nested):
        raise ValueError(f"{name} mixes token ids and sequences of token ids")
    if any(nested):
        yield from ((f"{name}[{j}]", tokens) for j, tokens in enumerate(entry))
    else:
        yield name, entry


def _plan(
    run: Run,
    prompts: Sequence[np.ndarray],
    given: Sequence[Sequence[Continuation]],
    batch_size: int | None,
) -> Plan:
    """Divides the continuations into groups that fit into memory.

    Raises:
        ValueError: groups of `batch_size`, or of one continuation if that is None, do not fit.
    """
    total = sum(map(len, given))
    longest = max(len(prompts[one.prompt]) + len(one.tokens) for own in given for one in own)
    slots = min(batch_size or MOST_AT_ONCE, _power_of_two(total))
    while True:
        groups = list(_groups(prompts, given, slots))
        # Prompts are shared if this saves at least half of their prefill; one token has none.
        held = _power_of_two(max(len({one.prompt for one in group}) for group in groups))
        shares = 2 * held <= slots and max(map(len, prompts)) > 1
        whole = not shares and whole_rows_for(longest - 1) is not None
        try:
            check_fits(
                run.model,
                slots=slots,
                prompt_slots=held if shares else slots,
                device=device_of(run.model),
                max_len=round_up_length(longest),
                max_draft_tokens=-(-LOGIT_ROWS // slots) - 1,  # as many rows get logits
            )
        except ValueError:
            if batch_size is not None or slots == 1:
                raise
            slots = -(-slots // 2)
        else:
            if whole:
                groups = list(_whole_groups(prompts, given, slots))
            return Plan(groups, slots, held if shares else None, whole)


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


def _whole_groups(
    prompts: Sequence[np.ndarray], given: Sequence[Sequence[Continuation]], slots: int
) -> Iterator[list[Continuation]]:
    """Yields groups of up to `slots` continuations that one call can feed, the longest first."""
    rows_of = lambda one: len(prompts[one.prompt]) + len(one.tokens) - 1
    group: list[Continuation] = []
    room = 0
    for one in sorted(itertools.chain(*given), key=rows_of, reverse=True):
        if group and (len(group) == slots or rows_of(one) > room):
            yield group
            group = []
        if not group:
            room = whole_rows_for(rows_of(one))
        group.append(one)
        room -= rows_of(one)
    yield group


def _score_group(
    run: Run, prompts: Sequence[np.ndarray], group: Sequence[Continuation], plan: Plan
) -> tuple[np.ndarray, np.ndarray]:
    """Scores one group; returns the arrays of its `Scores` on the host, one row per slot."""
    sequences = [np.concatenate([prompts[one.prompt], one.tokens]) for one in group]
    first_scored = [len(prompts[one.prompt]) for one in group]
    longest = max(map(len, sequences))
    if plan.whole:
        num_rows = whole_rows_for(longest - 1)
        bound = whole_bound_for(longest - 1)
        options = {"num_rows": num_rows, "row_bound": bound, "kernels": run.kernels}
        cache = empty_cache(run.model, batch=plan.slots, max_len=1)  # as small as possible
        # As wide as any sample that fits, so that there is one program for all groups.
        arrays = _arrays(sequences, plan.slots, num_rows + 1, first_scored)
        return _on_host(score_whole(run.model, cache, *arrays, **options))
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
    return _on_host(_run(run, sequences, plan.slots, width, first_scored, shared)[0])


def _on_host(scores: Scores) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(scores.logprobs), np.asarray(scores.is_greedy)


def _arrays(
    sequences: Sequence[np.ndarray], slots: int, width: int, first_scored: Sequence[int] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the arguments tokens, lengths and first_scored of `score_tokens`."""
    tokens = np.zeros((slots, width), np.int32)
    lengths, first = np.ones(slots, np.int32), np.ones(slots, np.int32)
    for slot, sequence in enumerate(sequences):
        tokens[slot, : len(sequence)], lengths[slot] = sequence, len(sequence)
    used = slice(len(sequences))
    first[used] = lengths[used] if first_scored is None else first_scored
    return tokens, lengths, first


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
    tokens, lengths, first = _arrays(sequences, slots, width, first_scored)
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
