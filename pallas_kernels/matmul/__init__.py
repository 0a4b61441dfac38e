"""Products of packed rows with a weight matrix."""

import functools
import importlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.implementations import (
    choose,
    runs_mosaic,
    runs_triton,
    with_gradient_of,
)
from pallas_kernels.common.numerics import is_invariant
from pallas_kernels.matmul import narrow_xla, xla
from pallas_kernels.matmul.activations import ACTIVATIONS, FUSED
from pallas_kernels.matmul.narrow import NarrowWeight
from pallas_kernels.matmul.rounded import RoundedRows, Rounding

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
    x: Array | RoundedRows,  # [rows, inputs]
    weight: Array | NarrowWeight,  # [inputs, outputs]
    bias: Array | None = None,  # [outputs]
    *,
    activation: str | None = None,
    gated: bool = False,
    implementation: str | None = None,
    numerics: str | None = None,
    interpret: bool = False,
) -> Array:
    """activation(x @ weight + bias), or a gated product.

    With `gated` the columns of `weight` and `bias` are two halves, gate and up:

        activation(x @ gate + gate_bias) * (x @ up + up_bias)

    Args:
        x: [rows, inputs]; they may be rounded already, see `rounding_for`.
        weight: [inputs, outputs], or [inputs, 2 * outputs] if `gated`. A product with a
            narrow weight has no gradient.
        bias: one number per column of `weight`; None: no bias.
        activation: "relu", "silu", "gelu" (with the error function), "gelu_tanh" (its
            approximation), or None.
        gated: whether the product is gated.
        implementation: "triton" (at most 128 rows; it reads the weights once), "mosaic"
            (Pallas Mosaic GPU: 16-bit numbers and rows in multiples of 8, or in fast numerics
            int8 and fp8 weights, and int4 weights without zeros; jax 0.11 and compute capability
            9.0), "xla", or None:
            Triton if the device runs it and it is faster (few rows of 16-bit numbers, sizes that
            are multiples of its tiles), Mosaic for as few rows where Triton's programs do not all
            run at once, otherwise XLA. For narrow weights and 16-bit rows None is
            Mosaic if it takes them, but Triton for one row and int4 weights without zeros, and
            otherwise Triton.
        numerics: "fast"; "invariant": the bits of a row depend on that row and the weight alone,
            not on the number of rows or the row's place among them; None: as in the context of
            `pallas_kernels.numerics`. If invariant, both kernels take any number of rows, and
            Triton weights of any sizes. Both halves of a gated product are rounded to x's dtype
            before the activation. Triton or Mosaic, which have the same bits, are then the
            default for all 16-bit and 32-bit numbers if the device runs them, and XLA computes
            a fixed number of rows at a time.
        interpret: run the kernel in interpret mode, on any device.

    Returns:
        [rows, outputs] in x's dtype.

    Raises:
        ValueError: the activation is unknown; `gated` and an odd number of columns; `numerics` is
            unknown; `implementation` is unknown or the device cannot run it; or it names a
            kernel that does not take so many rows or weights of these sizes.

    Reference: gated products as feed-forward layers, arXiv 2002.05202.
    """
    if activation not in (None, *ACTIVATIONS):
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"activation must be None or one of {known}, not {activation!r}")
    if gated and weight.shape[1] % 2:
        raise ValueError(f"a gated product needs an even number of columns, not {weight.shape[1]}")
    invariant = is_invariant(numerics)
    if isinstance(weight, NarrowWeight):
        kind = {"invariant": invariant, "split": False}
        kernel = _narrow_kernel(x, weight, implementation, interpret, **kind)
        epilogue = {"activation": activation, "gated": gated}
        if kernel is not None:
            module, tiling = kernel
            options = {"tiling": tiling, "dtype": x.dtype, "interpret": interpret}
            product = functools.partial(module.launch, weight.ordered(x), weight, bias, **options)
            if activation not in (None, *FUSED) or (gated and not module.GATES):
                return xla.activate(product(), activation, gated)
            return product(**epilogue) if module.GATES else product(activation=activation)
        product = functools.partial(narrow_xla.linear, **epilogue)
        return (xla.in_row_blocks(product) if invariant else product)(x, weight, bias)
    kernel = _kernel_for(x, weight, implementation, interpret, invariant=invariant)
    reference = functools.partial(xla.linear, activation=activation, gated=gated)
    if kernel is None and invariant:
        return with_gradient_of(reference, xla.in_row_blocks(reference))(x, weight, bias)
    if kernel is None:
        return reference(x, weight, bias)
    if activation not in (None, *FUSED):
        options = {"implementation": implementation, "numerics": numerics, "interpret": interpret}
        return xla.activate(linear(x, weight, bias, **options), activation, gated)
    product = functools.partial(launch, kernel, dtype=x.dtype, interpret=interpret)
    if not gated:
        product = functools.partial(product, activation=activation)
    elif kernel[0].GATES:
        product = functools.partial(product, activation=activation, gated=True, rounded=invariant)
    else:
        ungated, gate = product, _module("gate").launch
        epilogue = {"activation": activation, "interpret": interpret}
        product = lambda *arrays: gate(ungated(*arrays), **epilogue)
    return with_gradient_of(reference, product)(x, weight, bias)


