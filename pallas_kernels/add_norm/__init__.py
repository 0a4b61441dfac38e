"""Residual addition and normalisation in one pass."""

import functools
import importlib
from typing import Any

from jax import Array, lax

from pallas_kernels.add_norm import triton, xla
from pallas_kernels.add_norm.exchange import Exchange, sum_over_devices
from pallas_kernels.add_norm.xla import Norm
from pallas_kernels.common.blocks import in_blocks
from pallas_kernels.common.implementations import choose, with_gradient_of
from pallas_kernels.common.numerics import is_invariant

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
    over: Exchange | None = None,
    implementation: str | None = None,
    interpret: bool = False,
    numerics: str | None = None,
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
        over: every one of these devices has a part of y, and all parts are added. The function is
            then called on every device, as by `jax.shard_map`. None: y is whole.
        implementation: "triton" (one launch), "xla", or None: Triton on NVIDIA GPUs of
            compute capability 8.0 and newer, XLA elsewhere. With `over`, which has its own, it is
            that of the launch after a collective operation.
        interpret: run the Triton kernel in interpret mode, on any device.
        numerics: "fast" or "invariant": see `pallas_kernels.numerics`; None: the context's.

    Raises:
        ValueError: `implementation` or `numerics` is unknown, or the device cannot run it.

    Reference: layer normalisation, arXiv 1607.06450.
    """
    vectors = {"y_bias": y_bias, "scale": scale, "bias": bias}
    norm = Norm(epsilon, dtype or x.dtype, centred=True)
    options = {"implementation": implementation, "interpret": interpret}
    return _add_norm(x, y, vectors, norm, over, is_invariant(numerics), options)


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
    over: Exchange | None = None,
    implementation: str | None = None,
    interpret: bool = False,
    numerics: str | None = None,
) -> tuple[Array, Array]:
    """x + y + y_bias in x's dtype, and its RMS normalisation, each [rows, size].

        rms_norm(x, scale) = x / sqrt(mean(x ** 2) + epsilon) * (scale + offset)

    With `y_scale` the addend is normalised before it is added, x + rms_norm(y + y_bias, y_scale),
    as in layers that normalise both the input and the output of each part.

    Args:
        x, y, y_bias, dtype, over, implementation, interpret, numerics: as in `add_layer_norm`.
        scale: the scale of the normalisation, [size]; None: 1 - offset.
        y_scale: the scale of the addend's normalisation, [size]; None: it is not normalised.
        epsilon: added to the mean square.
        offset: added to both scales: 1 for weights that are stored as differences from 1.

    Raises:
        ValueError: `implementation` or `numerics` is unknown, or the device cannot run it.

    Reference: RMS normalisation, arXiv 1910.07467.
    """
    vectors = {"y_bias": y_bias, "scale": scale, "y_scale": y_scale}
    norm = Norm(epsilon, dtype or x.dtype, centred=False, offset=offset)
    options = {"implementation": implementation, "interpret": interpret}
    return _add_norm(x, y, vectors, norm, over, is_invariant(numerics), options)


def _add_norm(
    x,
    y,
    vectors: dict[str, Array | None],
    norm: Norm,
    over: Exchange | None,
    invariant: bool,
    options: dict[str, Any],
):
    vectors = {name: vector for name, vector in vectors.items() if vector is not None}
    implementation, interpret = options["implementation"], options["interpret"]
    reference = functools.partial(xla.add_norm, norm=norm)
    if over is not None:
        if over.buffers is not None:
            mosaic = importlib.import_module("pallas_kernels.add_norm.mosaic")
            static = {"norm": norm, "axis_name": over.axis_name, "interpret": over.interpret}
            return mosaic.add_norm(x, y, vectors, over.buffers, **static)
        numerics = "invariant" if invariant else "fast"
        y = sum_over_devices(y, over.axis_name, numerics=numerics)
    if choose(implementation, IMPLEMENTATIONS, interpret) == "triton":
        kernel = functools.partial(triton.add_norm, norm=norm, interpret=interpret)
    elif invariant:
        kernel = functools.partial(_in_blocks, reference)
    else:
        # Without the barrier XLA would recompute x, a sum itself, in each fusion that reads it.
        return reference(lax.optimization_barrier(x), y, vectors)
    return with_gradient_of(reference, kernel)(x, y, vectors)


def _in_blocks(function, x, y, vectors: dict[str, Array]):
    """function(x, y, vectors), computed for a fixed number of rows at a time."""
    return in_blocks(lambda x, y: function(x, y, vectors), x, y, axes=(0, -2))
