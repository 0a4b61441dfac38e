"""Residual addition and normalisation in one pass."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.add_norm import triton, xla
from pallas_kernels.add_norm.xla import Norm
from pallas_kernels.common.blocks import in_blocks
from pallas_kernels.common.implementations import choose, with_gradient_of
from pallas_kernels.common.numerics import is_invariant
from pallas_kernels.matmul.narrow import GROUP
from pallas_kernels.matmul.rounded import RoundedRows, Rounding

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
    axis_name: str | None = None,
    rounding: Rounding | None = None,
    implementation: str | None = None,
    interpret: bool = False,
    numerics: str | None = None,
) -> tuple[Array, Array | RoundedRows]:
    """x + y + y_bias in x's dtype, and its layer normalisation, each [rows, size].

    Everything is computed in float32; the sum is rounded to x's dtype before it is
    normalised. Where the kernel adds the parts of several devices up itself, each is rounded to y's
    dtype before.

    Args:
        x: [rows, size].
        y: a product [rows, size], or the shares [shares, rows, size] in which
            `pallas_kernels.linear_sums` returns it.
        y_bias: the product's bias, [size]; None: no bias.
        scale, bias: the normalisation's affine parameters, [size] each; None: not applied.
        epsilon: added to the variance.
        dtype: the dtype of the normalisation; None: x's.
        axis_name: every device on this axis of a mesh has a part of y, and all parts are added.
            The function is then called on every device, as by `jax.shard_map`. None: y is whole.
        rounding: of `pallas_kernels.rounding_for`: the Triton kernel then returns the normalised
            rows as that product takes them, and whatever else computes them ignores it.
        implementation: "triton" (one launch), "xla", or None: Triton on NVIDIA GPUs of
            compute capability 8.0 and newer, XLA elsewhere. With an `axis_name` the devices' parts
            are added by a collective operation first, or, for few rows in fast numerics, by the
            Triton kernel itself, which writes them to the other devices' memory: inside
            `pallas_kernels.on_mesh`, if the axis is the mesh's only one.
        interpret: run the Triton kernel in interpret mode, on any device.
        numerics: "fast" or "invariant": see `pallas_kernels.numerics`; None: the context's.

    Raises:
        ValueError: `implementation` or `numerics` is unknown, the device cannot run it, or the
            rounding is for fewer rows.

    Reference: layer normalisation, arXiv 1607.06450.
    """
    vectors = {"y_bias": y_bias, "scale": scale, "bias": bias}
    norm = Norm(epsilon, dtype or x.dtype, centred=True)
    options = {"implementation": implementation, "interpret": interpret, "rounding": rounding}
    return _add_norm(x, y, vectors, norm, axis_name, is_invariant(numerics), options)


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
    axis_name: str | None = None,
    rounding: Rounding | None = None,
    implementation: str | None = None,
    interpret: bool = False,
    numerics: str | None = None,
) -> tuple[Array, Array | RoundedRows]:
    """x + y + y_bias in x's dtype, and its RMS normalisation, each [rows, size].

        rms_norm(x, scale) = x / sqrt(mean(x ** 2) + epsilon) * (scale + offset)

    With `y_scale` the addend is normalised before it is added, x + rms_norm(y + y_bias, y_scale),
    as in layers that normalise both the input and the output of each part.

    Args:
        x, y, y_bias, dtype, axis_name, rounding, implementation, interpret, numerics: as in
            `add_layer_norm`.
        scale: the scale of the normalisation, [size]; None: 1 - offset.
        y_scale: the scale of the addend's normalisation, [size]; None: it is not normalised.
        epsilon: added to the mean square.
        offset: added to both scales: 1 for weights that are stored as differences from 1.

    Raises:
        ValueError: see `add_layer_norm`.

    Reference: RMS normalisation, arXiv 1910.07467.
    """
    vectors = {"y_bias": y_bias, "scale": scale, "y_scale": y_scale}
    norm = Norm(epsilon, dtype or x.dtype, centred=False, offset=offset)
    options = {"implementation": implementation, "interpret": interpret, "rounding": rounding}
    return _add_norm(x, y, vectors, norm, axis_name, is_invariant(numerics), options)


def sum_over_devices(y: Array, axis_name: str, *, numerics: str | None = None) -> Array:
    """The float32 sum of all devices' parts of a term; in invariant numerics its terms,
    [devices, r, e].

    The terms are then to be added in the devices' order, while the order in which a library for
    collective operations adds depends on the size of the array.

    Args:
        y: this device's part, [r, e], or the shares [shares, r, e] of it.
        axis_name: the axis of the mesh on which the devices are.
        numerics: "fast" or "invariant": see `pallas_kernels.numerics`; None: the context's.
    """
    invariant = is_invariant(numerics)
    y = y.astype(jnp.float32)
    if y.ndim == 3:
        y = functools.reduce(jnp.add, y) if invariant else y.sum(axis=0)
    return lax.all_gather(y, axis_name) if invariant else lax.psum(y, axis_name)


def _add_norm(
    x,
    y,
    vectors: dict[str, Array | None],
    norm: Norm,
    axis_name: str | None,
    invariant: bool,
    options: dict[str, Any],
):
    vectors = {name: vector for name, vector in vectors.items() if vector is not None}
    implementation, interpret = options["implementation"], options["interpret"]
    is_triton = choose(implementation, IMPLEMENTATIONS, interpret) == "triton"
    rounding = options["rounding"] if is_triton and x.shape[1] % GROUP == 0 else None
    reference = plain = functools.partial(xla.add_norm, norm=norm)
    exchange = {}
    if axis_name is not None:
        numerics = "invariant" if invariant else "fast"
        whole = functools.partial(sum_over_devices, axis_name=axis_name, numerics=numerics)
        inboxes, devices = None, lax.axis_size(axis_name)
        if is_triton and not (invariant or interpret):
            inboxes = triton.inboxes_for(x, y, rounding, devices)
        if inboxes is None:
            y = whole(y)
        else:
            exchange = {"inboxes": inboxes, "axis_name": axis_name}
            reference = lambda x, y, vectors: plain(x, whole(y), vectors)
    if is_triton:
        static = {"norm": norm, "rounding": rounding, "interpret": interpret, **exchange}
        kernel = functools.partial(triton.add_norm, **static)
        if exchange:  # each row of a launch has an inbox of its own
            kernel = jax.custom_batching.sequential_vmap(kernel)
        if rounding is not None:
            return kernel(x, y, vectors)
    elif invariant:
        kernel = functools.partial(_in_blocks, reference)
    else:
        # Without the barrier XLA would recompute x, a sum itself, in each fusion that reads it.
        return reference(lax.optimization_barrier(x), y, vectors)
    return with_gradient_of(reference, kernel)(x, y, vectors)


def _in_blocks(function, x, y, vectors: dict[str, Array]):
    """function(x, y, vectors), computed for a fixed number of rows at a time."""
    return in_blocks(lambda x, y: function(x, y, vectors), x, y, axes=(0, -2))
