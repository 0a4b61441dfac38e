"""GPT-2: learned positions, kernels stored as [inputs, outputs]."""

import dataclasses
from typing import ClassVar

from emsjax.models import schema
from emsjax.models.architecture import Architecture, AttentionKind, NormKind
from emsjax.models.config import DecoderConfig, activation, epsilon, layers
from emsjax.models.family import Family

GPT2_SIZES = {"layers": "n_layer", "width": "n_embd", "ffn_size": "n_inner", "heads": "n_head"}


@dataclasses.dataclass(frozen=True)
class GPT2Fields(DecoderConfig):
    """The fields that configs of GPT-2 and of its relatives share."""

    sizes: ClassVar = GPT2_SIZES
    relations: ClassVar = (schema.multiple("n_embd", "n_head"),)

    vocab_size: int = schema.count(50257)
    n_positions: int = schema.count(1024)
    n_embd: int = schema.count(768)
    n_layer: int = layers(12)
    n_head: int = schema.count(12)
    n_inner: int | None = schema.count(None, null=lambda config: 4 * config.n_embd)
    activation_function: str = activation("gelu_new")
    layer_norm_epsilon: float = epsilon(1e-5)
    initializer_range: float = schema.number(0.02, least=0.0)
    tie_word_embeddings: bool = schema.flag(True)
    pad_token_id: int | None = schema.token_id(None)
    bos_token_id: int | None = schema.token_id(50256)
    eos_token_id: schema.TokenIds = schema.token_ids(50256)

    @property
    def max_position_embeddings(self) -> int:
        return self.n_positions

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


@dataclasses.dataclass(frozen=True)
class GPT2Config(GPT2Fields):
    """Architecture of a GPT-2 model, with the field names and defaults of transformers."""

    scale_attn_weights: bool = schema.flag(True)
    scale_attn_by_inverse_layer_idx: bool = schema.flag(False)

    @property
    def architecture(self) -> Architecture:
        """The model as data."""
        scale = self.head_dim**-0.5 if self.scale_attn_weights else 1.0
        depth = lambda layer: layer + 1 if self.scale_attn_by_inverse_layer_idx else 1
        return Architecture(
            vocab_size=self.vocab_size,
            width=self.n_embd,
            ffn_size=self.n_inner,
            heads=self.n_head,
            kv_heads=self.n_head,
            head_dim=self.head_dim,
            max_positions=self.n_positions,
            layers=tuple(AttentionKind(scale / depth(i)) for i in range(self.n_layer)),
            norm=NormKind(self.layer_norm_epsilon, centred=True),
            activation=self.activation_function,
            position_offset=0,
            qkv_bias=True,
            out_bias=True,
            ffn_bias=True,
            tied_head=self.tie_word_embeddings,
            init_std=self.initializer_range,
        )


_LAYER = "transformer.h.{}"
FAMILY = Family(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    config=GPT2Config,
    modules={
        "embed_tokens": "transformer.wte",
        "embed_positions": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
        "layers.{}.qkv_proj": f"{_LAYER}.attn.c_attn",
        "layers.{}.out_proj": f"{_LAYER}.attn.c_proj",
        "layers.{}.up_proj": f"{_LAYER}.mlp.c_fc",
        "layers.{}.down_proj": f"{_LAYER}.mlp.c_proj",
        "layers.{}.attention_norm": f"{_LAYER}.ln_1",
        "layers.{}.ffn_norm": f"{_LAYER}.ln_2",
    },
    prefix="transformer.",
    ignored=r".*\.attn\.(bias|masked_bias)",
    transposed=False,
)
