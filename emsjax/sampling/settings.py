"""Temperature, top-k and top-p, and random bits per sequence and position."""

import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Key

import pallas_kernels
from emsjax.checks import INT32_MAX, check_at_least, check_number, is_per_prompt, per_prompt
from emsjax.values import pytree


@pytree
class Sampling:
    """Settings by which the next token is drawn: temperature, then top-k, then top-p.

    Each field is one value for all prompts or one per prompt. Inside the device
    loop it is an array [b], or None if no sample uses it. One top_k or top_p for all prompts
    applies to those with a temperature above 0, of which there must be one; with one value per
    prompt, prompts with temperature 0 must have the default.

    Attributes:
        temperature: divides the logits; 0, the default, is greedy decoding.
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
                temperature, a negative top_k, a top_p outside (0, 1], or a top_k or top_p
                without a temperature.
        """
        columns = {
            name: np.array(
                per_prompt(f"sampling.{name}", getattr(self, name), num_prompts, check), dtype
            )
            for name, (check, dtype, _) in FIELDS.items()
        }
        greedy = columns["temperature"] == 0
        for name, (_, _, default) in FIELDS.items():
            idle = greedy & (columns[name] != default)
            given = getattr(self, name)
            if idle.any() if is_per_prompt(given) else idle.all():
                prompt = f" of prompts[{idle.argmax()}]" if is_per_prompt(given) else ""
                raise ValueError(
                    f"sampling.{name}{prompt} has no effect at temperature 0, which is greedy "
                    f"decoding: set sampling.temperature above 0, or leave {name} at {default}"
                )
        return Sampling(**columns)

    def in_use(self) -> "Sampling | None":
        """The expanded settings without fields that have no effect; None if all are greedy."""
        sampled = self.temperature > 0
        if not sampled.any():
            return None
        top_k = self.top_k if (sampled & (self.top_k > 0)).any() else None
        top_p = self.top_p if (sampled & (self.top_p < 1)).any() else None
        return Sampling(self.temperature, top_k, top_p)


def _temperature(name: str, value: Any) -> float:
    most = float(np.finfo(np.float32).max)
    return check_number(name, value, "finite and >= 0", lambda x: 0 <= x <= most)


def _top_k(name: str, value: Any) -> int:
    return min(check_at_least(name, value, 0), INT32_MAX)


def _top_p(name: str, value: Any) -> float:
    return check_number(name, value, "in (0, 1]", lambda x: 0 < x <= 1)


# The check, the dtype on the device and the value without effect of each field.
FIELDS = {
    "temperature": (_temperature, np.float32, 0.0),
    "top_k": (_top_k, np.int32, 0),
    "top_p": (_top_p, np.float32, 1.0),
}


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
