"""What a draft model learns: the text, or the target's distribution.

Axis legend: see `emsjax.decode.pack`; n = predictions.

Reference: of the acceptance rate and total variation, corollary 3.6 of Leviathan et al.,
arXiv 2211.17192; of both divergences for draft models, DistillSpec, arXiv 2310.08461.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

CROSS_ENTROPY = "cross-entropy"


def cross_entropy(logits, labels, target_logits) -> Float[Array, "n"]:
    """-log q(label)."""
    del target_logits
    # Not by index: the gradient of that is a scatter into an array as large as the logits.
    is_label = jnp.arange(logits.shape[1]) == labels[:, None]
    return jax.nn.logsumexp(logits, axis=1) - jnp.sum(jnp.where(is_label, logits, 0), axis=1)


def forward_kl(logits, labels, target_logits) -> Float[Array, "n"]:
    """KL(p || q): the draft covers all that the target may say."""
    del labels
    return _kl(jax.nn.log_softmax(target_logits), jax.nn.log_softmax(logits))


def reverse_kl(logits, labels, target_logits) -> Float[Array, "n"]:
    """KL(q || p): the draft keeps to what the target says often."""
    del labels
    return _kl(jax.nn.log_softmax(logits), jax.nn.log_softmax(target_logits))


def total_variation(logits, labels, target_logits) -> Float[Array, "n"]:
    """Half the sum of |p - q|: a sampled draft token is rejected with just this probability."""
    del labels
    difference = jax.nn.softmax(logits) - jax.nn.softmax(target_logits)
    return 0.5 * jnp.sum(jnp.abs(difference), axis=-1)


def _kl(log_p, log_q):
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


LOSSES = {
    CROSS_ENTROPY: cross_entropy,
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "total-variation": total_variation,
}


def check_losses(weights: Mapping[str, float]) -> None:
    """Raises a ValueError for an unknown loss, or weights that are no finite numbers above 0."""
    if not weights:
        raise ValueError("losses is empty: at least one is needed")
    for name, weight in weights.items():
        if name not in LOSSES:
            raise ValueError(f"losses must be of {', '.join(LOSSES)}, not {name!r}")
        if not 0 < weight < math.inf:
            raise ValueError(f"the weight of {name} must be above 0 and finite, not {weight}")


def needs_target(weights: Mapping[str, float]) -> bool:
    return weights.keys() != {CROSS_ENTROPY}


def combined(
    weights: Mapping[str, float],
    logits: Float[Array, "n v"],
    labels: Int32[Array, "n"],
    target_logits: Float[Array, "n v"] | None,
) -> Float[Array, "n"]:
    """The weighted sum of the losses of each prediction, in nats but for total variation.

    Args:
        weights: by name, of `LOSSES`.
        logits: of the draft, q.
        labels: the tokens that follow.
        target_logits: of the target, p; None if no loss `needs_target`.
    """
    return sum(
        weight * LOSSES[name](logits, labels, target_logits) for name, weight in weights.items()
    )
