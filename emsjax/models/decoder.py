"""A decoder-only language model in Flax NNX, over packed rows with a read-only KV cache."""

import dataclasses
import functools
from collections.abc import Callable
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

import pallas_kernels
from emsjax.decode.base import ModelOutput
from emsjax.decode.cache import HEADS, Cache, KVCache
from emsjax.decode.pack import PackedRows
from emsjax.models import saving
from emsjax.models.architecture import AFTER
from emsjax.models.layers import (
    Addend,
    DecoderLayer,
    Norm,
    residual_stream,
    run_layer,
)
from emsjax.models.linears import copy_to_quantize, new_linear, project, quantize_layer
from emsjax.models.rotary import angles
from emsjax.models.splitting import Placement, specs_of
from emsjax.tensor_parallel import AXIS, REPLICATED, TensorParallel, side_by_side, take_rows
from pallas_kernels.common.indexing import take

CACHE_SIZES = ("num_layers", "kv_heads", "head_dim")


class Decoder(nnx.Module):
    """A decoder-only language model of any supported family.

    The same forward serves prefill, catch-up of a draft model and verification: it
    reads the cache, never writes it, and returns the fresh keys and values to commit.

    Args:
        config: the config of a family, such as `emsjax.OPTConfig`; its `architecture` describes
            the model.
        rngs: random generators for the initial weights.
        dtype: type of weights, matrix products and cache; the residual stream is float32
            unless layers normalise after each part. In float32, products are computed in full
            float32.
        quantize: the format of the layers' weights, one layer after the other: see `quantize`.
        mesh: devices over which each layer is split once it is made: see `split`.
    """

    quantization: str | None = None  # the format of the layers' weights, if they are narrow
    kv_dtype: str | None = None  # the format of caches, if they are in 8 bits
    parallel: TensorParallel | None = None  # the devices, if the model is on a mesh

    def __init__(
        self,
        config: Any,
        *,
        rngs: nnx.Rngs,
        dtype=jnp.bfloat16,
        quantize: str | None = None,
        mesh: jax.sharding.Mesh | None = None,
    ):
        dtype = jnp.dtype(dtype)
        a = self.architecture = config.architecture
        parallel = None if mesh is None else TensorParallel.over(mesh)
        place = Placement(a, parallel)
        self.config, self.dtype = config, dtype
        init = nnx.initializers.normal(a.init_std)
        options = {"embedding_init": init, "dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        projection = functools.partial(new_linear, bias=False, init=init, dtype=dtype, rngs=rngs)
        width = a.embedding_width or a.width
        self.embed_tokens = nnx.Embed(a.vocab_size, width, **options)
        learned = a.position_offset is not None
        positions = a.max_positions + (a.position_offset or 0)
        self.embed_positions = nnx.Embed(positions, a.width, **options) if learned else None
        self.project_in = projection(width, a.width) if a.is_projected else None
        self.project_out = projection(a.width, width) if a.is_projected else None
        self.final_norm = Norm(a.width, a.norm, dtype=dtype) if a.final_norm else None
        # Layers of the same kind are compiled once, also in models of other depths.
        shared = dataclasses.replace(a, layers=(), rotaries=())
        self.quantization = quantize
        layers = []
        for kind in a.layers:
            layers.append(layer := DecoderLayer(shared, kind, dtype=dtype, rngs=rngs))
            if quantize is not None:
                quantize_layer(layer, quantize)
            if parallel is not None:
                place.put_all(layer)
        self.lm_head = None if a.tied_head else nnx.Embed(a.vocab_size, width, **options)
        self.lm_head_bias = nnx.Param(jnp.zeros(a.vocab_size, dtype)) if a.head_bias else None
        if parallel is not None:
            place.put_all(self)
        self.layers = nnx.List(layers)
        place.set_structure(self)

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

        The hidden states are float32 unless layers normalise after each part.

        Args:
            token_ids: the rows' tokens; padding rows may hold any token.
            rows: the rows' samples and positions. Rows that are not verified may have positions
                beyond the model's limit.
            cache: committed K/V, read only; rows of sample s start at cache.lengths[s].
            attention: a callable with the signature of `pallas_kernels.ragged_attention`.
            max_rows_per_sample: static bound of rows per sample; None: all rows.
            taps: layers whose hidden states are returned, 0 (the embeddings) to the number of
                layers: see `emsjax.decode.base.Model`.

        Raises:
            ValueError: a tap is outside of that range.
        """
        check_taps(taps, len(self.layers))
        run = functools.partial(
            type(self)._run, attention=attention, max_rows_per_sample=max_rows_per_sample, taps=taps
        )
        if self.parallel is None:
            return ModelOutput(*run(self, token_ids, rows, cache, cache.layers))
        heads = self.parallel.on_axis(HEADS)
        specs = (specs_of(self, self.parallel), REPLICATED, REPLICATED, REPLICATED, heads)
        of_rows = self.parallel.on_axis(1)
        run = self.parallel.map(run, specs, (REPLICATED, of_rows, REPLICATED))
        lengths = dataclasses.replace(cache, layers=())
        return ModelOutput(*run(self, token_ids, rows, lengths, cache.layers))

    def _run(self, token_ids, rows, cache, cached_layers, *, attention, max_rows_per_sample, taps):
        """The call on one device, with its part of the model and of the cache's layers."""
        x, y = self.embed(token_ids, rows.positions)
        turns = [angles(rotary, rows.positions) for rotary in self.architecture.rotaries]
        norm, axis_name = self.architecture.norm, AXIS if self.is_split else None
        fresh, tapped = [], {}
        for index, (layer, cached) in enumerate(zip(self.layers, cached_layers, strict=True)):
            if index in taps:
                tapped[index] = residual_stream(norm, x, y, axis_name)
            x, y, qkv = run_layer(
                layer,
                (x, y),
                None if layer.kind.rotary is None else turns[layer.kind.rotary],
                cached,
                rows,
                cache.visible,
                attention=attention,
                max_rows_per_sample=max_rows_per_sample,
            )
            fresh.append(qkv)
        hidden = tapped[len(self.layers)] = residual_stream(norm, x, y, axis_name)
        return hidden, tuple(fresh), tuple(tapped[index] for index in taps)

    def embed(
        self, token_ids: Int32[Array, "r"], positions: Int32[Array, "r"]
    ) -> tuple[Float[Array, "r e"], Addend | None]:
        """Returns the two terms of the residual stream that the first layer begins with.

        If the model is split there is no second one, as it would have to have parts.
        """
        a = self.architecture
        # `nnx.Embed` is not called, as it fills in values for ids and positions out of range.
        token_ids = jnp.clip(token_ids, 0, a.vocab_size - 1)
        table = self.embed_tokens.embedding[...]
        x, y = (take_rows if self.is_split else take)(table, token_ids), None
        x = x if self.project_in is None else project(self.project_in, x)
        if self.embed_positions is not None:
            places = jnp.minimum(positions, a.max_positions - 1) + a.position_offset
            y = Addend(take(self.embed_positions.embedding[...], places))
        if a.order == AFTER:
            return x if y is None else x + y.sums, None
        scale = jnp.asarray(a.embedding_scale, self.dtype)  # rounded, as in training
        x = x.astype(jnp.float32) * scale.astype(jnp.float32)
        return (residual_stream(a.norm, x, y), None) if self.is_split else (x, y)

    def logits(self, hidden: Float[Array, "r e"]) -> Float[Array, "r v"]:
        """Computes float32 logits; their gradient is rounded to the model's dtype."""
        if self.parallel is None:
            return self._logits(hidden)
        specs = (specs_of(self, self.parallel), REPLICATED)
        return self.parallel.map(type(self)._logits, specs, REPLICATED)(self, hidden)

    def _logits(self, hidden: Float[Array, "r e"]) -> Float[Array, "r v"]:
        a = self.architecture
        x = hidden if self.final_norm is None else self.final_norm(hidden)
        x = x.astype(self.dtype)
        x = x if self.project_out is None else project(self.project_out, x)
        table = (self.lm_head or self.embed_tokens).embedding[...]
        logits = pallas_kernels.linear_sums(x, table, transposed=True)
        if self.lm_head_bias is not None:
            logits += self.lm_head_bias[...].astype(jnp.float32)
        if self.is_split:
            logits = side_by_side(logits)[:, : a.vocab_size]
        return logits if a.logit_cap is None else a.logit_cap * jnp.tanh(logits / a.logit_cap)

    def init_cache(self, batch: int, max_len: int) -> KVCache:
        """Returns an empty cache with room for `max_len` tokens of each of `batch` samples."""
        a = self.architecture
        sizes = {"num_layers": len(a.layers), "kv_heads": a.kv_heads, "head_dim": a.head_dim}
        if self.is_split:
            sizes["kv_heads"] = self.parallel.size * a.part(self.parallel.size).kv_heads
        sizes |= {"dtype": self.kv_dtype or self.dtype}
        if self.parallel is None:
            return KVCache.init(batch, max_len, **sizes)
        return _cache_on(self.parallel, batch, max_len, **sizes)

    @property
    def is_split(self) -> bool:
        """Whether each of several devices has a part of the model."""
        return self.parallel is not None and self.parallel.is_split

    def split(self, mesh: jax.sharding.Mesh) -> "Decoder":
        """Returns the model with each layer split over the devices of a mesh.

        Heads, intermediate sizes and the vocabulary are divided; where there are fewer K/V heads
        than devices, several devices have the same.

        The original stays where it is, and one whole matrix at a time is cut there.

        Args:
            mesh: the devices, such as `jax.make_mesh((2,), ("tp",))`.

        Raises:
            ValueError: `mesh` is not a mesh with the one axis "tp", the heads or the intermediate
                size cannot be divided by its devices, or the model is split over another number of
                devices already, or replicated.

        Reference: Megatron-LM, arXiv 1909.08053.
        """
        return self._on_mesh(TensorParallel.over(mesh))

    def replicate(self, mesh: jax.sharding.Mesh) -> "Decoder":
        """Returns the model with all of it on every device of a mesh: a draft model, for example.

        Raises:
            ValueError: `mesh` is not a mesh with the one axis "tp", or the model is split.
        """
        return self._on_mesh(TensorParallel.over(mesh, is_split=False))

    def _on_mesh(self, parallel: TensorParallel) -> "Decoder":
        place, old = Placement(self.architecture, parallel), self.parallel
        if old is None:
            model = jax.tree.map(lambda x: x, self)
            place.put_all(model)
        elif (old.size, old.is_split) == (parallel.size, parallel.is_split):
            layout = jax.tree.map(parallel.sharding_of, specs_of(self, parallel))
            model = jax.device_put(self, layout)
        elif old.is_split:
            raise ValueError(f"the model is split over {old.size} devices already")
        else:
            raise ValueError(
                "each device of a mesh has the whole model: split the original instead"
            )
        place.set_structure(model)
        return model

    def with_kv_dtype(self, kv_dtype: str | None) -> "Decoder":
        """Returns the same model with caches in 8 bits, "int8" or "fp8"; None: in its dtype."""
        model = nnx.merge(*nnx.split(self))
        model.kv_dtype = kv_dtype
        return model

    @property
    def row_bytes(self) -> int:
        """Bytes of activations of one packed row within a layer."""
        a = self.architecture if not self.is_split else self.architecture.part(self.parallel.size)
        # The stream before and after an addition, and the addend, all in float32.
        stream = 3 * a.width * 4
        return stream + (sum(a.columns) + (1 + a.gated) * a.ffn_size) * self.dtype.itemsize

    def astype(self, dtype) -> "Decoder":
        """Returns a model with the same weights, converted to this dtype.

        Raises:
            ValueError: the weights are narrow.
        """
        if self.quantization is not None:
            raise ValueError(f"weights in {self.quantization} have no other dtype")
        make = lambda: type(self)(self.config, rngs=nnx.Rngs(0), dtype=dtype)
        abstract = nnx.eval_shape(make)
        Placement(self.architecture, self.parallel).set_structure(abstract)
        graph, _ = nnx.split(abstract)
        return nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), nnx.state(self)))

    def quantize(self, format: str) -> "Decoder":
        """Returns a model whose layers have weights in a narrow format; others are shared.

        Args:
            format: "int8", "fp8", "int4" or "int8-weights"; see `emsjax.from_pretrained`.

        Raises:
            ValueError: the format is unknown, or the weights are narrow already.
        """
        model = copy_to_quantize(self, format)
        place = Placement(self.architecture, self.parallel)
        for layer in model.layers:
            place.quantize(layer, format)
        return model

    def save_pretrained(self, path: str | PathLike) -> None:
        """Writes a folder that transformers can load: see `emsjax.models.saving.save`."""
        saving.save(self, path)


# Under jit, as no device is to hold more than its part.
@functools.partial(jax.jit, static_argnums=(0, 1, 2), static_argnames=("dtype", *CACHE_SIZES))
def _cache_on(parallel: TensorParallel, batch: int, max_len: int, **sizes: Any) -> KVCache:
    return KVCache.init(batch, max_len, **sizes).on(parallel)


def check_taps(taps: tuple[int, ...], num_layers: int) -> None:
    """Raises ValueError for a tap that is not 0 (the embeddings) to the number of layers."""
    outside = [tap for tap in taps if not 0 <= tap <= num_layers]
    if outside:
        raise ValueError(f"taps must lie in 0..{num_layers} for this model, not {outside[0]}")
