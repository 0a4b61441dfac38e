"""The parts that networks over the target's hidden states share.

Axis legend: see `emsjax.decode.pack`; w = draft vocabulary.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

import pallas_kernels
from emsjax.decode.cache import KVCache
from emsjax.models.architecture import Architecture
from emsjax.models.layers import Norm, add_shares
from emsjax.models.linears import (
    NarrowLinear,
    copy_to_quantize,
    linear,
    narrow_linear,
    new_linear,
    quantize_layer,
)
from emsjax.models.llama import LlamaConfig
from emsjax.models.qwen import Qwen3Config
from emsjax.models.schema import Config, Relation, count, field, flag, many
from pallas_kernels.common.indexing import take
from pallas_kernels.matmul import narrow
from pallas_kernels.matmul.narrow import NarrowWeight

LAYER_CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}  # by model_type


def _layer_config(value: Any, config: Any) -> LlamaConfig | Qwen3Config:
    if not isinstance(value, tuple(LAYER_CONFIGS.values())):
        raise ValueError(f" must be a LlamaConfig or Qwen3Config, not {type(value).__name__}")
    return value


@dataclasses.dataclass(frozen=True)
class FeatureConfig(Config):
    """What the configs of these networks share.

    Attributes:
        layers: sizes of the draft layers, as the config of a Llama or Qwen 3 model with as many
            layers, whose vocabulary is the target's.
        taps: the target's layers whose hidden states are read: see `emsjax.decode.base.Model`.
        draft_vocab_size: tokens that can be drafted; None: the whole vocabulary.
        target_width: numbers per token of the target's hidden states; None: the draft layers'.
        owns_embeddings, owns_head: whether the network has a table of embeddings and a head of its
            own. Otherwise it uses the target's.
    """

    relations: ClassVar = (
        Relation(
            lambda config: all(kind.window is None for kind in config.layers.architecture.layers),
            "layers must have full attention: windows are not supported in draft layers",
        ),
        Relation(
            lambda config: config.draft_vocab_size <= config.layers.vocab_size,
            "draft_vocab_size ({draft_vocab_size}) must be at most the target's vocabulary size",
        ),
        Relation(lambda config: len(config.taps) > 0, "taps must name at least one layer"),
        Relation(
            lambda config: config.owns_head or config.draft_vocab_size == config.layers.vocab_size,
            "owns_head must be true if only some tokens can be drafted ({draft_vocab_size}): the "
            "target's head has all of them",
        ),
    )

    layers: Any = field(None, _layer_config)  # noqa: RUF009 - as the other kinds of fields
    taps: tuple[int, ...] = many((), count(0, least=0))
    draft_vocab_size: int | None = count(None, null=lambda config: config.layers.vocab_size)
    target_width: int | None = count(None, null=lambda config: config.layers.hidden_size)
    owns_embeddings: bool = flag(True)
    owns_head: bool = flag(True)

    @property
    def architecture(self) -> Architecture:
        """The draft layers as data."""
        return self.layers.architecture


class FeatureNetwork(nnx.Module):
    """Embeddings, the product of hidden states, a final norm and a head; layers are a subclass's.

    Args:
        config: see `FeatureConfig`.
        rngs: random generators for the initial weights.
        dtype: type of weights, products and cache.
    """

    quantization: str | None = None  # the format of weights, if they are narrow
    layers: Sequence[nnx.Module]

    def __init__(self, config: FeatureConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        dtype = jnp.dtype(dtype)
        a = self.architecture = config.architecture
        self.config, self.dtype = config, dtype
        init = nnx.initializers.normal(a.init_std)
        table = functools.partial(
            nnx.Embed, embedding_init=init, dtype=dtype, param_dtype=dtype, rngs=rngs
        )
        inputs = len(config.taps) * config.target_width
        self.fc = new_linear(inputs, a.width, bias=False, init=init, dtype=dtype, rngs=rngs)
        self.final_norm = Norm(a.width, a.norm, dtype=dtype)
        self.embed_tokens = table(a.vocab_size, a.width) if config.owns_embeddings else None
        self.lm_head = table(config.draft_vocab_size, a.width) if config.owns_head else None

    def project(self, taps: tuple[Float[Array, "r e"], ...]) -> Float[Array, "r f"]:
        """The product of the hidden states of each row, side by side."""
        return linear(self.fc, jnp.concatenate([tap.astype(self.dtype) for tap in taps], axis=-1))

    def astype(self, dtype) -> "FeatureNetwork":
        """Returns a network with the same weights, converted to this dtype.

        Raises:
            ValueError: the weights are narrow.
        """
        if self.quantization is not None:
            raise ValueError(f"weights in {self.quantization} have no other dtype")
        make = lambda: type(self)(self.config, rngs=nnx.Rngs(0), dtype=dtype)
        graph, _ = nnx.split(nnx.eval_shape(make))
        return nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), nnx.state(self)))

    def quantize(self, format: str) -> "FeatureNetwork":
        """Returns a network whose layers, product of hidden states and own head have weights in a
        narrow format; others are shared.

        Args:
            format: "int8", "fp8", "int4" or "int8-weights"; see `emsjax.from_pretrained`.

        Raises:
            ValueError: the format is unknown, or the weights are narrow already.
        """
        network = copy_to_quantize(self, format)
        narrow_linear(network, "fc", narrow.quantize(network.fc.kernel[...], format=format))
        for layer in network.layers:
            quantize_layer(layer, format)
        if network.lm_head is not None:
            matrix = network.lm_head.embedding[...].T
            network.lm_head = NarrowLinear(narrow.quantize(matrix, format=format), None)
        return network

    def init_cache(self, batch: int, max_len: int) -> KVCache:
        """An empty cache of the draft layers."""
        a = self.architecture
        sizes = {"num_layers": len(a.layers), "kv_heads": a.kv_heads, "head_dim": a.head_dim}
        return KVCache.init(batch, max_len, **sizes, dtype=self.dtype)


def embed(table: Float[Array, "v e"], token_ids: Int32[Array, "r"]) -> Float[Array, "r e"]:
    """Rows of a table of embeddings; ids outside of it, which no row that counts has, are cut."""
    return take(table, jnp.clip(token_ids, 0, table.shape[0] - 1))


def head_logits(
    head: Float[Array, "w e"] | NarrowWeight, hidden: Float[Array, "r e"]
) -> Float[Array, "r w"]:
    """float32 logits of normalised hidden states, of a head's table or its narrow matrix."""
    is_table = not isinstance(head, NarrowWeight)
    return whole_logits(pallas_kernels.linear_sums(hidden, head, transposed=is_table))


def whole_logits(sums: Float[Array, "..."]) -> Float[Array, "r w"]:
    """float32 logits of what `pallas_kernels.linear_sums` returns, whole or in shares."""
    sums = sums.astype(jnp.float32)
    return add_shares(sums) if sums.ndim == 3 else sums
