"""Sampling cutoffs in XLA operations: every pass reads all logits of all rows."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.cutoff.search import find_cutoff, order_of


def sampling_cutoff(
    logits: Array,  # float32 [rows, vocab]
    top_k: Array | None,  # int32 [rows]
    top_p: Array | None,  # float32 [rows]
    *,
    interpret: bool = False,
) -> Array:  # float32 [rows]
    """See `pallas_kernels.sampling_cutoff`."""
    del interpret  # it concerns the Triton kernel
    order = order_of(logits)

    def sums(weigh, bounds):
        above = lambda bound: jnp.where(order >= bound[:, None], weigh(logits), 0)
        return [jnp.sum(above(bound), axis=1) for bound in bounds]

    return find_cutoff(jnp.max(logits, axis=1), sums, top_k=top_k, top_p=top_p)
