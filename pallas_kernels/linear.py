"""Products of packed rows with a weight matrix: near the read rate for the few rows of decoding."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.implementations import (
    choose,
    matmul_precision,
    runs_triton,
    stages_that_fit,
    with_gradient_of,
)


class Tiling(NamedTuple):
    """Sizes of one launch."""

    columns: int  # of a program's tile of the weights
    depth: int  # of a block along the contracted axis
    splits: int  # shares of the contracted axis
    num_warps: int
    num_stages: int


# By the padded number of rows: the tilings of whole products and of sums in shares.
# Found by measurement on an H200, at the sizes of OPT-6.7B.
_WIDE = Tiling(columns=128, depth=64, splits=1, num_warps=4, num_stages=5)
TILINGS = {
    16: (_WIDE._replace(num_warps=8), _WIDE._replace(splits=4)),
    32: (_WIDE, _WIDE._replace(splits=4)),
    64: (_WIDE, Tiling(columns=64, depth=128, splits=2, num_warps=4, num_stages=5)),
    128: (_WIDE, Tiling(columns=64, depth=64, splits=2, num_warps=4, num_stages=6)),
}
# Where these would be too few programs, narrower ones: their columns, and warps.
NARROWER = ((64, 4), (32, 2))
PROGRAMS_WANTED = 90  # of 132 multiprocessors
MAX_ROWS = max(TILINGS)  # more, and arithmetic counts: XLA's products are faster
XLA_SHARES = 2
MAX_ROWS_IN_SHARES = 256  # more, and tiles of whole products fill the device


def linear(
    x: Array,  # [rows, inputs]
    weight: Array,  # [inputs, outputs]
    bias: Array | None = None,  # [outputs]
    *,
    parts: int = 1,
    relu: bool = False,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """x @ weight + bias, rectified where asked, as `parts` arrays of equally many columns.

    Args:
        x: [rows, inputs].
        weight: [inputs, outputs].
        bias: [outputs]; None: left out.
        parts: arrays that the columns are shared out to.
        relu: whether negative outputs become 0.
        implementation: "triton" (streams the weights once past at most `MAX_ROWS` rows),
            "xla", or None: Triton where the device runs it and it is faster: few rows of
            16-bit numbers, sizes that are multiples of its tiles.
        interpret: run the Triton kernel in interpret mode, on any device.

    Returns:
        `parts` arrays [rows, outputs / parts] in x's dtype.

    Raises:
        ValueError: unknown implementation, or one that the device cannot run; Triton was
            asked for, and there are too many rows or sizes are no multiples of its tiles.
    """
    tiling = _tiling(x, weight, split=False)
    if _choose(x, weight, parts, tiling, implementation, interpret) == "triton":
        options = {"parts": parts, "relu": relu}
        launch = functools.partial(_launch, tiling=tiling, interpret=interpret, **options)
        return with_gradient_of(functools.partial(_xla, **options), launch)(x, weight, bias)
    return _xla(x, weight, bias, parts=parts, relu=relu)


def _xla(x, weight, bias, *, parts, relu):
    y = _dot(x, weight)
    if parts > 1:
        # The bias inside the product would leave a launch of its own to every part.
        y = lax.optimization_barrier(y)
    y = y if bias is None else y + bias
    y = jax.nn.relu(y) if relu else y
    return tuple(jnp.unstack(y.reshape(x.shape[0], parts, -1), axis=1))


def linear_sums(
    x: Array,  # [rows, inputs]
    weight: Array,  # [inputs, outputs]
    *,
    implementation: str | None = None,
    interpret: bool = False,
) -> Array:
    """x @ weight as partial sums, for a consumer that adds them up anyway.

    Where there are fewer columns than keep a device busy the contracted axis is cut
    into shares. Arguments and errors are those of `linear`.

    Returns:
        float32 [shares, rows, outputs], or the product [rows, outputs] in x's dtype.
    """
    tiling = _tiling(x, weight, split=True)
    if _choose(x, weight, 1, tiling, implementation, interpret) == "triton":
        options = {"parts": 1, "relu": False, "interpret": interpret}
        launch = lambda x, weight: _launch(x, weight, None, tiling=tiling, **options)[0]
        splits = tiling.splits
        reference = functools.partial(_dot_in_shares, shares=splits) if splits > 1 else _dot
        return with_gradient_of(reference, launch)(x, weight)
    if implementation is None and _shares_pay(x, weight):
        return _dot_in_shares(x, weight, XLA_SHARES)
    return _dot(x, weight)


def _dot_in_shares(x, weight, shares: int):
    x = x.reshape(x.shape[0], shares, -1)
    weight = weight.reshape(shares, -1, weight.shape[1])
    precision = matmul_precision(x.dtype)
    kinds = {"precision": precision, "preferred_element_type": jnp.float32}
    return jnp.einsum("rsi,sio->sro", x, weight, **kinds)


def _tiling(x, weight, *, split: bool) -> Tiling:
    tiling = TILINGS[min(_tile_rows(x.shape[0]), MAX_ROWS)][split]
    inputs, outputs = weight.shape
    for columns, num_warps in NARROWER:
        if outputs // tiling.columns * tiling.splits < PROGRAMS_WANTED:
            tiling = tiling._replace(columns=columns, depth=128, num_warps=num_warps)
    return tiling if inputs % (tiling.depth * tiling.splits) == 0 else tiling._replace(depth=64)


def _tile_rows(rows: int) -> int:
    return max(16, pl.next_power_of_2(rows))


def _choose(x, weight, parts, tiling: Tiling, implementation, interpret) -> str:
    multiples = (tiling.depth * tiling.splits, tiling.columns * parts)
    fits = all(size % unit == 0 for size, unit in zip(weight.shape, multiples, strict=True))
    fits &= x.shape[0] <= MAX_ROWS
    if implementation is None:
        return "triton" if fits and x.dtype.itemsize == 2 and runs_triton() else "xla"
    name = choose(implementation, ("triton", "xla"), interpret)
    if name == "triton" and not fits:
        raise ValueError(
            f"implementation 'triton' takes at most {MAX_ROWS} rows and weights whose sizes are "
            f"multiples of {multiples}, not {x.shape[0]} rows and weights {weight.shape}"
        )
    return name


def _shares_pay(x, weight) -> bool:
    """Whether XLA would cut the contracted axis and add the shares up in a launch of its own."""
    few = x.shape[0] <= MAX_ROWS_IN_SHARES and x.dtype.itemsize == 2
    return few and weight.shape[0] % XLA_SHARES == 0 and runs_triton()


def _dot(x, weight):
    return jnp.dot(x, weight, precision=matmul_precision(x.dtype))


def _launch(x, weight, bias, *, tiling: Tiling, parts, relu, interpret):
    (rows, inputs), outputs = x.shape, weight.shape[1]
    if tiling.splits > 1:
        out_shape = [jax.ShapeDtypeStruct((tiling.splits, rows, outputs), jnp.float32)]
    else:
        out_shape = [jax.ShapeDtypeStruct((rows, outputs // parts), x.dtype)] * parts
    kernel = functools.partial(
        _kernel,
        tiling=tiling,
        share=inputs // tiling.splits,
        relu=relu,
        biased=bias is not None,
    )
    return tuple(
        pl.pallas_call(
            kernel,
            grid=(outputs // tiling.columns, tiling.splits),
            out_shape=out_shape,
            compiler_params=plgpu.CompilerParams(
                num_warps=tiling.num_warps,
                num_stages=stages_that_fit(
                    tiling.num_stages,
                    tiling.depth * (tiling.columns + _tile_rows(rows)) * x.dtype.itemsize,
                ),
            ),
            interpret=interpret,
            name="linear",
        )(x, weight, *(() if bias is None else (bias,)))
    )


def _kernel(x_ref, weight_ref, *refs, tiling: Tiling, share: int, relu: bool, biased: bool):
    bias_ref, outputs = (refs[0], refs[1:]) if biased else (None, refs)
    tile, split = pl.program_id(0), pl.program_id(1)
    rows = x_ref.shape[0]
    row = jnp.arange(_tile_rows(rows))
    column = tile * tiling.columns + jnp.arange(tiling.columns)
    # Masked, not clamped: every program would read the same last row again and again, and
    # wait for the others that do.
    is_row = row[:, None] < rows

    def block(i, total):
        depth = split * share + i * tiling.depth + jnp.arange(tiling.depth)
        mask = jnp.broadcast_to(is_row, (row.shape[0], tiling.depth))
        x = plgpu.load(x_ref.at[row[:, None], depth[None, :]], mask=mask, other=0)
        weight = plgpu.load(weight_ref.at[depth[:, None], column[None, :]])
        return total + jnp.dot(
            x,
            weight,
            precision=matmul_precision(x.dtype),
            preferred_element_type=jnp.float32,
        )

    total = jnp.zeros((row.shape[0], tiling.columns), jnp.float32)
    total = lax.fori_loop(0, share // tiling.depth, block, total)
    if biased:
        total += plgpu.load(bias_ref.at[column]).astype(jnp.float32)[None, :]
    if relu:
        total = jnp.maximum(total, 0)
    mask = jnp.broadcast_to(is_row, total.shape)
    if tiling.splits > 1:
        plgpu.store(outputs[0].at[split, row[:, None], column[None, :]], total, mask=mask)
        return
    width = outputs[0].shape[1]
    for part, ref in enumerate(outputs):

        def store(ref=ref, first=part * width):
            place = ref.at[row[:, None], (column - first)[None, :]]
            plgpu.store(place, total.astype(ref.dtype), mask=mask)

        if len(outputs) == 1:
            store()
        else:
            pl.when(tile * tiling.columns // width == part)(store)