def linear_sums(
    x: Array | RoundedRows,  # [rows, inputs]
    weight: Array | NarrowWeight,  # [inputs, outputs]
    *,
    transposed: bool = False,
    implementation: str | None = None,
    numerics: str | None = None,
    interpret: bool = False,
) -> Array:
    """x @ weight as partial sums, for a consumer that adds them up in float32 anyway.

    If the weight has too few columns to keep the device busy, the contracted axis is split
    into shares. Arguments and errors are those of `linear`, and:

    Args:
        transposed: the weight is [outputs, inputs], such as a table of embeddings that computes
            logits. The product is then never split, and by default fast numerics take XLA.

    Returns:
        The product [rows, outputs] in float32, or shares [shares, rows, outputs]. Shares are
        bfloat16 if x is, otherwise float32: rounding every share costs about as much accuracy
        as rounding the product, unless shares cancel each other. Invariant numerics have the same
        number of shares for any number of rows.
    """
    invariant = is_invariant(numerics)
    if isinstance(weight, NarrowWeight):
        kind = {"invariant": invariant, "split": True}
        kernel = _narrow_kernel(x, weight, implementation, interpret, **kind)
        if kernel is not None:
            module, tiling = kernel
            options = {"dtype": xla.sums_dtype(x.dtype, tiling.splits), "interpret": interpret}
            return module.launch(weight.ordered(x), weight, None, tiling=tiling, **options)
        return (xla.in_row_blocks(narrow_xla.dot) if invariant else narrow_xla.dot)(x, weight)
    kind = {"invariant": invariant, "transposed": transposed, "split": not transposed}
    kernel = _kernel_for(x, weight, implementation, interpret, **kind)
    reference = functools.partial(xla.widened_dot, transposed=transposed)
    if kernel is not None:
        splits = kernel[1].splits
        options = {"dtype": xla.sums_dtype(x.dtype, splits), "interpret": interpret}
        options |= {"transposed": True} if transposed else {}
        product = lambda x, weight: launch(kernel, x, weight, None, **options)
        if splits > 1:
            reference = functools.partial(xla.dot_in_shares, shares=splits)
        return with_gradient_of(reference, product)(x, weight)
    wide = functools.partial(xla.dot, dtype=jnp.float32, transposed=transposed)
    if invariant:
        return with_gradient_of(reference, xla.in_row_blocks(wide))(x, weight)
    if implementation is None and not transposed and _shares_pay(x, weight):
        return xla.dot_in_shares(x, weight, XLA_SHARES)
    return with_gradient_of(reference, wide)(x, weight)


def rounding_for(
    rows: int,
    dtype: jnp.dtype,
    weight: Array | NarrowWeight,
    *,
    sums: bool = False,
    numerics: str | None = None,
) -> Rounding | None:
    """How `linear` takes rows that are rounded already, if its default kernel rounds them.

    Such rows come from `pallas_kernels.add_layer_norm` and `pallas_kernels.add_rms_norm`.

    Args:
        rows, dtype: number and dtype of the rows.
        weight: the product's.
        sums: the product is that of `linear_sums`.
        numerics: "fast" or "invariant"; None: the context's.

    Returns:
        The rounding; None: the product takes the rows as they are.
    """
    if not isinstance(weight, NarrowWeight) or weight.order is not None:
        return None
    x = jax.ShapeDtypeStruct((rows, weight.shape[0]), dtype)
    kernel = _narrow_kernel(x, weight, None, False, split=sums, invariant=is_invariant(numerics))
    if kernel is None:
        return None
    module, tiling = kernel  # which takes weights of whole blocks of inputs only
    return module.rounding_for(rows, weight, tiling)


