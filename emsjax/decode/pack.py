"""Ragged batches as packed rows: all samples' tokens on one axis, no padding between.

The axis legend of the library, used in every shape annotation:

    b = batch (slots)            r = packed rows        t = tokens of a sequence buffer
    k = max_draft_tokens         v = vocabulary         e = hidden size
    l = cache length             h = heads              d = head_dim

A fresh row has query heads, then K/V heads of keys, then of values on its axis h; a cache has
K/V heads only.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, PyTree

from emsjax.values import pytree
from pallas_kernels.common.indexing import take


@pytree
class PackedRows:
    """Where each row of the packed axis belongs; padding rows come last.

    Attributes:
        segment_ids: sample of each row; `batch` for padding rows.
        positions: position of each row within its sample; 0 for padding rows.
        offsets: first row of each sample.
        counts: rows of each sample.
        ancestors: which of its sample's rows each row sees, by index; None: those before it.
    """

    segment_ids: Int32[Array, "r"]
    positions: Int32[Array, "r"]
    offsets: Int32[Array, "b"]
    counts: Int32[Array, "b"]
    ancestors: Bool[Array, "r f"] | None = None

    @property
    def samples(self) -> Int32[Array, "r"]:
        """The sample of each row; padding rows get the last sample."""
        return jnp.minimum(self.segment_ids, self.offsets.shape[0] - 1)

    @property
    def within(self) -> Int32[Array, "r"]:
        """The index of each row among its sample's rows; arbitrary for padding rows."""
        return jnp.arange(self.segment_ids.shape[0], dtype=jnp.int32) - take(
            self.offsets, self.samples
        )

    def gather(self, blocks: Array) -> Array:
        """Per-sample values `blocks` [b, n, ...] of the samples' rows, as [r, ...].

        Row i of sample s is blocks[s, i]; padding rows hold an arbitrary value.
        """
        return take(blocks, self.samples, jnp.clip(self.within, 0, blocks.shape[1] - 1))

    def scatter(self, rows: PyTree, width: int) -> PyTree:
        """Arrays of packed rows [r, ...] as per-sample blocks [b, width, ...].

        Entries beyond a sample's count are arbitrary.
        """
        row = self.offsets[:, None] + jnp.arange(width)
        row = jnp.minimum(row, self.segment_ids.shape[0] - 1)
        return jax.tree.map(lambda x: take(x, row), rows)


@pytree
class AcceptedPath:
    """Which rows of a call are committed, and where: a path through each sample's rows.

    A sample's rows may form a chain, of which a prefix is accepted, or a tree, of which a path
    from the root is accepted. A row's K/V are written after the preceding row of the path,
    whatever the row's index among the sample's rows.

    Attributes:
        ranks: place of each row on its sample's path, from 0 on; negative for rows that are
            rejected. Padding rows may hold anything.
        counts: rows on each sample's path.
    """

    ranks: Int32[Array, "r"]
    counts: Int32[Array, "b"]

    @classmethod
    def prefix(
        cls, rows: PackedRows, counts: Int32[Array, "b"], ranks: Int32[Array, "r"] | None = None
    ) -> "AcceptedPath":
        """The first counts[s] rows of each sample or, of paths with these ranks, of its path."""
        ranks = rows.within if ranks is None else ranks
        return cls(jnp.where(ranks < take(counts, rows.samples), ranks, -1), counts)

    def segment_ids(self, rows: PackedRows) -> Int32[Array, "r"]:
        """Sample of each row that is committed; `batch` for the others."""
        return jnp.where(self.ranks >= 0, rows.segment_ids, self.counts.shape[0])


def pack(starts: Int32[Array, "b"], counts: Int32[Array, "b"], num_rows: int) -> PackedRows:
    """Concatenate rows starts[s] .. starts[s] + counts[s] - 1 of every sample s.

    Rows beyond `num_rows` are cut off, last samples first: `counts` holds the rows that fit.

    >>> rows = pack(jnp.array([5, 9, 4]), jnp.array([2, 1, 0]), num_rows=4)
    >>> print(rows.segment_ids, rows.positions)
    [0 0 1 3] [5 6 9 0]
    """
    batch = starts.shape[0]
    ends = jnp.minimum(jnp.cumsum(counts, dtype=jnp.int32), num_rows)
    offsets = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    row = jnp.arange(num_rows, dtype=jnp.int32)
    segment_ids = jnp.searchsorted(ends, row, side="right", method="compare_all").astype(jnp.int32)
    sample = jnp.minimum(segment_ids, batch - 1)
    positions = jnp.where(segment_ids < batch, row + take(starts - offsets, sample), 0)
    return PackedRows(segment_ids, positions, offsets, ends - offsets)
