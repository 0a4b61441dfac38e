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
