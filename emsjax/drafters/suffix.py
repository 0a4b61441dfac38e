"""Drafting from the longest suffix match in a sample's history and in a memory of earlier outputs.

There is no automaton or suffix tree over a sample's history. Comparing its last tokens with all its
positions at once is a few kernels on a GPU, while the suffix links of an automaton are followed one
after the other, several launches each, and a step is too short for dozens of them.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from emsjax.checks import MOST, check_at_least, check_instance, check_number
from emsjax.decode.base import Draft, Drafter
from emsjax.drafters.suffix_memory import CONTEXT, SEPARATOR, SuffixMemory
from emsjax.trees import merged
from emsjax.verification import leading
from pallas_kernels.common.indexing import take_in_rows

OCCURRENCES = 8  # that vote for a continuation
NO_TOKEN = -2  # matches neither a token nor a separator


@jax.tree_util.register_pytree_node_class
class SuffixDrafter(Drafter):
    """Drafts what followed the longest earlier occurrence of a sample's last tokens.

    The last tokens, up to 16, are looked up among the sample's own tokens, prompt included, and in
    a memory of earlier outputs. The longer match is used, and the sample's own if both are equally
    long. Up to 8 of its occurrences vote, in its own tokens the latest ones: each draft token is
    the most frequent one after those before it. The draft ends where fewer than `min_probability`
    of the occurrences go on like it, or after `length_factor` times the matched tokens plus
    `length_offset`. A continuation that reaches the end of the sample's own tokens goes on with
    the draft, so that a repeated passage is drafted over and over.

    With several `branches` the draft is a tree of what followed the occurrences, the most frequent
    tokens first; where two tokens followed the same ones, both are drafted.

    The drafter is deterministic. A sample's drafts depend on its own tokens and the memory only.

    Args:
        max_draft_tokens: maximum number of tokens to draft.
        memory: an `emsjax.SuffixMemory`, read as it is now; None: the sample's own tokens only.
        min_match_length: fewest tokens that must match, 1 to 16.
        length_factor, length_offset: how the length of a draft grows with that of the match.
        min_probability: fraction of the occurrences that the whole draft must share, or in a tree
            each path.
        branches: most candidates for one token; 1: the draft is a chain.

    Raises:
        ValueError: an argument is of the wrong type or out of range.

    References: SuffixDecoding, arXiv 2411.04975.
    """

    free = True

    def __init__(
        self,
        max_draft_tokens: int = 16,
        memory: SuffixMemory | None = None,
        *,
        min_match_length: int = 1,
        length_factor: float = 2.0,
        length_offset: float = 0.0,
        min_probability: float = 0.2,
        branches: int = 1,
    ):
        self.max_draft_tokens = check_at_least("max_draft_tokens", max_draft_tokens, 1, MOST)
        self.min_match_length = check_at_least("min_match_length", min_match_length, 1, CONTEXT)
        self.branches = check_at_least("branches", branches, 1, MOST)
        is_length = lambda x: 0 <= x <= MOST
        rule = f"a number from 0 to {MOST}"
        self.length_factor = check_number("length_factor", length_factor, rule, is_length)
        self.length_offset = check_number("length_offset", length_offset, rule, is_length)
        self.min_probability = check_number(
            "min_probability", min_probability, "a number from 0 to 1", lambda x: 0 <= x <= 1
        )
        self.index = None
        if memory is not None:
            self.index = check_instance("memory", memory, SuffixMemory, "an emsjax.SuffixMemory")
            self.index = memory.index

    def tree_flatten(self):
        settings = (
            self.max_draft_tokens,
            self.min_match_length,
            self.branches,
            self.length_factor,
            self.length_offset,
            self.min_probability,
        )
        return (self.index,), settings

    @classmethod
    def tree_unflatten(cls, settings, children) -> "SuffixDrafter":
        self = object.__new__(cls)
        self.max_draft_tokens, self.min_match_length, self.branches, *others = settings
        self.length_factor, self.length_offset, self.min_probability = others
        (self.index,) = children
        return self

    def init(self, prompts, prompt_lengths, max_len) -> tuple[()]:
        return ()

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        k = self.max_draft_tokens
        suffix = last_tokens(tokens, lengths)
        matched, places = longest_matches(tokens, lengths, suffix)
        continuations = own_continuations(tokens, lengths, places, k)
        if self.index is not None:
            remembered, elsewhere = self.index.find(suffix, OCCURRENCES)
            better = remembered > matched
            matched = jnp.maximum(matched, remembered)
            places = jnp.where(better[:, None], elsewhere, places)
            others = self.index.continuations(elsewhere, k)
            continuations = jnp.where(better[:, None, None], others, continuations)

        longest = matched.astype(jnp.float32) * self.length_factor + self.length_offset
        longest = jnp.where(matched >= self.min_match_length, jnp.minimum(longest, k), 0)
        longest = longest.astype(jnp.int32)
        # A draft ends before a separator, so that what follows one does not matter.
        if self.branches > 1:
            before = jnp.min(jnp.where(continuations < 0, jnp.arange(k), k), axis=2)
            rows = jnp.where(places >= 0, jnp.minimum(before, longest[:, None]), 0)
            nodes = merged(continuations, rows, self.branches, k)
            fraction = nodes.scores / jnp.maximum(jnp.sum(places >= 0, axis=1, keepdims=True), 1)
            counts = jnp.minimum(nodes.counts, leading(fraction >= self.min_probability))
            counts = jnp.minimum(counts, draft_lengths)
            return Draft(nodes.tokens, counts, parents=nodes.parents), state
        drafted, probabilities = vote(continuations, places >= 0)
        counts = leading((drafted >= 0) & (probabilities >= self.min_probability))
        counts = jnp.minimum(counts, longest)
        return Draft(drafted, jnp.minimum(counts, draft_lengths)), state


def last_tokens(tokens: Int32[Array, "b t"], lengths: Int32[Array, "b"]) -> Int32[Array, "b w"]:
    """The last `CONTEXT` tokens of each sample, the last one first; NO_TOKEN before the first."""
    at = lengths[:, None] - 1 - jnp.arange(CONTEXT)
    return jnp.where(at >= 0, take_in_rows(tokens, jnp.maximum(at, 0)), NO_TOKEN)


def longest_matches(
    tokens: Int32[Array, "b t"], lengths: Int32[Array, "b"], suffix: Int32[Array, "b w"]
) -> tuple[Int32[Array, "b"], Int32[Array, "b o"]]:
    """Finds the positions in each sample before which the longest part of `suffix` stands.

    Returns:
        The number of tokens that match, and up to `OCCURRENCES` positions, the latest first; -1
        where there are fewer.
    """
    width = tokens.shape[1]
    position = jnp.arange(width)
    padded = jnp.pad(tokens, ((0, 0), (CONTEXT, 0)), constant_values=SEPARATOR)
    same, matches = position < lengths[:, None], jnp.zeros_like(tokens)
    for i in range(CONTEXT):
        earlier = lax.slice_in_dim(padded, CONTEXT - 1 - i, CONTEXT - 1 - i + width, axis=1)
        same &= earlier == suffix[:, i : i + 1]
        matches += same.astype(jnp.int32)
    matched = jnp.max(matches, axis=1)
    found = (matches == matched[:, None]) & (matches > 0)
    number = min(OCCURRENCES, width)
    # On a CPU XLA has a kernel for the largest of floats, and sorts integers. Positions are exact.
    places = lax.top_k(jnp.where(found, position, -1).astype(jnp.float32), number)[0]
    places = jnp.pad(places, ((0, 0), (0, OCCURRENCES - number)), constant_values=-1)
    return matched, places.astype(jnp.int32)


def own_continuations(
    tokens: Int32[Array, "b t"], lengths: Int32[Array, "b"], places: Int32[Array, "b o"], k: int
) -> Int32[Array, "b o k"]:
    """The k tokens from each position on, where a sample's end is followed by the draft itself."""
    period = jnp.maximum(lengths[:, None] - places, 1)[..., None]
    at = jnp.maximum(places, 0)[..., None] + jnp.arange(k) % period
    flat = jnp.minimum(at, tokens.shape[1] - 1).reshape(len(tokens), -1)
    return take_in_rows(tokens, flat).reshape(at.shape)


