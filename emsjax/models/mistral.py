"""Mistral (arXiv 2310.06825): Llama's decoder with sliding windows."""

import dataclasses

from emsjax.models import llama
from emsjax.models.architecture import Architecture
from emsjax.models.config import TokenIds
from emsjax.models.rotary import RopeScaling


@dataclasses.dataclass(frozen=True)
class MistralConfig(TokenIds):
    """Architecture of a Mistral model, with the field names and defaults of transformers."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 8  # None: num_attention_heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096 * 32
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    sliding_window: int | None = 4096  # None: every token is seen
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2

    @property
    def architecture(self) -> Architecture:
        """The model as data."""
        plain = llama.llama_architecture(self)
        window = lambda kind: dataclasses.replace(kind, window=self.sliding_window)
        return dataclasses.replace(plain, layers=tuple(map(window, plain.layers)))


FAMILY = dataclasses.replace(
    llama.FAMILY, model_type="mistral", class_name="MistralForCausalLM", config=MistralConfig
)
