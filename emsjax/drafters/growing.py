"""Drafts that grow by a token of every sample at a time, and the drafters that make them.

Axis legend: see `emsjax.decode.pack`; m = candidates for a token, n = tokens that can
be drafted.
"""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Key

from emsjax.decode.base import Draft, Drafter
from emsjax.sampling import (
    Purpose,
    Sampling,
    draw,
    log_softmax,
    position_keys,
    softmax,
    warp,
)
from emsjax.sampling.processors import Processing
from emsjax.trees import most_likely
from emsjax.values import pytree
from pallas_kernels.common.indexing import take


class GrowingDrafter(Drafter):
    """A drafter that chooses its tokens one after the other; a pytree.

    Attributes:
        children: names of the attributes that hold arrays; the others are static.
        has_own_limit: whether `max_draft_tokens` is the user's.
        branches: candidates for each token; 1: drafts are chains.
        process: the function through which logits pass first, within a step.
    """

    children: ClassVar[tuple[str, ...]]
    has_own_limit: bool
    branches: int = 1
    process: Processing | None = None

    def tree_flatten(self):
        settings = {name: x for name, x in vars(self).items() if name not in self.children}
        return tuple(getattr(self, x) for x in self.children), tuple(sorted(settings.items()))

    @classmethod
    def tree_unflatten(cls, settings, children):
        self = object.__new__(cls)
        vars(self).update(zip(cls.children, children, strict=True))
        vars(self).update(settings)
        return self

    def _with(self, **settings):
        children, own = self.tree_flatten()
        return self.tree_unflatten(tuple(sorted((dict(own) | settings).items())), children)

    @property
    def probs_width(self) -> int:
        """Numbers in the distribution from which a token is chosen."""
        raise NotImplementedError

    @property
    def drawn_vocab_size(self) -> int:
        """See `Drafter`; the candidates of trees are not drawn."""
        return self.probs_width if self.branches == 1 else 0

    @property
    def max_depth(self) -> int:
        """The most tokens on a path of the draft."""
        return max(1, self.max_draft_tokens // self.branches)

    def with_limit(self, max_draft_tokens: int):
        """Returns the drafter with this limit, unless it was created with its own."""
        return self if self.has_own_limit else self._with(max_draft_tokens=max_draft_tokens)

    def with_processing(self, process: Processing):
        """Returns the drafter for one step, whose logits pass through `process` first."""
        return self._with(process=process)

    def begin(self, counts: Int32[Array, "b"], sampling: Sampling | None) -> "GrowingDraft":
        """A draft without tokens, of which sample s wants counts[s]."""
        block = (counts.shape[0], self.max_depth)
        probs = None if sampling is None else jnp.zeros((*block, self.probs_width), jnp.float32)
        if self.branches > 1:
            probs = Candidates.none(*block, self.branches)
        return GrowingDraft(jnp.zeros(block, jnp.int32), counts, probs)

    @property
    def probs_bytes(self) -> int:
        """Bytes per sample for the distributions of one step's drafts; a tree has none."""
        return probs_bytes(self.max_draft_tokens, self.drawn_vocab_size)


def probs_bytes(max_draft_tokens: int, drawn_vocab_size: int) -> int:
    """Bytes per sample for the distributions of drafts of this length, while they are made."""
    return 2 * max_draft_tokens * drawn_vocab_size * 4


class Candidates(NamedTuple):
    """The likeliest tokens after each token of a chain of the likeliest ones; m candidates."""

    tokens: Int32[Array, "b k m"]
    probs: Float[Array, "b k m"]  # of each token, given the chain before it

    @classmethod
    def none(cls, batch: int, k: int, branches: int) -> "Candidates":
        shape = (batch, k, branches)
        return cls(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))

    def with_logits(
        self,
        logits: Float[Array, "b n"],
        step: int | Int32[Array, ""],
        ids: Int32[Array, "n"] | None,
    ) -> tuple["Candidates", Int32[Array, "b"]]:
        """The candidates with those of one more step, and the likeliest of these.

        Args:
            ids: see `GrowingDraft.extended`.
        """
        best, columns = lax.top_k(log_softmax(logits), self.tokens.shape[2])
        probs = jnp.where(jnp.isfinite(best), jnp.exp(jnp.minimum(best, 0)), 0)
        tokens = tokens_of(columns, ids)
        found = Candidates(put(self.tokens, tokens, step), put(self.probs, probs, step))
        return found, tokens[:, 0]

    def tree(self, depths: Int32[Array, "b"], k: int) -> Draft:
        """The k likeliest paths of up to depths[s] tokens, the likeliest first."""
        batch, depth, m = self.tokens.shape
        at = jnp.arange(depth)
        chain = jnp.cumprod(self.probs[:, :, 0], axis=1)
        scores = self.probs * jnp.pad(chain[:, :-1], ((0, 0), (1, 0)), constant_values=1)[..., None]
        scores = jnp.where((at < depths[:, None])[..., None], scores, 0)
        parents = jnp.broadcast_to(jnp.where(at > 0, (at - 1) * m, -1)[:, None], (batch, depth, m))
        flat = lambda x: jnp.pad(x.reshape(batch, -1), ((0, 0), (0, max(0, k - depth * m))))
        arrays = (scores, self.tokens, parents.astype(jnp.int32))
        nodes = most_likely(*map(flat, arrays), k)
        return Draft(nodes.tokens, nodes.counts, parents=nodes.parents)


