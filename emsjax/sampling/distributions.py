"""The distribution that logits stand for, in the numerics of the context.

With "invariant" numerics the bits of a row do not depend on the other rows: see
`pallas_kernels.numerics`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import pallas_kernels
from emsjax.verification import residual_distribution
from pallas_kernels.common.numerics import is_invariant


def log_softmax(logits: Float[Array, "r v"]) -> Float[Array, "r v"]:
    """The log-probabilities of each row's tokens."""
    if is_invariant():
        return logits - pallas_kernels.log_sum_exp(logits)[:, None]
    return jax.nn.log_softmax(logits)


def softmax(logits: Float[Array, "r v"]) -> Float[Array, "r v"]:
    """The probabilities of each row's tokens."""
    return jnp.exp(log_softmax(logits)) if is_invariant() else jax.nn.softmax(logits)


def residual(
    target_probs: Float[Array, "r v"], draft_probs: Float[Array, "r v"]
) -> Float[Array, "r v"]:
    """The residual distribution, or numbers in proportion to it where numerics are invariant.

    Drawing by the Gumbel-max trick needs no more: see `emsjax.verification.residual_distribution`.
    The largest number tells whether there is a residual, as its bits depend on no other row.
    """
    if not is_invariant():
        return residual_distribution(target_probs, draft_probs)
    excess = jnp.maximum(target_probs - draft_probs, 0)
    return jnp.where(jnp.max(excess, axis=-1, keepdims=True) > 0, excess, target_probs)
