"""The distribution that logits stand for, in the numerics of the context.

With "invariant" numerics the bits of a row do not depend on the other rows: see
`pallas_kernels.numerics`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import pallas_kernels
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
) -> tuple[Float[Array, "r v"], Float[Array, "r"]]:
    """Logits of the residual distribution, and its mass: the sum of max(0, p - q).

    If the mass is 0, the logits are those of p: see `emsjax.verification.residual_distribution`.
    """
    excess = jnp.maximum(target_probs - draft_probs, 0)
    logits = jnp.log(excess)
    if is_invariant():
        mass = jnp.exp(pallas_kernels.log_sum_exp(logits))
    else:
        mass = jnp.sum(excess, axis=-1)
    return jnp.where(mass[:, None] > 0, logits, jnp.log(target_probs)), mass
