"""The state that decoding begins with: prompts prefilled, drafters and policies at their start."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from emsjax.decode.cache import KVCache
from emsjax.decode.kernels import resolve_kernels
from emsjax.decode.prefill import prefill
from emsjax.decode.step import Counters, DecodeState
from emsjax.drafters import Drafter
from emsjax.engine.requests import Requests, keys_at
from pallas_kernels.common.indexing import take


def max_draft_tokens_of(drafter: Drafter | None) -> int:
    return 0 if drafter is None else int(drafter.max_draft_tokens)


def prompt_slots(slots: int, num_sequences: int) -> int:
    """How many prompts `slots` consecutive sequences can belong to."""
    if slots % num_sequences == 0:  # no prompt is cut in two
        return slots // num_sequences
    return min(slots, (slots - 2) // num_sequences + 2)


def served_by(requests: Requests, group: np.ndarray, slots: int) -> tuple[np.ndarray, int]:
    """The prompt of each slot that serves this group of sequences, and how many prompts there are.

    Idle slots of a partial group repeat the last prompt; they draft nothing.
    """
    served = np.minimum(group[0] + np.arange(slots), group[-1]) // requests.num_sequences
    return served, requests.num_prompts


def init_group(
    model,
    drafter,
    requests: Requests,
    group,
    slots,
    draft_length,
    *,
    cache_length,
    attention_implementation,
    layout,
) -> DecodeState:
    """The state of one group of sequences; slots beyond the group stay idle."""
    num_prompts = prompt_slots(slots, requests.num_sequences)
    first_prompt = group[0] // requests.num_sequences
    served = np.minimum(group[0] + np.arange(slots), group[-1])  # idle slots repeat the last
    prompt_of_slot = served // requests.num_sequences
    tokens = np.zeros((num_prompts, requests.max_len), np.int32)
    lengths = np.ones(num_prompts, np.int32)  # idle: a prompt of one token has nothing to prefill
    for row, prompt in enumerate(requests.prompts[first_prompt : prompt_of_slot[-1] + 1]):
        tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
    sampling = requests.sampling
    if sampling is not None:
        sampling = jax.tree.map(lambda x: x[prompt_of_slot], sampling)
    slot_prompts = (prompt_of_slot - first_prompt).astype(np.int32)
    fork = requests.num_sequences > 1
    cache = _prefilled(
        model,
        tokens,
        lengths,
        slot_prompts if fork else None,
        cache_length=cache_length,
        attention_implementation=attention_implementation,
    )
    return _complete(
        cache,
        drafter,
        draft_length,
        tokens,
        lengths,
        slot_prompts,
        requests.max_new_tokens[prompt_of_slot],
        np.where(np.arange(slots) < len(group), served, -1).astype(np.int32),
        requests.end_token_ids,
        keys_at(requests.keys, served),
        sampling,
        max_draft_tokens=max_draft_tokens_of(drafter),
        fork=fork,
        layout=layout,
    )


# Apart from what drafts: one compilation of the target's prefill serves all drafters and policies.
@functools.partial(jax.jit, static_argnames=("cache_length", "attention_implementation"))
def _prefilled(
    model, tokens, prompt_lengths, prompt_of_slot, *, cache_length, attention_implementation
) -> KVCache:
    """Each prompt prefilled once, all but its last token, with a copy for each of its slots.

    Args:
        prompt_of_slot: None: prompts and slots are the same.
    """
    kernels = resolve_kernels(attention_implementation)
    cache = model.init_cache(tokens.shape[0], cache_length)
    cache = prefill(model, cache, tokens, prompt_lengths - 1, kernels=kernels)
    return cache if prompt_of_slot is None else cache.fork(prompt_of_slot)


@functools.partial(
    jax.jit,
    static_argnames=("max_draft_tokens", "fork", "layout"),
    donate_argnames=("cache",),
)
def _complete(
    cache,
    drafter,
    draft_length,
    tokens,
    prompt_lengths,
    prompt_of_slot,
    max_new_tokens,
    sequence_ids,
    end_token_ids,
    keys,
    sampling,
    *,
    max_draft_tokens,
    fork,
    layout,
) -> DecodeState:
    """The state with the target's cache in it; drafters and policies begin."""
    max_len = tokens.shape[1]
    prompts = (tokens, prompt_lengths)
    if fork:
        tokens, prompt_lengths = (take(x, prompt_of_slot) for x in prompts)
    if drafter is None:
        drafter_state = ()
    elif fork and hasattr(drafter, "fork"):
        drafter_state = drafter.fork(drafter.init(*prompts, max_len), prompt_of_slot)
    else:
        drafter_state = drafter.init(tokens, prompt_lengths, max_len)
    slots = tokens.shape[0]
    return DecodeState(
        tokens=tokens,
        logprobs=jnp.zeros(tokens.shape, jnp.float32),
        lengths=prompt_lengths,
        prompt_lengths=prompt_lengths,
        length_limits=prompt_lengths + max_new_tokens,
        active=sequence_ids >= 0,
        ended=jnp.zeros(slots, bool),
        sequence_ids=sequence_ids,
        end_token_ids=end_token_ids,
        keys=keys,
        sampling=sampling,
        cache=layout.arrange(cache),
        drafter_state=drafter_state,
        policy_state=() if draft_length is None else draft_length.init(slots, max_draft_tokens),
        counters=Counters.init(slots, max_draft_tokens),
    )
