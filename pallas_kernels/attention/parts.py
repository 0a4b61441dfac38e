"""Attention of a tile in parts of keys at fixed places: bits depend on a row's sequence alone.

Part i of a sequence holds its keys i * PART_KEYS to (i + 1) * PART_KEYS - 1, whether they are
committed or fresh. A part's softmax is computed by itself, and the parts are merged in their order,
in one program or, where keys are cut into shares, by a second launch. A matrix unit adds up several
keys at once, which are the same whether a key is committed or fresh. It computes the weighted
values and, as a product with ones, the sum of weights. What a row does not see weighs exactly
nothing.

Axis legend: see `pallas_kernels.attention.triton`.
"""

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.attention.combine import merge
from pallas_kernels.attention.share import loop, product, scaled, scores_of, zeros_of_parts
from pallas_kernels.attention.tile import Tile

SUMS = 16  # columns of the sums of weights, all alike: the fewest that a product can have


def attend_parts(tile: Tile, *, decoding: bool) -> None:
    """Reads the parts of the tile's work item; stores the results, or each part.

    Args:
        tile: the tile.
        decoding: whether few rows are fresh, so that the parts that hold some are few as well.
    """
    item, keys, window = tile.item, tile.tiling.keys, tile.launch.window
    key_end, fresh_end = item["key_end"], item["fresh_end"]
    merges = len(tile.places.outputs) == 1
    static = {"scale": tile.launch.scale, "exp2": tile.exp2}
    softmax = functools.partial(_softmax_of_part, tile.query, **static)

    def finish(part, carry, own):
        if merges:
            return merge(carry, own)
        out, highest, totals = own
        tile.store_share(place_of(tile, part), out, highest, _any_of(totals))
        return carry

    def in_window(at):
        return None if window is None else at >= tile.first_seen

    def sees(at, visible=None):
        """Which lanes see the keys at these places, of those that are visible; None: all do."""
        if window is None:
            return visible
        near = at[None, :] >= tile.lowest[:, None]
        return near if visible is None else visible & near

    def whole_part(part, carry, *, load):
        at = part * keys + jnp.arange(keys)
        keys_at, values_at, *scales = load(at, in_window(at))
        return finish(part, carry, softmax(keys_at, values_at, sees(at), *scales))

    def committed(at, defined):
        loaded = (tile.load_cached(which, at, defined) for which in (0, 1))
        (keys_at, key_scales), (values_at, value_scales) = loaded
        return keys_at, values_at, key_scales, value_scales

    def fresh(at, defined):
        return tile.load_fresh(at - key_end, defined)

    def mixed_part(part, carry):
        """A part with fresh rows that not all lanes see; it may begin with committed keys."""
        at = part * keys + jnp.arange(keys)
        row = at - key_end
        is_old, is_new = row < 0, (row >= 0) & (row < fresh_end)
        if window is not None:
            is_old &= in_window(at)
        *old, key_scales, value_scales = committed(jnp.where(is_old, at, 0), is_old)
        loaded = tile.load_fresh(jnp.where(is_new, row, 0), is_new, old)
        # A fresh row's scale is 1, and that of a key which no row sees anything finite.
        scales = (x if x is None else jnp.where(is_old, x, 1) for x in (key_scales, value_scales))
        visible = jnp.where(is_new[None, :], tile.descends(row), is_old[None, :])
        return finish(part, carry, softmax(*loaded, sees(at, visible), *scales))

    zeros = lambda *width: jnp.zeros((tile.tiling.rows, *width), jnp.float32)
    carry = (zeros_of_parts(tile), zeros() - jnp.inf, zeros(SUMS))
    carry = carry if merges else ()
    begin, mixed = item["key_begin"] // keys, key_end // keys
    if window is not None and merges:
        begin = jnp.maximum(begin, tile.first_seen // keys)
    end = jnp.where(fresh_end > 0, pl.cdiv(key_end + fresh_end, keys), 0)
    carry = loop(begin, mixed, whole_part, carry, load=committed)
    if not decoding and "ancestors" not in tile.places.masks:
        # Behind the part that holds both, there are fresh rows which all lanes see.
        whole = pl.cdiv(key_end, keys)
        carry = _plain_loop(mixed, jnp.minimum(whole, end), mixed_part, carry)
        mixed = jnp.maximum(whole, (key_end + item["before"]) // keys)
        carry = loop(whole, jnp.minimum(mixed, end), whole_part, carry, load=fresh)
    carry = _plain_loop(mixed, end, mixed_part, carry)
    if merges:
        out, _, totals = carry
        tile.store_rows([part / _any_of(totals)[:, None] for part in out])


def place_of(tile: Tile, part):
    """Where a part of the tile's is stored: see `work_items.part_places`."""
    launch, outputs = tile.launch, tile.places.outputs
    batch = tile.places.cached[0].shape[0]
    num_parts = outputs[0].shape[0] // (batch * launch.max_tiles)
    own = tile.item["before"] // (tile.tiling.rows // launch.group)
    return (tile.item["sample"] * launch.max_tiles + own) * num_parts + part


def _softmax_of_part(
    query, keys, values, visible, key_scales=None, value_scales=None, *, scale, exp2
):
    """A part's weighted values, largest score (in powers of two) and sums of weights [t, SUMS]."""
    exponent, scores = scale * math.log2(math.e), scores_of(query, keys)
    if key_scales is not None:
        scores *= key_scales[None, :]
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    highest = jnp.max(scores, axis=1) * exponent
    shift = jnp.where(highest == -jnp.inf, 0, highest)
    weights = exp2(scores * exponent - shift[:, None])
    weights = weights.astype(values[0].dtype)
    # Before the other product: Triton divides both among warps as suits the one that comes last.
    totals = product(weights, jnp.ones((weights.shape[1], SUMS), weights.dtype))
    weights = scaled(weights, value_scales)
    return tuple(product(weights, part) for part in values), highest, totals


def _any_of(totals):
    """[t], of [t, SUMS] whose columns are alike."""
    return jnp.max(totals, axis=1)


def _plain_loop(begin, end, body, carry):
    """`fori_loop` in a form that Triton does not pipeline, for few iterations."""
    step = lambda state: (state[0] + 1, body(state[0], state[1]))
    return lax.while_loop(lambda state: state[0] < end, step, (begin, carry))[1]
