"""`generate`: ragged prompts in, the target model's own continuations out."""

import functools
import numbers
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, perf_counter

import jax
import numpy as np

from emsjax.checks import check_at_least
from emsjax.decode.kernels import resolve_kernels
from emsjax.decode.layout import UNPADDED, Layout
from emsjax.decode.step import DecodeState, Flat, decode_loop
from emsjax.drafters import Drafter
from emsjax.engine.initial_state import init_group, served_by
from emsjax.engine.output import GenerateOutput, assemble, collect
from emsjax.engine.preparation import check, check_memory, drafter_for
from emsjax.engine.requests import Requests
from emsjax.engine.slots import BUDGET_CHECK_STEPS, Slots, sequences_of, stacked
from emsjax.models.opt import OPT
from emsjax.policies.lengths import DraftLength
from emsjax.sampling import Sampling


def generate(
    model: OPT,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter | None = None,
    draft_length: DraftLength | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    sampling: Sampling | None = None,
    num_sequences: int = 1,
    batch_size: int | None = None,
    eos_token_ids: Sequence[int] | None = None,
    key: jax.Array | None = None,
    time_budget_s: float | None = None,
    attention_implementation: str | Callable | None = None,
) -> GenerateOutput:
    """Complete ragged prompts by batched, unpadded, lossless speculative decoding.

    Greedy tokens are those of plain decoding (`drafter=None`) whatever the drafter
    proposes, and so are sampled ones, under the same keys, if the drafter is
    deterministic; with a draft model they have the same distribution.

    Args:
        model: the target model.
        prompts: 1-D integer token-id sequences of any lengths.
        drafter: what proposes tokens; None: plain decoding.
        draft_length: a policy limiting draft tokens per step; None: as many as the
            drafter proposes. Without a drafter it changes nothing.
        max_new_tokens: tokens to emit at most, for all prompts or one per prompt.
        sampling: temperature, top-k and top-p; None: greedy.
        num_sequences: sequences per prompt; the prompt is prefilled once.
        batch_size: decode this many sequences at a time; None: all at once.
        eos_token_ids: tokens that end a sequence; None: the config's; (): none.
        key: one typed key (sequence i uses fold_in(key, i)) or one per sequence;
            needed when a temperature is above 0.
        time_budget_s: seconds after which unfinished sequences are returned as they
            are; checked between chunks of device steps.
        attention_implementation: "triton", "xla", "reference", a callable with the
            signature of `pallas_kernels.ragged_attention`, or None to let the device
            decide.

    Returns:
        A `GenerateOutput`, prompt-major.

    Raises:
        ValueError: an empty list or prompt, ids that are no integers or outside the
            vocabulary, a count below 1, a wrong number of per-prompt values or keys,
            a prompt whose length + max_new_tokens - 1 exceeds the model's positions,
            sampling values out of range, a missing or legacy key, a budget that is
            not positive, a drafter that does not suit the model, or a run that does
            not fit into memory. Nothing has been allocated then.

    Reference: EMS-SD, arXiv 2405.07542.
    """
    is_time = isinstance(time_budget_s, numbers.Real) and time_budget_s > 0
    if not (is_time or time_budget_s is None):
        raise ValueError(f"time_budget_s must be seconds above 0, not {time_budget_s!r}")
    deadline = None if time_budget_s is None else monotonic() + time_budget_s
    requests, drafter = check(
        model,
        drafter,
        draft_length,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        num_sequences=num_sequences,
        eos_token_ids=eos_token_ids,
        key=key,
    )
    return complete(
        model,
        drafter,
        requests,
        draft_length=draft_length,
        batch_size=batch_size,
        deadline=deadline,
        attention_implementation=attention_implementation,
    )


