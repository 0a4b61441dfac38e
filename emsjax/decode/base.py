"""The protocol of a draft source."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key

from emsjax.sampling import Sampling

REQUIRED = ("max_draft_tokens", "init", "propose")


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

    - `commit(state, lengths)`: called after verification, when tokens[s, :lengths[s]] stand, to
      forget what was rejected. Returns what is left of the state.
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


def check_is_drafter(drafter: Any) -> None:
    """Whether it has what every drafter has.

    Raises:
        ValueError: it has not, or it is a class.
    """
    if isinstance(drafter, type):
        name = drafter.__name__
        raise ValueError(f"drafter must be an instance, not the class {name}: pass {name}(...)")
    missing = [name for name in REQUIRED if not hasattr(drafter, name)]
    if missing:
        lacks = "none" if len(missing) == len(REQUIRED) else f"no {' and no '.join(missing)}"
        raise ValueError(
            "drafter must have max_draft_tokens, init and propose (emsjax.Drafter); "
            f"{type(drafter).__name__!r} has {lacks}"
        )


def proposed(drafter: Drafter, state: Any, *arguments: Any, vocab_size: int) -> tuple[Draft, Any]:
    """What `drafter.propose` returns, checked.

    Args:
        drafter: any.
        state: its own.
        arguments: of `Drafter.propose`, behind the state.
        vocab_size: of the target.

    Raises:
        ValueError: it is not what `Drafter.propose` returns.
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
    """The draft, its numbers as the loop has them.

    A narrower draft is refused, too: a step has the row buckets of its width, and policies
    price those of the limit.

    Raises:
        ValueError: an array of another shape or kind.
    """
    block = (batch, max_draft_tokens)
    what = f"integers [b, k] = {block}, k = max_draft_tokens"
    tokens = _checked("tokens", draft.tokens, jnp.integer, lambda shape: shape == block, what)
    what = f"integers [b] = {(batch,)}"
    counts = _checked("counts", draft.counts, jnp.integer, lambda shape: shape == (batch,), what)
    probs = draft.probs
    if probs is not None:
        fits = lambda shape: len(shape) == 3 and shape[:2] == block and shape[2] <= vocab_size
        what = f"None, or floating [b, k, v] = {(*block, vocab_size)}; v may be smaller"
        probs = _checked("probs", probs, jnp.floating, fits, what)
    return Draft(tokens.astype(jnp.int32), counts.astype(jnp.int32), probs)


def _checked(name: str, value: Any, kind: Any, fits: Callable[[tuple], bool], what: str) -> Array:
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise ValueError(f"Draft.{name} must be {what}: got {type(value).__name__}")
    if not jnp.issubdtype(value.dtype, kind) or not fits(value.shape):
        raise ValueError(f"Draft.{name} must be {what}: got {value.dtype}{list(value.shape)}")
    return jnp.asarray(value)


def state_after_commit(drafter: Drafter, state: Any, lengths: Int32[Array, "b"]) -> Any:
    """The drafter's state after verification.

    Raises:
        ValueError: it is of another kind than before.
    """
    if not hasattr(drafter, "commit"):
        return state
    after = drafter.commit(state, lengths)
    check_state("the drafter's", "commit", state, after)
    return after


def check_state(whose: str, method: str, before: Any, after: Any) -> None:
    """Whether the device loop can go on with the state that `method` returned.

    Raises:
        ValueError: it has another structure, or other shapes or types.
    """
    rule = f"{whose} state must keep its structure, shapes and types"
    old, new = jax.tree.structure(before), jax.tree.structure(after)
    if old != new:
        raise ValueError(f"{rule}: {method} returned {new} instead of {old}")
    kind = lambda x: f"{jax.typeof(x).dtype}{list(jnp.shape(x))}"
    leaves = jax.tree_util.tree_leaves_with_path(before)
    for (path, was), leaf in zip(leaves, jax.tree.leaves(after), strict=True):
        if kind(was) != kind(leaf):
            at = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise ValueError(f"{rule}: {method} returned {kind(leaf)} instead of {kind(was)}{at}")


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
