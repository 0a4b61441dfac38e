"""Residual addition and normalisation as one Pallas Triton kernel."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.add_norm.xla import Norm


@functools.partial(jax.jit, static_argnames=("norm", "interpret"))
def add_norm(
    x: Array,  # [rows, size]
    y: Array,  # [rows, size], or [shares, rows, size]
    vectors: Mapping[str, Array],  # y_bias, scale, bias, y_scale: [size] each, or left out
    *,
    norm: Norm,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `pallas_kernels.add_layer_norm` and `pallas_kernels.add_rms_norm`."""
    return pl.pallas_call(
        functools.partial(_kernel, names=tuple(vectors), norm=norm),
        grid=x.shape[:1],
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, kind) for kind in (x.dtype, norm.dtype)),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="add_layer_norm" if norm.centred else "add_rms_norm",
    )(x, y, *vectors.values())


def _kernel(x_ref, y_ref, *refs, names: tuple[str, ...], norm: Norm):
    *vector_refs, total_ref, out_ref = refs
    row, size = pl.program_id(0), x_ref.shape[1]
    at = jnp.arange(pl.next_power_of_2(size))
    mask = at < size
    load = lambda place: plgpu.load(place, mask=mask, other=0).astype(jnp.float32)
    vectors = dict(zip(names, (load(ref.at[at]) for ref in vector_refs), strict=True))

    def normalised(x, scale: str):
        if norm.centred:
            x = jnp.where(mask, x - jnp.sum(x) / size, 0)
        x = x * lax.rsqrt(jnp.sum(x * x) / size + norm.epsilon)
        return x * (vectors[scale] + norm.offset) if scale in vectors else x

    shares = range(y_ref.shape[0]) if len(y_ref.shape) == 3 else ()
    total = load(x_ref.at[row, at])
    y = sum(load(y_ref.at[i, row, at]) for i in shares) if shares else load(y_ref.at[row, at])
    if "y_scale" in vectors:
        total += normalised(y + vectors.get("y_bias", 0), "y_scale")
    else:
        total += y
        total += vectors.get("y_bias", 0)
    total = total.astype(x_ref.dtype)
    plgpu.store(total_ref.at[row, at], total, mask=mask)
    out = normalised(total.astype(jnp.float32), "scale") + vectors.get("bias", 0)
    plgpu.store(out_ref.at[row, at], out.astype(out_ref.dtype), mask=mask)