def complete(
    model: OPT,
    drafter: Drafter | None,
    requests: Requests,
    *,
    draft_length: DraftLength | None,
    batch_size: int | None,
    deadline: float | None = None,
    attention_implementation: str | Callable | None,
    layout: Layout = UNPADDED,
) -> GenerateOutput:
    """Complete checked requests, `batch_size` sequences at a time; None: all at once.

    Args:
        deadline: of `time.monotonic`; None: there is none.
        layout: what is padded.

    Raises:
        ValueError: a batch size below 1, a drafter that does not suit, or what does not fit.
    """
    total = requests.total_sequences
    slots = total if batch_size is None else check_at_least("batch_size", batch_size, 1)
    resolve_kernels(attention_implementation)
    if slots < total and layout == UNPADDED:
        served = Slots.of(model, drafter, requests, draft_length, slots, attention_implementation)
        rows = sorted(
            served.serve(sequences_of(requests), deadline=deadline),
            key=lambda row: row["sequence_ids"],
        )
        results = [stacked(rows) | served.counts()]
    else:
        results = in_groups(
            model,
            drafter,
            requests,
            slots,
            draft_length=draft_length,
            deadline=deadline,
            attention_implementation=attention_implementation,
            layout=layout,
        )
    return assemble(results, requests, pad_token_id=model.config.pad_token_id or 0)


def in_groups(
    model,
    drafter,
    requests: Requests,
    slots: int,
    *,
    draft_length,
    deadline,
    layout: Layout,
    **options,
) -> list[Mapping[str, np.ndarray]]:
    """The results of `slots` sequences at a time: a group ends with its last sequence."""
    groups = [
        np.arange(first, min(first + slots, requests.total_sequences))
        for first in range(0, requests.total_sequences, slots)
    ]
    # Every group is checked before the first one runs.
    drafters = [drafter_for(drafter, *served_by(requests, group, slots)) for group in groups]
    cache_length = check_memory(model, drafter, slots=slots, layout=layout, **requests.sizes)
    options |= {"layout": layout}
    weights, results = Flat.of(model), []
    for group, group_drafter in zip(groups, drafters, strict=True):
        state = init_group(
            model,
            group_drafter,
            requests,
            group,
            slots,
            draft_length,
            cache_length=cache_length,
            **options,
        )
        run = functools.partial(decode_loop, weights, Flat.of(group_drafter), **options)
        jax.block_until_ready(state)
        started = perf_counter()
        if deadline is None:
            state = run(state, draft_length, np.iinfo(np.int32).max // 2)
        while deadline is not None and monotonic() < deadline:
            state = run(state, draft_length, BUDGET_CHECK_STEPS)
            if not np.asarray(state.active).any():
                break
        jax.block_until_ready(state)
        results.append(collect(state, len(group), perf_counter() - started))
        del state  # two groups' caches must not exist at once
    return results


def init_state(
    model: OPT,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    draft_length: DraftLength | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    sampling: Sampling | None = None,
    num_sequences: int = 1,
    eos_token_ids: Sequence[int] | None = None,
    key: jax.Array | None = None,
    attention_implementation: str | Callable | None = None,
    layout: Layout = UNPADDED,
) -> DecodeState:
    """The state before the first `step`: prompts prefilled, nothing emitted.

    Arguments and errors are those of `generate`; every sequence gets a slot. `layout` says
    what is padded. With several sequences per prompt, a drafter that holds something for each
    prompt goes to `step` as drafter.for_prompts(np.arange(slots) // num_sequences, len(prompts)).
    """
    requests, drafter = check(
        model,
        drafter,
        draft_length,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        num_sequences=num_sequences,
        eos_token_ids=eos_token_ids,
        key=key,
    )
    slots = requests.total_sequences
    group = np.arange(slots)
    resolve_kernels(attention_implementation)
    return init_group(
        model,
        drafter_for(drafter, *served_by(requests, group, slots)),
        requests,
        group,
        slots,
        draft_length,
        cache_length=check_memory(model, drafter, slots=slots, layout=layout, **requests.sizes),
        attention_implementation=attention_implementation,
        layout=layout,
    )
