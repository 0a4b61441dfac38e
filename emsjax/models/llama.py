"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783), and what other families share with them."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from emsjax.models import schema
from emsjax.models.architecture import Architecture, AttentionKind, NormKind
from emsjax.models.config import (
    DecoderConfig,
    activation,
    epsilon,
    even,
    head_dim,
    kv_heads,
    layers,
)
from emsjax.models.family import Family
from emsjax.models.rotary import RopeScaling, rotary, with_rope_fields


@dataclasses.dataclass(frozen=True)
class LlamaFields(DecoderConfig):
    """The fields that configs of Llama and of its relatives share."""

    relations: ClassVar = (
        schema.multiple("num_attention_heads", "num_key_value_heads"),
        even("head_dim"),
    )

    vocab_size: int = schema.count(32000)
    hidden_size: int = schema.count(4096)
    intermediate_size: int = schema.count(11008)
    num_hidden_layers: int = layers(32)
    num_attention_heads: int = schema.count(32)
    num_key_value_heads: int | None = kv_heads(None)
    head_dim: int | None = head_dim()
    hidden_act: str = activation("silu")
    max_position_embeddings: int = schema.count(2048)
    initializer_range: float = schema.number(0.02, least=0.0)
    rms_norm_eps: float = epsilon(1e-6)
    rope_theta: float = schema.number(10000.0, least=1.0)
    rope_scaling: RopeScaling | None = schema.nested(RopeScaling)
    tie_word_embeddings: bool = schema.flag(False)
    pad_token_id: int | None = schema.token_id(None)
    bos_token_id: int | None = schema.token_id(1)
    eos_token_id: schema.TokenIds = schema.token_ids(2)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The config in the contents of a config.json."""
        return super().from_json(with_rope_fields(values))


@dataclasses.dataclass(frozen=True)
class LlamaConfig(LlamaFields):
    """Architecture of a Llama model, with the field names and defaults of transformers."""

    attention_bias: bool = schema.flag(False)
    mlp_bias: bool = schema.flag(False)

    @property
    def architecture(self) -> Architecture:
        """The model as data."""
        attention, ffn = self.attention_bias, self.mlp_bias
        return llama_architecture(self, qkv_bias=attention, out_bias=attention, ffn_bias=ffn)


def llama_architecture(config: LlamaFields, **switches: Any) -> Architecture:
    """The architecture of a config with Llama's field names.

    Args:
        config: the config.
        switches: fields of `Architecture` in which the family differs. If `layers` is not among
            them, all layers have the same attention, which sees every token.
    """
    heads, head_dim = config.num_attention_heads, config.head_dim
    positions = config.max_position_embeddings
    turned = rotary(config.rope_theta, head_dim, config.rope_scaling, positions)
    attention = AttentionKind(scale=head_dim**-0.5, rotary=0)
    fields = {
        "vocab_size": config.vocab_size,
        "width": config.hidden_size,
        "ffn_size": config.intermediate_size,
        "heads": heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "max_positions": positions,
        "layers": (attention,) * config.num_hidden_layers,
        "norm": NormKind(config.rms_norm_eps),
        "activation": config.hidden_act,
        "gated": True,
        "rotaries": (turned,),
        "tied_head": config.tie_word_embeddings,
        "init_std": config.initializer_range,
    }
    return Architecture(**(fields | switches))


_LAYER = "model.layers.{}"
MODULES = {
    "embed_tokens": "model.embed_tokens",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
    "layers.{}.qkv_proj": tuple(f"{_LAYER}.self_attn.{part}_proj" for part in "qkv"),
    "layers.{}.out_proj": f"{_LAYER}.self_attn.o_proj",
    "layers.{}.up_proj": (f"{_LAYER}.mlp.gate_proj", f"{_LAYER}.mlp.up_proj"),
    "layers.{}.down_proj": f"{_LAYER}.mlp.down_proj",
    "layers.{}.attention_norm": f"{_LAYER}.input_layernorm",
    "layers.{}.ffn_norm": f"{_LAYER}.post_attention_layernorm",
}
FAMILY = Family(
    model_type="llama",
    class_name="LlamaForCausalLM",
    config=LlamaConfig,
    modules=MODULES,
    ignored=r".*\.rotary_emb\.inv_freq",
)
