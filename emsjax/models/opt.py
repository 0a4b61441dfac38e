"""OPT (arXiv 2205.01068) in Flax NNX, over packed rows with a read-only KV cache."""

import functools
from collections.abc import Callable
from os import PathLike

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

import pallas_kernels
from emsjax.decode.base import ModelOutput
from emsjax.decode.cache import Cache, KVCache
from emsjax.decode.pack import PackedRows
from emsjax.models import checkpoint
from emsjax.models.config import ACTIVATIONS, POSITION_OFFSET, OPTConfig
from emsjax.models.layers import (
    Addend,
    add_norm,
    check_taps,
    linear,
    linear_addend,
    new_layer_norm,
    new_linear,
    run_layer,
    scale_and_bias,
)
from pallas_kernels.add_norm.xla import Norm, add, normalise
from pallas_kernels.common.implementations import matmul_precision, with_gradient_of
from pallas_kernels.common.indexing import take

LAYER_NORM_EPSILON = 1e-5
PLAIN_NORM = Norm(LAYER_NORM_EPSILON, jnp.float32, centred=True)  # without an addition


class OPTLayer(nnx.Module):
    """One decoder layer: attention and feed-forward, with a layer norm before or after each."""

    def __init__(self, config: OPTConfig, *, dtype, rngs: nnx.Rngs):
        size = config.hidden_size
        product = functools.partial(
            new_linear,
            bias=config.enable_bias,
            init=nnx.initializers.normal(config.init_std),
            dtype=dtype,
            rngs=rngs,
        )
        self.config = config
        self.qkv_proj = product(size, 3 * size)  # one product instead of three
        self.out_proj = product(size, size)
        self.fc1 = product(size, config.ffn_dim)
        self.fc2 = product(config.ffn_dim, size)
        self.self_attn_layer_norm = layer_norm(config, dtype, rngs)
        self.final_layer_norm = layer_norm(config, dtype, rngs)

    def __call__(
        self, x: Float[Array, "r e"], y: Addend | None, rows: PackedRows, attend: Callable
    ):
        """Runs the layer on the residual stream x + y: see `emsjax.models.layers.run_layer`.

        The stream is float32, since it is added to often and rounded each time. If the layer norm
        comes after each part, nothing is left to add: y is None, and x has the weights' dtype.
        `attend(qkv)` takes the rows' queries, keys and values as one array.
        """
        if self.config.do_layer_norm_before:
            x, h = add_norm(self.self_attn_layer_norm, x, y)
            y, qkv = self.attention(h, attend)
            x, h = add_norm(self.final_layer_norm, x, y)
            return x, self.feed_forward(h), qkv
        y, qkv = self.attention(x, attend)
        _, x = add_norm(self.self_attn_layer_norm, x, y)
        _, x = add_norm(self.final_layer_norm, x, self.feed_forward(x))
        return x, None, qkv

    def attention(self, h: Float[Array, "r e"], attend: Callable):
        qkv = linear(self.qkv_proj, h)
        qkv = qkv.reshape(-1, 3 * self.config.num_attention_heads, self.config.head_dim)
        return linear_addend(self.out_proj, attend(qkv).reshape(h.shape)), qkv

    def feed_forward(self, h: Float[Array, "r e"]) -> Addend:
        activation = self.config.activation_function
        relu = activation == "relu"
        h = linear(self.fc1, h, relu=relu)
        return linear_addend(self.fc2, h if relu else ACTIVATIONS[activation](h))


def layer_norm(config: OPTConfig, dtype, rngs: nnx.Rngs) -> nnx.LayerNorm:
    affine = config.layer_norm_elementwise_affine
    options = {"epsilon": LAYER_NORM_EPSILON, "dtype": dtype, "rngs": rngs}
    return new_layer_norm(config.hidden_size, affine=affine, **options)


