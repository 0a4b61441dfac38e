"""Scripted drafts that replace a drafter's own, while the drafter's work is still done."""

import abc
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from emsjax.decode.base import Draft, Drafter, ModelConfig
from emsjax.engine.adapt import as_drafter
from emsjax.trees import Tree
from emsjax.values import pytree
from pallas_kernels.common.indexing import take_in_rows


class Overriding(Drafter, abc.ABC):
    """A drafter that replaces the drafts of its `source`, while the source's work is still done.

    Attributes:
        max_draft_tokens: static limit of the replacements; the source's limit may differ.
        source: a drafter that is a pytree; None: drafting costs nothing.
    """

    max_draft_tokens: int
    source: Any

    @abc.abstractmethod
    def override(self, lengths: Int32[Array, "b"], draft_lengths: Int32[Array, "b"]) -> Draft:
        """Returns the draft to propose instead: see `Drafter.propose`."""

    @property
    def _source(self) -> Drafter | None:
        return as_drafter(self.source)

    @property
    def free(self) -> bool:
        """Whether proposing costs next to nothing."""
        return self.source is None or self._source.free

    def for_prompts(self, prompt_indices: np.ndarray, num_prompts: int):
        if self.source is None:
            return self
        source = self._source
        chosen = source.for_prompts(prompt_indices, num_prompts)
        return self if chosen is source else dataclasses.replace(self, source=chosen)

    @property
    def shares_cache(self) -> bool:
        """Whether the source writes its drafts' keys and values behind the target's."""
        return self.source is not None and self._source.shares_cache

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose hidden states the source observes."""
        return () if self.source is None else self._source.taps

    def observe(self, state, rows, taps):
        return self._source.observe(state, rows, taps)

    def with_processing(self, process):
        if self.source is None:
            return self
        return dataclasses.replace(self, source=self._source.with_processing(process))

    def check_target(self, config: ModelConfig, positions: int) -> None:
        if self.source is not None:
            self._source.check_target(config, positions)

    def state_bytes(self, max_len: int) -> int:
        return 0 if self.source is None else self._source.state_bytes(max_len)

    def init(self, *prompts):
        return () if self.source is None else self._source.init(*prompts)

    def admit(self, state, tokens, lengths, fresh):
        if self.source is None:
            return ()
        return self._source.admit(state, tokens, lengths, fresh)

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        draft = self.override(lengths, draft_lengths)
        if self.source is None:
            return draft, state
        arguments = (state, tokens, lengths, draft_lengths, keys, sampling)
        drafted, state = self._source.propose(*arguments)
        least = jnp.min(drafted.tokens, axis=1, keepdims=True)
        # This is never true, but it keeps the compiler from removing the source's work as unused.
        tokens = jnp.where(least == jnp.iinfo(jnp.int32).min, least, draft.tokens)
        return dataclasses.replace(draft, tokens=tokens), state

    def commit(self, state, lengths):
        return state if self.source is None else self._source.commit(state, lengths)


@pytree
class Replay(Overriding):
    """Proposes a given number of tokens, of which a given number are right.

    The target's greedy output must be `text`. Positions beyond the arrays read their last column.
    Everything except the two static sizes is traced, so other numbers need no new compilation.

    Attributes:
        text: the target's greedy output: text[s, p] is the token at position p of sample s.
        counts: tokens drafted when the next token's position is p; 0: nothing is drafted.
        right: how many of the drafted tokens are right; the token after them is wrong.
        vocab_size: vocabulary size; wrong tokens are below it.
        max_draft_tokens: limit of `counts`.
        source: see `Overriding`. It is asked for as many tokens as the step allows.
    """

    text: Int32[Array, "b t"]
    counts: Int32[Array, "b t"]
    right: Int32[Array, "b t"]
    vocab_size: int = dataclasses.field(metadata={"static": True})
    max_draft_tokens: int = dataclasses.field(metadata={"static": True})
    source: Any = None

    def override(self, lengths, draft_lengths) -> Draft:
        index = jnp.arange(self.max_draft_tokens)
        correct = _at(self.text, lengths[:, None] + index)
        wrong = index == _at(self.right, lengths[:, None])
        tokens = jnp.where(wrong, (correct + 1) % self.vocab_size, correct)
        counts = _at(self.counts, lengths[:, None])[:, 0]
        return Draft(tokens, jnp.minimum(counts, draft_lengths))


@pytree
class ReplayTrees(Overriding):
    """Proposes the same tree in every step; at each place one candidate may be right.

    The target's greedy output must be `text`. Positions beyond the arrays read their last column.

    Attributes:
        text: the target's greedy output: text[s, p] is the token at position p of sample s.
        right: which candidate for position p is right, counted from 0; a number that no candidate
            has: none is.
        parents: of the tree's tokens: see `Draft.parents`. Static.
        vocab_size: vocabulary size; wrong tokens are below it.
        source: see `Overriding`. It is asked for as many tokens as the step allows.
    """

    text: Int32[Array, "b t"]
    right: Int32[Array, "b t"]
    parents: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    vocab_size: int = dataclasses.field(metadata={"static": True})
    source: Any = None

    @property
    def max_draft_tokens(self) -> int:
        return len(self.parents)

    def override(self, lengths, draft_lengths) -> Draft:
        shape = (len(lengths), len(self.parents))
        parents = jnp.broadcast_to(jnp.array(self.parents, jnp.int32), shape)
        tree = Tree.of(parents)
        at = lengths[:, None] + tree.depths[:, 1:] - 1
        correct, candidate = _at(self.text, at), tree.places
        wrong = (correct + 1 + candidate) % self.vocab_size
        tokens = jnp.where(candidate == _at(self.right, at), correct, wrong)
        counts = jnp.minimum(shape[1], draft_lengths)
        return Draft(tokens, counts, parents=parents)


def _at(values: Int32[Array, "b t"], positions: Int32[Array, "b n"]) -> Int32[Array, "b n"]:
    """Gathers values[s, positions[s]]; positions beyond the last column read that column."""
    return take_in_rows(values, jnp.minimum(positions, values.shape[1] - 1))
