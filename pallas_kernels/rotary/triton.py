"""Rotary positions and the normalisation of queries and keys as one Pallas Triton kernel."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

HEADS = 8  # of a program


@functools.partial(jax.jit, static_argnames=("kv_heads", "epsilon", "offset", "interpret"))
def rotate(
    qkv: Array,  # [rows, heads + 2 * kv_heads, head_dim]
    cos: Array,  # float32 [rows, pairs]
    sin: Array,  # float32 [rows, pairs]
    *scales: Array,  # of queries and of keys [head_dim], or none
    kv_heads: int,
    epsilon: float,
    offset: float,
    interpret: bool = False,
) -> Array:
    """See `pallas_kernels.rotate_heads`."""
    rows, heads = qkv.shape[0], qkv.shape[1] - 2 * kv_heads
    return pl.pallas_call(
        functools.partial(_kernel, heads=heads, kv_heads=kv_heads, epsilon=epsilon, offset=offset),
        grid=(pl.cdiv(heads + kv_heads, HEADS), rows),
        out_shape=jax.ShapeDtypeStruct(qkv.shape, qkv.dtype),
        input_output_aliases={0: 0},  # so that values need not be copied
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="rotate_heads",
    )(qkv, cos, sin, *scales)


def _kernel(
    qkv_ref,  # [rows, heads + 2 * kv_heads, head_dim]
    cos_ref,  # [rows, pairs]
    sin_ref,  # [rows, pairs]
    *refs,  # scales of queries and of keys [head_dim], or none; the output, which is qkv
    heads: int,
    kv_heads: int,
    epsilon: float,
    offset: float,
):
    *scale_refs, out_ref = refs
    pairs, head_dim = cos_ref.shape[1], qkv_ref.shape[2]
    row = pl.program_id(1)
    head = pl.program_id(0) * HEADS + jnp.arange(HEADS)
    is_head = head < heads + kv_heads

    def part(start, size):
        """A part of every head: its numbers, where they are in the head, and which exist."""
        at = jnp.arange(pl.next_power_of_2(size))
        mask = is_head[:, None] & (at < size)[None, :]
        place = (row, head[:, None], (start + at)[None, :])
        x = plgpu.load(qkv_ref.at[place], mask=mask, other=0).astype(jnp.float32)
        return x, at, size, place, mask

    parts = [part(0, pairs), part(pairs, pairs)] if pairs else []
    if scale_refs and head_dim > 2 * pairs:
        parts.append(part(2 * pairs, head_dim - 2 * pairs))
    values = [x for x, *_ in parts]
    if scale_refs:
        square = sum(jnp.sum(x * x, axis=1) for x in values) / head_dim
        factor = lax.rsqrt(square + epsilon)[:, None]

        def scaled(x, at, size, place, mask):
            inside = at < size
            load = lambda ref: plgpu.load(ref.at[place[2][0]], mask=inside, other=0)
            query, key = (load(ref).astype(jnp.float32)[None, :] + offset for ref in scale_refs)
            return x * factor * jnp.where((head < heads)[:, None], query, key)

        values = [scaled(*one) for one in parts]
    if pairs:
        at, size = parts[0][1:3]
        angle = lambda ref: plgpu.load(ref.at[row, at], mask=at < size, other=0)[None, :]
        cos, sin = angle(cos_ref), angle(sin_ref)
        first, second, *rest = values
        values = [first * cos - second * sin, second * cos + first * sin, *rest]
    for value, (_, _, _, place, mask) in zip(values, parts, strict=True):
        plgpu.store(out_ref.at[place], value.astype(out_ref.dtype), mask=mask)
