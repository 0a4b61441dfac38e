"""The logarithm of sums of exponentials in XLA operations."""

import jax
from jax import Array


def log_sum_exp(
    logits: Array,  # float32 [rows, vocab]
    *,
    interpret: bool = False,
) -> Array:  # float32 [rows]
    """See `pallas_kernels.log_sum_exp`."""
    del interpret  # it concerns the Triton kernels
    return jax.nn.logsumexp(logits, axis=1)
