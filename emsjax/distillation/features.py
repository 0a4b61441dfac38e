"""What students that read the target's hidden states share.

Axis legend: see `emsjax.decode.pack`; w = draft vocabulary.
"""

from collections.abc import Mapping
from os import PathLike
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, Key

from emsjax.checks import check_number
from emsjax.distillation.losses import (
    binary_cross_entropy,
    check_losses,
    combined,
    overlap,
)
from emsjax.distillation.passes import forward_with_taps, sum_of_losses
from emsjax.distillation.sequences import Batch
from emsjax.distillation.student import Student
from emsjax.drafters.feature_drafter import FeatureDrafter
from emsjax.drafters.feature_files import shared_arrays
from emsjax.drafters.feature_network import FeatureNetwork
from emsjax.models.decoder import Decoder

DECAY = 0.8


class Predictions(NamedTuple):
    """Drafts of a batch before the head, n of each sequence or n groups of them.

    Attributes:
        hidden: the network's normalised outputs, [b, n, ..., e].
        of_target: the target's final hidden states at the tokens before the drafted ones.
        before: the tokens before the drafted ones, [b, n, ...].
        labels: the text's tokens at the drafted places.
        weights: what each draft counts; 0: nothing, as it goes beyond its text.
    """

    hidden: Float[Array, "b n ..."]
    of_target: Float[Array, "b n ..."]
    before: Int32[Array, "b n ..."]
    labels: Int32[Array, "b n ..."]
    weights: Float[Array, "b n ..."]


class FeatureStudent(Student):
    """A network over the target's hidden states, in training.

    Where only some tokens can be drafted, the target's distribution is renormalised over them, and
    a draft counts up to the first token of the text that cannot be drafted.

    Args:
        network: the weights before training, in any dtype.
        draft_ids: the target's id of each token that can be drafted; None: all, in order.
        decay: what a draft counts relative to the one before it, above 0 and at most 1.

    Raises:
        ValueError: `decay` is out of range.
    """

    make: ClassVar[type[FeatureDrafter]]

    def __init__(self, network: FeatureNetwork, draft_ids: Any = None, *, decay: float = DECAY):
        self.module = network
        self.draft_ids = None if draft_ids is None else jnp.asarray(draft_ids, jnp.int32)
        self.decay = check_number("decay", decay, "above 0 and at most 1", lambda x: 0 < x <= 1)

    def check(self, weights: Mapping[str, float], target: Decoder | None) -> Decoder:
        check_losses(weights)
        if target is None:
            raise ValueError("a drafter that reads hidden states needs a target to learn from")
        drafter = self.drafter(self.module, target)
        drafter.check_target(target.config, 0)
        return target

    def drafter(
        self, module: FeatureNetwork, target: Decoder, max_draft_tokens: int | None = None
    ) -> FeatureDrafter:
        return self._bound(module.astype(target.dtype), target, max_draft_tokens=max_draft_tokens)

    def _bound(self, network: FeatureNetwork, target: Decoder, **options: Any) -> FeatureDrafter:
        shared = shared_arrays(network.config, target, "the drafter")
        return self.make(network, self.draft_ids, shared, **options)

    def save(self, drafter: FeatureDrafter, path: str | PathLike) -> None:
        drafter.save_pretrained(path)

    def predictions(
        self,
        drafter: FeatureDrafter,
        hidden: Float[Array, "b t e"],
        taps: tuple[Float[Array, "r e"], ...],
        batch: Batch,
        key: Key[Array, ""],
    ) -> Predictions:
        """The drafts of a batch.

        Args:
            drafter: the network, with what it shares with the target.
            hidden: the target's final hidden states.
            taps: the hidden states that the network reads, of all tokens of the batch.
            batch: the sequences.
            key: see `loss`.
        """
        raise NotImplementedError

    def head(
        self, drafter: FeatureDrafter, hidden: Float[Array, "..."], before: Int32[Array, "..."]
    ) -> tuple[Float[Array, "n w"], Float[Array, "n"] | None]:
        """Logits of drafts, and the log-odds of the predicted probability that each is accepted.

        Args:
            hidden, before: parts of `Predictions`.
        """
        raise NotImplementedError

    def loss(
        self,
        weights: Mapping[str, float],
        module: FeatureNetwork,
        target: Decoder,
        batch: Batch,
        key: Key[Array, ""],
    ) -> Float[Array, ""]:
        """The mean of the drafts' losses, in which each has its weight.

        The binary cross-entropy of the predicted and the actual probability of acceptance, of
        tokens that are sampled, is added where the network predicts one.
        """
        target = lax.stop_gradient(target)
        hidden, taps = forward_with_taps(target, batch, module.config.taps)
        found = self.predictions(self._bound(module, target), hidden, taps, batch, key)

        def loss_of_part(network, hidden, target, of_target, before, labels, counts):
            logits, log_odds = self.head(self._bound(network, target), hidden, before)
            target_logits = target.logits(of_target.reshape(-1, of_target.shape[-1]))
            known, labels = self._drafted(target_logits), self._drafted_ids(labels.reshape(-1))
            losses = combined(weights, logits, labels, known)
            if log_odds is not None:
                log_probs = known - jax.nn.logsumexp(target_logits, axis=-1, keepdims=True)
                accepted = lax.stop_gradient(overlap(logits, jnp.exp(log_probs)))
                losses += binary_cross_entropy(log_odds, accepted)
            return jnp.sum(losses * counts.reshape(-1))

        rows = (found.hidden, found.of_target, found.before, found.labels, found.weights)
        vocab_size = target.config.vocab_size
        total = sum_of_losses(module, loss_of_part, rows, target, vocab_size)
        return total / jnp.maximum(jnp.sum(found.weights), 1e-6)

    def weights_of(
        self, inside: Bool[Array, "b n k"], labels: Int32[Array, "b n k"]
    ) -> Float[Array, "b n k"]:
        """What each of k successive drafts counts.

        Args:
            inside: whether the text has a token at the draft's place.
            labels: that token.
        """
        counted = jnp.cumprod(inside & (self._drafted_ids(labels) >= 0), axis=-1)
        return counted * self.decay ** jnp.arange(labels.shape[-1], dtype=jnp.float32)

    def _drafted(self, logits: Float[Array, "n v"]) -> Float[Array, "n w"]:
        return logits if self.draft_ids is None else logits[:, self.draft_ids]

    def _drafted_ids(self, token_ids: Int32[Array, "..."]) -> Int32[Array, "..."]:
        """The draft vocabulary's ids of the target's tokens; -1 for those that are not in it."""
        if self.draft_ids is None:
            return token_ids
        size = self.module.config.architecture.vocab_size
        known = jnp.full(size, -1, jnp.int32)
        known = known.at[self.draft_ids].set(jnp.arange(len(self.draft_ids), dtype=jnp.int32))
        return known[token_ids]

    def describe(self, drafter: FeatureDrafter) -> dict[str, Any]:
        name, a = type(drafter).__name__, drafter.network.architecture
        loading = [f'drafter = emsjax.{name}.from_pretrained("path/of/this/folder", target)']
        what = f"A drafter of type {name} with {len(a.layers)} layers of width {a.width}"
        return {
            "config": self.contents(drafter),
            "title": f"drafter of type {name}",
            "what": what,
            "loading": loading,
        }

    def contents(self, drafter: FeatureDrafter) -> dict[str, Any]:
        """The contents of the drafter's config.json."""
        raise NotImplementedError
