"""The static row counts that steps and prefill are compiled for."""

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.common.blocks import round_up

MIN_BUCKET_ROWS = 16  # the rows of a matrix unit's tile: fewer cost the same
MAX_BUCKETS = 17  # at one row per sample and above, as each takes seconds to compile
# If all samples are live and most of them draft, a step has this fraction of the maximum rows.
# In this range row counts are as close as MAX_BUCKETS allows.
FINE_FROM, FINE_TO = 5 / 8, 7 / 8
# From here on rows cost time: without the cost of cached tokens, a step of OPT-6.7B took 4.0 ms
# with 16 rows, 4.3 with 64, 4.6 with 96 and 4.9 with 136 (an H200, `emsjax profile`).
HALVED_FROM = 64
# From MORE_FROM to below MORE_TO, row counts are a multiple of 16 plus MORE, as cuBLAS offers tiles
# of half the rows for 344, but not for 352. Four layers of OPT-6.7B without attention took 668 us
# for 136 rows, 674 for 144 and 710 for 160 (batch 24), and 1103 for 344, 1193 for 352 and 1158 for
# 360 (batch 64; bfloat16, an H200, jax 0.11.2;
# `emsjax bench step --layers 4 --shapes 17x8,18x8,20x8,43x8,44x8,45x8`).
MORE_FROM, MORE_TO, MORE = 128, 512, 8
MAX_CHUNK_ROWS = 1024  # rows of a prefill chunk
PROMPT_SIXTEENTHS = (3, 6, 10, 16)  # row counts of steps that also feed prompts, of the most


def row_buckets(batch: int, max_rows_per_sample: int) -> tuple[int, ...]:
    """Static row counts that a step may be padded up to, ascending; each is compiled once.

    They range from one row per sample to the maximum, and are closest for steps in which all
    samples are live and most of them draft. Below that, for steps in which samples have ended,
    they are powers of two and, from HALVED_FROM rows on, also the sizes halfway between. With
    drafts there are also powers of four below one row per sample.
    """
    most = batch * max_rows_per_sample
    least = min(most, max(batch, MIN_BUCKET_ROWS))
    powers = [2**i for i in range(4, most.bit_length())]
    halfway = [n + n // 2 for n in powers if n >= HALVED_FROM]
    coarse = [n for n in (*powers, *halfway) if n < most * FINE_FROM]
    step = MIN_BUCKET_ROWS
    while len(buckets := _buckets(least, most, coarse, step)) > MAX_BUCKETS and step < most:
        step *= 2
    fewer = (n for n in powers[::2] if 3 * n <= 2 * least and max_rows_per_sample > 1)
    return tuple(sorted({*fewer, *buckets}))


def _buckets(least: int, most: int, coarse: list[int], step: int) -> set[int]:
    """Row counts from `least` to `most`: the coarse ones, and fine ones every `step` rows."""
    fine = (n for n in range(0, most, step) if most * FINE_FROM <= n <= most * FINE_TO)
    buckets = [least]
    for size in sorted(n + MORE if MORE_FROM <= n < MORE_TO else n for n in {*coarse, *fine}):
        if buckets[-1] + MIN_BUCKET_ROWS <= size < most:
            buckets.append(size)
    return {*buckets, most}


def smallest_bucket(buckets: tuple[int, ...], rows: Array) -> Array:
    """Index of the smallest bucket that holds `rows`, an array of any shape."""
    # All buckets are compared at once: a binary search would be a loop of launches on a GPU.
    return jnp.searchsorted(jnp.asarray(buckets, rows.dtype), rows, method="compare_all")


def chunk_rows(batch: int, width: int) -> int:
    """Static rows of a prefill chunk for a token buffer [batch, width]."""
    return min(MAX_CHUNK_ROWS, batch * width)


def prompt_row_counts(batch: int, k1: int, width: int) -> tuple[int, ...]:
    """Static row counts of steps that feed prompts, ascending; the last fits drafts and prompts.

    Args:
        width: width of the token buffer.
    """
    chunk = chunk_rows(batch, width)
    most = max(chunk, batch * k1 + chunk // 2)
    sizes = {round_up(-(-most * n // 16), MIN_BUCKET_ROWS) for n in PROMPT_SIXTEENTHS}
    return tuple(sorted(sizes))


def round_up_length(length: int) -> int:
    """A static width that holds `length` tokens, one of few, so that there are few compilations.

    Powers of two from 64 to 512, then multiples of 512.
    """
    if length > 512:
        return round_up(length, 512)
    return max(64, 1 << (length - 1).bit_length())
