"""Temperature, top-k and top-p, and random bits per sequence and position."""

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Key

import pallas_kernels
from emsjax.checks import per_prompt
from emsjax.values import pytree


@pytree
class Sampling:
    """Settings by which the next token is drawn: temperature, then top-k, then top-p.

    Each field is one value for all prompts or one per prompt. Inside the device
    loop it is an array [b], or None if no sample uses it.

    Attributes:
        temperature: divides the logits; 0, the default, is greedy decoding, which ignores top_k
            and top_p.
        top_k: only the k likeliest tokens are kept, ties with the k-th included;
            0 keeps all.
        top_p: only the smallest set of likeliest tokens with at least this
            probability is kept, ties included; 1 keeps all.
    """

    temperature: Any = 0.0
    top_k: Any = 0
    top_p: Any = 1.0

    def expand(self, num_prompts: int) -> "Sampling":
        """One checked value per prompt, as host arrays.

        Raises:
            ValueError: there is a wrong number of values, a negative or non-finite
                temperature, a negative top_k, or a top_p outside (0, 1].
        """
        columns = {}
        for name, dtype in (("temperature", float), ("top_k", int), ("top_p", float)):
            values = per_prompt(f"sampling.{name}", getattr(self, name), num_prompts)
            columns[name] = np.array(values)
            if columns[name].dtype.kind not in ("iu" if dtype is int else "iuf"):
                raise ValueError(f"sampling.{name} must be of type {dtype.__name__}")
        for value in columns["temperature"]:
            if not (abs(value) <= np.finfo(np.float32).max and value >= 0):
                raise ValueError(f"sampling.temperature must be finite and >= 0, not {value}")
        if (columns["top_k"] < 0).any():
            raise ValueError(f"sampling.top_k must be at least 0, not {columns['top_k'].min()}")
        for value in columns["top_p"]:
            if not 0 < value <= 1:
                raise ValueError(f"sampling.top_p must lie in (0, 1], not {value}")
        return Sampling(
            columns["temperature"].astype(np.float32),
            np.minimum(columns["top_k"], np.iinfo(np.int32).max).astype(np.int32),
            columns["top_p"].astype(np.float32),
        )

    def in_use(self) -> "Sampling | None":
        """The expanded settings without fields that have no effect; None if all are greedy."""
        sampled = self.temperature > 0
        if not sampled.any():
            return None
        top_k = self.top_k if (sampled & (self.top_k > 0)).any() else None
        top_p = self.top_p if (sampled & (self.top_p < 1)).any() else None
        return Sampling(self.temperature, top_k, top_p)


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


def warp(logits: Float[Array, "r v"], sampling: Sampling) -> Float[Array, "r v"]:
    """Logits of the distribution that each row is sampled from, -inf for excluded tokens.

    `sampling` holds one value per row. Rows with temperature 0 keep their distribution.
    """
    greedy = sampling.temperature <= 0
    # With the largest logit at 0, dividing by a small temperature cannot overflow to infinity.
    warped = logits - jnp.max(logits, axis=1, keepdims=True)
    warped = warped / jnp.where(greedy, 1, sampling.temperature)[:, None]
    if sampling.top_k is None and sampling.top_p is None:
        return warped
    cutoff = pallas_kernels.sampling_cutoff(warped, sampling.top_k, sampling.top_p)
    cutoff = jnp.where(greedy, -jnp.inf, cutoff)
    return jnp.where(warped >= cutoff[:, None], warped, -jnp.inf)


def draw(
    logits: Float[Array, "r v"], temperature: Float[Array, "r"], keys: Key[Array, "r"]
) -> Int32[Array, "r"]:
    """One token per row by the Gumbel-max trick; the likeliest one if the temperature is 0."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    noise = jnp.where(temperature[:, None] > 0, noise, 0)
    return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)
