"""The KV cache of one model: a pair of arrays per layer, each sample at its own length.

Beside it the cache of the padded method, where all samples are written at one place.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

import pallas_kernels
from emsjax.decode.kernels import AttentionOfThree
from emsjax.decode.pack import PackedRows
from pallas_kernels.common.indexing import take

# Whether branches of `lax.switch` may write a cache. What jax 0.10.2 compiles for a CPU copies all
# of it then; what 0.11.2 compiles does not, for a CPU and for a GPU.
BRANCHES_COMMIT = jax.__version_info__ >= (0, 11)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeysValues:
    """Keys and values of every layer, as separate arrays: slicing a stack would copy it.

    [b, l, h, d] each in a cache, [r, h, d] for the rows of a step.
    """

    keys: tuple[Float[Array, "..."], ...]
    values: tuple[Float[Array, "..."], ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FreshRows:
    """Queries, keys and values of a forward's rows in every layer, as one product computes them."""

    layers: tuple[Float[Array, "r n d"], ...]

    @property
    def keys(self) -> tuple[Float[Array, "r h d"], ...]:
        return tuple(jnp.split(qkv, 3, axis=1)[1] for qkv in self.layers)

    @property
    def values(self) -> tuple[Float[Array, "r h d"], ...]:
        return tuple(jnp.split(qkv, 3, axis=1)[2] for qkv in self.layers)

    def keys_values(self, num_rows: int) -> KeysValues:
        """Copied to arrays of `num_rows` rows; those beyond are arbitrary."""
        copy = lambda x: jnp.pad(x, [(0, num_rows - x.shape[0]), (0, 0), (0, 0)])
        return KeysValues(tuple(map(copy, self.keys)), tuple(map(copy, self.values)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Committed keys and values; what lies at or beyond `lengths` is undefined.

    Attributes:
        layers: keys and values of every layer, [b, l, h, d] each.
        lengths: committed tokens of each sample.
    """

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

    @property
    def num_masked(self) -> int:
        """There are no gaps between a sample's tokens."""
        return 0

    def attention(self, attention: Callable) -> Callable:
        """`attention`, with the signature of `pallas_kernels.ragged_attention`, to this cache.

        What is returned takes query, key and value as one array: see `AttentionOfThree`.
        """
        return AttentionOfThree(attention)

    def commit(
        self,
        fresh: KeysValues | FreshRows,
        rows: PackedRows,
        counts: Int32[Array, "b"],
        update: Callable = pallas_kernels.update_kv_caches,
    ) -> "KVCache":
        """Append the first `counts[s]` of sample s's fresh rows; the others leave no trace."""
        layers = _write(self, fresh, rows, counts, rows.positions, update)
        return dataclasses.replace(self, layers=layers, lengths=self.lengths + counts)

    def fork(self, samples: Int32[Array, "n"]) -> "KVCache":
        """A cache whose slot i starts as a copy of this one's slot samples[i], from 0 on."""
        return jax.tree.map(lambda x: take(x, samples), self)

    def copy_slots(self, sources: Int32[Array, "b"], copied: Bool[Array, "b"]) -> "KVCache":
        """The cache with slot sources[s] in slot s, where that is to be `copied`; one by one,
        so that the others stay where they are. Lengths are left as they are."""
        slots = jnp.argsort(~copied)  # those first

        def copy(i, layers: KeysValues) -> KeysValues:
            slot = take(slots, i)
            source = take(sources, slot)
            one = lambda x: lax.dynamic_update_index_in_dim(x, take(x, source), slot, 0)
            return jax.tree.map(one, layers)

        layers = lax.fori_loop(0, jnp.sum(copied, dtype=jnp.int32), copy, self.layers)
        return dataclasses.replace(self, layers=layers)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedIndexCache:
    """A cache in which all samples are written at the same place, with gaps that are masked.

    Attributes:
        layers: as of a `KVCache`.
        lengths: tokens of each sample, as if there were no gaps.
        index: where the next ones are written.
        mask: the places that hold tokens.
        num_masked: gaps of all samples together, but for those between prompts' ends.
    """

    layers: KeysValues
    lengths: Int32[Array, "b"]
    index: Int32[Array, ""]
    mask: Bool[Array, "b l"]
    num_masked: Int32[Array, ""]

    @classmethod
    def of(cls, cache: KVCache) -> "SharedIndexCache":
        """Behind the longest sample's tokens."""
        max_len = cache.layers.keys[0].shape[1]
        mask = jnp.arange(max_len) < cache.lengths[:, None]
        index = jnp.max(cache.lengths)
        return cls(cache.layers, cache.lengths, index, mask, jnp.zeros((), jnp.int32))

    def attention(self, attention: Callable) -> Callable:
        """See `KVCache.attention`."""
        attention = AttentionOfThree(attention)

        def to_mask(*args, **kwargs):
            *args, lengths = args
            lengths = jnp.full_like(lengths, self.index)
            return attention(*args, lengths, cache_mask=self.mask, **kwargs)

        return to_mask

    def commit(
        self,
        fresh: KeysValues | FreshRows,
        rows: PackedRows,
        counts: Int32[Array, "b"],
        update: Callable = pallas_kernels.update_kv_caches,
    ) -> "SharedIndexCache":
        """Append the first `counts[s]` of sample s's fresh rows, and gaps to the most of them."""
        places = self.index + rows.positions - take(self.lengths, rows.samples)
        layers = _write(self, fresh, rows, counts, places, update)
        at = jnp.arange(self.mask.shape[1]) - self.index
        most = jnp.max(counts)
        return SharedIndexCache(
            layers,
            self.lengths + counts,
            self.index + most,
            self.mask | ((at >= 0) & (at < counts[:, None])),
            self.num_masked + counts.shape[0] * most - jnp.sum(counts),
        )


Cache = KVCache | SharedIndexCache


def _write(
    cache: Cache, fresh: KeysValues | FreshRows, rows: PackedRows, counts, places, update: Callable
) -> KeysValues:
    """The layers with the first `counts[s]` of sample s's fresh rows at their places [r]."""
    batch, old = cache.lengths.shape[0], cache.layers
    kept = rows.positions < take(cache.lengths + counts, rows.samples)
    segment_ids = jnp.where(kept, rows.segment_ids, batch)
    new = (fresh.layers, None) if isinstance(fresh, FreshRows) else (fresh.keys, fresh.values)
    return KeysValues(*update(old.keys, old.values, *new, segment_ids, places))
