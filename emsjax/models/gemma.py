"""Gemma 3 (arXiv 2503.19786), text models: local and global layers, norms on both sides."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from emsjax.models import llama
from emsjax.models.architecture import BOTH, Architecture, AttentionKind, NormKind
from emsjax.models.config import (
    FULL,
    SLIDING,
    activation,
    head_dim,
    kv_heads,
    layers,
    types_of_layers,
)
from emsjax.models.rotary import RopeScaling, rotary
from emsjax.models.schema import TokenIds, count, flag, number, only, token_id, token_ids

LOCAL, GLOBAL = 0, 1  # rotary positions of layers with and without a window


@dataclasses.dataclass(frozen=True)
class Gemma3Config(llama.LlamaFields):
    """Architecture of a Gemma 3 text model, with transformers' field names and defaults."""

    relations: ClassVar = (
        *llama.LlamaFields.relations,
        only("attn_logit_softcapping", None, "attention scores cannot be capped"),
        only("use_bidirectional_attention", False, "text is decoded from left to right"),
    )

    vocab_size: int = count(262208)
    hidden_size: int = count(2304)
    intermediate_size: int = count(9216)
    num_hidden_layers: int = layers(26)
    num_attention_heads: int = count(8)
    num_key_value_heads: int | None = kv_heads(4)
    head_dim: int | None = head_dim(256)
    hidden_act: str = activation("gelu_pytorch_tanh", key="hidden_activation")
    max_position_embeddings: int = count(131072)
    rope_theta: float = number(1000000.0, least=1.0)  # of layers without a window
    rope_local_base_freq: float = number(10000.0, least=1.0)  # of layers with one
    tie_word_embeddings: bool = flag(True)
    pad_token_id: int | None = token_id(0)
    bos_token_id: int | None = token_id(2)
    eos_token_id: TokenIds = token_ids(1)
    attention_bias: bool = flag(False)
    query_pre_attn_scalar: int = count(256)
    sliding_window: int = count(4096)
    sliding_window_pattern: int = count(6)  # every so many layers, one has no window
    layer_types: tuple[str, ...] | None = types_of_layers(
        lambda config, layer: (layer + 1) % config.sliding_window_pattern == 0
    )
    final_logit_softcapping: float | None = number(None, least=1e-6, null=None)
    attn_logit_softcapping: float | None = number(None, least=1e-6, null=None)
    use_bidirectional_attention: bool = flag(False, null=False)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The config in the contents of a config.json.

        Newer versions of transformers write rotary parameters for each type of layer.
        """
        parameters = values.get("rope_parameters")
        if isinstance(parameters, Mapping) and isinstance(parameters.get(FULL), Mapping):
            local = RopeScaling.from_json(parameters.get(SLIDING) or {})
            if local != RopeScaling():
                raise ValueError(f"rope_parameters.{SLIDING} must be of rope_type default")
            base = (parameters.get(SLIDING) or {}).get("rope_theta", 10000.0)
            values = {**values, "rope_local_base_freq": base, "rope_parameters": parameters[FULL]}
        return super().from_json(values)

    @property
    def architecture(self) -> Architecture:
        """The model as data."""
        size, positions = self.head_dim, self.max_position_embeddings
        scale = self.query_pre_attn_scalar**-0.5
        kinds = {
            SLIDING: AttentionKind(scale, self.sliding_window, rotary=LOCAL),
            FULL: AttentionKind(scale, rotary=GLOBAL),
        }
        return llama.llama_architecture(
            self,
            layers=tuple(kinds[type] for type in self.layer_types),
            norm=NormKind(self.rms_norm_eps, offset=1.0),
            order=BOTH,
            rotaries=(
                rotary(self.rope_local_base_freq, size, None, positions),
                rotary(self.rope_theta, size, self.rope_scaling, positions),
            ),
            qkv_bias=self.attention_bias,
            out_bias=self.attention_bias,
            head_norm=True,
            embedding_scale=self.hidden_size**0.5,
            logit_cap=self.final_logit_softcapping,
        )


_LAYER = "model.layers.{}"
FAMILY = dataclasses.replace(
    llama.FAMILY,
    model_type="gemma3_text",
    class_name="Gemma3ForCausalLM",
    config=Gemma3Config,
    modules=llama.MODULES
    | {
        "layers.{}.query_norm": f"{_LAYER}.self_attn.q_norm",
        "layers.{}.key_norm": f"{_LAYER}.self_attn.k_norm",
        "layers.{}.attention_out_norm": f"{_LAYER}.post_attention_layernorm",
        "layers.{}.ffn_norm": f"{_LAYER}.pre_feedforward_layernorm",
        "layers.{}.ffn_out_norm": f"{_LAYER}.post_feedforward_layernorm",
    },
)
