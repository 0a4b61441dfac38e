"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783), and what other families share with them."""

import dataclasses
from typing import Any

from emsjax.models.architecture import Architecture, AttentionKind, NormKind
from emsjax.models.config import TokenIds
from emsjax.models.family import Family
from emsjax.models.rotary import RopeScaling, rotary


@dataclasses.dataclass(frozen=True)
class LlamaConfig(TokenIds):
    """Architecture of a Llama model, with the field names and defaults of transformers."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None  # None: num_attention_heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2

    @property
    def architecture(self) -> Architecture:
        """The model as data."""
        return llama_architecture(
            self,
            qkv_bias=self.attention_bias,
            out_bias=self.attention_bias,
            ffn_bias=self.mlp_bias,
        )


def llama_architecture(config: Any, **switches: Any) -> Architecture:
    """The architecture of a config with Llama's field names.

    Args:
        config: the config.
        switches: fields of `Architecture` in which the family differs. If `layers` is not among
            them, all layers have the same attention, which sees every token.
    """
    heads = config.num_attention_heads
    head_dim = config.head_dim or config.hidden_size // heads
    positions = config.max_position_embeddings
    turned = rotary(config.rope_theta, head_dim, config.rope_scaling, positions)
    attention = AttentionKind(scale=head_dim**-0.5, rotary=0)
    fields = {
        "vocab_size": config.vocab_size,
        "width": config.hidden_size,
        "ffn_size": config.intermediate_size,
        "heads": heads,
        "kv_heads": config.num_key_value_heads or heads,
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
    ignored=(r".*\.rotary_emb\.inv_freq",),
)
