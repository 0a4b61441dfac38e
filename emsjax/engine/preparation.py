"""Prepares a run: checks requests, makes the drafter ready to be traced and plans memory."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from emsjax.checks import is_traced
from emsjax.decode.base import Drafter
from emsjax.decode.run import Run
from emsjax.device import is_of_one_process, tree_bytes
from emsjax.engine.adapt import check_drafter, unwrapped
from emsjax.engine.memory import check_fits
from emsjax.engine.requests import Requests, check_requests
from emsjax.sampling import Settings
from emsjax.sampling.processors import initial_states


def check(run: Run, prompts: Any, **asked: Any) -> tuple[Run, Requests]:
    """Checks the requests, and that the run's drafter and policy can serve them.

    Args:
        asked: arguments of `check_requests`.

    Returns:
        The run with its drafter ready to be traced, and the checked requests.

    Raises:
        ValueError: the requests are invalid, or the drafter or the policy cannot serve them with
            this model.
    """
    requests = check_requests(run.model.config, prompts, processors=run.processors, **asked)
    return with_checked_drafter(run, requests.positions), requests


def with_checked_drafter(run: Run, positions: int) -> Run:
    """Returns the run with its drafter checked for samples of up to `positions` positions.

    Raises:
        ValueError: the drafter cannot draft at so many positions, or the policy's settings are
            invalid.
    """
    drafter = check_drafter(run.drafter, run.policy, run.model.config, positions)
    return dataclasses.replace(run, drafter=drafter)


def for_prompts(run: Run, prompts: np.ndarray, num_prompts: int) -> Run:
    """Returns the run whose drafter serves prompt prompts[i] in slot i."""
    if run.drafter is None:
        return run
    return dataclasses.replace(run, drafter=run.drafter.for_prompts(prompts, num_prompts))


def holds_prompts(drafter: Drafter | None, num_prompts: int | None) -> bool:
    """Returns whether the drafter holds data for each prompt.

    Args:
        num_prompts: number of prompts of the call; None: it is not known yet.

    Raises:
        ValueError: the drafter holds data for another number of prompts than `num_prompts`.
    """
    if drafter is None:
        return False
    try:
        chosen = drafter.for_prompts(np.zeros(1, np.int64), num_prompts or 1)
    except ValueError:
        if num_prompts is None:
            return True  # the drafter holds data for another number of prompts
        raise
    return unwrapped(chosen) is not unwrapped(drafter)


def prompt_slots(slots: int, num_sequences: int) -> int:
    """Returns how many prompts `slots` consecutive sequences can belong to."""
    if slots % num_sequences == 0:  # no prompt is split between groups
        return slots // num_sequences
    return min(slots, (slots - 2) // num_sequences + 2)


def check_memory(run: Run, requests: Requests, slots: int, *, refilled: bool = False) -> int:
    """Checks that the run fits into memory, and returns the length of its cache.

    Args:
        slots: samples decoded at once.
        refilled: whether slots take new prompts while others decode, so that one step does both.

    Raises:
        ValueError: the run does not fit, or its parts lie on different devices.
    """
    weights = jax.tree.leaves(run.model)  # once, as this takes about a millisecond
    check_devices(run, weights)
    k, max_len = run.max_draft_tokens, requests.max_len
    most_new = int(requests.max_new_tokens.max())
    cache_length = run.layout.cache_length(max_len, most_new, slots, k + 1)
    check_fits(
        run.model,
        slots=slots,
        prompt_slots=slots if refilled else prompt_slots(slots, requests.num_sequences),
        refilled=refilled,
        device=device_of(weights),
        weights=weights,
        max_len=cache_length,
        max_draft_tokens=k,
        drafter_bytes_per_slot=0 if run.drafter is None else run.drafter.state_bytes(max_len),
        processor_bytes_per_slot=_processor_bytes(run, requests),
    )
    return cache_length


def _processor_bytes(run: Run, requests: Requests) -> int | None:
    """Bytes of the logits processors' states for one slot; None: there are no processors."""
    processors = run.all_processors(requests.settings.controls)
    if not processors:
        return None
    prompts = jax.ShapeDtypeStruct((1, requests.max_len), np.int32)
    lengths = jax.ShapeDtypeStruct((1,), np.int32)
    begin = lambda *slots: initial_states(processors, *slots, Settings(request_ids=slots[1]))
    return tree_bytes(jax.eval_shape(begin, prompts, lengths))


def check_devices(run: Run, weights: Sequence[Any]) -> None:
    """Raises ValueError if the drafter's arrays were put on other devices than the model's.

    Arrays that were not put anywhere follow the model. On a mesh, a draft model must have been put
    there, as it would otherwise be copied to every device in each call.

    Args:
        weights: the model's arrays.
    """
    check_shared_cache(run)
    own = jax.tree.leaves(run.drafter)
    of_model, of_drafter = _devices(weights), _devices(own)
    if len(of_model) > 1 and not of_drafter:
        of_drafter = _devices([x for x in own if _is_weight(x)], every=True)
    if of_model and of_drafter and of_model != of_drafter:
        listed = [", ".join(sorted(map(str, devices))) for devices in (of_drafter, of_model)]
        raise ValueError(
            f"drafter is on {listed[0]} and model on {listed[1]}: put both on the same, as in "
            "jax.device_put(draft_model, device), or draft_model.replicate(mesh) on a mesh (arrays "
            "of your own: jax.device_put(x, NamedSharding(mesh, PartitionSpec())))"
        )


def check_shared_cache(run: Run) -> None:
    """Raises ValueError if a drafter shares the cache of a target that is split otherwise."""
    if run.drafter is None or not run.drafter.shares_cache:
        return
    own = getattr(unwrapped(run.drafter), "draft_model", run.model)
    if getattr(own, "parallel", None) != getattr(run.model, "parallel", None):
        raise ValueError(
            "a draft model that shares the target's cache must be split as the target is: make it "
            "of the split target, as in emsjax.SelfDraft(model.quantize('int4'))"
        )


def check_one_process(run: Run) -> None:
    """Raises ValueError for a time budget if the model is on devices of several processes."""
    if not is_of_one_process(run.model):
        raise ValueError(
            "time_budget_s must be None if the model is on devices of several processes, whose "
            "clocks differ"
        )


def _devices(arrays: Sequence[Any], *, every: bool = False) -> set[jax.Device]:
    """The devices that arrays were put on, or that `every` array is on."""
    found = set()
    for leaf in arrays:
        if isinstance(leaf, jax.Array) and not is_traced(leaf) and (every or leaf.committed):
            found |= leaf.devices()
    return found


def _is_weight(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)


def device_of(weights: Any) -> jax.Device | None:
    """Returns a model's device, or this process's first; None while the model is traced.

    Args:
        weights: the model's arrays, or the model, which takes longer.
    """
    weight = jax.tree.leaves(weights)[0]
    if isinstance(weight, jax.core.Tracer):
        return None
    return min(weight.sharding.addressable_devices, key=lambda device: device.id)
