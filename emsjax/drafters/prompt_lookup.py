"""Drafting by copying from a reference text: LLMA, arXiv 2304.04487."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32

from emsjax.checks import MOST, as_token_ids, check_at_least, check_flag, check_list
from emsjax.decode.base import Draft, Drafter, ModelConfig
from emsjax.decode.row_counts import round_up_length
from emsjax.trees import merged
from pallas_kernels.common.indexing import take, take_in_rows


@jax.tree_util.register_pytree_node_class
class PromptLookup(Drafter):
    """Searches a reference for the last `match_length` tokens and copies the tokens that follow.

    The last occurrence is used. A copy is shorter than `max_draft_tokens` only at
    the reference's end; without an occurrence nothing is drafted. With several `branches` the
    draft is a tree of the tokens that follow the last occurrences.

    Args:
        match_length: number of tokens that must match.
        max_draft_tokens: maximum number of tokens to copy.
        references: one token-id sequence per prompt; None: the prompt itself.
        search_generated: also search the sample's own prompt and generated
            tokens; an occurrence there takes precedence over one in `references`.
        branches: occurrences to copy from, the last ones; 1: the draft is a chain.

    Raises:
        ValueError: `match_length`, `max_draft_tokens` or `branches` is below 1 or far too large,
            the references are not sequences of token ids, or `search_generated` is not a boolean.
            When decoding begins: `match_length` is beyond the model's positions.

    References: LLMA, arXiv 2304.04487; the last occurrence is used as in EMS-SD,
    arXiv 2405.07542.
    """

    free = True

    def __init__(
        self,
        match_length: int = 2,
        max_draft_tokens: int = 7,
        references: Sequence[Any] | None = None,
        search_generated: bool = False,
        branches: int = 1,
    ):
        self.match_length = check_at_least("match_length", match_length, 1, MOST)
        self.max_draft_tokens = check_at_least("max_draft_tokens", max_draft_tokens, 1, MOST)
        self.search_generated = check_flag("search_generated", search_generated)
        self.branches = check_at_least("branches", branches, 1, MOST)
        self.references = self.reference_lengths = None
        if references is not None:
            check_list("references", references, "list of token-id sequences")
            texts = [as_token_ids(f"references[{i}]", text) for i, text in enumerate(references)]
            self.reference_lengths = np.array([len(text) for text in texts], np.int32)
            width = round_up_length(max(map(len, texts), default=1))
            self.references = np.zeros((len(texts), width), np.int32)
            for row, text in zip(self.references, texts, strict=True):
                row[: len(text)] = text

    def tree_flatten(self):
        settings = (
            self.match_length,
            self.max_draft_tokens,
            self.search_generated,
            self.branches,
        )
        return (self.references, self.reference_lengths), settings

    @classmethod
    def tree_unflatten(cls, settings, children) -> "PromptLookup":
        self = object.__new__(cls)
        self.match_length, self.max_draft_tokens, self.search_generated, self.branches = settings
        self.references, self.reference_lengths = children
        return self

    def for_prompts(self, prompt_indices: np.ndarray, num_prompts: int) -> "PromptLookup":
        """Returns the drafter for a batch whose slot i serves prompt prompt_indices[i].

        Raises:
            ValueError: the number of references is not `num_prompts`.
        """
        if self.references is None:
            return self
        if len(self.references) != num_prompts:
            raise ValueError(
                f"references must hold one sequence per prompt: got {len(self.references)} "
                f"for {num_prompts} prompts"
            )
        settings = self.tree_flatten()[1]
        chosen = (self.references[prompt_indices], self.reference_lengths[prompt_indices])
        return self.tree_unflatten(settings, chosen)

    def check_target(self, config: ModelConfig, positions: int) -> None:
        """Raises ValueError if no sample of the model could match so many tokens."""
        most = config.max_position_embeddings
        check_at_least("match_length", self.match_length, 1, most)

    def init(
        self, prompts: Int32[Array, "b t"], prompt_lengths: Int32[Array, "b"], max_len: int
    ) -> Any:
        return prompt_lengths

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        prompt_lengths, batch = state, tokens.shape[0]
        last = lengths[:, None] - self.match_length + jnp.arange(self.match_length)
        suffix = take_in_rows(tokens, jnp.maximum(last, 0))
        long_enough = lengths >= self.match_length
        k, o = self.max_draft_tokens, self.branches
        limits = jnp.minimum(draft_lengths, k)

        copies = jnp.zeros((batch, o, k), jnp.int32)
        counts = jnp.zeros((batch, o), jnp.int32)
        for text, text_lengths in self._texts(tokens, lengths, prompt_lengths):
            start = find_last(text, text_lengths, suffix, o)
            at = (jnp.maximum(start, 0)[..., None] + jnp.arange(k)).reshape(batch, -1)
            copy = take_in_rows(text, jnp.minimum(at, text.shape[1] - 1)).reshape(copies.shape)
            found = (start >= 0) & long_enough[:, None]
            number = jnp.where(found, jnp.minimum(text_lengths[:, None] - start, k), 0)
            # Occurrences in this text first, then as many others as there is room for.
            copies, counts = first_found(number, (copy, copies), (number, counts))
        if o > 1:
            nodes = merged(copies, counts, o, k)
            counts = jnp.minimum(nodes.counts, limits)
            return Draft(nodes.tokens, counts, parents=nodes.parents), state
        return Draft(copies[:, 0], jnp.minimum(counts[:, 0], limits)), state

    def _texts(self, tokens, lengths, prompt_lengths):
        """Returns the texts to search and their lengths; later texts take precedence."""
        own_lengths = lengths if self.search_generated else prompt_lengths
        if self.references is None:
            return [(tokens, own_lengths)]
        if len(self.references) != len(tokens):
            raise ValueError(
                f"the drafter holds {len(self.references)} references for {len(tokens)} samples: "
                "pass `step` the drafter that for_prompts returns for them"
            )
        texts = [(jnp.asarray(self.references), jnp.asarray(self.reference_lengths))]
        return [*texts, (tokens, own_lengths)] if self.search_generated else texts


def find_last(
    text: Int32[Array, "b w"], text_lengths: Int32[Array, "b"], suffix: Int32[Array, "b n"], o: int
) -> Int32[Array, "b o"]:
    """Finds the last o occurrences of `suffix` that at least one token follows.

    Returns:
        The index of the token that follows each, the last occurrence first; -1: there are fewer.
    """
    width, n = text.shape[1], suffix.shape[1]
    start = jnp.arange(width, dtype=jnp.int32)
    match = start + n < text_lengths[:, None]
    for i in range(n):
        match &= jnp.roll(text, -i, axis=1) == suffix[:, i : i + 1]
    places = jnp.where(match, start + n, -1)
    if o == 1:
        return jnp.max(places, axis=1, keepdims=True)
    places = jnp.pad(places, ((0, 0), (0, o)), constant_values=-1)
    # On a CPU XLA has a kernel for the largest of floats, and sorts integers. Places are exact.
    return lax.top_k(places.astype(jnp.float32), o)[0].astype(jnp.int32)


def first_found(found: Int32[Array, "b o"], *pairs: tuple[Array, Array]) -> tuple[Array, ...]:
    """The rows [b, o, ...] of each pair's first array that are found, then those of its second.

    Args:
        found: above 0 for the rows of the first arrays that are found; these come first.
    """
    o = found.shape[1]
    number = jnp.sum(found > 0, axis=1, keepdims=True)
    index = jnp.arange(o)
    rows = jnp.where(index < number, index, o + index - number)  # in both arrays side by side
    sample = jnp.arange(len(found))[:, None]
    return tuple(take(jnp.concatenate(pair, axis=1), sample, rows) for pair in pairs)
