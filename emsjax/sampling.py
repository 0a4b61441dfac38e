"""Temperature, top-k, top-p, and random bits that belong to a sequence and a position."""

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, Key

from emsjax.checks import per_prompt


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: warped by temperature, then top-k, then top-p.

    Each field is one value for all prompts or one per prompt; inside the device
    loop, an array [b].

    Attributes:
        temperature: divides the logits; 0 is greedy decoding.
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
            ValueError: a wrong number of values, a negative or non-finite
                temperature, a negative top_k, or top_p outside (0, 1].
        """
        columns = {}
        for name, dtype in (("temperature", float), ("top_k", int), ("top_p", float)):
            values = per_prompt(f"sampling.{name}", getattr(self, name), num_prompts)
            columns[name] = np.array(values)
            if columns[name].dtype.kind not in ("iu" if dtype is int else "iuf"):
                raise ValueError(f"sampling.{name} must be of type {dtype.__name__}")
        for value in columns["temperature"]:
            if not (np.isfinite(value) and value >= 0):
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


class Purpose(enum.IntEnum):
    """What random bits are for: each purpose has its own stream."""

    TARGET = 0
    DRAFT = 1
    ACCEPTANCE = 2
    RESIDUAL = 3


def position_keys(
    keys: Key[Array, "n"], positions: Int32[Array, "n"], purpose: Purpose
) -> Key[Array, "n"]:
    """Keys that depend on (sequence key, position of the token drawn, purpose) alone."""
    fold = lambda key, position: jax.random.fold_in(jax.random.fold_in(key, position), purpose)
    return jax.vmap(fold)(keys, positions)


def warp(logits: Float[Array, "r v"], sampling: Sampling) -> Float[Array, "r v"]:
    """Logits of the distribution that each row is sampled from, -inf for what is ruled out.

    `sampling` holds one value per row. Rows of temperature 0 stay as they are.
    Needs no sort: the thresholds are found by bisection.
    """
    greedy = sampling.temperature <= 0
    warped = logits / jnp.where(greedy, 1, sampling.temperature)[:, None]
    top_k = jnp.where(sampling.top_k > 0, sampling.top_k, logits.shape[1])
    warped = _keep_largest(warped, jnp.ones_like(warped), top_k.astype(jnp.float32), greedy)
    keep_all = greedy | (sampling.top_p >= 1)
    return _keep_largest(warped, jax.nn.softmax(warped), sampling.top_p, keep_all)


def draw(
    logits: Float[Array, "r v"], temperature: Float[Array, "r"], keys: Key[Array, "r"]
) -> Int32[Array, "r"]:
    """One token per row, by the Gumbel-max trick; the likeliest where the temperature is 0."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
    noise = jnp.where(temperature[:, None] > 0, noise, 0)
    return jnp.argmax(logits + noise, axis=-1).astype(jnp.int32)


def _keep_largest(logits, weights, goal, keep_all):
    """-inf for all but the fewest largest entries whose weights reach `goal`, ties kept.

    Bisects over the 32 bits of the floats' order, so the threshold is exact.
    """
    bits = lax.bitcast_convert_type(logits, jnp.int32)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the floats' order

    def halve(_, bounds):
        low, high = bounds  # the sum reaches the goal at `low`, not at `high`
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        reached = jnp.sum(jnp.where(order >= middle[:, None], weights, 0), axis=-1) >= goal
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    info = jnp.iinfo(jnp.int32)
    low = jnp.full(logits.shape[0], info.min, jnp.int32)
    threshold, _ = lax.fori_loop(0, 32, halve, (low, jnp.full_like(low, info.max)))
    kept = (order >= threshold[:, None]) | keep_all[:, None]
    return jnp.where(kept, logits, -jnp.inf)
