"""Frequencies of rotary positions, with the scalings that published models use.

References: rotary positions, arXiv 2104.09864; "linear", arXiv 2306.15595; "yarn", arXiv
2309.00071; "llama3", the Llama 3.1 models, arXiv 2407.21783.
"""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from emsjax.models.architecture import Rotary


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How frequencies are changed for sequences longer than those of the first training.

    The names are those of `rope_scaling` in a transformers config.json.

    Attributes:
        rope_type: "default", "linear", "llama3" or "yarn".
        factor: how many times longer sequences become.
        original_max_position_embeddings: tokens of the sequences of the first training; None: as
            many as the model has positions.
        low_freq_factor, high_freq_factor: "llama3": waves that fit less than `low_freq_factor`
            times into the original sequences become longer, those that fit more than
            `high_freq_factor` times stay as they are.
        beta_fast, beta_slow: the same of "yarn", in full turns.
        attention_factor, mscale, mscale_all_dim: "yarn": the factor of sines and cosines, or None
            for one that follows from `factor`.
        truncate: "yarn": whether the range of interpolated pairs ends at whole numbers.
    """

    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def rotary(theta: float, size: int, scaling: RopeScaling, max_positions: int) -> Rotary:
    """The rotary positions of `size` numbers of each head.

    Args:
        theta: the base, whose powers are the wavelengths.
        size: rotated numbers of a head, even.
        scaling: see `RopeScaling`.
        max_positions: the model's positions.
    """
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    frequencies = 1.0 / np.float32(theta) ** exponents
    original = scaling.original_max_position_embeddings or max_positions
    frequencies, amplitude = SCALINGS[scaling.rope_type](frequencies, theta, scaling, original)
    return Rotary(tuple(map(float, frequencies)), amplitude)


def _default(frequencies, theta, scaling: RopeScaling, original: int):
    return frequencies, 1.0


def _linear(frequencies, theta, scaling: RopeScaling, original: int):
    return frequencies / np.float32(scaling.factor), 1.0


def _llama3(frequencies, theta, scaling: RopeScaling, original: int):
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    waves = original / (2 * math.pi / frequencies)  # that fit into the original sequences
    kept = np.clip((waves - low) / (high - low), 0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor, 1.0


def _yarn(frequencies, theta, scaling: RopeScaling, original: int):
    size = 2 * len(frequencies)
    # The pair that turns this often in the original sequences, as a real number.
    pair = lambda turns: size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    last += 0.001 if first == last else 0
    stretched = np.clip((np.arange(len(frequencies)) - first) / (last - first), 0, 1)
    frequencies = (1 - stretched) * frequencies + stretched * frequencies / scaling.factor

    def attention_factor(scale: float = 1.0) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * scale * math.log(scaling.factor) + 1.0

    amplitude = scaling.attention_factor
    if amplitude is None and scaling.mscale and scaling.mscale_all_dim:
        scales = (scaling.mscale, scaling.mscale_all_dim)
        amplitude = math.prod(attention_factor(s) ** p for s, p in zip(scales, (1, -1), strict=True))
    return frequencies, attention_factor() if amplitude is None else amplitude


SCALINGS: dict[str, Callable] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def angles(
    rotary: Rotary, positions: Int32[Array, "r"]
) -> tuple[Float32[Array, "r p"], Float32[Array, "r p"]]:
    """Cosines and sines of each row's angles, as `pallas_kernels.rotate_heads` takes them."""
    turned = positions.astype(jnp.float32)[:, None] * jnp.array(rotary.frequencies, jnp.float32)
    amplitude = jnp.float32(rotary.amplitude)
    return jnp.cos(turned) * amplitude, jnp.sin(turned) * amplitude
