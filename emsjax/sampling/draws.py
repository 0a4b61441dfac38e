"""Random bits per sequence, position and purpose, and the tokens that are drawn with them."""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Key

import pallas_kernels
from emsjax.sampling.settings import Sampling


class Purpose(enum.IntEnum):
    """Purpose of random bits; each purpose has its own stream."""

    TARGET = 0
    DRAFT = 1
    ACCEPTANCE = 2
    RESIDUAL = 3
    STEP = 4  # new keys in every step for its draft


def position_keys(
    keys: Key[Array, "n"], positions: Int32[Array, "n"], purpose: Purpose | Int32[Array, "n"]
) -> Key[Array, "n"]:
    """Keys that depend only on (sequence key, position of the drawn token, purpose).

    Args:
        keys: of the sequences.
        positions: of the drawn tokens.
        purpose: one for all keys, or one per key.
    """
    fold = jax.vmap(jax.random.fold_in)
    return fold(fold(keys, positions), jnp.broadcast_to(jnp.asarray(purpose), positions.shape))


class RandomBits(NamedTuple):
    """Random bits for each position of a step's drafts, and for the position after each draft."""

    keys: Key[Array, "b k1"]  # keys of the tokens that the target draws
    # They decide how much of a drawn draft is accepted: see `emsjax.verification`. None: a token
    # is accepted if the target draws the same one.
    uniforms: Float[Array, "b k1"] | None


def random_bits(
    keys: Key[Array, "b"],
    positions: Int32[Array, "b k1"],
    counts: Int32[Array, "b"],
    *,
    drawn: bool,
) -> RandomBits:
    """Random bits that depend only on (key, position, purpose), not on the rest of the batch.

    The uniform numbers depend on the first position too. All of them decide how much of a draft is
    accepted, so that those of rejected tokens tell something: every step has its own.

    Args:
        positions: of each sample's draft tokens, and of the token after them.
        counts: number of each sample's draft tokens.
        drawn: whether draft tokens were drawn, so that they are verified as a block.
    """

    def keys_for(purpose, keys=keys):
        of_column = lambda at, purpose: position_keys(keys, at, purpose)
        purposes = jnp.broadcast_to(jnp.asarray(purpose), positions.shape)
        return jax.vmap(of_column, in_axes=1, out_axes=1)(positions, purposes)

    if not drawn:
        return RandomBits(keys_for(Purpose.TARGET), None)
    is_draft = jnp.arange(positions.shape[1]) < counts[:, None]
    purposes = jnp.where(is_draft, Purpose.RESIDUAL, Purpose.TARGET)
    of_step = position_keys(keys, positions[:, 0], Purpose.ACCEPTANCE)
    uniforms = jax.vmap(jax.vmap(jax.random.uniform))(keys_for(Purpose.ACCEPTANCE, of_step))
    return RandomBits(keys_for(purposes), uniforms)


def warp(logits: Float[Array, "r v"], sampling: Sampling) -> Float[Array, "r v"]:
    """Logits of the distribution that each row is sampled from, -inf for excluded tokens.

    `sampling` holds one value per row. Rows with temperature 0 keep their distribution.
    """
    greedy = sampling.temperature <= 0
    # With the largest logit at 0, dividing by a small temperature cannot overflow to infinity.
    warped = logits - jnp.max(logits, axis=1, keepdims=True)
    warped = warped / jnp.where(greedy, 1, sampling.temperature)[:, None]
    if sampling.top_k is None and sampling.top_p is None and sampling.min_p is None:
        return warped
    cutoff = jnp.full(logits.shape[:1], -jnp.inf, logits.dtype)
    if sampling.top_k is not None or sampling.top_p is not None:
        cutoff = pallas_kernels.sampling_cutoff(warped, sampling.top_k, sampling.top_p)
    if sampling.min_p is not None:  # of the likeliest token, whose logit is 0
        cutoff = jnp.maximum(cutoff, jnp.log(sampling.min_p))
    cutoff = jnp.where(greedy, -jnp.inf, cutoff)
    return jnp.where(warped >= cutoff[:, None], warped, -jnp.inf)


def draw(
    logits: Float[Array, "r v"], temperature: Float[Array, "r"], keys: Key[Array, "r"]
) -> Int32[Array, "r"]:
    """One token per row by the Gumbel-max trick; the likeliest one if the temperature is 0."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    noise = jnp.where(temperature[:, None] > 0, noise, 0)
    return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)
