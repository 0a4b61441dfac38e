"""The KV cache of one model: keys and values of every layer, each sample at its own length.

Rejected rows are never written: `commit` writes only the rows of the accepted path. This module
also has the cache of the padded method, which writes all samples at one place.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from emsjax.decode.kernels import Visible
from emsjax.decode.pack import AcceptedPath, PackedRows
from emsjax.tensor_parallel import REPLICATED, TensorParallel
from emsjax.values import pytree
from pallas_kernels.common.indexing import take
from pallas_kernels.common.narrow_rows import NarrowRows

HEADS = 2  # the axis of a cache's arrays that several devices share


@pytree
class LayerCache:
    """Committed keys and values of one layer, as separate arrays: slicing a stack would copy it.

    Attributes:
        keys, values: [b, l, h, d], h counts K/V heads; arrays, or `pallas_kernels.NarrowRows`.
    """

    keys: Float[Array, "b l h d"] | NarrowRows
    values: Float[Array, "b l h d"] | NarrowRows


@pytree
class KVCache:
    """Committed keys and values; entries at or beyond `lengths` are undefined.

    Attributes:
        layers: one `LayerCache` per layer.
        lengths: committed tokens of each sample.
        parallel: the devices, if the model is on a mesh: they have different heads.
    """

    layers: tuple[LayerCache, ...]
    lengths: Int32[Array, "b"]
    parallel: TensorParallel | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def init(
        cls, batch: int, max_len: int, *, num_layers: int, kv_heads: int, head_dim: int, dtype
    ) -> "KVCache":
        """An empty cache of `max_len` tokens per sample, in a dtype, or in "int8" or "fp8"."""
        make = NarrowRows.zeros if isinstance(dtype, str) else jnp.zeros
        empty = lambda: make((batch, max_len, kv_heads, head_dim), dtype)
        layers = tuple(LayerCache(empty(), empty()) for _ in range(num_layers))
        return cls(layers, jnp.zeros(batch, jnp.int32))

    def on(self, parallel: TensorParallel) -> "KVCache":
        """The cache on the devices of a mesh; to be called under `jax.jit`."""
        layers = lax.with_sharding_constraint(self.layers, parallel.sharding(HEADS))
        return dataclasses.replace(self, layers=layers, parallel=parallel)

    @property
    def max_len(self) -> int:
        """Places of each sample."""
        return self.layers[0].keys.shape[1]

    @property
    def num_masked(self) -> int:
        """Always 0, as there are no gaps between a sample's tokens."""
        return 0

    @property
    def visible(self) -> Visible:
        """The committed entries that attention sees."""
        return Visible(self.lengths)

    def commit(
        self,
        fresh: tuple[Float[Array, "r h d"], ...],
        rows: PackedRows,
        path: AcceptedPath,
        update: Callable,
    ) -> "KVCache":
        """Append the rows of each sample's accepted path; other rows are not written.

        Args:
            fresh: queries, keys and values of the rows in every layer.
            rows: where the rows belong.
            path: which of the rows are accepted, and in which order.
            update: a callable with the signature of `pallas_kernels.update_kv_caches`.
        """
        places = take(self.lengths, rows.samples) + path.ranks
        layers = with_rows(self, fresh, path.segment_ids(rows), places, update)
        return dataclasses.replace(self, layers=layers, lengths=self.lengths + path.counts)

    def fork(self, samples: Int32[Array, "n"]) -> "KVCache":
        """A cache whose slot i starts as a copy of this one's slot samples[i]."""
        return jax.tree.map(lambda x: take(x, samples), self)

    def copy_slots(self, sources: Int32[Array, "b"], copied: Bool[Array, "b"]) -> "KVCache":
        """Copies slot sources[s] into slot s where `copied`, one slot after the other, so that
        other slots are not touched. Lengths do not change."""
        slots = jnp.argsort(~copied)  # the copied ones first

        def copy(i, layers):
            slot = take(slots, i)
            source = take(sources, slot)
            one = lambda x: lax.dynamic_update_index_in_dim(x, take(x, source), slot, 0)
            return jax.tree.map(one, layers)

        layers = lax.fori_loop(0, jnp.sum(copied, dtype=jnp.int32), copy, self.layers)
        return dataclasses.replace(self, layers=layers)


@pytree
class SharedIndexCache:
    """A cache in which all samples are written at the same place, with gaps that are masked.

    Attributes:
        layers: as in a `KVCache`.
        lengths: tokens of each sample, as if there were no gaps.
        index: the place where the next tokens are written.
        mask: the places that hold tokens.
        num_masked: gaps of all samples together, except gaps between prompts' ends.
        parallel: as in a `KVCache`.
    """

    layers: tuple[LayerCache, ...]
    lengths: Int32[Array, "b"]
    index: Int32[Array, ""]
    mask: Bool[Array, "b l"]
    num_masked: Int32[Array, ""]
    parallel: TensorParallel | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def behind(cls, cache: KVCache) -> "SharedIndexCache":
        """A cache that continues after the longest sample's tokens."""
        mask = jnp.arange(cache.max_len) < cache.lengths[:, None]
        index = jnp.max(cache.lengths)
        none = jnp.zeros((), jnp.int32)
        return cls(cache.layers, cache.lengths, index, mask, none, cache.parallel)

    @property
    def visible(self) -> Visible:
        """See `KVCache.visible`."""
        return Visible(jnp.full_like(self.lengths, self.index), self.mask)

    def commit(
        self,
        fresh: tuple[Float[Array, "r h d"], ...],
        rows: PackedRows,
        path: AcceptedPath,
        update: Callable,
    ) -> "SharedIndexCache":
        """Append the rows of each sample's accepted path, and gaps up to the longest path."""
        segment_ids = path.segment_ids(rows)
        layers = with_rows(self, fresh, segment_ids, self.index + path.ranks, update)
        at = jnp.arange(self.mask.shape[1]) - self.index
        counts, most = path.counts, jnp.max(path.counts)
        return SharedIndexCache(
            layers,
            self.lengths + counts,
            self.index + most,
            self.mask | ((at >= 0) & (at < counts[:, None])),
            self.num_masked + counts.shape[0] * most - jnp.sum(counts),
            self.parallel,
        )


Cache = KVCache | SharedIndexCache


def with_rows(cache: Cache, fresh, segment_ids, places, update: Callable) -> tuple[LayerCache, ...]:
    """The layers of `cache` with each row [r] at its place in its sample; `batch`: no sample."""
    layers, parallel = cache.layers, cache.parallel
    keys, values = ([getattr(layer, name) for layer in layers] for name in ("keys", "values"))
    write = lambda keys, values, fresh, *rows: update(keys, values, fresh, None, *rows)
    if parallel is not None:
        heads = parallel.on_axis(HEADS)
        specs = (heads, heads, parallel.on_axis(1), REPLICATED, REPLICATED)
        write = parallel.map(write, specs, heads)
    keys, values = write(keys, values, fresh, segment_ids, places)
    written = zip(layers, keys, values, strict=True)
    return tuple(dataclasses.replace(old, keys=k, values=v) for old, k, v in written)
