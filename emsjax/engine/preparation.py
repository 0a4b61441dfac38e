"""Before any work: requests are checked, drafters made ready to be traced, memory planned."""

import dataclasses

import jax
import numpy as np

from emsjax.checks import check_at_least
from emsjax.decode.base import (
    admitted,
    check_is_drafter,
    is_free,
    state_after_commit,
    with_policys_limit,
)
from emsjax.decode.layout import Layout
from emsjax.drafters import Drafter
from emsjax.engine.initial_state import max_draft_tokens_of, prompt_slots
from emsjax.engine.memory import check_fits
from emsjax.engine.requests import Requests, check_requests
from emsjax.models.opt import OPT, check_is_model
from emsjax.policies.lengths import DraftLength, check_is_policy


def check(
    model: OPT, drafter: Drafter | None, draft_length: DraftLength | None, prompts, **asked
) -> tuple[Requests, Drafter | None]:
    """The checked requests, and the drafter with the policy's limit.

    Raises:
        ValueError: no model, bad requests, or a drafter that cannot draft for this model and them.
    """
    check_is_model("model", model)
    requests = check_requests(model.config, prompts, **asked)
    return requests, check_drafter(model, drafter, draft_length, requests.positions)


def check_drafter(
    model: OPT, drafter: Drafter | None, draft_length: DraftLength | None, positions: int
) -> Drafter | None:
    """The drafter with the policy's limit.

    Raises:
        ValueError: it is no drafter, or cannot draft for this model at so many positions; or the
            policy is none.
    """
    if draft_length is not None:
        check_is_policy(draft_length)
    if drafter is None:
        return None
    check_is_drafter(drafter)
    drafter = with_policys_limit(drafter, draft_length)
    check_at_least("drafter.max_draft_tokens", drafter.max_draft_tokens, 1)
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(drafter))
    if any(getattr(path[0], "name", None) == "max_draft_tokens" for path in paths if path):
        raise ValueError(
            "drafter.max_draft_tokens must be static, as it shapes the program, and is data of the "
            "pytree: declare it as dataclasses.field(metadata={'static': True})"
        )
    if hasattr(drafter, "check_target"):
        drafter.check_target(model.config, positions)
    return drafter


def drafter_for(drafter: Drafter | None, prompts: np.ndarray, num_prompts: int):
    """The drafter whose slot i serves prompt prompts[i]: a pytree for the compiled loop."""
    if drafter is None:
        return None
    if hasattr(drafter, "for_prompts"):
        drafter = drafter.for_prompts(prompts, num_prompts)
    is_leaf = jax.tree_util.all_leaves([drafter])
    return _ConstantDrafter(drafter) if is_leaf else drafter


def holds_prompts(drafter: Drafter | None, num_prompts: int | None) -> bool:
    """Whether the drafter holds something for each prompt; None: for any number of prompts."""
    if not hasattr(drafter, "for_prompts"):
        return False
    try:
        return drafter.for_prompts(np.zeros(1, np.int64), num_prompts or 1) is not drafter
    except ValueError:
        if num_prompts is None:
            return True  # of another number
        raise


def check_memory(
    model: OPT,
    drafter: Drafter | None,
    *,
    slots: int,
    max_len: int,
    max_new_tokens: int,
    num_sequences: int,
    layout: Layout,
    refilled: bool = False,
) -> int:
    """The length of the cache.

    Args:
        refilled: slots take prompts while others decode, so one step does both.

    Raises:
        ValueError: the run does not fit.
    """
    k = max_draft_tokens_of(drafter)
    state_bytes = getattr(drafter, "state_bytes", lambda max_len: 0)
    cache_length = layout.cache_length(max_len, max_new_tokens, slots, k + 1)
    check_fits(
        model.config,
        model.dtype,
        slots=slots,
        prompt_slots=slots if refilled else prompt_slots(slots, num_sequences),
        max_len=cache_length,
        max_draft_tokens=k,
        drafter_bytes_per_slot=state_bytes(max_len),
        refilled=refilled,
        device=device_of(model),
    )
    return cache_length


def device_of(model: OPT) -> jax.Device | None:
    """Where the model lies, or the first of several devices; None where it is traced."""
    weight = jax.tree.leaves(model)[0]
    if isinstance(weight, jax.core.Tracer):
        return None
    return min(weight.devices(), key=lambda device: device.id)


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

    @property
    def fork(self):
        return self.drafter.fork  # an AttributeError where it has none

    def admit(self, *args):
        return admitted(self.drafter, *args)

    def propose(self, *args):
        return self.drafter.propose(*args)

    def commit(self, *args):
        return state_after_commit(self.drafter, *args)
