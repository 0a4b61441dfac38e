"""Rotary positions and the normalisation of queries and keys as one Pallas Triton kernel."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

HEADS = 8  # of a program


@functools.partial(jax.jit, static_argnames=("kv_heads", "epsilon", "offset", "dtype", "interpret"))
def rotate(
    qkv: Array,  # [rows, heads + 2 * kv_heads, head_dim], or [shares, rows, ...]
    vectors: Mapping[str, Array],  # bias, query_scale, key_scale, or left out
    cos: Array,  # float32 [rows, pairs]
    sin: Array,  # float32 [rows, pairs]
    *,
    kv_heads: int,
    epsilon: float,
    offset: float,
    dtype,
    interpret: bool = False,
) -> Array:
    """See `pallas_kernels.rotate_heads`."""
    rows, heads, _ = qkv.shape[-3:]
    kernel = functools.partial(
        _kernel, names=tuple(vectors), kv_heads=kv_heads, epsilon=epsilon, offset=offset
    )
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(heads, HEADS), rows),
        out_shape=jax.ShapeDtypeStruct(qkv.shape[-3:], dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="rotate_heads",
    )(qkv, cos, sin, *vectors.values())


def _kernel(
    qkv_ref,  # [rows, h, head_dim], or [shares, rows, h, head_dim]
    cos_ref,  # [rows, pairs]
    sin_ref,  # [rows, pairs]
    *refs,  # bias [h, head_dim] and scales [head_dim], as named; out [rows, h, head_dim]
    names: tuple[str, ...],
    kv_heads: int,
    epsilon: float,
    offset: float,
):
    *vector_refs, out_ref = refs
    vectors = dict(zip(names, vector_refs, strict=True))
    pairs, (_, heads, head_dim) = cos_ref.shape[1], out_ref.shape
    row, head = pl.program_id(1), pl.program_id(0) * HEADS + jnp.arange(HEADS)[:, None]
    is_query, is_value = head < heads - 2 * kv_heads, head >= heads - kv_heads
    shares = range(qkv_ref.shape[0]) if len(qkv_ref.shape) == 4 else ()

    def part(start, size):
        """Where a part of the heads is, which of a head's numbers exist, and the numbers."""
        at = jnp.arange(pl.next_power_of_2(size))[None, :]
        inside = at < size
        mask = (head < heads) & inside
        load = lambda place: plgpu.load(place, mask=mask, other=0).astype(jnp.float32)
        place = (head, start + at)
        x = sum(load(qkv_ref.at[i, row, *place]) for i in shares)
        x = x if shares else load(qkv_ref.at[row, *place])
        return place, inside, x + load(vectors["bias"].at[place]) if "bias" in vectors else x

    parts = [part(0, pairs), part(pairs, pairs)]
    if head_dim > 2 * pairs:
        parts.append(part(2 * pairs, head_dim - 2 * pairs))
    values = [x for *_, x in parts]
    if "query_scale" in vectors:
        square = sum(jnp.sum(x * x, axis=1, keepdims=True) for x in values) / head_dim
        factor = lax.rsqrt(square + epsilon)

        def normalised(place, inside, x):
            load = lambda name: plgpu.load(vectors[name].at[place[1]], mask=inside, other=0)
            query, key = (load(name).astype(jnp.float32) for name in ("query_scale", "key_scale"))
            return x * jnp.where(is_value, 1, factor * (jnp.where(is_query, query, key) + offset))

        values = [normalised(*one) for one in parts]
    at = jnp.arange(pl.next_power_of_2(pairs))
    angle = lambda ref: plgpu.load(ref.at[row, at], mask=at < pairs, other=0)[None, :]
    cos, sin = jnp.where(is_value, 1, angle(cos_ref)), jnp.where(is_value, 0, angle(sin_ref))
    first, second, *rest = values
    turned = [first * cos - second * sin, second * cos + first * sin, *rest]
    for value, (place, inside, _) in zip(turned, parts, strict=True):
        mask = (head < heads) & inside
        plgpu.store(out_ref.at[row, *place], value.astype(out_ref.dtype), mask=mask)
