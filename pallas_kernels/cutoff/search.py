"""The search for the cutoff of top-k and top-p, without sorting the logits.

A float's 32 bits, read as an integer in the floats' order, are found from the highest on:
the cutoff is the largest number such that enough weight lies at or above it. Each pass over the
logits settles two bits, so the cutoff is exact.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

LOWEST = -(2**31)  # of the order; no float has this place
TINY = np.finfo(np.float32).tiny


def find_cutoff(highest, sums, *, top_k=None, top_p=None):
    """The cutoff of every row, in arrays of rows, or of one row, in scalars.

    Args:
        highest: the largest logit.
        sums: sums(weigh, bounds) sums weigh(logit), for each bound, over the logits at or above
            the bound in the floats' order.
        top_k, top_p: as in `pallas_kernels.sampling_cutoff`.
    """
    lowest = jnp.full_like(highest, LOWEST, dtype=jnp.int32)
    number = lowest
    if top_k is not None:
        goal = top_k.astype(jnp.float32)
        reached = lambda bounds: [count >= goal for count in sums(jnp.ones_like, bounds)]
        number = jnp.where(top_k > 0, _largest(reached, lowest), lowest)
    if top_p is not None:
        weigh = lambda logits: jnp.exp(logits - highest[..., None])
        (total,) = sums(weigh, [number])
        # Logits that top-k excludes lie below its cutoff, where the goal is reached already.
        share = jnp.maximum(top_p * total, TINY)  # 0 would be reached above the largest logit
        reached = lambda bounds: [weight >= share for weight in sums(weigh, bounds)]
        number = jnp.where(top_p < 1, _largest(reached, lowest), number)
    value = lax.bitcast_convert_type(_flip_negative(number), jnp.float32)
    return jnp.where(number == LOWEST, -jnp.inf, value)


def _largest(reached, lowest):
    """The largest number at which `reached` holds; it holds at `lowest` and at all below that."""

    def refine(step, number):
        shift = 30 - 2 * step
        bounds = [number + (np.int32(digit) << shift) for digit in (1, 2, 3)]
        digit = sum(is_reached.astype(jnp.int32) for is_reached in reached(bounds))
        return number + (digit << shift)

    return lax.fori_loop(0, 16, refine, lowest)


def order_of(logits):
    """int32 numbers that are ordered as the float32 logits are."""
    return _flip_negative(lax.bitcast_convert_type(logits, jnp.int32))


def _flip_negative(bits):
    """Reverses the order of negative floats' bits; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
