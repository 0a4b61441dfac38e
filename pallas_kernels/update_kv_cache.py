"""Scatter of packed K/V rows into a batch of caches, each row at its own place."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from pallas_kernels import reference, update_kv_cache_triton
from pallas_kernels.implementations import choose
from pallas_kernels.shapes import check_integers, check_shapes


def update_kv_cache(
    key_cache: Array,  # [batch, max_len, heads, head_dim]
    value_cache: Array,  # [batch, max_len, heads, head_dim]
    key: Array,  # [rows, heads, head_dim]
    value: Array,  # [rows, heads, head_dim]
    segment_ids: Array,  # int32 [rows]
    positions: Array,  # int32 [rows]
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Write row r of `key` and `value` at [segment_ids[r], positions[r]] of the caches.

    Rows whose segment id is `batch` write nothing; every other entry keeps its
    bits. Two real rows must not name the same place. Donate the caches to the
    surrounding `jax.jit` to update them in place.

    Args:
        key_cache, value_cache: [batch, max_len, heads, head_dim].
        key, value: of the rows, [rows, heads, head_dim].
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
        ValueError: unknown implementation, or one that the device cannot run; arrays of other
            shapes than said, or segment ids or positions that are no integers.

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
    key_caches: Sequence[Array],  # [batch, max_len, heads, head_dim] each
    value_caches: Sequence[Array],  # [batch, max_len, heads, head_dim] each
    keys: Sequence[Array],  # [rows, heads, head_dim] each
    values: Sequence[Array] | None,  # [rows, heads, head_dim] each
    segment_ids: Array,  # int32 [rows]
    positions: Array,  # int32 [rows]
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """`update_kv_cache` for several layers whose rows go to the same places.

    Through Triton all layers share a launch: a decoding step writes a few
    kilobytes per layer, less than a launch each is worth.

    Args:
        key_caches, value_caches: of each layer, [batch, max_len, heads, head_dim].
        keys, values: of each layer's rows, [rows, heads, head_dim]. Without values `keys` holds
            queries, keys and values of each layer, [rows, 3, heads, head_dim], as one product
            makes them; the Triton kernel reads them there.

    Other arguments and errors are those of `update_kv_cache`.

    Returns:
        The updated caches of each layer, in the caches' dtype: (key_caches, value_caches).
    """
    name = choose(implementation, IMPLEMENTATIONS, interpret)
    update = IMPLEMENTATIONS[name]
    if name == "triton":
        update = functools.partial(update, interpret=interpret)
    check_integers(segment_ids=segment_ids, positions=positions)
    of_row = "rows 3 heads head_dim" if values is None else "rows heads head_dim"
    layers = zip(key_caches, value_caches, keys, keys if values is None else values, strict=True)
    for key_cache, value_cache, key, value in layers:
        check_shapes(
            ("key_cache", key_cache, "batch max_len heads head_dim"),
            ("value_cache", value_cache, "batch max_len heads head_dim"),
            ("key", key, of_row),
            ("value", value, of_row),
            ("segment_ids", segment_ids, "rows"),
            ("positions", positions, "rows"),
        )
    rows = keys if values is None else [*keys, *values]
    if values is None and name != "triton":
        rows = [qkv[:, kind] for kind in (1, 2) for qkv in keys]
    caches = update([*key_caches, *value_caches], rows, segment_ids, positions)
    return tuple(caches[: len(key_caches)]), tuple(caches[len(key_caches) :])


def _scatter(caches, rows, segment_ids, positions):
    batch, max_len = caches[0].shape[:2]
    # Distinct out-of-range places keep the promise of unique indices.
    dropped = max_len + jnp.arange(segment_ids.shape[0], dtype=positions.dtype)
    positions = jnp.where(segment_ids < batch, positions, dropped)
    return [
        cache.at[segment_ids, positions].set(
            new.astype(cache.dtype),
            mode="drop",
            unique_indices=True,
            wrap_negative_indices=False,
        )
        for cache, new in zip(caches, rows, strict=True)
    ]


def _reference(caches, rows, segment_ids, positions):
    return [
        reference.update_kv_cache(cache, cache, new, new, segment_ids, positions)[0]
        for cache, new in zip(caches, rows, strict=True)
    ]


IMPLEMENTATIONS = {
    "triton": update_kv_cache_triton.update,
    "xla": _scatter,
    "reference": _reference,
}
