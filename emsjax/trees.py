"""Drafts that form trees: a token may have several candidates to follow it, and one path of tokens
is accepted. A chain is the tree whose tokens have one candidate each.

In a sample's block of k + 1 rows, row 0 is the last token of the sample, the root, and row i + 1 is
its draft token i. A token comes after its parent.

Axis legend: see `emsjax.decode.pack`; k1 is k + 1, o is a number of continuations.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from emsjax.values import pytree
from emsjax.verification import leading
from pallas_kernels.common.indexing import take, take_in_rows
from pallas_kernels.common.numerics import is_invariant


@pytree
class Tree:
    """The rows of each sample's draft, as a tree.

    Attributes:
        parents: the row that each draft token follows, smaller than its own.
        depths: the tokens on the path from the root to each row, the root not included.
        ancestors: ancestors[s, i, j] tells whether row j is on the path from the root to row i,
            which is on it itself.
        places: the place of each draft token among the candidates after the same row, from 0 on.
    """

    parents: Int32[Array, "b k"]
    depths: Int32[Array, "b k1"]
    ancestors: Bool[Array, "b k1 k1"]
    places: Int32[Array, "b k"]

    @classmethod
    def of(cls, parents: Int32[Array, "b k"]) -> "Tree":
        """The tree of `Draft.parents`: -1 for the root, otherwise the index of a draft token.

        >>> tree = Tree.of(jnp.array([[-1, 0, -1]]))
        >>> print(tree.depths, tree.places)
        [[0 1 2 1]] [[0 0 1]]
        """
        k = parents.shape[1]
        rows = jnp.clip(parents, -1, jnp.arange(k) - 1) + 1
        above = jnp.pad(rows, ((0, 0), (1, 0)))[..., None] == jnp.arange(k + 1)  # [b, k1, k1]
        ancestors = above | jnp.eye(k + 1, dtype=bool)
        for _ in range((k - 1).bit_length()):  # each time paths of twice the length
            ancestors = jnp.any(ancestors[..., None] & ancestors[:, None], axis=2)
        depths = jnp.sum(ancestors, axis=2, dtype=jnp.int32) - 1
        earlier = (rows[:, :, None] == rows[:, None]) & jnp.tri(k, k=-1, dtype=bool)
        return cls(rows, depths, ancestors, jnp.sum(earlier, axis=2, dtype=jnp.int32))

    def arrange(self, rows: Any, prompt_counts: Int32[Array, "b"] | None) -> Any:
        """The `PackedRows` with drafts as trees, at positions by their depths.

        Args:
            rows: the rows as sequences.
            prompt_counts: prompt tokens of each sample, which stay sequences; None: there are none.
        """
        ancestors, within = rows.gather(self.ancestors), rows.within
        moved = rows.gather(self.depths) - within
        if prompt_counts is not None:
            column = jnp.arange(len(within))
            is_prompt = take(prompt_counts, rows.samples) > 0
            ancestors = jnp.pad(ancestors, ((0, 0), (0, len(column) - ancestors.shape[1])))
            ancestors = jnp.where(is_prompt[:, None], column <= within[:, None], ancestors)
            moved = jnp.where(is_prompt, 0, moved)
        moved = jnp.where(rows.segment_ids < len(self.parents), moved, 0)
        return dataclasses.replace(rows, positions=rows.positions + moved, ancestors=ancestors)

    def accepted(self, draft: Any, verdict: Any) -> tuple[Any, Array, Array]:
        """The path from the root to the last draft token that is accepted, of each sample.

        Args:
            draft: the `Draft`.
            verdict: the `RowVerdict` of all rows [b, k1].

        Returns:
            The verdict on the rows of the path, in their order, and arbitrary ones behind its end;
            the number of accepted draft tokens [b]; and the place of each row on the path, or -1
            for a row that is not on it [b, k1].
        """
        on_path = self.followed(draft, verdict.tokens, jnp.isfinite(verdict.logprobs))
        ranks = jnp.where(on_path, self.depths, -1)
        rows = jnp.argmax(ranks[:, None] == jnp.arange(on_path.shape[1])[:, None], axis=2)
        sample = jnp.arange(len(rows))[:, None]
        verdict = jax.tree.map(lambda x: take(x, sample, rows), verdict)
        return verdict, jnp.sum(on_path, axis=1, dtype=jnp.int32) - 1, ranks

    def followed(
        self, draft: Any, following: Int32[Array, "b k1"], exists: Bool[Array, "b k1"]
    ) -> Bool[Array, "b k1"]:
        """Which rows are on the path that each sample's text takes through its draft.

        The root is. A draft token is if its parent is and if it equals the token that follows
        there; the first of two equal candidates is taken.

        Args:
            draft: the `Draft`.
            following: the token that follows each row.
            exists: whether there is such a token.
        """
        tokens, index = draft.tokens, jnp.arange(draft.tokens.shape[1])
        same = (self.parents[:, :, None] == self.parents[:, None]) & (index < index[:, None])
        same &= tokens[:, :, None] == tokens[:, None]
        drafted = index < draft.counts[:, None]
        right = drafted & (take_in_rows(following, self.parents) == tokens)
        right &= take_in_rows(exists, self.parents) & ~jnp.any(same, axis=2)
        right = jnp.pad(right, ((0, 0), (1, 0)), constant_values=True)
        return jnp.all(~self.ancestors | right[:, None], axis=2)

    def paths(self, tokens: Int32[Array, "b k"]) -> Int32[Array, "b k1 k"]:
        """The draft tokens on the path to each row, in order; arbitrary ones behind them."""
        at = self.depths[:, 1:, None] == jnp.arange(1, tokens.shape[1] + 1)  # [b, token, depth]
        on_path = self.ancestors[:, :, 1:, None] & at[:, None]
        return jnp.sum(jnp.where(on_path, tokens[:, None, :, None], 0), axis=2)

    def product(self, factors: Float[Array, "b k"]) -> Float[Array, "b k"]:
        """The product of the factors of all draft tokens on the path to each."""
        return jnp.prod(jnp.where(self.ancestors[:, 1:, 1:], factors[:, None], 1), axis=2)


def usable_nodes(draft: Any, limits: Int32[Array, "b"], vocab_size: int) -> Int32[Array, "b"]:
    """Number of draft tokens of trees to verify per sample, `limits` at most.

    Drafts are cut before the first id outside the vocabulary, and before the first token whose
    parent does not precede it.
    """
    tokens, parents = draft.tokens, draft.parents
    valid = (tokens >= 0) & (tokens < vocab_size)
    valid &= (parents >= -1) & (parents < jnp.arange(tokens.shape[1]))
    return jnp.clip(jnp.minimum(draft.counts, leading(valid)), 0, limits)


def chosen_nodes(
    draft: Any, counts: Int32[Array, "b"], policy: Any, policy_state: Any, view: Any
) -> Any:
    """The draft with the tokens of trees that a policy chooses among the first `counts`.

    Args:
        draft: the `Draft`.
        policy: the `DraftLength`; None: all are chosen.
        view: the `StepView`.

    Raises:
        ValueError: numerics are invariant.
    """
    if is_invariant():
        raise ValueError("numerics 'invariant' verifies chains only, and the drafter drafts trees")
    if policy is None:
        return dataclasses.replace(draft, counts=counts)
    view = view._replace(available=counts, drafted=True, tree=Tree.of(draft.parents))
    kept = policy.nodes(policy_state, view)
    return with_nodes(draft, kept & (jnp.arange(draft.tokens.shape[1]) < counts[:, None]))


def with_nodes(draft: Any, kept: Bool[Array, "b k"]) -> Any:
    """The draft with some of its tokens alone, parents included, in their order."""
    order = jnp.argsort(~kept, axis=1, stable=True)
    tokens, parents = reordered(order, draft.tokens, draft.parents)
    counts = jnp.sum(kept, axis=1, dtype=jnp.int32)
    return dataclasses.replace(draft, tokens=tokens, counts=counts, parents=parents)


def reordered(
    order: Int32[Array, "b n"], tokens: Int32[Array, "b n"], parents: Int32[Array, "b n"]
) -> tuple[Int32[Array, "b n"], Int32[Array, "b n"]]:
    """Nodes in another order: their tokens, and their parents' places in it.

    Args:
        order: the node at each place, a parent before its children.
    """
    moved = jnp.argsort(order, axis=1).astype(jnp.int32)
    parents = jnp.where(parents < 0, -1, take_in_rows(moved, jnp.maximum(parents, 0)))
    return take_in_rows(tokens, order), take_in_rows(parents, order)


class Nodes(NamedTuple):
    """Nodes of each sample's tree, the best ones first.

    Attributes:
        tokens: the tokens.
        parents: see `Draft.parents`.
        counts: number of nodes; the others are arbitrary.
        scores: what they are sorted by.
    """

    tokens: Int32[Array, "b k"]
    parents: Int32[Array, "b k"]
    counts: Int32[Array, "b"]
    scores: Float[Array, "b k"] | Int32[Array, "b k"]


def most_likely(
    scores: Float[Array, "b n"] | Int32[Array, "b n"],
    tokens: Int32[Array, "b n"],
    parents: Int32[Array, "b n"],
    k: int,
) -> Nodes:
    """The k nodes with the highest scores, the highest first.

    Nodes with equal scores stay in order, so that none precedes its parent.

    Args:
        scores: of the nodes, at most those of their parents; 0 or less: there is no such node.
        tokens, parents: of the nodes, which come after their parents; parent -1: the root.
    """
    order = jnp.argsort(-scores, axis=1, stable=True)
    tokens, parents = reordered(order, tokens, parents)
    counts = jnp.minimum(jnp.sum(scores > 0, axis=1, dtype=jnp.int32), k)
    scores = take_in_rows(scores, order)
    return Nodes(tokens[:, :k], parents[:, :k], counts, scores[:, :k])


def merged(
    continuations: Int32[Array, "b o n"],
    counts: Int32[Array, "b o"],
    branches: int,
    k: int,
) -> Nodes:
    """The trees of several continuations, in which those that begin alike share their beginning.

    Equal tokens behind different tokens are not shared, as their keys and values differ.

    Args:
        continuations: of each sample, o rows of tokens.
        counts: tokens of each row, 0 for a row that does not exist.
        branches: most candidates for one token: the most frequent ones, and of equally frequent
            ones those of earlier rows.
        k: most tokens of a tree: the most frequent ones, and of equally frequent ones those that
            are nearer to the root.

    Returns:
        The nodes, whose scores are the numbers of rows that they are on.
    """
    b, o, n = continuations.shape
    depth, row = jnp.arange(n), jnp.arange(o)
    exists = depth < counts[..., None]  # [b, o, n]
    different = continuations[:, :, None] != continuations[:, None]
    different |= ~(exists[:, :, None] & exists[:, None])
    shared = jnp.min(jnp.where(different, depth, n), axis=3)  # tokens that two rows begin with
    alike = shared[..., None] > depth  # [b, o, o, n]: both rows are on the node of this depth
    before = shared[..., None] >= depth  # both are on its parent
    votes = jnp.sum(alike, axis=2, dtype=jnp.int32)  # [b, o, n]
    first = exists & (jnp.argmax(alike, axis=2) == row[:, None])  # the row that names the node
    # The place of a node among the candidates of its parent, from 0 on.
    order = votes * o - row[:, None]
    leader = jnp.where(alike, order[:, None], -o).max(axis=2)  # the order of the node's first row
    better = before & first[:, None] & (order[:, None] > leader[:, :, None])
    place = lax.cummax(jnp.sum(better, axis=2, dtype=jnp.int32), axis=2)
    is_node = first & (place < branches)
    # Nodes as n x o numbers, sorted by votes, then depth, then row.
    flat = lambda x: jnp.swapaxes(x, 1, 2).reshape(b, n * o)
    above = jnp.argmax(before, axis=2)  # [b, o, n]: the parent's first row
    parents = jnp.where(depth > 0, (depth - 1) * o + above, -1).astype(jnp.int32)
    scores = jnp.where(is_node, votes, 0)
    return most_likely(*map(flat, (scores, continuations, parents)), k)
