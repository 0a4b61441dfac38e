"""Residual addition and layer normalisation in one pass."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.implementations import choose, with_gradient_of


def add_layer_norm(
    x: Array,  # [rows, size]
    y: Array,  # [rows, size], or [shares, rows, size]
    y_bias: Array | None,  # [size]
    scale: Array | None,  # [size]
    bias: Array | None,  # [size]
    *,
    epsilon: float,
    dtype=None,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """x + y + y_bias in x's dtype, and its layer normalisation, each [rows, size].

    Everything is computed in float32; the sum is rounded to x's dtype before it is
    normalised.

    Args:
        x: [rows, size].
        y: a product [rows, size], or the shares [shares, rows, size] that
            `pallas_kernels.linear_sums` makes of it.
        y_bias: the product's bias, [size]; None: left out.
        scale, bias: the normalisation's affine part, [size] each; None: left out.
        epsilon: added to the variance.
        dtype: of the normalisation; None: x's.
        implementation: "triton" (one launch), "xla", or None: Triton on NVIDIA GPUs of
            compute capability 8.0 and newer, XLA elsewhere.
        interpret: run the Triton kernel in interpret mode, on any device.

    Raises:
        ValueError: unknown implementation, or one that the device cannot run.

    Reference: layer normalisation, arXiv 1607.06450.
    """
    options = {"epsilon": epsilon, "dtype": dtype or x.dtype}
    reference = functools.partial(_xla, **options)
    if choose(implementation, ("triton", "xla"), interpret) == "xla":
        # XLA would add up all that came before anew, in each of the fusions that read x.
        return reference(lax.optimization_barrier(x), y, y_bias, scale, bias)
    launch = functools.partial(_launch, **options, interpret=interpret)
    return with_gradient_of(reference, launch)(x, y, y_bias, scale, bias)


@functools.partial(jax.jit, static_argnames=("epsilon", "dtype", "interpret"))
def _launch(x, y, y_bias, scale, bias, *, epsilon, dtype, interpret):
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


def _xla(x, y, y_bias, scale, bias, *, epsilon, dtype):
    total = add(x, y, y_bias)
    return total, normalise(total, scale, bias, epsilon).astype(dtype)


def normalise(x: Array, scale: Array | None, bias: Array | None, epsilon: float) -> Array:
    """The normalisation alone, in float32: see `add_layer_norm`."""
    out = x.astype(jnp.float32)
    out -= jnp.mean(out, axis=1, keepdims=True)
    out *= lax.rsqrt(jnp.mean(out * out, axis=1, keepdims=True) + epsilon)
    out = out if scale is None else out * scale.astype(jnp.float32)
    return out if bias is None else out + bias.astype(jnp.float32)


def add(x: Array, y: Array, y_bias: Array | None) -> Array:
    """The sum alone: see `add_layer_norm`."""
    y = y.astype(jnp.float32)
    total = x.astype(jnp.float32) + (jnp.sum(y, axis=0) if y.ndim == 3 else y)
    total = total if y_bias is None else total + y_bias.astype(jnp.float32)
    return total.astype(x.dtype)


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
