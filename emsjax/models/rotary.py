"""Rotary positions, with the scalings that published models use.

References: rotary positions, arXiv 2104.09864; "linear", arXiv 2306.15595; "yarn", arXiv
2309.00071; "llama3", the Llama 3.1 models, arXiv 2407.21783.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from emsjax.models.architecture import Rotary
from emsjax.models.schema import Config, Relation, choice, count, flag, number

# The parameters that each type needs.
TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
# All parameters of each type.
PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": (*TYPES["llama3"], "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
        *("attention_factor", "mscale", "mscale_all_dim"),
    ),
}
_positive = lambda default=None: number(default, least=1e-6, null=None)


@dataclasses.dataclass(frozen=True)
class RopeScaling(Config):
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
        attention_factor: "yarn": the factor of sines and cosines; None: it follows from `factor`
            and, if given, `mscale` and `mscale_all_dim`.
        truncate: "yarn": whether the range of interpolated pairs ends at whole numbers.
    """

    relations: ClassVar = (
        Relation(
            lambda scaling: all(getattr(scaling, name) for name in TYPES[scaling.rope_type]),
            "rope_type {rope_type} lacks parameters: linear and yarn need factor; llama3 needs "
            "factor, low_freq_factor and high_freq_factor",
        ),
        Relation(
            lambda scaling: (scaling.low_freq_factor or 0) < (scaling.high_freq_factor or math.inf),
            "low_freq_factor ({low_freq_factor}) must be below high_freq_factor "
            "({high_freq_factor})",
        ),
    )

    rope_type: str = choice("default", TYPES)
    factor: float | None = _positive()
    original_max_position_embeddings: int | None = count(None, null=None)
    low_freq_factor: float | None = _positive()
    high_freq_factor: float | None = _positive()
    beta_fast: float | None = _positive(32.0)
    beta_slow: float | None = _positive(1.0)
    attention_factor: float | None = _positive()
    mscale: float | None = number(None, least=0.0, null=None)
    mscale_all_dim: float | None = number(None, least=0.0, null=None)
    truncate: bool = flag(True)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RopeScaling":
        """The scaling in a config.json, whose older versions say `type` for `rope_type`."""
        return super().from_json({"rope_type": values.get("type", "default"), **values})

    def to_json(self) -> dict[str, Any]:
        """The inverse of `from_json`, with the parameters of this type alone."""
        names = ("rope_type", *PARAMETERS[self.rope_type])
        given = super().to_json()
        return {name: given[name] for name in names if given[name] is not None}


def with_rope_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of a config.json with `rope_theta` and `rope_scaling`.

    Newer versions of transformers write `rope_parameters` instead, which holds both.
    """
    parameters = values.get("rope_parameters")
    fields = dict(values)
    if isinstance(parameters, Mapping):
        fields["rope_scaling"] = parameters
        for name in ("rope_theta", "partial_rotary_factor"):
            if name in parameters:
                fields[name] = parameters[name]
    scaling = fields.get("rope_scaling")
    if isinstance(scaling, Mapping):
        named = scaling.get("rope_type", scaling.get("type", "default"))
        fields["rope_scaling"] = None if named == "default" else scaling
    return fields


def rotary(theta: float, size: int, scaling: RopeScaling | None, max_positions: int) -> Rotary:
    """The rotary positions of `size` numbers of each head.

    Args:
        theta: the base, whose powers are the wavelengths.
        size: rotated numbers of a head, even.
        scaling: see `RopeScaling`; None: "default".
        max_positions: the model's positions.
    """
    scaling = scaling or RopeScaling()
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    frequencies = 1.0 / np.float32(theta) ** exponents
    original = scaling.original_max_position_embeddings or max_positions
    scale = SCALINGS.get(scaling.rope_type)
    amplitude = 1.0
    if scale is not None:
        frequencies, amplitude = scale(frequencies, theta, scaling, original)
    return Rotary(tuple(map(float, frequencies)), amplitude)


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
    first, last = pair(scaling.beta_fast or 32.0), pair(scaling.beta_slow or 1.0)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    last += 0.001 if first == last else 0
    stretched = np.clip((np.arange(len(frequencies)) - first) / (last - first), 0, 1)
    frequencies = (1 - stretched) * frequencies + stretched * frequencies / scaling.factor

    def grown(scale: float = 1.0) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * scale * math.log(scaling.factor) + 1.0

    amplitude = grown()
    if scaling.attention_factor is not None:
        amplitude = scaling.attention_factor
    elif scaling.mscale and scaling.mscale_all_dim:
        amplitude = grown(scaling.mscale) / grown(scaling.mscale_all_dim)
    return frequencies, amplitude


SCALINGS: dict[str, Callable] = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}


def angles(
    rotary: Rotary, positions: Int32[Array, "r"]
) -> tuple[Float32[Array, "r p"], Float32[Array, "r p"]]:
    """Cosines and sines of each row's angles, as `pallas_kernels.rotate_heads` takes them."""
    turned = positions.astype(jnp.float32)[:, None] * jnp.array(rotary.frequencies, jnp.float32)
    amplitude = jnp.float32(rotary.amplitude)
    return jnp.cos(turned) * amplitude, jnp.sin(turned) * amplitude
