"""The architecture of an OPT model."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

POSITION_OFFSET = 2  # the first two entries of the position table are never used
ACTIVATIONS = {"relu": jax.nn.relu, "gelu": lambda x: jax.nn.gelu(x, approximate=False)}


@dataclasses.dataclass(frozen=True)
class OPTConfig:
    """Architecture of an OPT model, with the field names and defaults of transformers.

    Raises:
        ValueError: a size is below 1, the heads do not divide hidden_size, the activation is
            unknown, or the head is not tied.
    """

    vocab_size: int = 50272
    hidden_size: int = 768
    num_hidden_layers: int = 12
    ffn_dim: int = 3072
    max_position_embeddings: int = 2048
    num_attention_heads: int = 12
    word_embed_proj_dim: int | None = None  # None: hidden_size
    do_layer_norm_before: bool = True
    _remove_final_layer_norm: bool = False
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    activation_function: str = "relu"
    init_std: float = 0.02
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 1
    bos_token_id: int | None = 2
    eos_token_id: int | tuple[int, ...] | list[int] | None = 2

    def __post_init__(self):
        if self.word_embed_proj_dim is None:
            object.__setattr__(self, "word_embed_proj_dim", self.hidden_size)
        if isinstance(self.eos_token_id, list):
            object.__setattr__(self, "eos_token_id", tuple(self.eos_token_id))
        for field in dataclasses.fields(self):
            if field.type in (int, int | None) and not field.name.endswith("_token_id"):
                size = getattr(self, field.name)
                if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                    raise ValueError(f"{field.name} must be an integer of at least 1, not {size!r}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of "
                f"num_attention_heads ({self.num_attention_heads})"
            )
        if self.activation_function not in ACTIVATIONS:
            raise ValueError(
                f"activation_function must be one of {sorted(ACTIVATIONS)}, "
                f"not {self.activation_function!r}"
            )
        if not self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings must be true: OPT's head is its embedding table")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "OPTConfig":
        """The config in the contents of a transformers config.json, without training-only fields.

        Raises:
            ValueError: `model_type` is not "opt".
        """
        if values.get("model_type") != "opt":
            raise ValueError(
                f"unknown model type {values.get('model_type')!r}: emsjax reads models whose "
                'config.json says "model_type": "opt"'
            )
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def has_projections(self) -> bool:
        """Whether embeddings are narrower or wider than the layers (350m)."""
        return self.word_embed_proj_dim != self.hidden_size

    @property
    def has_final_layer_norm(self) -> bool:
        return self.do_layer_norm_before and not self._remove_final_layer_norm

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        ids = self.eos_token_id
        return () if ids is None else ids if isinstance(ids, tuple) else (ids,)
