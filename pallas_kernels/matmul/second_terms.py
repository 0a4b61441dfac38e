"""Where rounded rows have second terms: a bit for each GROUP of a row's inputs, in 32-bit words.

A kernel multiplies second terms in the groups in which any row of its tile has some.
"""

import functools
import itertools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

BITS = 32  # of a word


def words_for(groups: int) -> int:
    """Number of words of a row with this many groups."""
    return pl.cdiv(groups, BITS)


def in_words(flags: Array) -> Array:
    """The words int32 [m] of a row's flags, bool [n]; n is a power of two. For Triton kernels."""
    count = flags.shape[0]
    bits = flags.astype(jnp.int32) << place_of(jnp.arange(count))[1]
    return jnp.sum(bits.reshape(-1, min(count, BITS)), axis=1, dtype=jnp.int32)


def place_of(group: Array) -> tuple[Array, Array]:
    """The number of the word that holds a group's bit, and of the bit."""
    return group >> (BITS.bit_length() - 1), group & (BITS - 1)


def flags_of(word: Array, bit: Array) -> Array:
    """0 or 1."""
    return lax.shift_right_logical(word, bit) & 1


def ranges_of_steps(groups: int) -> list[tuple[int, int]]:
    """A share's steps, one of each group, in ranges: in each a word of every row is read."""
    aligned = groups % BITS == 0 or BITS % groups == 0
    count = words_for(groups) if aligned else words_for(groups - 1) + 1
    bounds = [part * groups // count for part in range(count + 1)]
    return list(itertools.pairwise(bounds))


def read(
    words_ref, first_row: Array, rows: int, number: Array, step: Array, steps: int
) -> tuple[Array, ...]:
    """The words that a step reads, when `steps` of them read those of all of a tile's rows.

    Args:
        words_ref: [words, rows] of all tiles, in a Mosaic GPU kernel.
        first_row: of the tile, which has `rows`.
        number: of the word; those beyond the last have no bits of the share: see `bits_of_share`.
        step: counted from 0.
    """
    of_step = words_of_step(rows, steps)
    number = lax.min(number, jnp.int32(words_ref.shape[0] - 1))
    places = (lax.min(step * of_step + i, jnp.int32(rows - 1)) for i in range(of_step))
    return tuple(words_ref[number, first_row + i] for i in places)


def words_of_step(rows: int, steps: int) -> int:
    """Number of words that `read` returns."""
    return pl.cdiv(rows, steps)


def union(word: Array, words: Sequence[Array]) -> Array:
    """The bits of all of them."""
    return functools.reduce(lax.bitwise_or, words, word)


def bits_of_share(word: Array, number: Array, first: Array, groups: int) -> Array:
    """A word without the bits of groups outside of a share.

    Args:
        number: of the word.
        first: the share's first group, of so many.
    """
    begin = lax.max(first - number * BITS, jnp.int32(0))
    end = lax.min(first + groups - number * BITS, jnp.int32(BITS))
    inside = lax.max(end - begin, jnp.int32(0))  # from 0 to BITS
    ones = lax.shift_right_logical(jnp.int32(-1), BITS - lax.max(inside, jnp.int32(1)))
    ones = lax.select(inside == 0, jnp.int32(0), ones)
    return word & lax.shift_left(ones, lax.min(begin, jnp.int32(BITS - 1)))


def count_bits(word: Array) -> Array:
    """Number of bits of a word that are set, where no instruction counts them."""
    of = lambda shift, mask, x: lax.shift_right_logical(x, jnp.int32(shift)) & mask
    pairs = word - of(1, 0x55555555, word)
    fours = (pairs & 0x33333333) + of(2, 0x33333333, pairs)
    bytes_ = (fours + of(4, -1, fours)) & 0x0F0F0F0F
    return lax.shift_right_logical(bytes_ * 0x01010101, jnp.int32(24))
