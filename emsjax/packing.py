"""Ragged batches as packed rows: all samples' tokens on one axis, no padding between.

The axis legend of the library, used in every shape annotation:

    b = batch (slots)            r = packed rows        t = tokens of a sequence buffer
    k = max_draft_tokens         v = vocabulary         e = hidden size
    l = cache length             h = heads              d = head_dim
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

MAX_BUCKETS = 11  # from one row per sample on
MIN_BUCKET_ROWS = 16  # the rows of a matrix unit's tile: fewer cost the same
# From how many rows on they are told apart, and in how many steps to twice as many. On a GPU the
# first 64 cost nearly nothing, since a step reads all weights anyway, and up to about 200 each
# costs less than half of what one costs where arithmetic takes longer than reading. Of resolutions
# with as many row counts the earlier one is taken.
RESOLUTIONS = ({64: 8}, {128: 8}, {128: 4}, {128: 2, 256: 8}, {128: 2})
# Between these powers of two row counts are so many fewer than a multiple of 32: cuBLAS offers
# tiles of half the rows for 344, and not for 352. The products of a layer of OPT-6.7B (bfloat16, an
# H200, jax 0.11.2) took 189 us for 344 rows and 205 for 352, 214 for 408 and 259 for 416: see the
# profiles of `python -m emsjax.benchmarks.step --layers 4 --shapes 43x8,44x8,51x8,52x8`.
LESS_BETWEEN, FEWER = (256, 512), 8
MAX_CHUNK_ROWS = 1024  # of prefill
PROMPT_SIXTEENTHS = (3, 6, 10, 16)  # of them, in steps that feed prompts beside drafts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Where each row of the packed axis belongs; padding rows come last.

    Attributes:
        segment_ids: sample of each row; `batch` for padding rows.
        positions: position of each row within its sample; 0 for padding rows.
        offsets: first row of each sample.
        counts: rows of each sample.
    """

    segment_ids: Int32[Array, "r"]
    positions: Int32[Array, "r"]
    offsets: Int32[Array, "b"]
    counts: Int32[Array, "b"]

    def gather(self, blocks: Array) -> Array:
        """Per-sample values `blocks` [b, n, ...] of the samples' rows, as [r, ...].

        Row i of sample s is blocks[s, i]; padding rows hold an arbitrary value.
        """
        batch, width = blocks.shape[:2]
        sample = jnp.minimum(self.segment_ids, batch - 1)
        within = jnp.arange(self.segment_ids.shape[0]) - self.offsets[sample]
        return blocks[sample, jnp.clip(within, 0, width - 1)]

    def scatter(self, rows: Array, width: int) -> Array:
        """Values of packed rows [r, ...] as per-sample blocks [b, width, ...].

        Entries beyond a sample's count are arbitrary.
        """
        row = self.offsets[:, None] + jnp.arange(width)
        return rows[jnp.minimum(row, rows.shape[0] - 1)]


def pack(starts: Int32[Array, "b"], counts: Int32[Array, "b"], num_rows: int) -> PackedRows:
    """Concatenate rows starts[s] .. starts[s] + counts[s] - 1 of every sample s.

    Rows beyond `num_rows` are cut off, last samples first, so a long run of
    rows can be fed in chunks: the result's `counts` tell what went in.

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
    positions = jnp.where(segment_ids < batch, starts[sample] + row - offsets[sample], 0)
    return PackedRows(segment_ids, positions, offsets, ends - offsets)


def row_buckets(batch: int, max_rows_per_sample: int) -> tuple[int, ...]:
    """Static row counts that a step may be padded up to, ascending.

    From one row per sample to all; between them powers of two, and where rows cost something in
    the finest steps with which these are few (each bucket is compiled once), and each saves a
    twelfth of the most rows. With drafts also fewer, powers of four, for when most samples have
    ended.
    """
    most = batch * max_rows_per_sample
    least = min(most, max(batch, MIN_BUCKET_ROWS))
    powers = [2**i for i in range(4, most.bit_length())]
    between = lambda sizes: sorted(
        n for n in sizes if least + MIN_BUCKET_ROWS <= n <= most - most // 12
    )
    choices = [between(_stepped(powers, steps)) for steps in (*RESOLUTIONS, {})]
    fitting = [sizes for sizes in choices if len(sizes) <= MAX_BUCKETS - 2]
    sizes = max(fitting, key=len, default=between(powers[::2]))
    fewer = [n for n in powers[::2] if 3 * n <= 2 * least and max_rows_per_sample > 1]
    return tuple(sorted({*fewer, least, *sizes, most}))


def _stepped(powers: Sequence[int], steps: Mapping[int, int]) -> set[int]:
    """The powers of two, and from each to the next the steps of a resolution."""
    sizes: set[int] = set()
    for low in powers:
        _, parts = max(((n, of) for n, of in steps.items() if n <= low), default=(0, 1))
        sizes |= {low + low * i // parts for i in range(parts)}
    first, last = LESS_BETWEEN
    return {n - FEWER if first < n < last else n for n in sizes if n % MIN_BUCKET_ROWS == 0}


def smallest_bucket(buckets: tuple[int, ...], rows: Array) -> Array:
    """Index of the smallest bucket that holds so many rows; rows of any shape."""
    # All compared at once: a binary search would be a loop of launches on a GPU.
    return jnp.searchsorted(jnp.asarray(buckets, rows.dtype), rows, method="compare_all")


def chunk_rows(batch: int, width: int) -> int:
    """Static rows of a prefill chunk for a token buffer [batch, width]."""
    return min(MAX_CHUNK_ROWS, batch * width)


def prompt_row_counts(batch: int, k1: int, width: int) -> tuple[int, ...]:
    """Static row counts of steps that feed prompts, ascending; the last has room beside drafts.

    Args:
        width: of the token buffer.
    """
    chunk = chunk_rows(batch, width)
    most = max(chunk, batch * k1 + chunk // 2)
    sizes = {round_up(-(-most * n // 16), MIN_BUCKET_ROWS) for n in PROMPT_SIXTEENTHS}
    return tuple(sorted(sizes))


def round_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple


def round_up_length(length: int) -> int:
    """A static width that holds `length` tokens: few widths, so few compilations.

    Powers of two from 64 to 512, then multiples of 512.
    """
    if length > 512:
        return round_up(length, 512)
    return max(64, 1 << (length - 1).bit_length())
