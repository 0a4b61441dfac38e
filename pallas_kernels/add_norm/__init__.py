"""Residual addition and normalisation in one pass."""

import functools

from jax import Array, lax

from pallas_kernels.add_norm import triton, xla
from pallas_kernels.add_norm.xla import Norm
from pallas_kernels.common.implementations import choose, with_gradient_of

IMPLEMENTATIONS = {"triton": triton.add_norm, "xla": xla.add_norm}


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
    vectors = {"y_bias": y_bias, "scale": scale, "bias": bias}
    norm = Norm(epsilon, dtype or x.dtype, centred=True)
    return _add_norm(x, y, vectors, norm, implementation, interpret)


def add_rms_norm(
    x: Array,  # [rows, size]
    y: Array,  # [rows, size], or [shares, rows, size]
    y_bias: Array | None,  # [size]
    scale: Array | None,  # [size]
    y_scale: Array | None = None,  # [size]
    *,
    epsilon: float,
    offset: float = 0.0,
    dtype=None,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """x + y + y_bias in x's dtype, and its RMS normalisation, each [rows, size].

        rms_norm(x, scale) = x / sqrt(mean(x ** 2) + epsilon) * (scale + offset)

    With `y_scale` the addend is normalised before it is added, x + rms_norm(y + y_bias, y_scale),
    as in layers that normalise both the input and the output of each part.

    Args:
        x, y, y_bias, dtype, implementation, interpret: as in `add_layer_norm`.
        scale: the scale of the normalisation, [size]; None: 1 - offset.
        y_scale: the scale of the addend's normalisation, [size]; None: it is not normalised.
        epsilon: added to the mean square.
        offset: added to both scales: 1 for weights that are stored as differences from 1.

    Raises:
        ValueError: `implementation` is unknown or the device cannot run it.

    Reference: RMS normalisation, arXiv 1910.07467.
    """
    vectors = {"y_bias": y_bias, "scale": scale, "y_scale": y_scale}
    norm = Norm(epsilon, dtype or x.dtype, centred=False, offset=offset)
    return _add_norm(x, y, vectors, norm, implementation, interpret)


def _add_norm(x, y, vectors: dict[str, Array | None], norm: Norm, implementation, interpret):
    vectors = {name: vector for name, vector in vectors.items() if vector is not None}
    reference = functools.partial(xla.add_norm, norm=norm)
    if choose(implementation, IMPLEMENTATIONS, interpret) == "xla":
        # Without the barrier XLA would recompute x, a sum itself, in each fusion that reads it.
        return reference(lax.optimization_barrier(x), y, vectors)
    kernel = functools.partial(triton.add_norm, norm=norm, interpret=interpret)
    return with_gradient_of(reference, kernel)(x, y, vectors)
