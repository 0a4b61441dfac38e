"""Before any work: requests are checked, drafters made ready to be traced, memory planned."""

import dataclasses
from typing import Any

import jax
import numpy as np

from emsjax.decode.base import Drafter
from emsjax.decode.run import Run
from emsjax.engine.adapt import check_drafter, unwrapped
from emsjax.engine.memory import check_fits
from emsjax.engine.requests import Requests, check_requests


def check(run: Run, prompts: Any, **asked: Any) -> tuple[Run, Requests]:
    """The run, its drafter fit for these requests, and the checked requests.

    Args:
        asked: arguments of `check_requests`.

    Raises:
        ValueError: bad requests, or a drafter or policy that cannot serve this model and them.
    """
    requests = check_requests(run.model.config, prompts, **asked)
    return with_checked_drafter(run, requests.positions), requests


def with_checked_drafter(run: Run, positions: int) -> Run:
    """The run, if its drafter can draft at so many positions.

    Raises:
        ValueError: it cannot, or the policy has wrong settings.
    """
    drafter = check_drafter(run.drafter, run.policy, run.model.config, positions)
    return dataclasses.replace(run, drafter=drafter)


def for_prompts(run: Run, prompts: np.ndarray, num_prompts: int) -> Run:
    """The run whose drafter's slot i serves prompt prompts[i]."""
    if run.drafter is None:
        return run
    return dataclasses.replace(run, drafter=run.drafter.for_prompts(prompts, num_prompts))


def holds_prompts(drafter: Drafter | None, num_prompts: int | None) -> bool:
    """Whether the drafter holds something for each prompt; None: for any number of prompts."""
    if drafter is None:
        return False
    try:
        chosen = drafter.for_prompts(np.zeros(1, np.int64), num_prompts or 1)
    except ValueError:
        if num_prompts is None:
            return True  # it holds something for another number of prompts
        raise
    return unwrapped(chosen) is not unwrapped(drafter)


def prompt_slots(slots: int, num_sequences: int) -> int:
    """How many prompts `slots` consecutive sequences can belong to."""
    if slots % num_sequences == 0:  # no prompt is cut in two
        return slots // num_sequences
    return min(slots, (slots - 2) // num_sequences + 2)


def check_memory(run: Run, requests: Requests, slots: int, *, refilled: bool = False) -> int:
    """The length of the cache.

    Args:
        slots: samples decoded at once.
        refilled: slots take prompts while others decode, so one step does both.

    Raises:
        ValueError: the run does not fit.
    """
    k, max_len = run.max_draft_tokens, requests.max_len
    most_new = int(requests.max_new_tokens.max())
    cache_length = run.layout.cache_length(max_len, most_new, slots, k + 1)
    check_fits(
        run.model,
        slots=slots,
        prompt_slots=slots if refilled else prompt_slots(slots, requests.num_sequences),
        refilled=refilled,
        device=device_of(run.model),
        max_len=cache_length,
        max_draft_tokens=k,
        drafter_bytes_per_slot=0 if run.drafter is None else run.drafter.state_bytes(max_len),
    )
    return cache_length


def device_of(model: Any) -> jax.Device | None:
    """Where the model lies, or the first of several devices; None while it is traced."""
    weight = jax.tree.leaves(model)[0]
    if isinstance(weight, jax.core.Tracer):
        return None
    return min(weight.devices(), key=lambda device: device.id)
