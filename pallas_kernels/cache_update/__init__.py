"""Writes packed K/V rows into a batch of caches, each row at its own place."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from pallas_kernels.cache_update import reference, triton, xla
from pallas_kernels.common.implementations import choose
from pallas_kernels.common.narrow_rows import NarrowRows, round_rows
from pallas_kernels.common.shapes import check_integers, check_packed_heads, check_shapes

IMPLEMENTATIONS = {
    "triton": triton.update_kv_caches,
    "xla": xla.update_kv_caches,
    "reference": reference.update_kv_caches,
}


def update_kv_cache(
    key_cache: Array,  # [batch, max_len, kv_heads, head_dim]
    value_cache: Array,  # [batch, max_len, kv_heads, head_dim]
    key: Array,  # [rows, kv_heads, head_dim]
    value: Array,  # [rows, kv_heads, head_dim]
    segment_ids: Array,  # int32 [rows]
    positions: Array,  # int32 [rows]
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Write row r of `key` and `value` at [segment_ids[r], positions[r]] of the caches.

    Rows whose segment id is `batch` write nothing, nor do rows whose place lies outside of the
    caches; every other entry keeps its bits. Two real rows must not have the same place. Donate
    the caches to the surrounding `jax.jit` to update them in place.

    Args:
        key_cache, value_cache: [batch, max_len, kv_heads, head_dim].
        key, value: the rows to write, [rows, kv_heads, head_dim].
        segment_ids: the sample of each row, int32 [rows]; batch for padding rows.
        positions: the place of each row in its sample's cache, int32 [rows].
        implementation: "triton" (one launch that touches real rows only), "xla" (one
            scatter per cache), "reference", or None: Triton on NVIDIA GPUs of compute
            capability 8.0 and newer, XLA elsewhere.
        interpret: run the Triton kernel in interpret mode, on any device; the
            others ignore it.

    Returns:
        The updated (key_cache, value_cache), in the caches' dtype.

    Raises:
        ValueError: `implementation` is unknown or the device cannot run it; an array has another
            shape than documented, or segment ids or positions are not integers.

    Reference: the unpadded KV cache of EMS-SD, arXiv 2405.07542, section 3.
    """
    keys, values = update_kv_caches(
        [key_cache],
        [value_cache],
        [key],
        [value],
        segment_ids,
        positions,
        implementation=implementation,
        interpret=interpret,
    )
    return keys[0], values[0]


def update_kv_caches(
    key_caches: Sequence[Array | NarrowRows],  # [batch, max_len, kv_heads, head_dim] each
    value_caches: Sequence[Array | NarrowRows],  # [batch, max_len, kv_heads, head_dim] each
    keys: Sequence[Array],  # [rows, kv_heads, head_dim] each
    values: Sequence[Array] | None,  # [rows, kv_heads, head_dim] each
    segment_ids: Array,  # int32 [rows]
    positions: Array,  # int32 [rows]
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """`update_kv_cache` for several layers whose rows go to the same places.

    The Triton kernel writes all layers in one launch: a decoding step writes a few
    kilobytes per layer, too little for a launch of its own.

    Args:
        key_caches, value_caches: the caches of each layer, [batch, max_len, kv_heads, head_dim];
            all of them arrays, or all `NarrowRows`, for which rows are rounded.
        keys, values: the rows of each layer, [rows, kv_heads, head_dim]. If `values` is None,
            `keys` holds queries, keys and values of each layer, [rows, heads + 2 * kv_heads,
            head_dim] with `heads` a multiple of `kv_heads`, as one product computes them; the
            Triton kernel reads them in place.

    Other arguments and errors are those of `update_kv_cache`.

    Returns:
        The updated caches of each layer, in the caches' dtype: (key_caches, value_caches).
    """
    name = choose(implementation, IMPLEMENTATIONS, interpret)
    update = IMPLEMENTATIONS[name]
    check_integers(segment_ids=segment_ids, positions=positions)
    layers = zip(key_caches, value_caches, keys, keys if values is None else values, strict=True)
    for key_cache, value_cache, key, value in layers:
        of_row = "rows kv_heads head_dim"
        rows = [("key", key, of_row), ("value", value, of_row)]
        if values is None:
            rows = [("keys", key, "rows packed_heads head_dim")]
        check_shapes(
            ("key_cache", key_cache, "batch max_len kv_heads head_dim"),
            ("value_cache", value_cache, "batch max_len kv_heads head_dim"),
            *rows,
            ("segment_ids", segment_ids, "rows"),
            ("positions", positions, "rows"),
        )
        if values is None:
            check_packed_heads("keys", key, key_cache.shape[2])
    places = {"segment_ids": segment_ids, "positions": positions, "interpret": interpret}
    if key_caches and isinstance(key_caches[0], NarrowRows) and name != "triton":
        return _update_narrow(update, key_caches, value_caches, keys, values, places)
    new_keys, new_values = update(key_caches, value_caches, keys, values, **places)
    return tuple(new_keys), tuple(new_values)


def _update_narrow(update, key_caches, value_caches, keys, values, places):
    """An update of caches in 8 bits, whose words and scales are written as two sets of caches."""
    kv_heads = key_caches[0].shape[2]
    if values is None:
        values = [packed[:, -kv_heads:] for packed in keys]
        keys = [packed[:, -2 * kv_heads : -kv_heads] for packed in keys]
    format = key_caches[0].format
    rounded = [[round_rows(x, format) for x in rows] for rows in (keys, values)]
    caches = (key_caches, value_caches)
    words_of = lambda narrow: [x.words for x in narrow]
    scales_of = lambda narrow: [x.row_scales[..., None] for x in narrow]
    written = (
        update(*map(part, caches), *map(part, rounded), **places) for part in (words_of, scales_of)
    )
    together = lambda words, scales: NarrowRows.of(words, jnp.squeeze(scales, -1), format)
    new_keys, new_values = (tuple(map(together, *parts)) for parts in zip(*written, strict=True))
    return new_keys, new_values
