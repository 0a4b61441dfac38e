"""Trees from a drafter that goes on with its likeliest token only.

Axis legend: see `emsjax.decode.pack`; m = candidates for a token.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from emsjax.decode.base import Draft
from emsjax.sampling import log_softmax
from emsjax.trees import most_likely


class Candidates(NamedTuple):
    """The likeliest tokens after each token of a chain of the likeliest ones; m candidates."""

    tokens: Int32[Array, "b k m"]
    probs: Float[Array, "b k m"]  # of each token, given the chain before it

    @classmethod
    def none(cls, batch: int, k: int, branches: int) -> "Candidates":
        shape = (batch, k, branches)
        return cls(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))

    def with_logits(self, logits: Float[Array, "b v"], step: Int32[Array, ""]) -> "Candidates":
        """The candidates with those of one more step."""
        best, tokens = lax.top_k(log_softmax(logits), self.tokens.shape[2])
        probs = jnp.where(jnp.isfinite(best), jnp.exp(jnp.minimum(best, 0)), 0)
        return Candidates(self.tokens.at[:, step].set(tokens), self.probs.at[:, step].set(probs))

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
