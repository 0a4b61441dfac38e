"""Drafts of several sources: their sizes, the one draft of a step, and those that were not used.

Axis legend: see `emsjax.decode.pack`.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from emsjax.decode.base import Draft, Drafter
from emsjax.drafters.choice import NONE, Choice, Offers
from emsjax.trees import Tree, with_nodes
from emsjax.verification import leading
from pallas_kernels.common.indexing import take_in_rows


def chain_parents(batch: int, k: int) -> Int32[Array, "b k"]:
    """The `Draft.parents` of a chain: each token follows the one before it."""
    return jnp.broadcast_to(jnp.arange(-1, k - 1, dtype=jnp.int32), (batch, k))


def no_draft(batch: int, k: int) -> Draft:
    """A draft without tokens that has parents, as those that are kept have."""
    none = jnp.zeros(batch, jnp.int32)
    return Draft(jnp.zeros((batch, k), jnp.int32), none, parents=chain_parents(batch, k))


def usable_draft(draft: Draft, limits: Int32[Array, "b"], of_depth: bool) -> tuple[Draft, Offers]:
    """The part of a free source's draft that a step can use, and the sizes.

    Args:
        limits: of each sample's draft.
        of_depth: whether they limit the tokens on each path of a tree; otherwise all its tokens.
    """
    width = draft.tokens.shape[1]
    counts = jnp.clip(draft.counts, 0, width)
    if draft.parents is None:
        usable = jnp.minimum(counts, limits)
        return dataclasses.replace(draft, counts=usable), Offers(counts, usable, usable)
    at = Tree.of(draft.parents).depths[:, 1:]
    exists = lambda counts: jnp.arange(width) < counts[:, None]
    deepest = lambda counts: jnp.max(jnp.where(exists(counts), at, 0), axis=1)
    depths = deepest(counts)
    if of_depth:
        draft = with_nodes(draft, exists(counts) & (at <= limits[:, None]))
        return draft, Offers(depths, jnp.minimum(depths, limits), draft.counts)
    rows = jnp.minimum(counts, limits)
    return dataclasses.replace(draft, counts=rows), Offers(depths, deepest(rows), rows)


def expected_offer(source: Drafter, limits: Int32[Array, "b"]) -> Offers:
    """The sizes of what a source will draft that has not drafted yet.

    Args:
        limits: the most tokens on each path.
    """
    k = source.max_draft_tokens
    deepest = min(source.max_depth or k, k)
    depths = jnp.minimum(limits, deepest)
    return Offers(depths, depths, depths if deepest == k else depths * (k // deepest))


def merged_draft(drafts: Sequence[Draft], choice: Choice, k: int) -> Draft:
    """The draft of up to k tokens in which each sample has its source's.

    A chain beside trees is the tree whose tokens have one candidate each.

    Args:
        drafts: of each source, those of free sources cut to what the step can use.

    Raises:
        ValueError: a source draws its tokens, and another one drafts trees.
    """
    trees = [i for i, draft in enumerate(drafts) if draft.parents is not None]
    drawn = [i for i, draft in enumerate(drafts) if draft.probs is not None]
    if trees and drawn:
        raise ValueError(
            f"drafters[{drawn[0]}] draws its tokens (Draft.probs) and drafters[{trees[0]}] drafts "
            "trees (Draft.parents), and a step verifies one or the other: with greedy decoding no "
            "token is drawn"
        )
    batch = len(choice.source)
    widened = lambda x: jnp.pad(x, [(0, 0), (0, k - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    tokens, counts = jnp.zeros((batch, k), jnp.int32), jnp.zeros(batch, jnp.int32)
    parents = chain_parents(batch, k) if trees else None
    for i, draft in enumerate(drafts):
        mine, own = choice.source == i, draft.counts
        if draft.parents is None:
            own = jnp.minimum(own, choice.depths)
        else:
            parents = jnp.where(mine[:, None], widened(draft.parents), parents)
        tokens = jnp.where(mine[:, None], widened(draft.tokens), tokens)
        counts = jnp.where(mine, own, counts)
    if not drawn:
        return Draft(tokens, counts, parents=parents)
    width = max(drafts[i].probs.shape[2] for i in drawn)
    # Tokens that were not drawn were certain. Those beyond the drawn ones' vocabulary end them.
    probs, is_certain = jax.nn.one_hot(tokens, width, dtype=jnp.float32), choice.source != NONE
    for i in drawn:
        mine = choice.source == i
        own = drafts[i].probs.astype(jnp.float32)
        own = widened(jnp.pad(own, ((0, 0), (0, 0), (0, width - own.shape[2]))))
        probs = jnp.where(mine[:, None, None], own, probs)
        is_certain &= ~mine
    known = leading((tokens >= 0) & (tokens < width))
    counts = jnp.where(is_certain, jnp.minimum(counts, known), counts)
    return Draft(tokens, counts, probs)


def unused_draft(draft: Draft, before: Draft, is_used: Bool[Array, "b"]) -> Draft:
    """What is kept of a free source's draft until it is known which tokens follow.

    Args:
        before: what was kept of the one before; a chain has the same parents.
        is_used: samples of which nothing is kept, as the draft is verified.
    """
    parents = before.parents if draft.parents is None else draft.parents
    return Draft(draft.tokens, jnp.where(is_used, 0, draft.counts), parents=parents)


def agreement(
    unused: Draft,
    is_tree: bool,
    tokens: Int32[Array, "b t"],
    lengths: Int32[Array, "b"],
    emitted: Int32[Array, "b"],
) -> tuple[Int32[Array, "b"], Int32[Array, "b"]]:
    """How a draft that was not used compares with the tokens that followed.

    Args:
        unused: the draft.
        is_tree: whether it is to be read as a tree; otherwise it is a chain.
        tokens: of the samples, by now.
        lengths: tokens of each before the draft.
        emitted: tokens of each since then.

    Returns:
        The draft tokens that agree, before any that differs, and how many these and the longest
        path from their end on are together.
    """
    after = lambda x: take_in_rows(tokens, jnp.minimum(lengths[:, None] + x, tokens.shape[1] - 1))
    if not is_tree:
        place = jnp.arange(unused.tokens.shape[1])
        same = after(place) == unused.tokens
        right = leading(same & (place < jnp.minimum(emitted, unused.counts)[:, None]))
        return right, unused.counts
    tree = Tree.of(unused.parents)
    on_path = tree.followed(unused, after(tree.depths), tree.depths < emitted[:, None])
    right = jnp.sum(on_path, axis=1, dtype=jnp.int32) - 1
    shared = jnp.sum(tree.ancestors & on_path[:, None], axis=2) - 1  # tokens with each row's path
    exists = jnp.arange(on_path.shape[1]) <= unused.counts[:, None]
    goes_on = exists & (shared == right[:, None])
    return right, jnp.max(jnp.where(goes_on, tree.depths, 0), axis=1)
