"""Which of several draft sources each sample uses in a step: estimates and the choice.

Axis legend: b = samples, n = sources, c = classes of offers, k = draft tokens.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from emsjax.drafters.prices import Prices
from emsjax.values import pytree
from pallas_kernels.common.indexing import take, take_in_rows

NONE = -1  # the source of a sample that drafts nothing
# A source is tried while it may still turn out to be good: before it has been tried, each of its
# tokens is expected to be accepted with this probability.
PRIOR_RATE = 0.9
PRIOR_STEPS = 1.0  # steps that this expectation counts for
OWN_TOKENS = 4.0  # accepted tokens from which on a sample's own record outweighs the batch's
MEMORY = 0.99  # factor by which records decay in each step


class Offers(NamedTuple):
    """Sizes of what sources offer in a step, of one source or of all of them.

    A chain has as many tokens as it is deep; a tree has more, each of which is a row.

    Attributes:
        depths: tokens on the longest path.
        usable: those of them within the step's limit: so many can be accepted.
        rows: draft tokens to verify within the limit.
    """

    depths: Int32[Array, "b *n"]
    usable: Int32[Array, "b *n"]
    rows: Int32[Array, "b *n"]


@pytree
class Choice:
    """What a step drafts, as decided from the tokens and the records before it.

    Attributes:
        source: the source of each sample; `NONE`: nothing is drafted.
        depths: tokens on the longest path of each sample's draft, at most.
        classes: class of each sample's offer.
        asked: samples for which each source drafts.
        missed: see `Records`, of which these are the ones after the step.
        time: expected time of the step.
    """

    source: Int32[Array, "b"]
    depths: Int32[Array, "b"]
    classes: Int32[Array, "b"]
    asked: Bool[Array, "b n"]
    missed: Float[Array, "b n"]
    time: Float[Array, ""]

    @classmethod
    def none(cls, batch: int, num_sources: int) -> "Choice":
        zeros = jnp.zeros(batch, jnp.int32)
        nobody, nothing = (jnp.zeros((batch, num_sources), of) for of in (bool, jnp.float32))
        return cls(zeros + NONE, zeros, zeros, nobody, nothing, jnp.zeros((), jnp.float32))


class _Plan(NamedTuple):
    """The source of each sample, as in `Choice`, and draft steps of each source."""

    source: Int32[Array, "b"]
    asked: Bool[Array, "b n"]
    steps: Float[Array, "n"]


@pytree
class Records:
    """Decaying records of what each source has brought where it was chosen.

    What is recorded is the number of accepted tokens of a step: the tokens that a sample emitted,
    without the target's own, at most as many as were offered. A draft-length policy that is asked
    after the drafts may have verified fewer tokens than were offered, and a sample's last step may
    end early. Both make the record smaller than the number of tokens that were right, but this
    smaller number is what the source brings under that policy, and so what it should be chosen by.
    While a policy has all drafts dropped, every source that is chosen loses in the same way.
    Free sources draft in every step, so what they would have brought is recorded as well.

    Attributes:
        steps: decayed number of a sample's steps, by source and class of its offer.
        accepted: tokens accepted in them.
        all_steps, all_accepted: the same of all samples, also of those that have finished.
        missed: tokens that each source was expected to add to a sample in the steps since it was
            last asked, and did not because it would have had to catch up.
        tokens, time: tokens that all samples emitted, and the time of their steps.
    """

    steps: Float[Array, "b n c"]
    accepted: Float[Array, "b n c"]
    all_steps: Float[Array, "n c"]
    all_accepted: Float[Array, "n c"]
    missed: Float[Array, "b n"]
    tokens: Float[Array, ""]
    time: Float[Array, ""]

    @classmethod
    def init(cls, batch: int, num_sources: int, max_draft_tokens: int) -> "Records":
        zeros = lambda *shape: jnp.zeros(shape, jnp.float32)
        n, c = num_sources, max_draft_tokens.bit_length()
        each = (zeros(batch, n, c), zeros(batch, n, c))
        return cls(*each, zeros(n, c), zeros(n, c), zeros(batch, n), zeros(), zeros())

    def expected(self, depths: Int32[Array, "b n"]) -> Float[Array, "b n"]:
        """Expected accepted tokens of each source's offer, by the length of its longest path.

        The mean of all samples' steps with offers of that class, times the ratio of the tokens
        that the source has brought to this sample to what it would have brought to others in the
        same classes. Both begin with pseudo-counts: the mean at `PRIOR_RATE`, the ratio at 1.
        """
        means = self._means
        own, usual = jnp.sum(self.accepted, axis=2), jnp.sum(self.steps * means, axis=2)
        ratio = (own + OWN_TOKENS) / (usual + OWN_TOKENS)
        sources = jnp.arange(depths.shape[1])
        found = take(means, jnp.broadcast_to(sources, depths.shape), classes_of(depths))
        return jnp.minimum(found * ratio, depths.astype(jnp.float32))

    @property
    def _means(self) -> Float[Array, "n c"]:
        hoped = hoped_tokens(2 ** np.arange(self.all_steps.shape[1]))  # of the shortest offers
        return (self.all_accepted + PRIOR_STEPS * hoped) / (self.all_steps + PRIOR_STEPS)

    def choose(
        self,
        offers: Offers,
        active: Bool[Array, "b"],
        prices: Prices,
        free: Sequence[bool],
        behind: Int32[Array, "b n"],
    ) -> Choice:
        """Chooses a source for each sample, and which sources that are not free run at all.

        A sample takes the source with the most expected tokens, less the time of their rows. A
        draft step reads a model's weights once for all samples, and adds a token to every path. So
        the model drafts if what it adds over all samples is worth its draft steps. The worth of
        time is the tokens that the batch has emitted in it lately. How many steps will gain by
        catching up now is unknown, so a sample does once it has missed as much for not having done
        so (as one buys skis when one has paid their price in rent).

        Args:
            offers: what each source offers to each sample.
            active: samples that may draft.
            free: whether each source has drafted already.
            behind: tokens of each sample that each source has to read before it drafts.
        """
        num_active = jnp.maximum(jnp.sum(active), 1).astype(jnp.float32)
        rate = (self.tokens + num_active) / (self.time + prices.step)  # tokens per time
        as_float = lambda x: x.astype(jnp.float32)
        expected = jnp.minimum(self.expected(offers.depths), as_float(offers.usable))
        gains = expected - rate * prices.row * as_float(offers.rows)
        gains = jnp.where(offers.usable > 0, gains, -jnp.inf)

        reading = prices.catch_up * as_float(behind)
        dues = jnp.maximum(rate * reading - self.missed, 0)

        def plan(gains: Float[Array, "b n"]) -> _Plan:
            usable = jnp.where(_subsets(free)[:, None], gains, -jnp.inf)  # [m, b, n]
            source = jnp.where(jnp.max(usable, axis=2) > 0, jnp.argmax(usable, axis=2), NONE)
            asked = source[..., None] == jnp.arange(len(free))
            steps = as_float(jnp.max(jnp.where(asked, offers.usable, 0), axis=1))  # [m, n]
            gained = jnp.sum(jnp.where(asked, gains, 0), axis=(1, 2))
            best = jnp.argmax(gained - rate * jnp.sum(prices.draft * steps, axis=1))
            return _Plan(*(take(x, best) for x in (source, asked, steps)))

        def worth(plan: _Plan) -> Float[Array, ""]:
            gained = jnp.sum(jnp.where(plan.asked, gains, 0))
            return gained - rate * jnp.sum(prices.draft * plan.steps)

        source, asked, steps = chosen = plan(gains - dues)
        unhindered = plan(gains)
        hindered = unhindered.asked & ~asked & (dues > 0)
        lost = jnp.maximum(worth(unhindered) - worth(chosen), 0)
        number = as_float(jnp.maximum(jnp.sum(hindered), 1))
        lost = jnp.where(hindered, lost / number, 0)
        missed = jnp.where(asked, 0, self.missed + lost)

        at = jnp.maximum(source, 0)[:, None]
        of_source = lambda x: jnp.where(source >= 0, take_in_rows(x, at)[:, 0], 0)
        rows = jnp.sum(of_source(offers.rows), dtype=jnp.float32)
        time = prices.step + prices.row * rows + jnp.sum(jnp.where(asked, reading, 0))
        time += jnp.sum(prices.draft * steps)
        classes = of_source(classes_of(offers.depths))
        source = source.astype(jnp.int32)
        return Choice(source, of_source(offers.usable), classes, asked, missed, time)

    def update(self, choice: Choice, emitted: Int32[Array, "b"]) -> "Records":
        """The records after a step, in which each sample emitted this many tokens."""
        stepped = emitted > 0
        kept = jnp.where(jnp.any(stepped), MEMORY, 1.0)
        accepted = jnp.clip(emitted - 1, 0, choice.depths)
        counted = choice.asked & (stepped & (choice.depths > 0))[:, None]
        is_class = choice.classes[:, None] == jnp.arange(self.all_steps.shape[1])
        steps = (counted[..., None] & is_class[:, None]).astype(jnp.float32)
        tokens = steps * accepted[:, None, None].astype(jnp.float32)
        new = {
            "steps": steps,
            "accepted": tokens,
            "all_steps": jnp.sum(steps, axis=0),
            "all_accepted": jnp.sum(tokens, axis=0),
            "tokens": jnp.sum(jnp.maximum(emitted, 0), dtype=jnp.float32),
            "time": jnp.where(jnp.any(stepped), choice.time, 0),
        }
        counts = {name: kept * getattr(self, name) + more for name, more in new.items()}
        return Records(**counts, missed=choice.missed)

    def learn(
        self,
        source: int,
        depths: Int32[Array, "b"],
        most: Int32[Array, "b"],
        right: Int32[Array, "b"],
        emitted: Int32[Array, "b"],
    ) -> "Records":
        """The records with offers that were not used, but compared with what was emitted.

        An offer that agrees with all emitted tokens and has more is expected to bring as many
        more as such offers bring on average.

        Args:
            depths: tokens on the longest path of each offer, by which they are classed.
            most: the most tokens of each that could have been accepted; 0: no comparison.
            right: tokens of each offer that agree with the emitted ones, before any that differs.
            emitted: tokens that were emitted.
        """
        classes = classes_of(depths)
        compared = (most > 0) & (emitted > 0)
        right = right.astype(jnp.float32)
        more = jnp.where(
            right >= emitted.astype(jnp.float32), take(self._means[source], classes), 0
        )
        brought = jnp.minimum(right + more, most.astype(jnp.float32))
        is_class = classes[:, None] == jnp.arange(self.all_steps.shape[1])
        steps = (compared[:, None] & is_class).astype(jnp.float32)
        tokens = steps * brought[:, None]
        return dataclasses.replace(
            self,
            steps=self.steps.at[:, source].add(steps),
            accepted=self.accepted.at[:, source].add(tokens),
            all_steps=self.all_steps.at[source].add(jnp.sum(steps, axis=0)),
            all_accepted=self.all_accepted.at[source].add(jnp.sum(tokens, axis=0)),
        )

    def admit(self, fresh: Bool[Array, "b"]) -> "Records":
        """The records in which slots with `fresh` begin new sequences; the batch's remain."""
        forget = lambda counts: jnp.where(fresh[:, None, None], 0, counts)
        steps, accepted = forget(self.steps), forget(self.accepted)
        missed = jnp.where(fresh[:, None], 0, self.missed)
        return dataclasses.replace(self, steps=steps, accepted=accepted, missed=missed)


def hoped_tokens(offers: Int[np.ndarray, "n"]) -> Float32[np.ndarray, "n"]:
    """Accepted tokens of offers of these lengths, if each token is right at `PRIOR_RATE`."""
    return np.float32(PRIOR_RATE * (1 - PRIOR_RATE**offers) / (1 - PRIOR_RATE))


def classes_of(offers: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
    """The class of an offer by its depth: 0 for 1 token, 1 for 2 or 3, 2 for 4 to 7, and so on.

    >>> print(classes_of(jnp.array([0, 1, 2, 3, 4, 16])))
    [0 0 1 1 2 4]
    """
    powers = 2 ** jnp.arange(1, 31, dtype=jnp.int32)
    return jnp.sum(offers[..., None] >= powers, axis=-1, dtype=jnp.int32)


def _subsets(free: Sequence[bool]) -> Bool[np.ndarray, "m n"]:
    """All sets of sources that may run: the free ones always do; the first set has no others."""
    choices = [(True,) if is_free else (False, True) for is_free in free]
    return np.array(list(itertools.product(*choices)))
