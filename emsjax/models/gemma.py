"""Gemma 3 (arXiv 2503.19786), text models: local and global layers, norms on both sides."""

import dataclasses

from emsjax.models import llama
from emsjax.models.architecture import BOTH, Architecture, AttentionKind, NormKind
from emsjax.models.config import TokenIds
from emsjax.models.layer_types import FULL, SLIDING, windowed
from emsjax.models.rotary import RopeScaling, rotary

LOCAL, GLOBAL = 0, 1  # rotary positions of layers with and without a window


@dataclasses.dataclass(frozen=True)
class Gemma3Config(TokenIds):
    """Architecture of a Gemma 3 text model, with transformers' field names and defaults."""

    vocab_size: int = 262208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4  # None: num_attention_heads
    head_dim: int = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 131072
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1000000.0
    rope_local_base_freq: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()  # of layers without a window
    attention_bias: bool = False
    query_pre_attn_scalar: int = 256
    sliding_window: int = 4096
    sliding_window_pattern: int = 6  # every so many layers, one has no window
    layer_types: tuple[str, ...] | None = None  # None: as the pattern says
    final_logit_softcapping: float | None = None
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 2
    eos_token_id: int | tuple[int, ...] | None = 1

    @property
    def hidden_act(self) -> str:
        """The activation, under the name that other families have for it."""
        return self.hidden_activation

    @property
    def architecture(self) -> Architecture:
        """The model as data."""
        turned = lambda theta, scaling: rotary(
            theta, self.head_dim, scaling, self.max_position_embeddings
        )
        types = self.layer_types or [
            SLIDING if (layer + 1) % self.sliding_window_pattern else FULL
            for layer in range(self.num_hidden_layers)
        ]
        scale = self.query_pre_attn_scalar**-0.5
        kinds = {
            SLIDING: AttentionKind(scale=scale, rotary=LOCAL),
            FULL: AttentionKind(scale=scale, rotary=GLOBAL),
        }
        return llama.llama_architecture(
            self,
            layers=windowed([kinds[type] for type in types], types, self.sliding_window),
            norm=NormKind(self.rms_norm_eps, offset=1.0),
            order=BOTH,
            rotaries=(
                turned(self.rope_local_base_freq, RopeScaling()),
                turned(self.rope_theta, self.rope_scaling),
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
