"""GPT-NeoX (arXiv 2204.06745) and Pythia (arXiv 2304.01373): parallel parts, partial rotation."""

import dataclasses

import numpy as np

from emsjax.models.architecture import BEFORE, PARALLEL, Architecture, AttentionKind, NormKind
from emsjax.models.config import TokenIds
from emsjax.models.family import Family
from emsjax.models.rotary import RopeScaling, rotary


@dataclasses.dataclass(frozen=True)
class GPTNeoXConfig(TokenIds):
    """Architecture of a GPT-NeoX model, with the field names and defaults of transformers."""

    vocab_size: int = 50432
    hidden_size: int = 6144
    num_hidden_layers: int = 44
    num_attention_heads: int = 64
    intermediate_size: int = 24576
    hidden_act: str = "gelu"
    rotary_pct: float = 0.25
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    use_parallel_residual: bool = True
    attention_bias: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 2

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def architecture(self) -> Architecture:
        """The model as data."""
        turned = int(self.head_dim * self.rotary_pct)
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
            rotaries=(rotary(self.rope_theta, turned, self.rope_scaling, positions),),
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
    ignored=(r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
    columns=columns,
)
