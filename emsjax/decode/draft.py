"""The first part of a step: drafts for each sample, cut to the usable tokens."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from emsjax.decode.base import Draft, StepView
from emsjax.decode.run import Run
from emsjax.returned import available_lengths, checked_proposal
from emsjax.sampling import Purpose, position_keys
from emsjax.sampling.processors import Processing
from emsjax.trees import chosen_nodes, usable_nodes
from emsjax.verification import is_distribution, leading, usable_counts


class Proposal(NamedTuple):
    """A step's draft, and what goes with it.

    Attributes:
        draft: the tokens to verify.
        drafter_state: the drafter's state after proposing them.
        cache: the target's cache, in which the drafter may have written behind the tokens.
        view: what the policy saw.
        num_invalid: tokens per sample that were dropped as their `probs` are no distributions.
    """

    draft: Draft
    drafter_state: Any
    cache: Any
    view: StepView
    num_invalid: Int32[Array, "b"]


def propose(run: Run, state: Any, ready: Bool[Array, "b"], process: Processing) -> Proposal:
    """The step's draft. A sample that is not `ready` drafts nothing.

    Args:
        state: the `DecodeState`.
        ready: samples whose prompts are cached and that still decode.
        process: the function through which a draft model's logits pass.

    Raises:
        ValueError: the drafter or the policy does not return what it should, or a `free` drafter
            draws its tokens.
    """
    drafter, vocab_size = run.drafter, run.model.config.vocab_size
    remaining = state.length_limits - state.lengths
    most = limits = jnp.where(ready, jnp.minimum(remaining - 1, run.max_draft_tokens), 0)
    view = StepView(ready, state.lengths, most, drafted=bool(getattr(drafter, "free", False)))
    if drafter is None:
        none = jnp.zeros_like(state.lengths)
        draft = Draft(jnp.zeros((len(none), 0), jnp.int32), none)
        return Proposal(draft, (), state.cache, view, none)

    def allowed(view: StepView) -> Int32[Array, "b"]:
        if run.policy is None:
            return view.available
        return available_lengths(run.policy, state.policy_state, view)

    if not view.drafted:
        view = view._replace(available=jnp.minimum(most, drafter.max_depth or most))
        limits = allowed(view)
    # A policy may learn more from a shortened draft than how much was accepted. So no later step
    # may draw from the same bits: whether it drafts could depend on the tokens it would draw.
    keys = position_keys(state.keys, state.lengths, Purpose.STEP)
    arguments = (state.tokens, state.lengths, limits, keys, state.sampling)
    if process.processors:
        drafter = drafter.with_processing(process)
    rules = {"kind": Draft, "vocab_size": vocab_size}
    draft, drafter_state, cache = checked_proposal(drafter, state, *arguments, **rules)
    if draft.parents is not None:
        nodes = usable_nodes(draft, most, vocab_size)
        draft = chosen_nodes(draft, nodes, run.policy, state.policy_state, view)
        return Proposal(draft, drafter_state, cache, view, jnp.zeros_like(nodes))
    counts = usable_counts(draft.tokens, draft.counts, limits, state.end_token_ids, vocab_size)
    if view.drafted:
        if draft.probs is not None:
            # A draft's remaining length must not depend on which tokens were drawn.
            raise ValueError("a drafter that draws its tokens (Draft.probs) cannot be `free`")
        view = view._replace(available=counts)
        counts = allowed(view)
    # A sample that is not ready verifies nothing, even if its drafter has proposed tokens.
    counts = valid = jnp.where(ready, counts, 0)
    tokens, probs = draft.tokens, draft.probs
    if process.processors:
        tokens, forced, counts = process.force(tokens, counts, most)
        valid = counts
        if probs is not None:
            # A draft model's vocabulary may be smaller.
            probs = jnp.pad(probs, ((0, 0), (0, 0), (0, vocab_size - probs.shape[2])))
            certain = jax.nn.one_hot(tokens, vocab_size, dtype=probs.dtype)
            probs = jnp.where(forced[..., None], certain, probs)
    if probs is not None:  # a token counts only if what it was drawn from is a distribution
        valid = jnp.minimum(counts, leading(is_distribution(probs)))
    return Proposal(Draft(tokens, valid, probs), drafter_state, cache, view, counts - valid)