class Randomness(NamedTuple):
    """How `Drafter.propose` is to draw tokens; see there."""

    keys: Key[Array, "b"] | None
    sampling: Sampling | None

    def repeated(self, count: int) -> "Randomness":
        """That of `count` rows of each sample, which are side by side."""
        return jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), self)

    def choose(
        self, logits: Float[Array, "r v"], positions: Int32[Array, "r"]
    ) -> tuple[Int32[Array, "r"], Float[Array, "r v"] | None]:
        """A token of each row, and the distributions if tokens are drawn.

        What is drawn depends on the row's key, its position and its logits alone.

        Args:
            positions: of the tokens in their sequences.
        """
        if self.sampling is None:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32), None
        logits = warp(logits, self.sampling)
        keys = position_keys(self.keys, positions, Purpose.DRAFT)
        return draw(logits, self.sampling.temperature, keys), softmax(logits)


@pytree
class GrowingDraft:
    """A draft that grows by a token of every sample at a time, or by all tokens at once.

    Attributes:
        tokens, counts, probs: as in a `Draft`; `counts` is what each sample wants. For a tree,
            these are the likeliest tokens, and instead of `probs` the candidates for each.
    """

    tokens: Int32[Array, "b k"]
    counts: Int32[Array, "b"]
    probs: Float[Array, "b k v"] | Candidates | None

    def extended(
        self,
        step: int | Int32[Array, ""],
        logits: Float[Array, "b n"],
        lengths: Int32[Array, "b"],
        randomness: Randomness,
        process: Processing | None,
        ids: Int32[Array, "n"] | None = None,
    ) -> tuple["GrowingDraft", Int32[Array, "b"]]:
        """The draft with a token of these logits at place `step` of every sample, and the tokens.

        A draft ends where no token is allowed.

        Args:
            lengths: tokens of each sample before the draft.
            ids: the token of each column of the logits, if nothing is drawn or processed; None: all
                tokens have columns, in order.
        """
        tokens, counts, probs = self.tokens, self.counts, self.probs
        if process is not None:
            samples = jnp.arange(tokens.shape[0], dtype=jnp.int32)
            logits = process(logits, tokens, samples, jnp.full_like(samples, step))
            stuck = jnp.all(logits == -jnp.inf, axis=-1)
            counts = jnp.where(stuck, jnp.minimum(counts, step), counts)
        if isinstance(probs, Candidates):
            if randomness.sampling is not None:
                logits = warp(logits, randomness.sampling)
            probs, token = probs.with_logits(logits, step, ids)
        else:
            token, drawn_from = randomness.choose(logits, lengths + step)
            token = tokens_of(token, ids)
            probs = probs if drawn_from is None else put(probs, drawn_from, step)
        return GrowingDraft(put(tokens, token, step), counts, probs), token

    def filled(
        self,
        logits: Float[Array, "b k n"],
        lengths: Int32[Array, "b"],
        randomness: Randomness,
        ids: Int32[Array, "n"] | None = None,
    ) -> "GrowingDraft":
        """The chain with tokens of these logits at all places, the same as `extended` chooses.

        Args:
            logits: of every place, which do not depend on the tokens before.
            lengths, ids: see `extended`.
        """
        batch, count, width = logits.shape
        positions = (lengths[:, None] + jnp.arange(count, dtype=jnp.int32)).reshape(-1)
        rows = logits.reshape(-1, width)
        token, drawn_from = randomness.repeated(count).choose(rows, positions)
        tokens = tokens_of(token, ids).reshape(batch, count)
        probs = None if drawn_from is None else drawn_from.reshape(batch, count, -1)
        return GrowingDraft(tokens, self.counts, probs)

    def finished(self, most: int) -> Draft:
        """The draft, of up to `most` tokens."""
        if isinstance(self.probs, Candidates):
            return self.probs.tree(self.counts, most)
        return Draft(self.tokens, self.counts, self.probs)


def tokens_of(columns: Int32[Array, "..."], ids: Int32[Array, "n"] | None) -> Int32[Array, "..."]:
    """The tokens of columns of logits: see `GrowingDraft.extended`."""
    return columns if ids is None else take(ids, columns)


def put(
    block: Array, column: Array, step: int | Int32[Array, ""]
) -> Float[Array, "b k ..."] | Int32[Array, "b k ..."]:
    """The block [b, k, ...] with `column` at place `step`, which is one of its places."""
    return lax.dynamic_update_index_in_dim(block, column, step, axis=1)
