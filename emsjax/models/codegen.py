"""CodeGen (arXiv 2203.13474): one norm for parallel parts, neighbouring numbers rotated."""

import dataclasses
from typing import ClassVar

import numpy as np

from emsjax.models import schema
from emsjax.models.architecture import SHARED, Architecture, AttentionKind, NormKind
from emsjax.models.config import even, layers
from emsjax.models.family import Family
from emsjax.models.gpt2 import GPT2Fields
from emsjax.models.rotary import rotary

BLOCKS = 4  # devices that the models were trained on, each with a part of the heads


@dataclasses.dataclass(frozen=True)
class CodeGenConfig(GPT2Fields):
    """Architecture of a CodeGen model, with the field names and defaults of transformers."""

    relations: ClassVar = (
        *GPT2Fields.relations,
        schema.Relation(
            lambda config: config.n_head % BLOCKS == 0,
            f"n_head ({{n_head}}) must be a multiple of {BLOCKS}, the stored parts",
        ),
        even("rotary_dim"),
        schema.Relation(
            lambda config: config.rotary_dim <= config.head_dim,
            "rotary_dim ({rotary_dim}) must be at most the size of a head, n_embd / n_head",
        ),
    )

    vocab_size: int = schema.count(50400)
    n_positions: int = schema.count(2048)
    n_embd: int = schema.count(4096)
    n_layer: int = layers(28)
    n_head: int = schema.count(16)
    tie_word_embeddings: bool = schema.flag(False)
    rotary_dim: int = schema.count(64)  # rotated numbers of a head

    @property
    def architecture(self) -> Architecture:
        """The model as data."""
        attention = AttentionKind(self.head_dim**-0.5, rotary=0)
        return Architecture(
            vocab_size=self.vocab_size,
            width=self.n_embd,
            ffn_size=self.n_inner,
            heads=self.n_head,
            kv_heads=self.n_head,
            head_dim=self.head_dim,
            max_positions=self.n_positions,
            layers=(attention,) * self.n_layer,
            norm=NormKind(self.layer_norm_epsilon, centred=True),
            activation=self.activation_function,
            order=SHARED,
            rotaries=(rotary(10000.0, self.rotary_dim, None, self.n_positions),),
            ffn_bias=True,
            tied_head=self.tie_word_embeddings,
            head_bias=True,
            init_std=self.initializer_range,
        )


def columns(config: CodeGenConfig) -> np.ndarray:
    """Where each column of q | k | v is stored.

    On disk every block holds its heads' queries, values and keys. Numbers 2i and 2i + 1 of queries
    and keys are rotated together; here they become numbers i and rotary_dim / 2 + i, which
    changes no score.
    """
    turned, size = config.rotary_dim, config.head_dim
    stored = np.arange(3 * config.n_embd).reshape(BLOCKS, 3, -1, size)
    queries, values, keys = (stored[:, part].reshape(-1, size) for part in range(3))
    order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, size)]
    return np.concatenate([queries[:, order], keys[:, order], values]).reshape(-1)


_LAYER = "transformer.h.{}"
FAMILY = Family(
    model_type="codegen",
    class_name="CodeGenForCausalLM",
    config=CodeGenConfig,
    modules={
        "embed_tokens": "transformer.wte",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
        "lm_head_bias": "lm_head.bias",
        "layers.{}.qkv_proj": f"{_LAYER}.attn.qkv_proj",
        "layers.{}.out_proj": f"{_LAYER}.attn.out_proj",
        "layers.{}.up_proj": f"{_LAYER}.mlp.fc_in",
        "layers.{}.down_proj": f"{_LAYER}.mlp.fc_out",
        "layers.{}.attention_norm": f"{_LAYER}.ln_1",
    },
    prefix="transformer.",
    ignored=r".*\.attn\.(causal_mask|bias|masked_bias)",
    columns=columns,
)
