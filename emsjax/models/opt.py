"""OPT (arXiv 2205.01068) and models of its architecture, such as Galactica."""

import dataclasses
from typing import ClassVar

from emsjax.models import schema
from emsjax.models.architecture import AFTER, BEFORE, Architecture, AttentionKind, NormKind
from emsjax.models.config import OWN_HEADS, DecoderConfig, activation, layers
from emsjax.models.family import Family

POSITION_OFFSET = 2  # the first two entries of the position table are never used


@dataclasses.dataclass(frozen=True)
class OPTConfig(DecoderConfig):
    """Architecture of an OPT model, with the field names and defaults of transformers.

    Raises:
        ValueError: a field has another type or is out of its range, token ids are outside the
            vocabulary, the heads do not divide hidden_size, the activation is unknown, or the
            head is not tied.
    """

    relations: ClassVar = (
        schema.multiple("hidden_size", "num_attention_heads"),
        schema.only("tie_word_embeddings", True, "OPT's head is its embedding table"),
    )

    vocab_size: int = schema.count(50272)
    hidden_size: int = schema.count(768)
    num_hidden_layers: int = layers(12)
    ffn_dim: int = schema.count(3072)
    max_position_embeddings: int = schema.count(2048)
    num_attention_heads: int = schema.count(12)
    word_embed_proj_dim: int | None = schema.count(None, null=lambda config: config.hidden_size)
    do_layer_norm_before: bool = schema.flag(True)
    _remove_final_layer_norm: bool = schema.flag(False)
    enable_bias: bool = schema.flag(True)
    layer_norm_elementwise_affine: bool = schema.flag(True)
    activation_function: str = activation("relu")
    init_std: float = schema.number(0.02, least=0.0)
    tie_word_embeddings: bool = schema.flag(True)
    pad_token_id: int | None = schema.token_id(1)
    bos_token_id: int | None = schema.token_id(2)
    eos_token_id: schema.TokenIds = schema.token_ids(2)

    sizes: ClassVar = OWN_HEADS | {"ffn_size": "ffn_dim"}

    def with_embeddings(self, width: int) -> "OPTConfig":
        """The config with embeddings of this width."""
        return self.changed(word_embed_proj_dim=width)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def architecture(self) -> Architecture:
        """The model as data."""
        attention = AttentionKind(scale=self.head_dim**-0.5)
        return Architecture(
            vocab_size=self.vocab_size,
            width=self.hidden_size,
            ffn_size=self.ffn_dim,
            heads=self.num_attention_heads,
            kv_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            max_positions=self.max_position_embeddings,
            layers=(attention,) * self.num_hidden_layers,
            norm=NormKind(1e-5, centred=True, affine=self.layer_norm_elementwise_affine),
            activation=self.activation_function,
            order=BEFORE if self.do_layer_norm_before else AFTER,
            position_offset=POSITION_OFFSET,
            qkv_bias=self.enable_bias,
            out_bias=self.enable_bias,
            ffn_bias=self.enable_bias,
            final_norm=self.do_layer_norm_before and not self._remove_final_layer_norm,
            embedding_width=self.word_embed_proj_dim,
            init_std=self.init_std,
        )


_LAYER = "model.decoder.layers.{}"
FAMILY = Family(
    model_type="opt",
    class_name="OPTForCausalLM",
    config=OPTConfig,
    modules={
        "embed_tokens": "model.decoder.embed_tokens",
        "embed_positions": "model.decoder.embed_positions",
        "project_in": "model.decoder.project_in",
        "project_out": "model.decoder.project_out",
        "final_norm": "model.decoder.final_layer_norm",
        "layers.{}.qkv_proj": tuple(f"{_LAYER}.self_attn.{part}_proj" for part in "qkv"),
        "layers.{}.out_proj": f"{_LAYER}.self_attn.out_proj",
        "layers.{}.up_proj": f"{_LAYER}.fc1",
        "layers.{}.down_proj": f"{_LAYER}.fc2",
        "layers.{}.attention_norm": f"{_LAYER}.self_attn_layer_norm",
        "layers.{}.ffn_norm": f"{_LAYER}.final_layer_norm",
    },
    can_untie=False,
    has_flax=True,
)
