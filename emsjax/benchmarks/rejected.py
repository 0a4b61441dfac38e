"""Drafts that are always rejected, as chains or trees, for steps of a known shape."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from emsjax.decode.base import Draft
from emsjax.drafters.replay import Overriding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RejectedDrafter(Overriding):
    """Always proposes the most tokens that it may, all of them `token_id`.

    Attributes:
        source: a drafter that does its work in every step; the target's rows are the same as
            without it.
        counts: the most tokens of each sample, [b]; None: `max_draft_tokens` of each.
        branches: candidates behind each token of a tree; 1: the draft is a chain.
    """

    token_id: int = dataclasses.field(metadata={"static": True})
    max_draft_tokens: int = dataclasses.field(metadata={"static": True})
    source: Any = None
    counts: Any = None
    branches: int = dataclasses.field(default=1, metadata={"static": True})

    def override(self, lengths, draft_lengths):
        shape = (lengths.shape[0], self.max_draft_tokens)
        if self.counts is not None:
            draft_lengths = jnp.minimum(draft_lengths, self.counts)
        tokens = jnp.full(shape, self.token_id, jnp.int32)
        if self.branches == 1:
            return Draft(tokens, draft_lengths)
        parents = jnp.arange(self.max_draft_tokens, dtype=jnp.int32) // self.branches - 1
        return Draft(tokens, draft_lengths, parents=jnp.broadcast_to(parents, shape))
