"""`generate`: ragged prompts in, the target model's own continuations out."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from time import monotonic, perf_counter

import jax
import numpy as np

from emsjax.checks import check_at_least
from emsjax.decoding import DecodeState, Flat, decode_loop
from emsjax.draft_length import DraftLength
from emsjax.drafting import Drafter
from emsjax.drafting.drafter import is_free, with_policys_limit
from emsjax.initial_state import init_group, max_draft_tokens_of, prompt_slots
from emsjax.kernels import resolve_kernels
from emsjax.layout import UNPADDED, Layout
from emsjax.memory import check_fits
from emsjax.opt import OPT
from emsjax.output import GenerateOutput, assemble, collect
from emsjax.requests import Requests, check_requests
from emsjax.sampling import Sampling

BUDGET_CHECK_STEPS = 16  # device steps between two looks at the clock


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
            drafter proposes.
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
    if time_budget_s is not None and not time_budget_s > 0:
        raise ValueError(f"time_budget_s must be above 0, not {time_budget_s}")
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
    slots = requests.total_sequences
    if batch_size is not None:
        slots = check_at_least("batch_size", batch_size, 1)
    resolve_kernels(attention_implementation)
    groups = [
        np.arange(first, min(first + slots, requests.total_sequences))
        for first in range(0, requests.total_sequences, slots)
    ]
    # Every group is checked before the first one runs.
    drafters = [_drafter_for(drafter, requests, group, slots) for group in groups]
    cache_length = _check_memory(model, drafter, requests, slots, layout)
    options = {"attention_implementation": attention_implementation, "layout": layout}
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
    return assemble(results, requests, pad_token_id=model.config.pad_token_id or 0)


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
    what is padded.
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
    drafter = _drafter_for(drafter, requests, group, slots)
    return init_group(
        model,
        drafter,
        requests,
        group,
        slots,
        draft_length,
        cache_length=_check_memory(model, drafter, requests, slots, layout),
        attention_implementation=attention_implementation,
        layout=layout,
    )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _ConstantDrafter:
    """A drafter that is no pytree, as a constant of the compiled loop."""

    drafter: Drafter

    @property
    def max_draft_tokens(self) -> int:
        return self.drafter.max_draft_tokens

    @property
    def free(self) -> bool:
        return is_free(self.drafter)

    def init(self, *args):
        return self.drafter.init(*args)

    def propose(self, *args):
        return self.drafter.propose(*args)

    def commit(self, *args):
        return self.drafter.commit(*args)


def _drafter_for(drafter, requests: Requests, group: np.ndarray, slots: int):
    """The drafter as it serves the group's prompts: a pytree for the compiled loop."""
    if drafter is None:
        return None
    check_at_least("drafter.max_draft_tokens", drafter.max_draft_tokens, 1)
    if hasattr(drafter, "for_prompts"):
        # Idle slots of a partial group repeat the last prompt; they draft nothing.
        served = np.minimum(group[0] + np.arange(slots), group[-1]) // requests.num_sequences
        drafter = drafter.for_prompts(served, requests.num_prompts)
    is_leaf = jax.tree_util.all_leaves([drafter])
    return _ConstantDrafter(drafter) if is_leaf else drafter


def check(
    model: OPT, drafter: Drafter | None, draft_length: DraftLength | None, prompts, **asked
) -> tuple[Requests, Drafter | None]:
    """The checked requests, and the drafter with the policy's limit.

    Raises:
        ValueError: bad requests, or a drafter that cannot draft for this model and them.
    """
    requests = check_requests(model.config, prompts, **asked)
    drafter = with_policys_limit(drafter, draft_length)
    if hasattr(drafter, "check_target"):
        drafter.check_target(model.config, requests.positions)
    return requests, drafter


def _check_memory(
    model: OPT, drafter: Drafter | None, requests: Requests, slots: int, layout: Layout
) -> int:
    """The length of the cache; raises a ValueError if the run does not fit."""
    state_bytes = getattr(drafter, "state_bytes", lambda max_len: 0)
    most = int(requests.max_new_tokens.max())
    max_len = layout.cache_length(requests.max_len, most, slots, max_draft_tokens_of(drafter) + 1)
    check_fits(
        model.config,
        model.dtype,
        slots=slots,
        prompt_slots=prompt_slots(slots, requests.num_sequences),
        max_len=max_len,
        max_draft_tokens=max_draft_tokens_of(drafter),
        drafter_bytes_per_slot=state_bytes(requests.max_len),
    )
    return max_len
