"""Qwen 2 and 2.5 (arXiv 2407.10671, 2412.15115) and Qwen 3 (arXiv 2505.09388)."""

import dataclasses

from emsjax.models import llama
from emsjax.models.architecture import Architecture
from emsjax.models.config import head_dim, kv_heads, types_of_layers, windowed
from emsjax.models.schema import TokenIds, count, flag, token_id, token_ids


@dataclasses.dataclass(frozen=True)
class Qwen2Config(llama.LlamaFields):
    """Architecture of a Qwen 2 model, with the field names and defaults of transformers."""

    vocab_size: int = count(151936)
    intermediate_size: int = count(22016)
    num_key_value_heads: int | None = kv_heads(32)
    max_position_embeddings: int = count(32768)
    bos_token_id: int | None = token_id(None)
    eos_token_id: TokenIds = token_ids(None)
    use_sliding_window: bool = flag(False)
    sliding_window: int | None = count(4096, null=None)
    max_window_layers: int = count(28, least=0)  # the first layer with a window
    layer_types: tuple[str, ...] | None = types_of_layers(
        lambda config, layer: config.window is None or layer < config.max_window_layers
    )

    @property
    def window(self) -> int | None:
        """Tokens that a token sees in layers with a window; None: there are none."""
        return self.sliding_window if self.use_sliding_window else None

    @property
    def architecture(self) -> Architecture:
        """The model as data."""
        return self.with_windows(llama.llama_architecture(self, qkv_bias=True))

    def with_windows(self, plain: Architecture) -> Architecture:
        """`plain` with windows where this config has them."""
        layers = windowed(plain.layers, self.layer_types, self.window)
        return dataclasses.replace(plain, layers=layers)


@dataclasses.dataclass(frozen=True)
class Qwen3Config(Qwen2Config):
    """Architecture of a Qwen 3 model, with the field names and defaults of transformers."""

    head_dim: int | None = head_dim(128)
    attention_bias: bool = flag(False)

    @property
    def architecture(self) -> Architecture:
        """The model as data."""
        biases = dict.fromkeys(("qkv_bias", "out_bias"), self.attention_bias)
        return self.with_windows(llama.llama_architecture(self, head_norm=True, **biases))


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