def _narrow_kernel(
    x, weight: NarrowWeight, implementation, interpret: bool, **kind: bool
) -> tuple[ModuleType, Any] | None:
    """The module of the kernel for narrow weights and the sizes of its launch; None: XLA.

    By default that is Mosaic where it takes the rows and the weight, but the kernel for one row
    where that takes them.

    Args:
        kind: `split` and `invariant`, as the kernels' `tiling_for` takes them.

    Raises:
        ValueError: see `linear`; or rows are rounded already, and XLA would take them.
    """
    name = choose(implementation, (*KERNELS, "xla"), interpret)
    if name == "xla" and isinstance(x, RoundedRows):
        raise ValueError("implementation 'xla' takes rows as they are, not RoundedRows")
    if name == "xla":
        return None
    names, split = [name], kind["split"]  # the first that takes the arrays, or the last
    if not kind["invariant"]:
        if implementation is None and x.dtype.itemsize == 2 and runs_mosaic():
            names.insert(0, "mosaic")
        if name == "triton":
            names.insert(0, "vector")
    *faster, module = [_module(f"narrow_{name}") for name in names]
    module = next((one for one in faster if one.takes(weight, x, split=split)), module)
    if not module.takes(weight, x, split=split):
        if implementation is None:
            return None
        raise ValueError(
            f"implementation {name!r} takes {module.TAKES} whose sizes are multiples of "
            f"{module.MULTIPLES}, not {weight.shape} of {weight.format}"
        )
    tiling = module.tiling_for(x.shape[0], *weight.shape, weight.kind, dtype=x.dtype, **kind)
    return module, tiling


def launch(kernel: tuple[ModuleType, Any], x, weight, bias, **options) -> Array:
    """The product of a kernel, with rows padded to a multiple of those that it takes."""
    module, tiling = kernel
    rows = x.shape[0]
    padding = -rows % module.ROW_MULTIPLE
    if not padding:
        return module.launch(x, weight, bias, tiling=tiling, **options)
    x = jnp.pad(x, ((0, padding), (0, 0)))
    return module.launch(x, weight, bias, tiling=tiling, **options)[..., :rows, :]


def _kernel_for(
    x,
    weight,
    implementation,
    interpret: bool,
    *,
    invariant: bool = False,
    transposed: bool = False,
    split: bool = False,
) -> tuple[ModuleType, Any] | None:
    """The module of the kernel to launch and the sizes of the launch; None: XLA.

    Raises:
        ValueError: see `linear`.
    """
    default = implementation is None
    sizes = weight.shape[::-1] if transposed else weight.shape
    names = (implementation,)
    if default:
        names = _defaults(x, sizes, invariant=invariant, transposed=transposed, split=split)
    kind = {"dtype": x.dtype, "split": split, "transposed": transposed}
    if invariant and names != ("xla",):
        kind["splits"] = _module("triton").shares_of(*sizes, split=split)
    for name in names:
        if choose(name, (*KERNELS, "xla"), interpret) == "xla":
            return None
        module = _module(name)
        tiling = module.tiling_for(x.shape[0], *sizes, **kind)
        if _takes(module, tiling, x, sizes, invariant=invariant, transposed=transposed):
            one_depth = invariant and x.dtype.itemsize == 4
            return module, tiling._replace(depth=module.FLOAT32_DEPTH) if one_depth else tiling
    raise ValueError(
        f"implementation {name!r} takes {module.TAKES} and weights whose sizes are multiples of "
        f"{tiling.multiples}, not {x.shape[0]} rows of {x.dtype} and weights {weight.shape}"
    )


def _defaults(x, sizes, *, invariant: bool, transposed: bool, split: bool) -> tuple[str, ...]:
    """The implementations of which the first that takes the arrays is used if none is named."""
    if not runs_triton():
        return ("xla",)
    triton, rows = _module("triton"), x.shape[0]
    if invariant:
        if x.dtype.itemsize not in triton.ITEM_BYTES:
            return ("xla",)
        return ("mosaic", "triton") if rows > triton.MAX_ROWS and runs_mosaic() else ("triton",)
    if x.dtype.itemsize != 2 or transposed:
        return ("xla",)
    few = rows <= triton.MAX_ROWS
    if few and runs_mosaic() and not triton.runs_at_once(rows, *sizes, split=split):
        return ("mosaic", "triton", "xla")
    return ("triton", "xla")


def _takes(module: ModuleType, tiling, x, sizes, *, invariant: bool, transposed: bool) -> bool:
    """Whether a kernel takes these rows and a weight of these inputs and outputs."""
    rows = x.shape[0]
    takes = x.dtype.itemsize in module.ITEM_BYTES
    takes &= module.TAKES_TRANSPOSED or not transposed
    if not invariant:
        takes &= rows % module.ROW_MULTIPLE == 0 and rows <= (module.MAX_ROWS or rows)
    if not (invariant and module.TAKES_ANY_WEIGHT):
        units = tiling.multiples
        takes &= all(size % unit == 0 for size, unit in zip(sizes, units, strict=True))
    return takes


def _module(name: str) -> ModuleType:
    """An implementation's module, imported when it is used."""
    return importlib.import_module(f"pallas_kernels.matmul.{name}")


def _shares_pay(x, weight) -> bool:
    """Whether XLA would split the contracted axis and add the shares up in another launch."""
    few = x.shape[0] <= MAX_ROWS_IN_SHARES and x.dtype.itemsize == 2
    return few and weight.shape[0] % XLA_SHARES == 0 and runs_triton()
