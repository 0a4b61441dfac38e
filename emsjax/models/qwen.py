"""Qwen 2 and 2.5 (arXiv 2407.10671, 2412.15115) and Qwen 3 (arXiv 2505.09388)."""

import dataclasses

from emsjax.models import llama
from emsjax.models.architecture import Architecture
from emsjax.models.config import TokenIds
from emsjax.models.layer_types import FULL, SLIDING, windowed
from emsjax.models.rotary import RopeScaling


@dataclasses.dataclass(frozen=True)
class _QwenConfig(TokenIds):
    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32  # None: num_attention_heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    hidden_act: str = "silu"
    max_position_embeddings: int = 32768
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28  # the first layer with a window
    layer_types: tuple[str, ...] | None = None  # None: as the fields above say
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    def windowed_layers(self, plain: Architecture) -> Architecture:
        """`plain` with windows where this config has them."""
        window = self.sliding_window if self.use_sliding_window else None
        first = self.num_hidden_layers if window is None else self.max_window_layers
        types = self.layer_types or [
            SLIDING if layer >= first else FULL for layer in range(self.num_hidden_layers)
        ]
        return dataclasses.replace(plain, layers=windowed(plain.layers, types, window))


@dataclasses.dataclass(frozen=True)
class Qwen2Config(_QwenConfig):
    """Architecture of a Qwen 2 model, with the field names and defaults of transformers."""

    @property
    def architecture(self) -> Architecture:
        """The model as data."""
        return self.windowed_layers(llama.llama_architecture(self, qkv_bias=True))


@dataclasses.dataclass(frozen=True)
class Qwen3Config(_QwenConfig):
    """Architecture of a Qwen 3 model, with the field names and defaults of transformers."""

    head_dim: int | None = 128
    attention_bias: bool = False

    @property
    def architecture(self) -> Architecture:
        """The model as data."""
        bias = self.attention_bias
        switches = {"qkv_bias": bias, "out_bias": bias, "head_norm": True}
        return self.windowed_layers(llama.llama_architecture(self, **switches))


QWEN2 = dataclasses.replace(
    llama.FAMILY, model_type="qwen2", class_name="Qwen2ForCausalLM", config=Qwen2Config
)
QWEN3 = dataclasses.replace(
    llama.FAMILY,
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    config=Qwen3Config,
    modules=llama.MODULES
    | {
        "layers.{}.query_norm": "model.layers.{}.self_attn.q_norm",
        "layers.{}.key_norm": "model.layers.{}.self_attn.k_norm",
    },
)
