"""Attention of packed rows over each sample's committed cache and its own fresh rows."""

import math

from jax import Array

from pallas_kernels.attention import reference, triton, xla
from pallas_kernels.common.implementations import choose
from pallas_kernels.common.narrow_rows import NarrowRows, round_packed, rounded_like, wide_array
from pallas_kernels.common.numbers import check_at_least, check_number
from pallas_kernels.common.numerics import is_invariant
from pallas_kernels.common.shapes import (
    check_heads,
    check_integers,
    check_packed_heads,
    check_shapes,
)

MOST_POSITIONS = 2**31 - 1
IMPLEMENTATIONS = {
    "triton": triton.ragged_attention,
    "xla": xla.ragged_attention,
    "reference": reference.ragged_attention,
}


def ragged_attention(
    query: Array,  # [rows, heads, head_dim]
    key: Array | None,  # [rows, kv_heads, head_dim]
    value: Array | None,  # [rows, kv_heads, head_dim]
    key_cache: Array | NarrowRows,  # [batch, max_len, kv_heads, head_dim]
    value_cache: Array | NarrowRows,  # [batch, max_len, kv_heads, head_dim]
    segment_ids: Array,  # int32 [rows]
    positions: Array,  # int32 [rows]
    cache_lengths: Array,  # int32 [batch]
    *,
    max_rows_per_sample: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    ancestors: Array | None = None,  # bool [rows, fresh]
    cache_mask: Array | None = None,  # bool [batch, max_len]
    implementation: str | None = None,
    interpret: bool = False,
    numerics: str | None = None,
) -> Array:  # [rows, heads, head_dim]
    """Segment-indexed attention: every row attends within its own sample only.

    Row r of sample s = segment_ids[r] sees the committed entries
    `key_cache[s, :cache_lengths[s]]` and the fresh rows of s at positions not
    after its own. For every query head,

        out[r] = softmax(scale * query[r] @ K(r).T) @ V(r)

    where query head i reads K/V head i // (heads // kv_heads).

    Rows of one sample are contiguous, at consecutive positions, from cache_lengths[s] on unless a
    `cache_mask` is given; samples may have no rows and come in any order.
    Padding rows carry segment id `batch`, come last, and yield zeros. Cache
    entries at or beyond cache_lengths, and K/V of padding rows, may hold
    anything, NaN included.

    With a `window`, the row at position p sees only keys at positions above p - window: itself and
    the window - 1 tokens before it. Committed entry i is at position i or, with a `cache_mask`, at
    the number of visible entries before it. The Triton kernel does not read blocks of the cache
    that lie outside of the windows of all of a tile's rows.

    With `ancestors` the fresh rows of a sample may form a tree (several drafts
    with common prefixes) rather than a sequence: row r sees the i-th fresh
    row of its sample where ancestors[r, i], and every committed entry. A row must be its own
    ancestor. Positions matter only to a window.

    With `cache_mask`, a row of sample s sees committed entry i only where cache_mask[s, i] is
    true; other entries may hold anything, NaN included.

    Args:
        query: the fresh rows' queries, [rows, heads, head_dim]. If key and value are None it
            holds queries, keys and values, [rows, heads + 2 * kv_heads, head_dim], as one
            product computes them; the Triton kernel reads them in place.
        key, value: the fresh rows' keys and values, [rows, kv_heads, head_dim], or None.
        key_cache, value_cache: [batch, max_len, kv_heads, head_dim]; `heads` is a multiple of
            `kv_heads`. With both in 8 bits, as `NarrowRows`, fresh keys and values are rounded as
            these are; the Triton kernel widens what it reads, and the other implementations a
            layer's cache.
        segment_ids: the sample of each row, int32 [rows]; batch for padding rows.
        positions: the position of each row within its sample, int32 [rows].
        cache_lengths: the number of committed entries of each sample, int32 [batch].
        max_rows_per_sample: static upper bound of the rows that one sample has
            in this call; None: all of them. Small bounds (decoding) take a path
            that serves all samples at once.
        scale: the factor of the scores, above 0; None: head_dim ** -0.5.
        window: static; tokens that a row sees, itself included. None: all.
        ancestors: visibility among the fresh rows, bool [rows, fresh], with at least as many
            columns as any sample has rows. None: causal.
        cache_mask: visibility of the committed entries, bool [batch, max_len]. None: all
            of them.
        implementation: "triton", "xla", "reference", or None: Triton on NVIDIA GPUs
            of compute capability 8.0 and newer, XLA elsewhere.
        interpret: run the Triton kernel in interpret mode, on any device; the
            others ignore it.
        numerics: "fast" or "invariant": see `pallas_kernels.numerics`; None: the context's.

    Returns:
        Attention outputs [rows, heads, head_dim] in the query's dtype.

    Raises:
        ValueError: `implementation` is unknown or the device cannot run it; `scale` is not above
            0; `window` or `max_rows_per_sample` is not an integer of at least 1; only one of key
            and value is None; `heads` is not a multiple of `kv_heads`; an array has another shape
            than documented, or segment ids, positions or lengths are not integers; `numerics` is
            unknown, or "invariant" with the reference or a `cache_mask`, which moves keys to places
            that depend on other samples.

    Reference: the unpadded input tokens of EMS-SD, arXiv 2405.07542, section 3; the
    ancestor mask is the tree attention of SpecInfer, arXiv 2305.09781, section 4; heads that share
    keys and values are grouped-query attention, arXiv 2305.13245; the window is that of Mistral 7B,
    arXiv 2310.06825.
    """
    name = choose(implementation, IMPLEMENTATIONS, interpret)
    invariant = is_invariant(numerics)
    if invariant and name == "reference":
        raise ValueError("numerics 'invariant' needs implementation 'triton' or 'xla'")
    if invariant and cache_mask is not None:
        raise ValueError(
            "numerics 'invariant' takes no cache_mask: with it the places of keys depend on other "
            "samples, and with them the order of sums"
        )
    if scale is not None:
        scale = check_number("scale", scale, "above 0", lambda x: 0 < x < math.inf)
    if window is not None:
        window = min(check_at_least("window", window, 1), MOST_POSITIONS)
    if max_rows_per_sample is not None:
        max_rows_per_sample = check_at_least("max_rows_per_sample", max_rows_per_sample, 1)
    if (key is None) != (value is None):
        raise ValueError("key and value must be two arrays, or both None")
    fresh = [("query", query, "rows heads head_dim")]
    if key is not None:
        of_row = "rows kv_heads head_dim"
        fresh += [("key", key, of_row), ("value", value, of_row)]
    check_shapes(
        *fresh,
        ("key_cache", key_cache, "batch max_len kv_heads head_dim"),
        ("value_cache", value_cache, "batch max_len kv_heads head_dim"),
        ("segment_ids", segment_ids, "rows"),
        ("positions", positions, "rows"),
        ("cache_lengths", cache_lengths, "batch"),
        *([] if ancestors is None else [("ancestors", ancestors, "rows fresh")]),
        *([] if cache_mask is None else [("cache_mask", cache_mask, "batch max_len")]),
    )
    check_integers(segment_ids=segment_ids, positions=positions, cache_lengths=cache_lengths)
    kv_heads = key_cache.shape[2]
    if key is None:
        check_packed_heads("query", query, kv_heads)
    else:
        check_heads(query.shape[1], kv_heads)
    if name != "triton":
        if key is None:
            query = round_packed(query, key_cache)
        key, value = (rounded_like(x, key_cache) for x in (key, value))
        key_cache, value_cache = (wide_array(x, query.dtype) for x in (key_cache, value_cache))
    arrays = query, key, value, key_cache, value_cache, segment_ids, positions, cache_lengths
    return IMPLEMENTATIONS[name](
        *arrays,
        max_rows_per_sample=max_rows_per_sample,
        scale=scale,
        window=window,
        ancestors=ancestors,
        cache_mask=cache_mask,
        invariant=invariant,
        interpret=interpret,
    )
