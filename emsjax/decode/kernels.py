"""Selects the kernels of the forward and the commit."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int32

import pallas_kernels
from emsjax.decode.pack import PackedRows
from emsjax.returned import check_alike
from pallas_kernels.attention import IMPLEMENTATIONS as ATTENTIONS
from pallas_kernels.cache_update import IMPLEMENTATIONS as UPDATES
from pallas_kernels.common.implementations import choose
from pallas_kernels.common.narrow_rows import wide_array


@dataclasses.dataclass(frozen=True)
class OwnAttention:
    """This library's attention with a chosen implementation; equal instances compile once."""

    implementation: str

    def __call__(self, *args, **options) -> Array:
        return pallas_kernels.ragged_attention(*args, implementation=self.implementation, **options)


@dataclasses.dataclass(frozen=True)
class OwnUpdate:
    """This library's cache update with a chosen implementation."""

    implementation: str | None

    def __call__(self, *args) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        return pallas_kernels.update_kv_caches(*args, implementation=self.implementation)


class Kernels(NamedTuple):
    """The attention and the cache update of one run; static."""

    attention: Callable
    update: Callable


class Visible(NamedTuple):
    """Which committed entries attention sees.

    Attributes:
        lengths: entries from here on are undefined.
        mask: visible entries; None: all.
    """

    lengths: Int32[Array, "b"]
    mask: Bool[Array, "b l"] | None = None


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
    they are copied into separate arrays, a cache in 8 bits is widened, and the result is checked.

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
    places = (rows.segment_ids, rows.positions, visible.lengths)
    called = getattr(attention, "func", attention)  # of functools.partial
    if isinstance(called, OwnAttention) or called is pallas_kernels.ragged_attention:
        return attention(qkv, None, None, cached.keys, cached.values, *places, **options)
    kv_heads = cached.keys.shape[2]
    query, fresh = qkv[:, : -2 * kv_heads], qkv[:, -2 * kv_heads :]
    key, value = fresh[:, :kv_heads], fresh[:, kv_heads:]
    caches = (wide_array(x, qkv.dtype) for x in (cached.keys, cached.values))
    out = attention(query, key, value, *caches, *places, **options)
    rule = "attention_implementation must return [rows, heads, head_dim] in the query's dtype"
    return check_alike(rule, out, query)


def resolve_kernels(attention_implementation: str | Callable | None) -> Kernels:
    """Resolves a name, None (the device's default) or the user's own attention to kernels.

    Raises:
        ValueError: an unknown name, or one that the device cannot run.
    """
    if callable(attention_implementation) and not isinstance(attention_implementation, type):
        return Kernels(attention_implementation, OwnUpdate(None))
    try:
        name = choose(attention_implementation, ATTENTIONS)
    except ValueError as error:
        # A kernel called by itself can be interpreted; a run cannot.
        advice = str(error).removesuffix(" or interpret=True")
        raise ValueError(f"attention_{advice}") from None
    return Kernels(OwnAttention(name), OwnUpdate(name if name in UPDATES else None))
