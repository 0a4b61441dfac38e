"""How likely drafts stand, estimated from verdicts while decoding."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


class Verdicts(NamedTuple):
    """Weighted counts of verdicts on each draft position, recent ones counting more.

    Attributes:
        trials: verdicts on position i of a draft whose earlier tokens all stood.
        hits: those of them by which it stood too.
    """

    trials: Float[Array, "b k"]
    hits: Float[Array, "b k"]

    @classmethod
    def init(cls, batch: int, max_draft_tokens: int) -> "Verdicts":
        return cls(*jnp.zeros((2, batch, max_draft_tokens), jnp.float32))

    def update(
        self, num_drafted: Int32[Array, "b"], num_accepted: Int32[Array, "b"], memory
    ) -> "Verdicts":
        """After a step; what was counted before weighs `memory` of what it did."""
        position = jnp.arange(self.trials.shape[1])
        hit = position < num_accepted[:, None]
        tried = (position <= num_accepted[:, None]) & (position < num_drafted[:, None])
        count = lambda old, new: memory * old + new.astype(jnp.float32)
        return Verdicts(count(self.trials, tried), count(self.hits, hit))

    def survival(self, prior_rate, prior_weight) -> Float[Array, "b k"]:
        """Estimated probability that a sample's draft stands up to each position, included.

        The odds of a position are those of its sample times those of the position over all
        samples, over the overall odds; at each level `prior_weight` verdicts of the level
        above, at the top of `prior_rate`, fill up one's own.
        """

        def filled(axis, rate):
            hits, trials = (jnp.sum(x, axis=axis, keepdims=True) for x in (self.hits, self.trials))
            return (hits + prior_weight * rate) / (trials + prior_weight)

        odds = lambda rate: rate / (1 - rate)
        overall = filled((0, 1), prior_rate)
        expected = odds(filled(1, overall)) * odds(filled(0, overall)) / odds(overall)
        return jnp.cumprod(filled((), expected / (1 + expected)), axis=1)
