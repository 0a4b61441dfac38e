"""Which logits top-k and top-p keep, without sorting them.

A float's 32 bits, read as an integer in the floats' order, are found from the highest on:
the cutoff is the largest number that enough weight lies at or above. Each pass over the
logits settles two bits, so the cutoff is exact.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.implementations import choose

LOWEST = -(2**31)  # of the order; no float has this place
TINY = np.finfo(np.float32).tiny
CHUNK = 4096  # logits that a program holds at a time


def sampling_cutoff(
    logits: Array,  # float32 [rows, vocab]
    top_k: Array | None,  # int32 [rows]
    top_p: Array | None,  # float32 [rows]
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> Array:  # float32 [rows]
    """The least logit of each row that may be sampled; equal ones are kept with it.

    Top-k keeps the k largest. Of these, top-p keeps the fewest largest whose share of
    the softmax reaches p.

    Args:
        logits: float32 [rows, vocab].
        top_k: int32 [rows], 0 keeps all; None: so in every row.
        top_p: float32 [rows], 1 and more keeps all; None: so in every row.
        implementation: "triton" (one launch), "xla", or None: Triton on NVIDIA GPUs of
            compute capability 8.0 and newer, XLA elsewhere.
        interpret: run the Triton kernel in interpret mode, on any device.

    Returns:
        The cutoffs, float32 [rows]; -inf where all is kept.

    Raises:
        ValueError: unknown implementation, or one that the device cannot run.

    Reference: nucleus sampling, arXiv 1904.09751.
    """
    limits = {"top_k": top_k, "top_p": top_p}
    limits = {name: limit for name, limit in limits.items() if limit is not None}
    if choose(implementation, ("triton", "xla"), interpret) == "xla":
        return _cutoff(*_xla_passes(logits), **limits)
    return pl.pallas_call(
        functools.partial(_kernel, names=tuple(limits)),
        grid=logits.shape[:1],
        out_shape=jax.ShapeDtypeStruct(logits.shape[:1], jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=16, num_stages=1),
        interpret=interpret,
        name="sampling_cutoff",
    )(logits, *limits.values())


def _cutoff(highest, sums, *, top_k=None, top_p=None):
    """The cutoff of every row, or of one: numbers are arrays of rows, or scalars.

    Args:
        highest: the largest logit.
        sums: of weigh(logit) over the logits that lie, in order, at or above each bound.
    """
    lowest = jnp.full_like(highest, LOWEST, dtype=jnp.int32)
    cutoff = lowest
    if top_k is not None:
        goal = top_k.astype(jnp.float32)
        reached = lambda bounds: [count >= goal for count in sums(jnp.ones_like, bounds)]
        cutoff = jnp.where(top_k > 0, _largest(reached, lowest), lowest)
    if top_p is not None:
        weigh = lambda logits: jnp.exp(logits - highest[..., None])
        (total,) = sums(weigh, [cutoff])
        # What top-k rules out lies below the cutoff, where the goal is reached already.
        share = jnp.maximum(top_p * total, TINY)  # of 0 it would be reached beyond the largest
        reached = lambda bounds: [weight >= share for weight in sums(weigh, bounds)]
        cutoff = jnp.where(top_p < 1, _largest(reached, lowest), cutoff)
    value = lax.bitcast_convert_type(_flip_negative(cutoff), jnp.float32)
    return jnp.where(cutoff == LOWEST, -jnp.inf, value)


def _largest(reached, lowest):
    """The largest number from `lowest` on at which `reached` holds, as it does below it."""

    def refine(step, number):
        shift = 30 - 2 * step
        bounds = [number + (np.int32(digit) << shift) for digit in (1, 2, 3)]
        digit = sum(is_reached.astype(jnp.int32) for is_reached in reached(bounds))
        return number + (digit << shift)

    return lax.fori_loop(0, 16, refine, lowest)


def _order(logits):
    """int32 numbers in the order of float32 ones."""
    return _flip_negative(lax.bitcast_convert_type(logits, jnp.int32))


def _flip_negative(bits):
    """Its own inverse: larger magnitudes of negative floats come first."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _xla_passes(logits):
    order = _order(logits)

    def sums(weigh, bounds):
        above = lambda bound: jnp.where(order >= bound[:, None], weigh(logits), 0)
        return [jnp.sum(above(bound), axis=1) for bound in bounds]

    return jnp.max(logits, axis=1), sums


def _kernel(logits_ref, *refs, names: tuple[str, ...]):
    *limit_refs, out_ref = refs
    row, vocab = pl.program_id(0), logits_ref.shape[1]
    width = min(CHUNK, pl.next_power_of_2(vocab))

    def accumulate(add, start):
        """Fold all chunks of the row; `start` are numbers that fill the accumulators."""

        def advance(i, totals):
            at = i * width + jnp.arange(width)
            logits = plgpu.load(logits_ref.at[row, at], mask=at < vocab, other=-jnp.inf)
            return add(totals, logits)

        totals = tuple(jnp.full(width, x, jnp.float32) for x in start)
        return lax.fori_loop(0, pl.cdiv(vocab, width), advance, totals)

    def sums(weigh, bounds):
        def add(totals, logits):
            order, weights = _order(logits), weigh(logits)
            above = [jnp.where(order >= bound, weights, 0) for bound in bounds]
            return tuple(total + x for total, x in zip(totals, above, strict=True))

        return [jnp.sum(total) for total in accumulate(add, [0.0] * len(bounds))]

    (highest,) = accumulate(lambda most, logits: (jnp.maximum(*most, logits),), [-jnp.inf])
    limits = {name: ref[row] for name, ref in zip(names, limit_refs, strict=True)}
    out_ref[row] = _cutoff(jnp.max(highest), sums, **limits)
