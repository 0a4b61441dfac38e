"""The KV cache of one model: a pair of arrays per layer, each sample at its own length."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

import pallas_kernels
from emsjax.packing import PackedRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeysValues:
    """Keys and values of every layer, as separate arrays: slicing a stack would copy it.

    [r, h, d] each for the fresh rows of a forward, [b, l, h, d] in a cache.
    """

    keys: tuple[Float[Array, "..."], ...]
    values: tuple[Float[Array, "..."], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Committed keys and values; what lies at or beyond `lengths` is undefined."""

    layers: KeysValues
    lengths: Int32[Array, "b"]

    @classmethod
    def init(
        cls, batch: int, max_len: int, *, num_layers: int, num_heads: int, head_dim: int, dtype
    ) -> "KVCache":
        """An empty cache of `max_len` tokens per sample."""
        empty = lambda: tuple(
            jnp.zeros((batch, max_len, num_heads, head_dim), dtype) for _ in range(num_layers)
        )
        return cls(KeysValues(empty(), empty()), jnp.zeros(batch, jnp.int32))

    def commit(
        self,
        fresh: KeysValues,
        rows: PackedRows,
        counts: Int32[Array, "b"],
        update: Callable = pallas_kernels.update_kv_caches,
    ) -> "KVCache":
        """Append the first `counts[s]` of sample s's fresh rows; the others leave no trace."""
        batch = self.lengths.shape[0]
        sample = jnp.minimum(rows.segment_ids, batch - 1)
        kept = rows.positions < (self.lengths + counts)[sample]
        segment_ids = jnp.where(kept, rows.segment_ids, batch)
        old = self.layers
        keys, values = update(
            old.keys, old.values, fresh.keys, fresh.values, segment_ids, rows.positions
        )
        return dataclasses.replace(
            self, layers=KeysValues(keys, values), lengths=self.lengths + counts
        )

    def fork(self, samples: Int32[Array, "n"]) -> "KVCache":
        """A cache whose slot i starts as a copy of this one's slot samples[i]."""
        return jax.tree.map(lambda x: jnp.take(x, samples, axis=0), self)
