"""The logarithm of sums of exponentials as two Pallas Triton kernels.

The first sums each chunk of a row, so that a single row keeps many multiprocessors busy. The second
adds up the chunks of each row. The places of the chunks depend on the vocabulary alone, so the
order of a row's sum is the same for any number of rows.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

CHUNK = 4096  # logits of a program


@functools.partial(jax.jit, static_argnames="interpret")
def log_sum_exp(
    logits: Array,  # float32 [rows, vocab]
    *,
    interpret: bool = False,
) -> Array:  # float32 [rows]
    """See `pallas_kernels.log_sum_exp`."""
    rows, vocab = logits.shape
    width = min(CHUNK, pl.next_power_of_2(vocab))
    chunks = pl.cdiv(vocab, width)
    part = jax.ShapeDtypeStruct((rows, chunks), jnp.float32)
    shares = pl.pallas_call(
        functools.partial(_sum_chunk, width=width),
        grid=(rows, chunks),
        out_shape=(part, part),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="log_sum_exp_chunks",
    )(logits)
    return pl.pallas_call(
        _add_chunks,
        grid=(rows,),
        out_shape=jax.ShapeDtypeStruct((rows,), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="log_sum_exp",
    )(*shares)


def _sum_chunk(
    logits_ref,  # [rows, vocab]
    highest_ref,  # [rows, chunks]
    total_ref,  # [rows, chunks]
    *,
    width: int,
):
    """The largest logit of a chunk, and the sum of exponentials of differences from it."""
    row, chunk = pl.program_id(0), pl.program_id(1)
    at = chunk * width + jnp.arange(width)
    mask = at < logits_ref.shape[1]
    logits = plgpu.load(logits_ref.at[row, at], mask=mask, other=-jnp.inf)
    highest = jnp.max(logits)
    highest_ref[row, chunk] = highest
    total_ref[row, chunk] = jnp.sum(jnp.exp(logits - _finite(highest)))


def _add_chunks(
    highest_ref,  # [rows, chunks]
    total_ref,  # [rows, chunks]
    out_ref,  # [rows]
):
    row, chunks = pl.program_id(0), total_ref.shape[1]
    at = jnp.arange(pl.next_power_of_2(chunks))
    load = lambda ref, other: plgpu.load(ref.at[row, at], mask=at < chunks, other=other)
    tops, totals = load(highest_ref, -jnp.inf), load(total_ref, 0)
    highest = _finite(jnp.max(tops))
    # A chunk without a finite largest logit has 0, infinity or NaN as its sum, and keeps it.
    weights = jnp.where(jnp.abs(tops) < jnp.inf, jnp.exp(tops - highest), 1)
    out_ref[row] = highest + jnp.log(jnp.sum(totals * weights))


def _finite(x):
    """The number, or 0 if it is infinite or NaN."""
    return jnp.where(jnp.abs(x) < jnp.inf, x, 0)
