"""GPT-NeoX (arXiv 2204.06745) and Pythia (arXiv 2304.01373): parallel parts, partial rotation."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np

from emsjax.models import schema
from emsjax.models.architecture import BEFORE, PARALLEL, Architecture, AttentionKind, NormKind
from emsjax.models.config import OWN_HEADS, DecoderConfig, activation, epsilon, layers
from emsjax.models.family import Family
from emsjax.models.rotary import RopeScaling, rotary, with_rope_fields


@dataclasses.dataclass(frozen=True)
class GPTNeoXConfig(DecoderConfig):
    """Architecture of a GPT-NeoX model, with the field names and defaults of transformers."""

    relations: ClassVar = (
        schema.multiple("hidden_size", "num_attention_heads"),
        schema.Relation(
            lambda config: config.rotated and config.rotated % 2 == 0,
            "rotary_pct ({rotary_pct}) of a head must be an even number of at least 2",
        ),
    )

    vocab_size: int = schema.count(50432)
    hidden_size: int = schema.count(6144)
    num_hidden_layers: int = layers(44)
    num_attention_heads: int = schema.count(64)
    intermediate_size: int = schema.count(24576)
    hidden_act: str = activation("gelu")
    rotary_pct: float = schema.number(0.25, least=0.0, most=1.0)  # rotated part of a head
    rope_theta: float = schema.number(10000.0, least=1.0, key="rotary_emb_base")
    rope_scaling: RopeScaling | None = schema.nested(RopeScaling)
    max_position_embeddings: int = schema.count(2048)
    initializer_range: float = schema.number(0.02, least=0.0)
    layer_norm_eps: float = epsilon(1e-5)
    use_parallel_residual: bool = schema.flag(True)
    attention_bias: bool = schema.flag(True)
    tie_word_embeddings: bool = schema.flag(False)
    pad_token_id: int | None = schema.token_id(None)
    bos_token_id: int | None = schema.token_id(0)
    eos_token_id: schema.TokenIds = schema.token_ids(2)

    sizes: ClassVar = OWN_HEADS

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def rotated(self) -> int:
        """Rotated numbers of a head."""
        return int(self.head_dim * self.rotary_pct)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The config in the contents of a config.json, with the newer names of some fields."""
        values = with_rope_fields(values)
        newer = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
        given = {old: values[new] for old, new in newer.items() if new in values}
        return super().from_json({**values, **given})

    @property
    def architecture(self) -> Architecture:
        """The model as data."""
        attention = AttentionKind(self.head_dim**-0.5, rotary=0)
        positions = self.max_position_embeddings
        return Architecture(
            vocab_size=self.vocab_size,
            width=self.hidden_size,
            ffn_size=self.intermediate_size,
            heads=self.num_attention_heads,
            kv_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            max_positions=positions,
            layers=(attention,) * self.num_hidden_layers,
            norm=NormKind(self.layer_norm_eps, centred=True),
            activation=self.hidden_act,
            order=PARALLEL if self.use_parallel_residual else BEFORE,
            rotaries=(rotary(self.rope_theta, self.rotated, self.rope_scaling, positions),),
            qkv_bias=self.attention_bias,
            out_bias=self.attention_bias,
            ffn_bias=True,
            tied_head=self.tie_word_embeddings,
            init_std=self.initializer_range,
        )


def columns(config: GPTNeoXConfig) -> np.ndarray:
    """Where each column of q | k | v is stored: a head's queries, keys and values lie together."""
    heads, size = config.num_attention_heads, config.head_dim
    return np.arange(3 * heads * size).reshape(heads, 3, size).swapaxes(0, 1).reshape(-1)


_LAYER = "gpt_neox.layers.{}"
FAMILY = Family(
    model_type="gpt_neox",
    class_name="GPTNeoXForCausalLM",
    config=GPTNeoXConfig,
    modules={
        "embed_tokens": "gpt_neox.embed_in",
        "final_norm": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out",
        "layers.{}.qkv_proj": f"{_LAYER}.attention.query_key_value",
        "layers.{}.out_proj": f"{_LAYER}.attention.dense",
        "layers.{}.up_proj": f"{_LAYER}.mlp.dense_h_to_4h",
        "layers.{}.down_proj": f"{_LAYER}.mlp.dense_4h_to_h",
        "layers.{}.attention_norm": f"{_LAYER}.input_layernorm",
        "layers.{}.ffn_norm": f"{_LAYER}.post_attention_layernorm",
    },
    prefix="gpt_neox.",
    head="embed_out",
    ignored=r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
    columns=columns,
)
