"""The first part of a step: drafts for each sample, cut to the usable tokens."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from emsjax.checks import check_array, check_state
from emsjax.decode.base import Draft, Drafter, DraftLength, StepView
from emsjax.decode.run import Run
from emsjax.sampling import Purpose, position_keys
from emsjax.verification import usable_counts


class Proposal(NamedTuple):
    """A step's draft, the drafter's state after proposing it, and the view the policy saw."""

    draft: Draft
    drafter_state: Any
    view: StepView


def propose(run: Run, state: Any, ready: Bool[Array, "b"]) -> Proposal:
    """The step's draft. A sample that is not `ready` drafts nothing.

    Args:
        state: the `DecodeState`.
        ready: samples whose prompts are cached and that still decode.

    Raises:
        ValueError: the drafter or the policy does not return what it should, or a `free` drafter
            draws its tokens.
    """
    drafter, vocab_size = run.drafter, run.model.config.vocab_size
    remaining = state.length_limits - state.lengths
    limits = jnp.where(ready, jnp.minimum(remaining - 1, state.counters.max_draft_tokens), 0)
    if drafter is None:
        batch = state.lengths.shape[0]
        draft = Draft(jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32))
        return Proposal(draft, (), StepView(ready, state.lengths, limits, drafted=False))
    view = StepView(ready, state.lengths, limits, drafted=bool(drafter.free))

    def allowed(view: StepView) -> Int32[Array, "b"]:
        if run.policy is None:
            return view.available
        return available_lengths(run.policy, state.policy_state, view)

    if not view.drafted:
        limits = allowed(view)
    # A policy may learn more from a shortened draft than how much was accepted. So no later step
    # may draw from the same bits: whether it drafts could depend on the tokens it would draw.
    keys = position_keys(state.keys, state.lengths, Purpose.STEP)
    arguments = (state.tokens, state.lengths, limits, keys, state.sampling)
    draft, drafter_state = checked_proposal(
        drafter, state.drafter_state, *arguments, vocab_size=vocab_size
    )
    counts = usable_counts(draft.tokens, draft.counts, limits, state.end_token_ids, vocab_size)
    if view.drafted:
        if draft.probs is not None:
            # A draft's remaining length must not depend on which tokens were drawn.
            raise ValueError("a drafter that draws its tokens (Draft.probs) cannot be `free`")
        view = view._replace(available=counts)
        counts = allowed(view)
    # A sample that is not ready verifies nothing, even if its drafter has proposed tokens.
    draft = Draft(draft.tokens, jnp.where(ready, counts, 0), draft.probs)
    return Proposal(draft, drafter_state, view)


def available_lengths(policy: DraftLength, state: Any, view: StepView) -> Int32[Array, "b"]:
    """The policy's lengths, capped by the number of tokens that each sample could use.

    Raises:
        ValueError: the lengths are not integers, or not one for each sample.
    """
    lengths = policy.lengths(state, view)
    shape, dtype = jnp.shape(lengths), jnp.result_type(lengths)
    if not jnp.issubdtype(dtype, jnp.integer) or shape not in ((), view.available.shape):
        raise ValueError(
            f"{policy.name}.lengths must return integers [b] = "
            f"{view.available.shape}, not {dtype}{list(shape)}"
        )
    return jnp.clip(jnp.asarray(lengths).astype(jnp.int32), 0, view.available)


def checked_proposal(
    drafter: Drafter, state: Any, *arguments: Any, vocab_size: int
) -> tuple[Draft, Any]:
    """Calls `drafter.propose` and checks the result.

    Args:
        arguments: the arguments of `Drafter.propose` after the state.
        vocab_size: the target's vocabulary size.

    Raises:
        ValueError: the result is not what `Drafter.propose` must return.
    """
    tokens, *_ = arguments
    found = drafter.propose(state, *arguments)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Draft)):
        kind = lambda x: "array" if isinstance(x, jax.Array) else type(x).__name__
        several = isinstance(found, tuple)
        what = f"({', '.join(map(kind, found))})" if several else kind(found)
        raise ValueError(f"the drafter's propose must return a pair (Draft, state), not {what}")
    draft, after = found
    check_state("the drafter's", "propose", state, after)
    return checked_draft(draft, len(tokens), drafter.max_draft_tokens, vocab_size), after


def checked_draft(draft: Draft, batch: int, max_draft_tokens: int, vocab_size: int) -> Draft:
    """Checks the draft and converts its integers to the loop's types.

    A narrower draft is refused too: a step has the row buckets of the draft's width, while
    policies price the buckets of the limit.

    Raises:
        ValueError: an array has another shape or kind.
    """
    check = lambda name, *rule: check_array(f"Draft.{name}", getattr(draft, name), *rule)
    block = (batch, max_draft_tokens)
    what = f"integers [b, k] = {block}, k = max_draft_tokens"
    tokens = check("tokens", jnp.integer, lambda shape: shape == block, what)
    what = f"integers [b] = {(batch,)}"
    counts = check("counts", jnp.integer, lambda shape: shape == (batch,), what)
    if (probs := draft.probs) is not None:
        fits = lambda shape: len(shape) == 3 and shape[:2] == block and shape[2] <= vocab_size
        what = f"None, or floating [b, k, v] = {(*block, vocab_size)}; v may be smaller"
        probs = check("probs", jnp.floating, fits, what)
    return Draft(tokens.astype(jnp.int32), counts.astype(jnp.int32), probs)
