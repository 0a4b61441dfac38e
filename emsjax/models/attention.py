"""Attention of a layer's fresh rows, by this library's kernels or a user's own function.

Axis legend: see `emsjax.decode.pack`.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

import pallas_kernels
from emsjax.decode.kernels import OwnAttention, Visible
from emsjax.decode.pack import PackedRows
from emsjax.returned import check_alike
from pallas_kernels.common.narrow_rows import round_packed, wide_array


def attend(
    attention: Callable,
    qkv: Float[Array, "r h d"],
    cached: Any,
    rows: PackedRows,
    visible: Visible,
    **options: Any,
) -> Float[Array, "r hq d"]:
    """Attention of one layer's fresh rows to its cache and to themselves.

    This library's attention reads queries, keys and values from one array. For a user's attention
    they are copied into separate arrays and rounded as a cache in 8 bits has them, which is
    widened, and the result is checked.

    Args:
        attention: a callable with the signature of `pallas_kernels.ragged_attention`.
        qkv: query heads, heads of keys and heads of values, side by side.
        cached: the `LayerCache`.
        options: other arguments: max_rows_per_sample, and window and scale if they are not None.

    Raises:
        ValueError: a user's attention did not return an array [rows, heads, head_dim].
    """
    if visible.mask is not None:
        options["cache_mask"] = visible.mask
    if rows.ancestors is not None:
        options["ancestors"] = rows.ancestors
    places = (rows.segment_ids, rows.positions, visible.lengths)
    called = getattr(attention, "func", attention)  # of functools.partial
    if isinstance(called, OwnAttention) or called is pallas_kernels.ragged_attention:
        return attention(qkv, None, None, cached.keys, cached.values, *places, **options)
    kv_heads, qkv = cached.keys.shape[2], round_packed(qkv, cached.keys)
    query, fresh = qkv[:, : -2 * kv_heads], qkv[:, -2 * kv_heads :]
    key, value = fresh[:, :kv_heads], fresh[:, kv_heads:]
    caches = (wide_array(x, qkv.dtype) for x in (cached.keys, cached.values))
    out = attention(query, key, value, *caches, *places, **options)
    rule = "attention_implementation must return [rows, heads, head_dim] in the query's dtype"
    return check_alike(rule, out, query)
