"""Losses of a draft model with respect to the text or the target's distribution.

p is the target's distribution and q the draft model's. Axis legend: see `emsjax.decode.pack`;
n = predictions.

References: Leviathan et al., arXiv 2211.17192, corollary 3.6, for the acceptance rate and total
variation; DistillSpec, arXiv 2310.08461, for both divergences in draft models.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from emsjax.checks import check_number

CROSS_ENTROPY = "cross-entropy"


def cross_entropy(logits, labels, target_logits) -> Float[Array, "n"]:
    """-log q(label)."""
    del target_logits
    # Indexing would have a scatter into an array as large as the logits as its gradient.
    is_label = jnp.arange(logits.shape[1]) == labels[:, None]
    return jax.nn.logsumexp(logits, axis=1) - jnp.sum(jnp.where(is_label, logits, 0), axis=1)


def forward_kl(logits, labels, target_logits) -> Float[Array, "n"]:
    """KL(p || q), which makes the draft cover all of the target's distribution."""
    del labels
    return _kl(jax.nn.log_softmax(target_logits), jax.nn.log_softmax(logits))


def reverse_kl(logits, labels, target_logits) -> Float[Array, "n"]:
    """KL(q || p), which makes the draft concentrate on the target's likeliest tokens."""
    del labels
    return _kl(jax.nn.log_softmax(logits), jax.nn.log_softmax(target_logits))


def total_variation(logits, labels, target_logits) -> Float[Array, "n"]:
    """Half the sum of |p - q|, the probability that a sampled draft token is rejected."""
    del labels
    difference = jax.nn.softmax(logits) - jax.nn.softmax(target_logits)
    return 0.5 * jnp.sum(jnp.abs(difference), axis=-1)


def _kl(log_p, log_q):
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def overlap(logits, target_probs) -> Float[Array, "n"]:
    """The sum of min(p, q), the probability that a sampled draft token is accepted.

    Args:
        logits: logits of the draft, q.
        target_probs: the probabilities p of the same tokens, which may be only some of p's.
    """
    return jnp.sum(jnp.minimum(jax.nn.softmax(logits), target_probs), axis=-1)


def binary_cross_entropy(log_odds, probability) -> Float[Array, "n"]:
    """The cross-entropy, in nats, of predictions with these log-odds of events of a probability."""
    return jax.nn.softplus(log_odds) - probability * log_odds


LOSSES = {
    CROSS_ENTROPY: cross_entropy,
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "total-variation": total_variation,
}


def check_losses(weights: Mapping[str, float]) -> None:
    """Raises a ValueError unless all losses are known and have finite weights above 0."""
    if not isinstance(weights, Mapping):
        raise ValueError(f"losses must be a mapping, not {type(weights).__name__}")
    if not weights:
        raise ValueError("losses is empty: at least one is needed")
    for name, weight in weights.items():
        if name not in LOSSES:
            raise ValueError(f"losses must be of {', '.join(LOSSES)}, not {name!r}")
        rule = "above 0 and finite"
        check_number(f"the weight of {name}", weight, rule, lambda x: 0 < x < math.inf)


def needs_target(weights: Mapping[str, float]) -> bool:
    return weights.keys() != {CROSS_ENTROPY}


def combined(
    weights: Mapping[str, float],
    logits: Float[Array, "n v"],
    labels: Int32[Array, "n"],
    target_logits: Float[Array, "n v"] | None,
) -> Float[Array, "n"]:
    """The weighted sum of the losses of each prediction.

    All losses are in nats, except for total variation.

    Args:
        weights: weight of each loss by its name in `LOSSES`.
        logits: logits of the draft, q.
        labels: the next tokens.
        target_logits: logits of the target, p; None if no loss `needs_target`.
    """
    return sum(
        weight * LOSSES[name](logits, labels, target_logits) for name, weight in weights.items()
    )
