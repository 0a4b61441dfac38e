"""Where rows and cached tokens lie: unpadded, or padded as in the vanilla method.

The padded method pads twice. A step feeds every sample as many rows as the sample with the
longest draft has, and commits at one cache position for all samples, which advances by the most
tokens that any sample emits; the gaps in the other samples stay masked. Nothing else differs, so
both methods share one step and one loop.

Reference: the vanilla method and the two ablations of EMS-SD, arXiv 2405.07542.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int32

from emsjax.checks import check_flag
from emsjax.decode.cache import Cache, KVCache, SharedIndexCache
from emsjax.decode.pack import PackedRows, pack
from emsjax.decode.row_counts import round_up_length, row_buckets, smallest_bucket
from pallas_kernels.common.indexing import take

MAX_WIDTHS = 11  # row counts of a padded step, besides one row per sample


@dataclasses.dataclass(frozen=True)
class Layout:
    """What is padded: nothing (EMS-SD), or a step's rows, or the cache, or both (vanilla).

    Static; the axes are those of `emsjax.decode.pack`.
    """

    pad_inputs: bool = False
    pad_kv_cache: bool = False

    def __post_init__(self):
        for name in ("pad_inputs", "pad_kv_cache"):
            object.__setattr__(self, name, check_flag(name, getattr(self, name)))

    def row_counts(self, batch: int, k1: int) -> tuple[int, ...]:
        """Static row counts of a step, ascending; each is compiled once."""
        if not self.pad_inputs:
            return row_buckets(batch, k1)
        # One width per length of the longest draft, unless that needs too many programs.
        widths = {-(-k1 * n // MAX_WIDTHS) for n in range(1, MAX_WIDTHS + 1)}
        return tuple(batch * width for width in sorted({1, *widths}))

    def smallest(self, sizes: tuple[int, ...], counts: Int32[Array, "b"]) -> Int32[Array, ""]:
        """Index of the smallest of the row counts that holds the samples' rows."""
        if not self.pad_inputs:
            return smallest_bucket(sizes, jnp.sum(counts))
        return smallest_bucket(sizes, counts.shape[0] * jnp.max(counts))

    def pack(
        self, starts: Int32[Array, "b"], counts: Int32[Array, "b"], num_rows: int
    ) -> PackedRows:
        """The samples' rows starts[s] .. starts[s] + counts[s] - 1 among `num_rows`.

        Padded samples, finished ones too, have the same number of rows each; rows beyond their
        own are fed with their segment id, and are rejected.
        """
        if not self.pad_inputs:
            return pack(starts, counts, num_rows)
        batch = starts.shape[0]
        row, width = jnp.arange(num_rows, dtype=jnp.int32), num_rows // batch
        segment_ids = jnp.minimum(row // width, batch)
        positions = take(starts, jnp.minimum(segment_ids, batch - 1)) + row % width
        positions = jnp.where(segment_ids < batch, positions, 0)
        offsets = width * jnp.arange(batch, dtype=jnp.int32)
        return PackedRows(segment_ids.astype(jnp.int32), positions, offsets, counts)

    def cache_length(self, max_len: int, max_new_tokens: int, slots: int, k1: int) -> int:
        """Places of each sample in the cache: `max_len` if they are not shared."""
        if not self.pad_kv_cache:
            return max_len
        # A step advances by k1 at most, and by no more than all samples emit together.
        return round_up_length(max_len + max_new_tokens * min(slots, k1))

    def arrange(self, cache: KVCache) -> Cache:
        """Converts a prefilled cache to the layout that decoding uses."""
        return SharedIndexCache.behind(cache) if self.pad_kv_cache else cache


UNPADDED = Layout()
