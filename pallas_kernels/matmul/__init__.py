"""Products of packed rows with a weight matrix."""

import functools
import importlib
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.implementations import choose, runs_triton, with_gradient_of
from pallas_kernels.matmul import xla

KERNELS = ("triton", "mosaic")  # modules beside this one, imported when they are used
XLA_SHARES = 2
# Of more rows it was not measured. In steps of four layers of OPT-6.7B (bfloat16, an H200, jax
# 0.11.2) leaving sums in shares took 54 us off all kernels at 360 and at 368 rows, 49 at 376, 91 at
# 392 and 43 at 408, of 2099 to 2220: XLA cuts some of these too, in float32, and adds up in a
# launch of its own. Rounded, shares took 16 us less than in float32 at 144 rows, 18 at 160 and 27
# at 344. To compare, with this at 256 and at 512, the profiles of
# `python -m emsjax.benchmarks.step --layers 4 --shapes 43x8,45x8,47x8,51x8`.
MAX_ROWS_IN_SHARES = 408


def linear(
    x: Array,  # [rows, inputs]
    weight: Array,  # [inputs, outputs]
    bias: Array | None = None,  # [outputs]
    *,
    relu: bool = False,
    implementation: str | None = None,
    interpret: bool = False,
) -> Array:
    """x @ weight + bias, rectified where asked.

    Args:
        x: [rows, inputs].
        weight: [inputs, outputs].
        bias: [outputs]; None: left out.
        relu: whether negative outputs become 0.
        implementation: "triton" (streams the weights once past at most 128 rows), "mosaic"
            (Pallas Mosaic GPU: 16-bit numbers, rows in multiples of 8, jax 0.11 and compute
            capability 9.0; never the default), "xla", or None: Triton where the device runs it
            and it is faster: few rows of 16-bit numbers, sizes that are multiples of its tiles.
        interpret: run the kernel in interpret mode, on any device.

    Returns:
        [rows, outputs] in x's dtype.

    Raises:
        ValueError: unknown implementation, or one that the device cannot run; a kernel was
            asked for, and there are too many rows or sizes are no multiples of its tiles.
    """
    kernel = _kernel_for(x, weight, implementation, interpret)
    reference = functools.partial(xla.linear, relu=relu)
    if kernel is None:
        return reference(x, weight, bias)
    module, tiling = kernel
    options = {"tiling": tiling, "relu": relu, "dtype": x.dtype, "interpret": interpret}
    launch = functools.partial(module.launch, **options)
    return with_gradient_of(reference, launch)(x, weight, bias)


def linear_sums(
    x: Array,  # [rows, inputs]
    weight: Array,  # [inputs, outputs]
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> Array:
    """x @ weight as partial sums, for a consumer that adds them up in float32 anyway.

    Where there are fewer columns than keep a device busy the contracted axis is cut
    into shares. Arguments and errors are those of `linear`.

    Returns:
        The product [rows, outputs] in float32, or shares [shares, rows, outputs]. Shares are
        bfloat16 where x is, and float32 elsewhere: the errors of rounding each add up to one of
        the size that rounding the product makes, unless shares cancel each other.
    """
    kernel = _kernel_for(x, weight, implementation, interpret, split=True)
    if kernel is not None:
        module, tiling = kernel
        dtype = xla.sums_dtype(x.dtype, tiling.splits)
        options = {"tiling": tiling, "relu": False, "dtype": dtype, "interpret": interpret}
        launch = lambda x, weight: module.launch(x, weight, None, **options)
        in_shares = functools.partial(xla.dot_in_shares, shares=tiling.splits)
        reference = in_shares if tiling.splits > 1 else xla.widened_dot
        return with_gradient_of(reference, launch)(x, weight)
    if implementation is None and _shares_pay(x, weight):
        return xla.dot_in_shares(x, weight, XLA_SHARES)
    wide = functools.partial(xla.dot, dtype=jnp.float32)
    return with_gradient_of(xla.widened_dot, wide)(x, weight)


def _kernel_for(
    x, weight, implementation, interpret: bool, *, split: bool = False
) -> tuple[ModuleType, Any] | None:
    """The module that launches it and the sizes of the launch; None: XLA.

    Raises:
        ValueError: as `linear`.
    """
    rows, (inputs, outputs) = x.shape[0], weight.shape
    default = implementation is None
    if default:
        implementation = "triton" if x.dtype.itemsize == 2 and runs_triton() else "xla"
    name = choose(implementation, (*KERNELS, "xla"), interpret)
    if name == "xla":
        return None
    module = importlib.import_module(f"pallas_kernels.matmul.{name}")
    tiling = module.tiling_for(rows, inputs, outputs, split=split)
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
    """Whether XLA would cut the contracted axis and add the shares up in a launch of its own."""
    few = x.shape[0] <= MAX_ROWS_IN_SHARES and x.dtype.itemsize == 2
    return few and weight.shape[0] % XLA_SHARES == 0 and runs_triton()
