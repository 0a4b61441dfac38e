"""Products of packed rows with a weight matrix."""

import functools
import importlib
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.implementations import choose, runs_triton, with_gradient_of
from pallas_kernels.matmul import xla
from pallas_kernels.matmul.activations import ACTIVATIONS, FUSED

KERNELS = ("triton", "mosaic")  # modules beside this one, imported when they are used
XLA_SHARES = 2
# More rows were not measured. In steps of four layers of OPT-6.7B (bfloat16, H200, jax 0.11.2)
# shares made all kernels together, 2099 to 2220 us, faster by 54 us at 360 and at 368 rows, by 49
# at 376, 91 at 392 and 43 at 408: XLA itself splits some of these products, in float32, and adds
# the shares up in another launch. bfloat16 shares took 16 us less than float32 ones at 144 rows, 18
# at 160 and 27 at 344. To measure this, compare profiles with the limit at 256 and at 512:
# `python -m emsjax.benchmarks.step --layers 4 --shapes 43x8,45x8,47x8,51x8`.
MAX_ROWS_IN_SHARES = 408


def linear(
    x: Array,  # [rows, inputs]
    weight: Array,  # [inputs, outputs]
    bias: Array | None = None,  # [outputs]
    *,
    activation: str | None = None,
    gated: bool = False,
    implementation: str | None = None,
    interpret: bool = False,
) -> Array:
    """activation(x @ weight + bias), or a gated product.

    With `gated` the columns of `weight` and `bias` are two halves, gate and up:

        activation(x @ gate + gate_bias) * (x @ up + up_bias)

    Args:
        x: [rows, inputs].
        weight: [inputs, outputs], or [inputs, 2 * outputs] if `gated`.
        bias: one number per column of `weight`; None: no bias.
        activation: "relu", "silu", "gelu" (with the error function), "gelu_tanh" (its
            approximation), or None.
        gated: whether the product is gated.
        implementation: "triton" (at most 128 rows; it reads the weights once), "mosaic"
            (Pallas Mosaic GPU: 16-bit numbers, rows in multiples of 8, jax 0.11 and
            compute capability 9.0), "xla", or None: Triton if the device runs it
            and it is faster (few rows of 16-bit numbers, sizes that are multiples of its tiles),
            otherwise XLA.
        interpret: run the kernel in interpret mode, on any device.

    Returns:
        [rows, outputs] in x's dtype.

    Raises:
        ValueError: the activation is unknown; `gated` and an odd number of columns;
            `implementation` is unknown or the device cannot run it; or it names a kernel
            that does not take so many rows or weights of these sizes.

    Reference: gated products as feed-forward layers, arXiv 2002.05202.
    """
    if activation not in (None, *ACTIVATIONS):
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"activation must be None or one of {known}, not {activation!r}")
    if gated and weight.shape[1] % 2:
        raise ValueError(f"a gated product needs an even number of columns, not {weight.shape[1]}")
    kernel = _kernel_for(x, weight, implementation, interpret, gated=gated)
    reference = functools.partial(xla.linear, activation=activation, gated=gated)
    if kernel is None:
        return reference(x, weight, bias)
    module, tiling = kernel
    if activation not in (None, *FUSED):
        product = linear(x, weight, bias, implementation=implementation, interpret=interpret)
        return xla.activate(product, activation, gated)
    epilogue = {"activation": activation, "gated": gated}
    launch = functools.partial(
        module.launch, tiling=tiling, dtype=x.dtype, interpret=interpret, **epilogue
    )
    return with_gradient_of(reference, launch)(x, weight, bias)


def linear_sums(
    x: Array,  # [rows, inputs]
    weight: Array,  # [inputs, outputs]
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> Array:
    """x @ weight as partial sums, for a consumer that adds them up in float32 anyway.

    If the weight has too few columns to keep the device busy, the contracted axis is split
    into shares. Arguments and errors are those of `linear`.

    Returns:
        The product [rows, outputs] in float32, or shares [shares, rows, outputs]. Shares are
        bfloat16 if x is, otherwise float32: rounding every share costs about as much accuracy
        as rounding the product, unless shares cancel each other.
    """
    kernel = _kernel_for(x, weight, implementation, interpret, split=True)
    if kernel is not None:
        module, tiling = kernel
        dtype = xla.sums_dtype(x.dtype, tiling.splits)
        options = {"tiling": tiling, "dtype": dtype, "interpret": interpret}
        launch = lambda x, weight: module.launch(x, weight, None, **options)
        in_shares = functools.partial(xla.dot_in_shares, shares=tiling.splits)
        reference = in_shares if tiling.splits > 1 else xla.widened_dot
        return with_gradient_of(reference, launch)(x, weight)
    if implementation is None and _shares_pay(x, weight):
        return xla.dot_in_shares(x, weight, XLA_SHARES)
    wide = functools.partial(xla.dot, dtype=jnp.float32)
    return with_gradient_of(xla.widened_dot, wide)(x, weight)


def _kernel_for(
    x, weight, implementation, interpret: bool, *, split: bool = False, gated: bool = False
) -> tuple[ModuleType, Any] | None:
    """The module of the kernel to launch and the sizes of the launch; None: XLA.

    Raises:
        ValueError: see `linear`.
    """
    rows, (inputs, outputs) = x.shape[0], weight.shape
    default = implementation is None
    if default:
        implementation = "triton" if x.dtype.itemsize == 2 and runs_triton() else "xla"
    name = choose(implementation, (*KERNELS, "xla"), interpret)
    if name == "xla":
        return None
    module = importlib.import_module(f"pallas_kernels.matmul.{name}")
    tiling = module.tiling_for(rows, inputs, outputs, split=split, gated=gated)
    multiples = tiling.multiples
    fits = all(size % unit == 0 for size, unit in zip(weight.shape, multiples, strict=True))
    fits &= rows % module.ROW_MULTIPLE == 0 and rows <= (module.MAX_ROWS or rows)
    fits &= x.dtype.itemsize in module.ITEM_BYTES
    if fits:
        return module, tiling
    if default:
        return None
    raise ValueError(
        f"implementation {name!r} takes {module.TAKES} and weights whose sizes are multiples of "
        f"{multiples}, not {rows} rows of {x.dtype} and weights {weight.shape}"
    )


def _shares_pay(x, weight) -> bool:
    """Whether XLA would split the contracted axis and add the shares up in another launch."""
    few = x.shape[0] <= MAX_ROWS_IN_SHARES and x.dtype.itemsize == 2
    return few and weight.shape[0] % XLA_SHARES == 0 and runs_triton()
