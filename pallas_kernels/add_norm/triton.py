"""Residual addition and layer normalisation as one Pallas Triton kernel."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


@functools.partial(jax.jit, static_argnames=("epsilon", "dtype", "interpret"))
def add_layer_norm(
    x: Array,  # [rows, size]
    y: Array,  # [rows, size], or [shares, rows, size]
    y_bias: Array | None,  # [size]
    scale: Array | None,  # [size]
    bias: Array | None,  # [size]
    *,
    epsilon: float,
    dtype,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `pallas_kernels.add_layer_norm`."""
    vectors = {"y_bias": y_bias, "scale": scale, "bias": bias}
    vectors = {name: vector for name, vector in vectors.items() if vector is not None}
    return pl.pallas_call(
        functools.partial(_kernel, names=tuple(vectors), epsilon=epsilon),
        grid=x.shape[:1],
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, kind) for kind in (x.dtype, dtype)),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="add_layer_norm",
    )(x, y, *vectors.values())


def _kernel(x_ref, y_ref, *refs, names: tuple[str, ...], epsilon: float):
    *vector_refs, total_ref, out_ref = refs
    row, size = pl.program_id(0), x_ref.shape[1]
    at = jnp.arange(pl.next_power_of_2(size))
    mask = at < size
    load = lambda place: plgpu.load(place, mask=mask, other=0).astype(jnp.float32)
    vectors = dict(zip(names, (load(ref.at[at]) for ref in vector_refs), strict=True))
    shares = range(y_ref.shape[0]) if len(y_ref.shape) == 3 else ()
    total = load(x_ref.at[row, at])
    total += sum(load(y_ref.at[i, row, at]) for i in shares) if shares else load(y_ref.at[row, at])
    total += vectors.get("y_bias", 0)
    total = total.astype(x_ref.dtype)
    plgpu.store(total_ref.at[row, at], total, mask=mask)
    total = total.astype(jnp.float32)
    centred = jnp.where(mask, total - jnp.sum(total) / size, 0)
    out = centred * lax.rsqrt(jnp.sum(centred * centred) / size + epsilon)
    out = out * vectors.get("scale", 1) + vectors.get("bias", 0)
    plgpu.store(out_ref.at[row, at], out.astype(out_ref.dtype), mask=mask)
