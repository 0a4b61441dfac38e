"""Mistral (arXiv 2310.06825): Llama's decoder with sliding windows."""

import dataclasses

from emsjax.models import llama
from emsjax.models.architecture import Architecture
from emsjax.models.config import kv_heads
from emsjax.models.schema import count


@dataclasses.dataclass(frozen=True)
class MistralConfig(llama.LlamaFields):
    """Architecture of a Mistral model, with the field names and defaults of transformers."""

    intermediate_size: int = count(14336)
    num_key_value_heads: int | None = kv_heads(8)
    max_position_embeddings: int = count(131072)
    sliding_window: int | None = count(4096, null=None)  # None: every token is seen

    @property
    def architecture(self) -> Architecture:
        """The model as data."""
        plain = llama.llama_architecture(self)
        window = lambda kind: dataclasses.replace(kind, window=self.sliding_window)
        return dataclasses.replace(plain, layers=tuple(map(window, plain.layers)))


FAMILY = dataclasses.replace(
    llama.FAMILY, model_type="mistral", class_name="MistralForCausalLM", config=MistralConfig
)
