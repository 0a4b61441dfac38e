"""Residual addition and layer normalisation in one pass."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.implementations import choose


def add_layer_norm(
    x: Array,  # [rows, size]
    y: Array,  # [rows, size]
    scale: Array | None,  # [size]
    bias: Array | None,  # [size]
    *,
    epsilon: float,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """x + y and its layer normalisation, each [rows, size] in x's dtype.

    The sum is rounded to x's dtype before it is normalised; statistics and
    normalisation are in float32.

    Args:
        scale, bias: the affine part; None: left out.
        epsilon: added to the variance.
        implementation: "triton" (one launch), "xla", or None: Triton on NVIDIA GPUs of
            compute capability 8.0 and newer, XLA elsewhere.
        interpret: run the Triton kernel in interpret mode, on any device.

    Raises:
        ValueError: unknown implementation, or one that the device cannot run.

    Reference: layer normalisation, arXiv 1607.06450.
    """
    if choose(implementation, ("triton", "xla"), interpret) == "xla":
        return _xla(x, y, scale, bias, epsilon)
    affine = [a for a in (scale, bias) if a is not None]
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    kernel = functools.partial(
        _kernel, epsilon=epsilon, scaled=scale is not None, biased=bias is not None
    )
    return pl.pallas_call(
        kernel,
        grid=x.shape[:1],
        out_shape=(shape, shape),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="add_layer_norm",
    )(x, y, *affine)


def _xla(x, y, scale, bias, epsilon):
    total = x + y
    normalised = total.astype(jnp.float32)
    normalised -= jnp.mean(normalised, axis=1, keepdims=True)
    variance = jnp.mean(normalised * normalised, axis=1, keepdims=True)
    normalised *= lax.rsqrt(variance + epsilon)
    if scale is not None:
        normalised *= scale.astype(jnp.float32)
    if bias is not None:
        normalised += bias.astype(jnp.float32)
    return total, normalised.astype(x.dtype)


def _kernel(x_ref, y_ref, *refs, epsilon: float, scaled: bool, biased: bool):
    *affine, total_ref, normalised_ref = refs
    row, size = pl.program_id(0), x_ref.shape[1]
    at = jnp.arange(pl.next_power_of_2(size))
    mask = at < size
    load = lambda place: plgpu.load(place, mask=mask, other=0)
    affine = [load(ref.at[at]).astype(jnp.float32) for ref in affine]
    total = load(x_ref.at[row, at]) + load(y_ref.at[row, at])
    plgpu.store(total_ref.at[row, at], total, mask=mask)
    total = total.astype(jnp.float32)
    centred = jnp.where(mask, total - jnp.sum(total) / size, 0)
    out = centred * lax.rsqrt(jnp.sum(centred * centred) / size + epsilon)
    if scaled:
        out = out * affine[0]
    if biased:
        out = out + affine[-1]
    plgpu.store(normalised_ref.at[row, at], out.astype(normalised_ref.dtype), mask=mask)
