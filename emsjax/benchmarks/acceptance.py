"""How often scripted drafts are accepted: random numbers of drafted and right tokens."""

import dataclasses
import heapq
from typing import Protocol

import numpy as np

from emsjax.checks import check_at_least


def check_probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must lie in [0, 1], not {value}")


class Profile(Protocol):
    """Random numbers of drafted and accepted tokens.

    Attributes:
        max_draft_tokens: the most tokens that a sample drafts in a step.
    """

    max_draft_tokens: int

    def draw(
        self, rng: np.random.Generator, batch: int, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of drafted tokens and of right ones among them, both int32 [batch, width].

        They are drawn for every sample and position, as a step starts at one position of a sample.
        """
        ...


@dataclasses.dataclass(frozen=True)
class CopyAcceptance:
    """Copies from a reference: a step drafts a whole copy or nothing, and often all is right.

    Args:
        miss: probability that nothing is drafted.
        draft_tokens: length of a copy.
        whole: probability that all of a copy is right.
        decay: otherwise the first a = 0..draft_tokens - 1 tokens are right, with weights decay^a.

    Raises:
        ValueError: a probability or the decay outside [0, 1], or a negative length.
    """

    miss: float = 0.3
    draft_tokens: int = 7
    whole: float = 0.5
    decay: float = 0.6

    def __post_init__(self):
        for name in ("miss", "whole", "decay"):
            check_probability(name, getattr(self, name))
        check_at_least("draft_tokens", self.draft_tokens, 0)

    @property
    def max_draft_tokens(self) -> int:
        return self.draft_tokens

    def draw(self, rng, batch, width):
        uniform = rng.random((3, batch, width))
        counts = np.where(uniform[0] < self.miss, 0, self.draft_tokens)
        weights = self.decay ** np.arange(max(self.draft_tokens, 1))
        edges = np.cumsum(weights)[:-1] / np.sum(weights)
        part = np.searchsorted(edges, uniform[1], side="right")
        right = np.where(uniform[2] < self.whole, counts, np.minimum(part, counts))
        return counts.astype(np.int32), right.astype(np.int32)


@dataclasses.dataclass(frozen=True)
class TokenAcceptance:
    """A draft model: each of `draft_tokens` tokens is right with probability `rate`.

    Whether a token is right depends on its position and not on where the draft starts, so that a
    longer draft is never worse by chance. No position is verified twice, so results of
    verification are independent nevertheless.

    Raises:
        ValueError: a rate outside [0, 1], or a negative number of tokens.
    """

    rate: float
    draft_tokens: int

    def __post_init__(self):
        check_probability("rate", self.rate)
        check_at_least("draft_tokens", self.draft_tokens, 0)

    @property
    def max_draft_tokens(self) -> int:
        return self.draft_tokens

    def draw(self, rng, batch, width):
        place = np.arange(width + self.draft_tokens)
        is_right = rng.random((batch, place.size)) < self.rate
        wrong = np.where(is_right, place.size, place)
        next_wrong = np.minimum.accumulate(wrong[:, ::-1], axis=1)[:, ::-1]
        right = np.minimum(next_wrong - place, self.draft_tokens)[:, :width].astype(np.int32)
        return np.full((batch, width), self.draft_tokens, np.int32), right


@dataclasses.dataclass(frozen=True)
class CandidateAcceptance:
    """A draft model with several candidates: candidate i is right with probability rates[i].

    Which one is right depends on the position, as in `TokenAcceptance`, which is what remains if
    only the first candidates are drafted. The drafts are the tree with the likeliest paths.

    Raises:
        ValueError: rates that are no probabilities, do not descend, or have a sum above 1, or
            fewer than 1 token.
    """

    rates: tuple[float, ...]
    draft_tokens: int

    def __post_init__(self):
        for rate in (*self.rates, sum(self.rates)):
            check_probability("rates", rate)
        if list(self.rates) != sorted(self.rates, reverse=True) or not self.rates:
            raise ValueError(f"rates must descend, as those of {self.rates} do not")
        check_at_least("draft_tokens", self.draft_tokens, 1)

    @property
    def max_draft_tokens(self) -> int:
        return self.draft_tokens

    def parents(self, k: int) -> tuple[int, ...]:
        """The tree of the k likeliest paths, the likeliest first: see `Draft.parents`."""
        chosen, waiting = [], [(-rate, -1, place) for place, rate in enumerate(self.rates)]
        while len(chosen) < k:
            loss, parent, _ = heapq.heappop(waiting)
            chosen.append(parent)
            for place, rate in enumerate(self.rates):
                heapq.heappush(waiting, (loss * rate, len(chosen) - 1, place))
        return tuple(chosen)

    def candidates(self, rng: np.random.Generator, batch: int, width: int) -> np.ndarray:
        """Which candidate is right at each place, int32 [batch, width]; len(rates): none."""
        edges = np.cumsum(self.rates)
        return np.searchsorted(edges, rng.random((batch, width)), side="right").astype(np.int32)

    def draw(self, rng, batch, width):
        return TokenAcceptance(self.rates[0], self.draft_tokens).draw(rng, batch, width)


@dataclasses.dataclass(frozen=True, init=False)
class Mixed:
    """Sample s follows profiles[s % len(profiles)].

    Raises:
        ValueError: no profiles.
    """

    profiles: tuple[Profile, ...]

    def __init__(self, *profiles: Profile):
        if not profiles:
            raise ValueError("profiles is empty: at least one is needed")
        object.__setattr__(self, "profiles", profiles)

    @property
    def max_draft_tokens(self) -> int:
        return max(profile.max_draft_tokens for profile in self.profiles)

    def draw(self, rng, batch, width):
        drawn = np.empty((2, batch, width), np.int32)
        for first, profile in enumerate(self.profiles):
            samples = drawn[:, first :: len(self.profiles)]
            samples[:] = profile.draw(rng, samples.shape[1], width)
        return drawn[0], drawn[1]


PROFILES = {
    "llma": CopyAcceptance(),
    "draft-model": TokenAcceptance(0.8, 4),
    "self": TokenAcceptance(0.98, 6),  # as often as the embedded target's own copy in int4 is
}
