"""The architecture of an OPT model, and the configs of all families by their `model_type`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax

from emsjax.models.schema import (
    Config,
    TokenIds,
    choice,
    count,
    flag,
    multiple,
    number,
    only,
    shown,
    token_id,
    token_ids,
)

POSITION_OFFSET = 2  # the first two entries of the position table are never used
ACTIVATIONS = {"relu": jax.nn.relu, "gelu": lambda x: jax.nn.gelu(x, approximate=False)}
QUANTIZED = ("quantization_config", "compression_config")  # the first is transformers' name


@dataclasses.dataclass(frozen=True)
class OPTConfig(Config):
    """Architecture of an OPT model, with the field names and defaults of transformers.

    Raises:
        ValueError: a field has another type or is out of its range, token ids are outside the
            vocabulary, the heads do not divide hidden_size, the activation is unknown, or the
            head is not tied.
    """

    model_type: ClassVar[str] = "opt"
    architecture: ClassVar[str] = "OPTForCausalLM"
    relations: ClassVar = (
        multiple("hidden_size", "num_attention_heads"),
        only("tie_word_embeddings", True, "OPT's head is its embedding table"),
    )

    vocab_size: int = count(50272)
    hidden_size: int = count(768)
    num_hidden_layers: int = count(12)
    ffn_dim: int = count(3072)
    max_position_embeddings: int = count(2048)
    num_attention_heads: int = count(12)
    word_embed_proj_dim: int | None = count(None, null=lambda config: config.hidden_size)
    do_layer_norm_before: bool = flag(True)
    _remove_final_layer_norm: bool = flag(False)
    enable_bias: bool = flag(True)
    layer_norm_elementwise_affine: bool = flag(True)
    activation_function: str = choice("relu", ACTIVATIONS)
    init_std: float = number(0.02, least=0.0)
    tie_word_embeddings: bool = flag(True)
    pad_token_id: int | None = token_id(1)
    bos_token_id: int | None = token_id(2)
    eos_token_id: TokenIds | list[int] = token_ids(2)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "OPTConfig":
        """The config in the contents of a transformers config.json, without training-only fields.

        Raises:
            ValueError: `model_type` is not "opt", the weights are quantised, or a field is wrong.
        """
        check_supported(values, [cls.model_type])
        return cls.from_json(values)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def has_projections(self) -> bool:
        """Whether embeddings are narrower or wider than the layers (350m)."""
        return self.word_embed_proj_dim != self.hidden_size

    @property
    def has_final_layer_norm(self) -> bool:
        return self.do_layer_norm_before and not self._remove_final_layer_norm

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        ids = self.eos_token_id
        return () if ids is None else ids if isinstance(ids, tuple) else (ids,)


CONFIGS: dict[str, type[OPTConfig]] = {OPTConfig.model_type: OPTConfig}


def check_supported(values: Mapping[str, Any], model_types: list[str]) -> None:
    """Check what a config.json says about the model as a whole.

    Raises:
        ValueError: `model_type` is not one of these, or the weights are quantised.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in model_types:
        known = " or ".join(f'"model_type": "{name}"' for name in model_types)
        raise ValueError(
            f"unknown model type {shown(model_type)}: emsjax reads models whose config.json says "
            + known
        )
    for name in QUANTIZED:
        if (how := values.get(name)) is not None:
            method = how.get("quant_method", how) if isinstance(how, Mapping) else how
            raise ValueError(
                f"{name} says that the weights are quantised ({shown(method)}), which emsjax does "
                "not read: choose a repository or revision whose weights are float32, float16 or "
                "bfloat16"
            )
