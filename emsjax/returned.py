"""Checks of what a user's drafter, policy or attention returns while the loop is traced.

Each raises a ValueError that names the method and what it should have returned.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


def available_lengths(policy: Any, state: Any, view: Any) -> Int32[Array, "b"]:
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


def checked_draft(draft: Any, batch: int, max_draft_tokens: int, vocab_size: int) -> Any:
    """Checks a `Draft` and converts its integers to the loop's types.

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
    tokens, counts = tokens.astype(jnp.int32), counts.astype(jnp.int32)
    if (parents := draft.parents) is not None:
        what = f"None, or integers [b, k] = {block}"
        parents = check("parents", jnp.integer, lambda shape: shape == block, what)
        parents = parents.astype(jnp.int32)
        if probs is not None:
            raise ValueError("a Draft with parents cannot have probs: its tokens are not drawn")
    return dataclasses.replace(draft, tokens=tokens, counts=counts, probs=probs, parents=parents)


def checked_proposal(
    drafter: Any, state: Any, *arguments: Any, kind: type, vocab_size: int
) -> tuple[Any, Any, Any]:
    """Calls `drafter.propose`, and checks the draft and the state.

    Args:
        state: the `DecodeState`, with the drafter's state and the target's cache.
        arguments: the arguments of `Drafter.propose` after the state.
        kind: the class of a draft, `emsjax.Draft`.
        vocab_size: the target's vocabulary size.

    Returns:
        The draft, the drafter's state and the target's cache.

    Raises:
        ValueError: the result is not what `Drafter.propose` must return.
    """
    tokens, *_ = arguments
    given = state.cache if drafter.shares_cache else state.drafter_state
    found = drafter.propose(given, *arguments)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], kind)):
        name = lambda x: "array" if isinstance(x, jax.Array) else type(x).__name__
        several = isinstance(found, tuple)
        what = f"({', '.join(map(name, found))})" if several else name(found)
        raise ValueError(f"the drafter's propose must return a pair (Draft, state), not {what}")
    draft, after = found
    check_state("the drafter's", "propose", given, after)
    draft = checked_draft(draft, len(tokens), drafter.max_draft_tokens, vocab_size)
    if not drafter.shares_cache:
        return draft, after, state.cache
    # What lies behind the committed tokens may have changed, and nothing else.
    return draft, state.drafter_state, dataclasses.replace(state.cache, layers=after.layers)


def check_state(whose: str, method: str, before: Any, after: Any) -> None:
    """Raises ValueError unless `after`, which `method` returned, has the structure, shapes and
    types of the state `before`, as the device loop needs."""
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


def check_array(
    name: str, value: Any, kind: Any, fits: Callable[[tuple], bool], what: str
) -> Array:
    """`value` as an array.

    Args:
        kind: a scalar type such as `jnp.integer`.
        fits: whether a shape is right.
        what: the right kind and shape, in words.

    Raises:
        ValueError: no array, or one of another kind or shape.
    """
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise ValueError(f"{name} must be {what}: got {type(value).__name__}")
    if not jnp.issubdtype(value.dtype, kind) or not fits(value.shape):
        raise ValueError(f"{name} must be {what}: got {value.dtype}{list(value.shape)}")
    return jnp.asarray(value)


def check_alike(rule: str, output: Any, given: Array) -> Array:
    """The output of a user's function, which is like the array that it was given.

    Args:
        rule: what the function must return, in words.

    Raises:
        ValueError: no array, or one of another shape or dtype.
    """
    is_array = hasattr(output, "dtype") and hasattr(output, "shape")
    kind = lambda x: f"{x.dtype}{list(x.shape)}"
    found = kind(output) if is_array else type(output).__name__
    if found != kind(given):
        raise ValueError(f"{rule}, {kind(given)}, not {found}")
    return output
