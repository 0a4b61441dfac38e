"""Starts a batch all at once: its prompts are prefilled before the first step."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int32

from emsjax.decode.cache import KVCache
from emsjax.decode.kernels import Kernels
from emsjax.decode.prefill import prefill, prefill_observed
from emsjax.decode.run import Run
from emsjax.decode.state import DecodeState, Sequences, begin
from emsjax.engine.preparation import prompt_slots
from emsjax.engine.requests import Requests
from pallas_kernels.common.indexing import take


def sequences_served(group: np.ndarray, slots: int) -> np.ndarray:
    """Sequence of each slot; slots beyond the group repeat the last sequence and stay idle."""
    return np.minimum(group[0] + np.arange(slots), group[-1])


def begin_group(
    run: Run,
    requests: Requests,
    group: np.ndarray,
    slots: int,
    cache_length: int,
    cache: KVCache | None = None,
) -> DecodeState:
    """Returns the state before the first step of one group of sequences.

    A prompt with several sequences is prefilled once, unless the drafter has `taps` and must
    see every slot's prompt.

    Args:
        group: consecutive sequence numbers.
        slots: number of slots, at least the number of sequences; slots left over are idle.
        cache: the slots' prompts without their last tokens, for drafters without `taps`. None: it
            is computed.
    """
    served = sequences_served(group, slots)
    prompt_of_slot = served // requests.num_sequences
    fork = requests.num_sequences > 1 and not run.taps
    first = prompt_of_slot[0]
    held = range(first, prompt_of_slot[-1] + 1) if fork else prompt_of_slot
    rows = prompt_slots(slots, requests.num_sequences) if fork else slots
    tokens = np.zeros((rows, requests.max_len), np.int32)
    lengths = np.ones(rows, np.int32)  # a prompt of one token has nothing to prefill
    for row, prompt in enumerate(requests.prompts[index] for index in held):
        tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
    idle = np.arange(slots) >= len(group)
    of_slots = (
        requests.max_new_tokens[prompt_of_slot],
        np.where(idle, -1, served).astype(np.int32),
        requests.keys.at(served),
        jax.tree.map(lambda x: x[prompt_of_slot], requests.settings),
    )
    slot_prompts = (prompt_of_slot - first).astype(np.int32) if fork else None
    observed = None
    # The drafter is kept out, so one compiled prefill of the target serves all drafters and
    # policies.
    if run.taps:
        cache, observed = _prefilled_observed(run, tokens, lengths, cache_length=cache_length)
    elif cache is None:
        cache = _prefilled(
            run.model,
            tokens,
            lengths,
            slot_prompts,
            cache_length=cache_length,
            kernels=run.kernels,
        )
    without_model = dataclasses.replace(run, model=None)
    prompts = (tokens, lengths)
    common = requests.common
    return _begun(without_model, cache, prompts, slot_prompts, of_slots, observed, common)


@functools.partial(jax.jit, static_argnames=("cache_length", "kernels"))
def _prefilled(
    model: Any,
    tokens: Int32[Array, "p t"],
    prompt_lengths: Int32[Array, "p"],
    prompt_of_slot: Int32[Array, "b"] | None,
    *,
    cache_length: int,
    kernels: Kernels,
) -> KVCache:
    """Prefills each prompt once, except its last token, and copies the cache to its slots.

    Args:
        prompt_of_slot: the row of `tokens` that each slot starts from; None: row i is slot i.
    """
    cache = model.init_cache(tokens.shape[0], cache_length)
    cache = prefill(model, cache, tokens, prompt_lengths - 1, kernels=kernels)
    return cache if prompt_of_slot is None else cache.fork(prompt_of_slot)


@functools.partial(jax.jit, static_argnames=("cache_length",))
def _prefilled_observed(run: Run, tokens, prompt_lengths, *, cache_length: int):
    """Prefills each slot's prompt, except its last token; returns cache and drafter state."""
    drafter_state = run.drafter.init(tokens, prompt_lengths, tokens.shape[1])
    return prefill_observed(
        run.model,
        run.model.init_cache(tokens.shape[0], cache_length),
        tokens,
        prompt_lengths - 1,
        run.drafter,
        drafter_state,
        kernels=run.kernels,
    )


@functools.partial(jax.jit, donate_argnames=("cache",))
def _begun(
    run: Run, cache: KVCache, prompts, prompt_of_slot, of_slots, drafter_state, common
) -> DecodeState:
    """Builds the state around the target's cache, and initialises the drafter and the policy.

    Args:
        run: the run; its model may be left out.
        prompts: token and length arrays, one row per slot, or one row per prompt that
            `prompt_of_slot` indexes.
        of_slots: the other fields of the slots' `Sequences`.
        drafter_state: the drafter's state after observing the prompts; None: it is not
            initialised yet.
    """
    max_len, own = prompts[0].shape[1], prompts
    if prompt_of_slot is not None:
        own = tuple(take(x, prompt_of_slot) for x in prompts)
    if run.drafter is None:
        drafter_state = ()
    elif drafter_state is None:
        if prompt_of_slot is not None and run.drafter.fork is not None:
            begun = run.drafter.init(*prompts, max_len)
            drafter_state = run.drafter.fork(begun, prompt_of_slot)
        else:
            drafter_state = run.drafter.init(*own, max_len)
    return begin(run, Sequences(*own, *of_slots), common, cache, drafter_state)


@functools.partial(jax.jit, static_argnames=("max_len",), donate_argnames=("cache",))
def begin_idle(run: Run, cache: KVCache, keys, settings, common, *, max_len: int) -> DecodeState:
    """Returns a state whose slots are all idle; `settings` has one row per slot."""
    sequences = Sequences.none(keys, settings, max_len)
    of_slots = (sequences.tokens, sequences.prompt_lengths)
    drafter_state = () if run.drafter is None else run.drafter.init(*of_slots, max_len)
    return begin(run, sequences, common, cache, drafter_state)
