"""Attention of packed rows over each sample's committed cache and its own fresh rows."""

import functools

import jax.numpy as jnp
from jax import Array

from pallas_kernels import ragged_attention_triton, ragged_attention_xla, reference
from pallas_kernels.implementations import choose
from pallas_kernels.shapes import check_integers, check_shapes

IMPLEMENTATIONS = {
    "triton": ragged_attention_triton.ragged_attention,
    "xla": ragged_attention_xla.ragged_attention,
    "reference": reference.ragged_attention,
}


def ragged_attention(
    query: Array,  # [rows, heads, head_dim]
    key: Array | None,  # [rows, heads, head_dim]
    value: Array | None,  # [rows, heads, head_dim]
    key_cache: Array,  # [batch, max_len, heads, head_dim]
    value_cache: Array,  # [batch, max_len, heads, head_dim]
    segment_ids: Array,  # int32 [rows]
    positions: Array,  # int32 [rows]
    cache_lengths: Array,  # int32 [batch]
    *,
    max_rows_per_sample: int | None = None,
    scale: float | None = None,
    ancestors: Array | None = None,  # bool [rows, fresh]
    cache_mask: Array | None = None,  # bool [batch, max_len]
    implementation: str | None = None,
    interpret: bool = False,
) -> Array:  # [rows, heads, head_dim]
    """Segment-indexed attention: every row attends within its own sample only.

    Row r of sample s = segment_ids[r] sees the committed entries
    `key_cache[s, :cache_lengths[s]]` and the fresh rows of s at positions not
    after its own:

        out[r] = softmax(scale * query[r] @ K(r).T) @ V(r)

    Rows of one sample are contiguous, at consecutive positions, from cache_lengths[s] on unless a
    `cache_mask` is given; samples may have no rows and come in any order.
    Padding rows carry segment id `batch`, come last, and yield zeros. Cache
    entries at or beyond cache_lengths, and K/V of padding rows, may hold
    anything, NaN included.

    With `ancestors` the fresh rows of a sample may form a tree (several drafts
    that share their beginnings) rather than a sequence: row r sees the i-th fresh
    row of its sample where ancestors[r, i], whatever the positions are, and every
    committed entry. A row must be its own ancestor.

    With `cache_mask`, a row of sample s sees committed entry i only where cache_mask[s, i] is
    true; other entries may hold anything, NaN included.

    Args:
        query, key, value: of the fresh rows, [rows, heads, head_dim]. With neither key nor
            value `query` holds all three, [rows, 3, heads, head_dim], as one product makes them;
            the Triton kernel reads them there.
        key_cache, value_cache: [batch, max_len, heads, head_dim].
        segment_ids: the sample of each row, int32 [rows]; batch for padding rows.
        positions: of each row within its sample, int32 [rows].
        cache_lengths: committed entries of each sample, int32 [batch].
        max_rows_per_sample: static upper bound of the rows that one sample has
            in this call; None: all of them. Small bounds (decoding) take a path
            that serves all samples at once.
        scale: of the scores, above 0; None: head_dim ** -0.5.
        ancestors: visibility among the fresh rows, bool [rows, fresh]; as many columns
            as any sample has rows, at least. None: causal.
        cache_mask: visibility of the committed entries, bool [batch, max_len]. None: all
            of them.
        implementation: "triton", "xla", "reference", or None: Triton on NVIDIA GPUs
            of compute capability 8.0 and newer, XLA elsewhere.
        interpret: run the Triton kernel in interpret mode, on any device; the
            others ignore it.

    Returns:
        Attention outputs [rows, heads, head_dim] in the query's dtype.

    Raises:
        ValueError: unknown implementation, or one that the device cannot run; a scale
            that is not above 0; a key without a value; arrays of other shapes than said, or
            segment ids, positions or lengths that are no integers.

    Reference: the unpadded input tokens of EMS-SD, arXiv 2405.07542, section 3; the
    ancestor mask is the tree attention of SpecInfer, arXiv 2305.09781, section 4.
    """
    name = choose(implementation, IMPLEMENTATIONS, interpret)
    if scale is not None and not scale > 0:
        raise ValueError(f"scale must be above 0, not {scale}")
    of_three = query.shape[1:-2]  # (3,), or () for one of them
    if (key is None) != (value is None) or of_three != ((3,) if key is None else ()):
        shapes = [None if x is None else x.shape for x in (query, key, value)]
        raise ValueError(
            "query, key and value must be [rows, heads, head_dim] each, or query "
            f"[rows, 3, heads, head_dim] alone, not {shapes}"
        )
    of_row = "rows 3 heads head_dim" if key is None else "rows heads head_dim"
    fresh = [("query", query, of_row)]
    if key is not None:
        fresh += [("key", key, of_row), ("value", value, of_row)]
    check_shapes(
        *fresh,
        ("key_cache", key_cache, "batch max_len heads head_dim"),
        ("value_cache", value_cache, "batch max_len heads head_dim"),
        ("segment_ids", segment_ids, "rows"),
        ("positions", positions, "rows"),
        ("cache_lengths", cache_lengths, "batch"),
        *([] if ancestors is None else [("ancestors", ancestors, "rows fresh")]),
        *([] if cache_mask is None else [("cache_mask", cache_mask, "batch max_len")]),
    )
    check_integers(segment_ids=segment_ids, positions=positions, cache_lengths=cache_lengths)
    if key is None and name != "triton":
        query, key, value = jnp.unstack(query, axis=1)
    attention = IMPLEMENTATIONS[name]
    if name == "triton":
        attention = functools.partial(attention, interpret=interpret)
    return attention(
        query,
        key,
        value,
        key_cache,
        value_cache,
        segment_ids,
        positions,
        cache_lengths,
        max_rows_per_sample=max_rows_per_sample,
        scale=scale,
        ancestors=ancestors,
        cache_mask=cache_mask,
    )
