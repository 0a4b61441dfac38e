"""Attention of a tile over a share of its keys, in the order that is fastest for the launch.

Axis legend: see `pallas_kernels.attention.triton`.
"""

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.attention.tile import Tile, last
from pallas_kernels.common.implementations import matmul_precision


def attend_share(tile: Tile, *, decoding: bool, one_block: bool) -> None:
    """Reads the keys of the tile's work item and stores the results, or the share.

    Args:
        tile: the tile.
        decoding: whether the fresh rows are read in tiles, in the end.
        one_block: whether one of these holds all fresh rows.
    """
    item, keys, window, masks = tile.item, tile.tiling.keys, tile.launch.window, tile.places.masks
    attend = functools.partial(_attend, tile.query, scale=tile.launch.scale, exp2=tile.exp2)
    fresh_end, key_end = item["fresh_end"], item["key_end"]

    def fresh_keys(at):
        return tile.load_fresh(jnp.minimum(at, last(fresh_end)))

    def fresh_visible(at):
        visible = (at < fresh_end)[None, :]
        if window is not None:
            row = tile.sample_row + jnp.minimum(at, last(fresh_end))
            visible &= plgpu.load(masks["positions"].at[row])[None, :] >= tile.lowest[:, None]
        return visible & tile.descends(at)

    def committed_block(block, carry, *, masked):
        at = block * keys + jnp.arange(keys)
        visible = at < key_end if masked else None
        place = jnp.minimum(at, key_end - 1) if masked else at
        defined = None
        if "cache" in masks:
            seen = plgpu.load(masks["cache"].at[item["sample"], place]) != 0
            defined = visible = visible & seen
        if window is not None:
            entry = at
            if "entries" in masks:
                entry = plgpu.load(masks["entries"].at[item["sample"], place])
            defined = visible = visible & (entry >= tile.first_seen)
        (keys_at, key_scales), (values_at, value_scales) = (
            tile.load_cached(which, place, defined) for which in (0, 1)
        )
        if visible is not None:
            visible = visible[None, :]
        if window is not None:
            visible &= entry[None, :] >= tile.lowest[:, None]
        return attend(carry, keys_at, values_at, visible, key_scales, value_scales)

    def fresh_block(block, carry, *, masked):
        at = block * keys + jnp.arange(keys)
        return attend(carry, *fresh_keys(at), fresh_visible(at) if masked else None)

    def fresh_tile(block, carry):
        at = block * tile.tiling.rows + tile.lane
        return attend(carry, *fresh_keys(at), fresh_visible(at))

    begin, end = item["key_begin"] // keys, pl.cdiv(key_end, keys)
    if window is not None and "entries" not in masks:
        begin = jnp.maximum(begin, tile.first_seen // keys)
    carry = _start(tile)
    if decoding:
        # Fetched before the long loop, needed after it; registers hold them as they are.
        fresh = tile.fetch_fresh(jnp.minimum(tile.lane, last(fresh_end)))
        carry = loop(begin, end, committed_block, carry, masked=True)
        fresh, visible = tile.as_cached(fresh), fresh_visible(tile.lane)
        carry = attend(_sum_total(carry), *fresh, visible)
        if not one_block:
            carry = loop(1, pl.cdiv(fresh_end, tile.tiling.rows), fresh_tile, carry)
    else:
        if "cache" not in masks and window is None:
            full = key_end // keys
            carry = loop(begin, full, committed_block, carry, masked=False)
            begin = full
        carry = loop(begin, end, committed_block, carry, masked=True)
        first, full = 0, item["before"] // keys
        if "ancestors" in masks or window is not None:
            full = 0
        if "ancestors" not in masks and window is not None:
            first = jnp.maximum(item["before"] - window + 1, 0) // keys
        carry = loop(0, full, fresh_block, carry, masked=False)
        end = pl.cdiv(fresh_end, keys)
        carry = loop(jnp.maximum(first, full), end, fresh_block, carry, masked=True)
    out, highest, total = _sum_total(carry)
    if len(tile.places.outputs) == 1:
        tile.store_rows([part / total for part in out])
    else:
        highest, total = highest * tile.launch.scale, jnp.sum(total, axis=1)
        tile.store_share(tile.index, out, highest, total)


def _attend(
    query, carry, keys, values, visible, key_scales=None, value_scales=None, *, scale, exp2
):
    """One block of keys: the softmax so far as (weighted values, largest score, weights).

    Queries, keys and values are tuples of parts: see `Tile`. Keys and values may have scales [m];
    None: they are 1.
    """
    out, highest, total = carry
    scores = scores_of(query, keys)  # scaled in the exponent, as one multiply-add
    if key_scales is not None:
        scores *= key_scales[None, :]
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    new_highest = jnp.maximum(highest, jnp.max(scores, axis=1))
    shift = new_highest
    if visible is not None:  # rows that see nothing yet must not turn into inf - inf
        shift = jnp.where(new_highest == -jnp.inf, 0, new_highest)
    exponent = scale * math.log2(math.e)
    weights = exp2(scores * exponent - (shift * exponent)[:, None])
    decay = exp2((highest - shift) * exponent)[:, None]
    # Weights are summed over keys once, at the end, where blocks are of one size.
    added = weights if total.shape == weights.shape else jnp.sum(weights, axis=1, keepdims=True)
    weights = scaled(weights.astype(values[0].dtype), value_scales)
    out = tuple(
        part * decay + product(weights, its_values)
        for part, its_values in zip(out, values, strict=True)
    )
    return out, new_highest, total * decay + added


def scores_of(query, keys):
    """Scores [t, m] of queries and keys in parts, not yet scaled."""
    products = [product(one, other.T) for one, other in zip(query, keys, strict=True)]
    return functools.reduce(jnp.add, products)


def product(x, y):
    """x @ y in float32."""
    precision = matmul_precision(x.dtype)
    return jnp.dot(x, y, precision=precision, preferred_element_type=jnp.float32)


def scaled(weights, scales):
    """Weights [t, m] times the scales [m] of their values; None: these are 1."""
    return weights if scales is None else weights * scales.astype(weights.dtype)[None, :]


def _start(tile: Tile):
    rows, keys = tile.tiling.rows, tile.tiling.keys
    zeros = lambda width: jnp.zeros((rows, width), jnp.float32)
    highest = jnp.full(rows, -jnp.inf, jnp.float32)
    return zeros_of_parts(tile), highest, zeros(keys)


def zeros_of_parts(tile: Tile):
    """Zeros for the weighted values of a tile's rows."""
    zeros = jnp.zeros((tile.tiling.rows, tile.dims.shape[1]), jnp.float32)
    return (zeros,) * tile.num_parts


def _sum_total(carry):
    out, highest, total = carry
    return out, highest, jnp.sum(total, axis=1, keepdims=True)


def loop(begin, end, body, carry, **static):
    """`fori_loop` from `begin`, counted from zero: the form that Triton pipelines."""
    step = lambda i, carry: body(begin + i, carry, **static)
    return lax.fori_loop(0, jnp.maximum(end - begin, 0), step, carry)
