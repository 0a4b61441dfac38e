"""Sampling cutoffs as a Pallas Triton kernel: a program owns a row."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.cutoff.search import find_cutoff, order_of

CHUNK = 4096  # logits that a program holds at a time


def sampling_cutoff(
    logits: Array,  # float32 [rows, vocab]
    top_k: Array | None,  # int32 [rows]
    top_p: Array | None,  # float32 [rows]
    *,
    interpret: bool = False,
) -> Array:  # float32 [rows]
    """See `pallas_kernels.sampling_cutoff`."""
    limits = {"top_k": top_k, "top_p": top_p}
    limits = {name: limit for name, limit in limits.items() if limit is not None}
    return pl.pallas_call(
        functools.partial(_kernel, names=tuple(limits)),
        grid=logits.shape[:1],
        out_shape=jax.ShapeDtypeStruct(logits.shape[:1], jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=16, num_stages=1),
        interpret=interpret,
        name="sampling_cutoff",
    )(logits, *limits.values())


def _kernel(logits_ref, *refs, names: tuple[str, ...]):
    *limit_refs, out_ref = refs
    row, vocab = pl.program_id(0), logits_ref.shape[1]
    width = min(CHUNK, pl.next_power_of_2(vocab))

    def accumulate(add, start):
        """Fold all chunks of the row into accumulators that are filled with the numbers `start`."""

        def advance(i, totals):
            at = i * width + jnp.arange(width)
            logits = plgpu.load(logits_ref.at[row, at], mask=at < vocab, other=-jnp.inf)
            return add(totals, logits)

        totals = tuple(jnp.full(width, x, jnp.float32) for x in start)
        return lax.fori_loop(0, pl.cdiv(vocab, width), advance, totals)

    def sums(weigh, bounds):
        def add(totals, logits):
            order, weights = order_of(logits), weigh(logits)
            above = [jnp.where(order >= bound, weights, 0) for bound in bounds]
            return tuple(total + x for total, x in zip(totals, above, strict=True))

        return [jnp.sum(total) for total in accumulate(add, [0.0] * len(bounds))]

    (highest,) = accumulate(lambda most, logits: (jnp.maximum(*most, logits),), [-jnp.inf])
    limits = {name: ref[row] for name, ref in zip(names, limit_refs, strict=True)}
    out_ref[row] = find_cutoff(jnp.max(highest), sums, **limits)
