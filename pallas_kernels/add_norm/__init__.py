"""Residual addition and layer normalisation in one pass."""

import functools

from jax import Array, lax

from pallas_kernels.add_norm import triton, xla
from pallas_kernels.common.implementations import choose, with_gradient_of


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
        y: a product [rows, size], or the shares [shares, rows, size] in which
            `pallas_kernels.linear_sums` returns it.
        y_bias: the product's bias, [size]; None: no bias.
        scale, bias: the normalisation's affine parameters, [size] each; None: not applied.
        epsilon: added to the variance.
        dtype: the dtype of the normalisation; None: x's.
        implementation: "triton" (one launch), "xla", or None: Triton on NVIDIA GPUs of
            compute capability 8.0 and newer, XLA elsewhere.
        interpret: run the Triton kernel in interpret mode, on any device.

    Raises:
        ValueError: `implementation` is unknown or the device cannot run it.

    Reference: layer normalisation, arXiv 1607.06450.
    """
    options = {"epsilon": epsilon, "dtype": dtype or x.dtype}
    reference = functools.partial(xla.add_layer_norm, **options)
    if choose(implementation, ("triton", "xla"), interpret) == "xla":
        # Without the barrier XLA would recompute x, a sum itself, in each fusion that reads it.
        return reference(lax.optimization_barrier(x), y, y_bias, scale, bias)
    kernel = functools.partial(triton.add_layer_norm, **options, interpret=interpret)
    return with_gradient_of(reference, kernel)(x, y, y_bias, scale, bias)