def vote(
    continuations: Int32[Array, "b o k"], exists: Bool[Array, "b o"]
) -> tuple[Int32[Array, "b k"], Float[Array, "b k"]]:
    """Chooses the most frequent next token again and again; the earlier row wins a tie.

    A token is compared among the rows that agree with those chosen before it.

    Returns:
        The tokens, and the fraction of all existing rows that begin with those up to each.
    """
    _, o, k = continuations.shape
    depth = jnp.arange(k)
    different = continuations[:, :, None] != continuations[:, None]
    shared = jnp.min(jnp.where(different, depth, k), axis=3)  # tokens that two rows begin with
    shared = jnp.where(exists[:, :, None] & exists[:, None], shared, 0)
    # One number for each row and depth, of which the high bits count the rows that begin alike, and
    # the low ones, one for each row, tell apart groups of the same size.
    weight = (1 << o) + (1 << jnp.arange(o)[::-1])
    groups = jnp.sum(jnp.where(shared[..., None] > depth, weight[:, None], 0), axis=2)
    # Rows that differ first at some depth are in the same groups before it.
    rank = jnp.take_along_axis(groups, jnp.minimum(shared, k - 1), axis=2)
    above = (rank >= jnp.swapaxes(rank, 1, 2)) | (shared == k) | ~exists[:, None]
    winner = jnp.argmax(jnp.all(above, axis=2) & exists, axis=1)[:, None]
    tokens = jnp.take_along_axis(continuations, winner[..., None], axis=1)[:, 0]
    count = jnp.take_along_axis(groups, winner[..., None], axis=1)[:, 0] >> o
    number = jnp.maximum(jnp.sum(exists, axis=1, keepdims=True), 1)
    return tokens, count / number
