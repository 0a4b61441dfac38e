"""Residual addition and normalisation in one pass."""

import functools
import importlib
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.add_norm import triton, xla
from pallas_kernels.add_norm.xla import Norm
from pallas_kernels.common.blocks import in_blocks
from pallas_kernels.common.implementations import (
    check_mosaic,
    choose,
    reads_other_devices,
    runs_mosaic,
    with_gradient_of,
)
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
    normalised.

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
            compute capability 8.0 and newer, XLA elsewhere. With an `axis_name`: "mosaic" (Pallas
            Mosaic GPU: one launch in which the devices read each other's parts; jax 0.11, compute
            capability 9.0, one process, and devices whose numbers are their places in the mesh:
            see `pallas_kernels.on_mesh`), or after a collective operation one of the others;
            None: Mosaic for few rows in fast numerics.
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
    rounding = options.pop("rounding")
    implementation, interpret = options["implementation"], options["interpret"]
    reference = functools.partial(xla.add_norm, norm=norm)
    if axis_name is not None:
        over_devices = _over_devices(x, y, axis_name, invariant, **options)
        numerics = "invariant" if invariant else "fast"
        whole = functools.partial(sum_over_devices, axis_name=axis_name, numerics=numerics)
        if over_devices is not None:
            static = {"norm": norm, "axis_name": axis_name, "interpret": interpret}
            kernel = functools.partial(over_devices.add_norm, **static)
            in_xla = lambda x, y, vectors: reference(x, whole(y), vectors)
            return with_gradient_of(in_xla, kernel)(x, y, vectors)
        y = whole(y)
    if choose(implementation, IMPLEMENTATIONS, interpret) == "triton":
        kernel = functools.partial(triton.add_norm, norm=norm, interpret=interpret)
        if rounding is not None and x.shape[1] % GROUP == 0:
            return kernel(x, y, vectors, rounding=rounding)
    elif invariant:
        kernel = functools.partial(_in_blocks, reference)
    else:
        # Without the barrier XLA would recompute x, a sum itself, in each fusion that reads it.
        return reference(lax.optimization_barrier(x), y, vectors)
    return with_gradient_of(reference, kernel)(x, y, vectors)


def _over_devices(
    x, y, axis_name: str, invariant: bool, *, implementation, interpret: bool
) -> ModuleType | None:
    """The kernel that adds the devices' parts up itself; None: a collective operation does.

    Raises:
        ValueError: "mosaic" was asked for, and cannot be.
    """
    asked = implementation == "mosaic"
    if asked:
        check_mosaic(interpret)
    elif implementation is not None or interpret or not runs_mosaic():
        return None
    mosaic = importlib.import_module("pallas_kernels.add_norm.mosaic")
    if mosaic.takes(x, y, lax.axis_size(axis_name)) and not invariant and reads_other_devices():
        return mosaic
    if asked:
        raise ValueError(
            f"implementation 'mosaic' takes {mosaic.TAKES} in fast numerics, in one process whose "
            f"devices are numbered as in the mesh, not an array {x.shape}"
        )
    return None


def _in_blocks(function, x, y, vectors: dict[str, Array]):
    """function(x, y, vectors), computed for a fixed number of rows at a time."""
    return in_blocks(lambda x, y: function(x, y, vectors), x, y, axes=(0, -2))
