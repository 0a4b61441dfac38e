"""The combination of attention's shares over cut keys, as a Pallas Triton kernel.

Axis legend: see `pallas_kernels.attention.triton`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.attention.tilings import dims_of

COMBINED_HEADS = 4  # most heads of one program
COMBINED_SHARES = 16  # most shares that are read at once
MERGED_PARTS = 16  # parts that are read at once


def combine(
    of_rows: Array,  # int32 [3, r]
    shares: tuple[Array, Array, Array],  # float32 [n, t, k, d], [n, t, k], [n, t, k]
    like: jax.ShapeDtypeStruct,  # [r, h, d]
    *,
    splits: int,
    interpret: bool,
) -> Array:  # [r, h, d]
    """The rows' results; zeros for padding rows.

    Args:
        of_rows: the places of each row's shares: see `work_items.WorkItems`.
        shares: of each item, lane of its tile and K/V head: the weighted values, not yet divided,
            the largest scaled score, the sum of weights.
        like: shape and type of the results.
        splits: the most shares that a row can have.
        interpret: run in interpret mode, on any device.
    """
    rows, heads, _ = like.shape
    group = heads // shares[0].shape[2]
    together = math.gcd(heads, COMBINED_HEADS)
    return pl.pallas_call(
        functools.partial(_kernel, splits=splits, group=group, together=together),
        grid=(heads // together, rows),
        out_shape=like,
        compiler_params=plgpu.CompilerParams(num_warps=2, num_stages=1),
        interpret=interpret,
        name="ragged_attention_combine",
    )(of_rows, *shares)


def _kernel(
    of_rows_ref,  # [3, r]
    share_ref,  # [n, t, k, d]: weighted values, not yet divided
    highest_ref,  # [n, t, k]: largest scaled score
    total_ref,  # [n, t, k]: sum of weights
    out_ref,  # [r, h, d]
    *,
    splits: int,
    group: int,
    together: int,
):
    """One row and `together` heads: the shares weighted by their part of the softmax's sum."""
    row, head_dim = pl.program_id(1), out_ref.shape[2]
    first, count, place = (of_rows_ref[i, row] for i in range(3))
    size = max(2, min(COMBINED_SHARES, pl.next_power_of_2(splits)))
    heads = pl.program_id(0) * together + jnp.arange(together)[None, :]
    lanes, kv_heads = place, heads
    if group > 1:
        lanes, kv_heads = place * group + heads % group, heads // group
    dims = dims_of(head_dim)
    is_dim = dims < head_dim
    expand = lambda index: index if index.ndim == 0 else index[:, :, None]

    def add(block, carry):
        out, top, total = carry
        share = block * size + jnp.arange(size)[:, None]
        mask = jnp.broadcast_to(share < count, (size, together))
        at = (first + share, lanes, kv_heads)
        highest = plgpu.load(highest_ref.at[at], mask=mask, other=-jnp.inf)
        sums = plgpu.load(total_ref.at[at], mask=mask, other=0)
        values = plgpu.load(
            share_ref.at[(*map(expand, at), dims[None, None, :])],
            mask=mask[:, :, None] & is_dim[None, None, :],
            other=0,
        )
        new_top = jnp.maximum(top, jnp.max(highest, axis=0))
        weight = jnp.exp(highest - new_top[None, :])  # exp(-inf) where there is no share
        decay = jnp.exp(top - new_top)
        out = out * decay[:, None] + jnp.sum(values * weight[:, :, None], axis=0)
        return out, new_top, total * decay + jnp.sum(sums * weight, axis=0)

    zeros = lambda *shape: jnp.zeros((together, *shape), jnp.float32)
    carry = zeros(dims.shape[0]), zeros() - jnp.inf, zeros()
    out, _, total = lax.fori_loop(0, pl.cdiv(count, size), add, carry)
    out /= jnp.where(count > 0, total, 1)[:, None]  # zero for padding rows
    plgpu.store(
        out_ref.at[row, heads[0][:, None], dims[None, :]],
        out.astype(out_ref.dtype),
        mask=jnp.broadcast_to(is_dim[None, :], out.shape),
    )


def merge(one, other):
    """Two parts' weighted values, largest scores (in powers of two) and sums of weights, as one.

    The values may be tuples of parts, and the sums may have several columns.
    """
    (out, highest, total), (its_out, its_highest, its_total) = one, other
    top = jnp.maximum(highest, its_highest)
    shift = jnp.where(top == -jnp.inf, 0, top)
    scale, its_scale = jnp.exp2(highest - shift), jnp.exp2(its_highest - shift)
    add = lambda x, y: x * scale[..., None] + y * its_scale[..., None]
    out = jax.tree.map(add, out, its_out)
    if total.ndim > top.ndim:
        return out, top, add(total, its_total)
    return out, top, total * scale + its_total * its_scale


def combine_parts(
    of_rows: Array,  # int32 [3, r]
    parts: tuple[Array, Array, Array],  # float32 [n, t, k, d], [n, t, k], [n, t, k]
    like: jax.ShapeDtypeStruct,  # [r, h, d]
    *,
    interpret: bool,
) -> Array:  # [r, h, d]
    """The rows' results from their parts, merged in order; zeros for padding rows."""
    rows, heads, _ = like.shape
    group = heads // parts[0].shape[2]
    together = math.gcd(heads, COMBINED_HEADS)
    return pl.pallas_call(
        functools.partial(_merge_kernel, group=group, together=together),
        grid=(heads // together, rows),
        out_shape=like,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="ragged_attention_combine",
    )(of_rows, *parts)


def _merge_kernel(of_rows_ref, part_ref, highest_ref, total_ref, out_ref, *, group, together):
    row, head_dim = pl.program_id(1), out_ref.shape[2]
    first, count, place = (of_rows_ref[i, row] for i in range(3))
    heads = pl.program_id(0) * together + jnp.arange(together)
    lanes, kv_heads = place * group + heads % group, heads // group
    dims = dims_of(head_dim)
    is_dim = jnp.broadcast_to(dims < head_dim, (together, dims.shape[0]))

    def add(block, carry):
        parts = []
        for i in range(MERGED_PARTS):  # all are loaded before the first one is merged
            part = block * MERGED_PARTS + i
            at = (first + part, lanes, kv_heads)
            there = jnp.broadcast_to(part < count, lanes.shape)
            highest = plgpu.load(highest_ref.at[at], mask=there, other=-jnp.inf)
            total = plgpu.load(total_ref.at[at], mask=there, other=0)
            place = (first + part, lanes[:, None], kv_heads[:, None], dims[None, :])
            out = plgpu.load(part_ref.at[place], mask=is_dim & there[:, None], other=0)
            parts.append((out, highest, total))
        return functools.reduce(merge, parts, carry)

    zeros = lambda *shape: jnp.zeros((together, *shape), jnp.float32)
    carry = zeros(dims.shape[0]), zeros() - jnp.inf, zeros()
    out, _, total = lax.fori_loop(0, pl.cdiv(count, MERGED_PARTS), add, carry)
    out /= jnp.where(count > 0, total, 1)[:, None]
    place = (row, heads[:, None], dims[None, :])
    plgpu.store(out_ref.at[place], out.astype(out_ref.dtype), mask=is_dim)
