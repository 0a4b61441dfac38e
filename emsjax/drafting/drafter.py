"""The protocol of a draft source."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key

from emsjax.sampling import Sampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """Proposed continuations, each sample with its own number of tokens.

    Attributes:
        tokens: the proposals; entries at or beyond `counts` are ignored.
        counts: proposed tokens per sample, 0 allowed.
        probs: the distributions the tokens were drawn from, each conditioned on the
            preceding draft tokens, v at most the target's vocabulary; None where the
            tokens were not drawn: all is greedy, or the drafter is deterministic.
    """

    tokens: Int32[Array, "b k"]
    counts: Int32[Array, "b"]
    probs: Float[Array, "b k v"] | None = None


@runtime_checkable
class Drafter(Protocol):
    """What proposes draft tokens inside the device loop.

    All methods are pure functions on arrays, traced once into the loop. The
    drafter may be a pytree (its arrays are then arguments of the compiled loop)
    or any other object (then it is a constant of it). In greedy decoding, and under
    sampling where `Draft.probs` is None, the output tokens are those of plain decoding
    whatever it proposes. If it returns `Draft.probs`, these must be the distributions that
    its tokens were really drawn from; otherwise sampled output has the wrong distribution,
    which no comparison of tokens can show. Proposals beyond a sample's limit, outside the
    vocabulary, or behind an end token are cut off before verification.

    Optional parts:

    - `for_prompts(prompt_indices, num_prompts)`: for a drafter that holds something for each
      prompt; called on the host before `init`. Returns the drafter for a batch whose slot i
      serves prompt prompt_indices[i].
    - `check_target(config, positions)`: raises a ValueError for a target that it cannot serve.
    - `state_bytes(max_len)`: bytes of its state per sample, if that is large.
    - `with_limit(n)`: for a drafter made without a limit; returns a copy limited to n.
    - `fork(state, samples)`: for an expensive `init`. Where prompts have several sequences,
      `init` then sees each prompt once, and slot i starts from samples[i]'s state.
    - `admit(state, tokens, lengths, fresh)`: where slots are refilled, returns the state in which
      slots with `fresh` [b] begin a new prompt tokens[s, :lengths[s]]. Without it `init` is
      called for all slots, and fresh slots take their part of arrays whose first axis is the
      slots'.
    - `free`: a true attribute, for a drafter that proposes at next to no cost and does not draw
      its tokens. A draft-length policy then chooses among the tokens that it found.

    Attributes:
        max_draft_tokens: static upper limit k of tokens per sample and step.
    """

    max_draft_tokens: int

    def init(
        self, prompts: Int32[Array, "b t"], prompt_lengths: Int32[Array, "b"], max_len: int
    ) -> Any:
        """State for a batch; `prompts` is padded, `max_len` bounds every sample's length."""
        ...

    def propose(
        self,
        state: Any,
        tokens: Int32[Array, "b t"],
        lengths: Int32[Array, "b"],
        draft_lengths: Int32[Array, "b"],
        keys: Key[Array, "b"],
        sampling: Sampling | None,
    ) -> tuple[Draft, Any]:
        """Continue tokens[s, :lengths[s]] by up to draft_lengths[s] <= k tokens.

        `keys` are random keys of the sequences, others in each step: derive bits with
        `emsjax.sampling.position_keys`. `sampling` is None for greedy decoding,
        otherwise holds one value per sample. A draft length of 0 asks for nothing.
        """
        ...

    def commit(self, state: Any, lengths: Int32[Array, "b"]) -> Any:
        """Told after verification: tokens[s, :lengths[s]] stand. By default changes nothing."""
        return state


def admitted(drafter: Drafter, state: Any, tokens, lengths, fresh: Bool[Array, "b"]) -> Any:
    """The drafter's state where `fresh` slots begin new sequences."""
    if hasattr(drafter, "admit"):
        return drafter.admit(state, tokens, lengths, fresh)
    return of_fresh_slots(drafter.init(tokens, lengths, tokens.shape[1]), state, fresh)


def of_fresh_slots(begun: Any, state: Any, fresh: Bool[Array, "b"]) -> Any:
    """`state`, and of fresh slots what has `begun`: of arrays whose first axis is the slots'."""
    of_slots = lambda x: jnp.shape(x)[:1] == fresh.shape
    return jax.tree.map(
        lambda new, old: choose(fresh, new, old) if of_slots(old) else old, begun, state
    )


def choose(fresh: Bool[Array, "b"], new: Array, old: Array) -> Array:
    """Entries of the fresh slots from `new`, of the others from `old`; slots lead."""
    return jnp.where(fresh.reshape(-1, *[1] * (old.ndim - 1)), new, old)


def is_free(drafter: Drafter | None) -> bool:
    """Whether a draft-length policy is asked after it has proposed."""
    return getattr(drafter, "free", False)


def with_policys_limit(drafter: Drafter | None, draft_length: Any) -> Drafter | None:
    """The drafter as the draft-length policy wants it, where both leave room for that."""
    limit = getattr(draft_length, "max_draft_tokens", None)
    if limit is None or not hasattr(drafter, "with_limit"):
        return drafter
    return drafter.with_limit(limit)