class OPT(nnx.Module):
    """A decoder-only OPT language model.

    The same forward serves prefill, catch-up of a draft model and verification: it
    reads the cache, never writes it, and returns the fresh keys and values to commit.

    Args:
        config: the architecture.
        rngs: random generators for the initial weights.
        dtype: type of weights, matrix products and cache; the residual stream is float32
            if layers normalise first. In float32, products are computed in full float32.
    """

    def __init__(self, config: OPTConfig, *, rngs: nnx.Rngs, dtype=jnp.bfloat16):
        dtype = jnp.dtype(dtype)
        init = nnx.initializers.normal(config.init_std)
        options = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        projection = {"bias": False, "init": init, "dtype": dtype, "rngs": rngs}
        width, size = config.word_embed_proj_dim, config.hidden_size
        positions = config.max_position_embeddings + POSITION_OFFSET
        self.config = config
        self.dtype = dtype
        self.embed_tokens = nnx.Embed(config.vocab_size, width, embedding_init=init, **options)
        self.embed_positions = nnx.Embed(positions, size, embedding_init=init, **options)
        projected, normalised = config.has_projections, config.has_final_layer_norm
        self.project_in = new_linear(width, size, **projection) if projected else None
        self.project_out = new_linear(size, width, **projection) if projected else None
        self.final_layer_norm = layer_norm(config, dtype, rngs) if normalised else None
        self.layers = nnx.List(
            OPTLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_hidden_layers)
        )

    def __call__(
        self,
        token_ids: Int32[Array, "r"],
        rows: PackedRows,
        cache: Cache,
        *,
        attention: Callable = pallas_kernels.ragged_attention,
        max_rows_per_sample: int | None = None,
        taps: tuple[int, ...] = (),
    ) -> ModelOutput:
        """Computes final hidden states of the packed rows, and their q, k and v in every layer.

        The hidden states are float32 if layers normalise before each part.

        Args:
            token_ids: the rows' tokens; padding rows may hold any token.
            rows: the rows' samples and positions. Rows that are not verified may have positions
                beyond the model's limit.
            cache: committed K/V, read only; rows of sample s start at cache.lengths[s].
            attention: a callable with the signature of `pallas_kernels.ragged_attention`.
            max_rows_per_sample: static bound of rows per sample; None: all rows.
            taps: layers whose hidden states are returned, 0 (the embeddings) to the number of
                layers: see `emsjax.decode.base.Model`.
        """
        # `nnx.Embed` is not called, as it fills in values for ids and positions out of range.
        token_ids = jnp.clip(token_ids, 0, self.config.vocab_size - 1)
        check_taps(taps, len(self.layers))
        x = take(self.embed_tokens.embedding[...], token_ids)
        x = x if self.project_in is None else self.project_in(x)
        last = self.config.max_position_embeddings - 1
        positions = jnp.minimum(rows.positions, last) + POSITION_OFFSET
        y = Addend(take(self.embed_positions.embedding[...], positions), None)
        if self.config.do_layer_norm_before:
            x = x.astype(jnp.float32)
        else:
            x, y = x + y.sums, None

        stream = lambda x, y: x if y is None else add(x, *y)
        fresh, tapped = [], {}
        for index, (layer, cached) in enumerate(zip(self.layers, cache.layers, strict=True)):
            if index in taps:
                tapped[index] = stream(x, y)
            x, y, qkv = run_layer(
                layer,
                x,
                y,
                cached,
                rows,
                cache.visible,
                attention=attention,
                max_rows_per_sample=max_rows_per_sample,
            )
            fresh.append(qkv)
        hidden = tapped[len(self.layers)] = stream(x, y)
        return ModelOutput(hidden, tuple(fresh), tuple(tapped[index] for index in taps))

    def logits(self, hidden: Float[Array, "r e"]) -> Float[Array, "r v"]:
        """Computes float32 logits; their gradient is rounded to the model's dtype."""
        x, norm = hidden, self.final_layer_norm
        if norm is not None:
            x = normalise(x, *scale_and_bias(norm), PLAIN_NORM)
        x = x.astype(self.dtype)
        x = x if self.project_out is None else self.project_out(x)
        precision = matmul_precision(self.dtype)
        product = functools.partial(jnp.einsum, "rw,vw->rv", precision=precision)
        narrow = lambda x, table: product(x, table).astype(jnp.float32)
        wide = functools.partial(product, preferred_element_type=jnp.float32)
        # Otherwise the gradient's matrix products would have float32 factors.
        return with_gradient_of(narrow, wide)(x, self.embed_tokens.embedding[...])

    def init_cache(self, batch: int, max_len: int) -> KVCache:
        """Returns an empty cache with room for `max_len` tokens of each of `batch` samples."""
        return KVCache.init(
            batch,
            max_len,
            num_layers=self.config.num_hidden_layers,
            kv_heads=self.config.num_attention_heads,
            head_dim=self.config.head_dim,
            dtype=self.dtype,
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of activations of one packed row within a layer."""
        # The stream before and after an addition, and the addend, all in float32.
        stream = 3 * self.config.hidden_size * 4
        inner = (3 * self.config.hidden_size + self.config.ffn_dim) * self.dtype.itemsize
        return stream + inner

    def astype(self, dtype) -> "OPT":
        """Returns a model with the same weights, converted to this dtype."""
        make = lambda: OPT(self.config, rngs=nnx.Rngs(0), dtype=dtype)
        graph, _ = nnx.split(nnx.eval_shape(make))
        return nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), nnx.state(self)))

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo_id: str | PathLike,
        *,
        dtype=jnp.bfloat16,
        revision: str | None = None,
        allow_nonfinite: bool = False,
    ) -> "OPT":
        """Loads a Hugging Face checkpoint: see `emsjax.models.checkpoint.load`."""
        options = {"dtype": dtype, "revision": revision, "allow_nonfinite": allow_nonfinite}
        return checkpoint.load(cls, path_or_repo_id, **options)

    def save_pretrained(self, path: str | PathLike) -> None:
        """Writes a folder that transformers can load: see `emsjax.models.checkpoint.save`."""
        checkpoint.save(self, path)
