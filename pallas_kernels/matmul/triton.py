"""Products of few rows as a Pallas Triton kernel: near the read rate, for rows of decoding."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.common.implementations import matmul_precision, stages_that_fit


class Tiling(NamedTuple):
    """Sizes of one launch."""

    columns: int  # of a program's tile of the weights
    depth: int  # of a block along the contracted axis
    splits: int  # shares of the contracted axis
    num_warps: int
    num_stages: int

    @property
    def multiples(self) -> tuple[int, int]:
        """What numbers of inputs and of outputs are multiples of."""
        return self.depth * self.splits, self.columns


# By the padded number of rows: the tilings of whole products and of sums in shares.
# Found by measurement on an H200, at the sizes of OPT-6.7B.
_WIDE = Tiling(columns=128, depth=64, splits=1, num_warps=4, num_stages=5)
TILINGS = {
    16: (
        _WIDE._replace(num_warps=8),
        Tiling(columns=64, depth=128, splits=2, num_warps=4, num_stages=5),
    ),
    32: (_WIDE, _WIDE._replace(splits=4)),
    64: (_WIDE, Tiling(columns=64, depth=64, splits=2, num_warps=4, num_stages=8)),
    128: (_WIDE, Tiling(columns=64, depth=64, splits=2, num_warps=4, num_stages=6)),
}
# Where these would be too few programs, those of so many rows, in more shares, and then narrower
# ones: their columns, and warps.
IN_MORE_SHARES = 32
NARROWER = ((64, 4), (32, 2))
PROGRAMS_WANTED = 90  # of 132 multiprocessors
MAX_ROWS = max(TILINGS)  # more, and arithmetic counts: other products are faster
ROW_MULTIPLE, ITEM_BYTES = 1, (2, 4)  # bytes of a number
TAKES = f"at most {MAX_ROWS} rows"


def tiling_for(rows: int, inputs: int, outputs: int, *, split: bool = False) -> Tiling:
    """Of a product; `split`: of one whose sums may be left in shares."""
    too_few = lambda tiling: outputs // tiling.columns * tiling.splits < PROGRAMS_WANTED
    tile_rows = min(_tile_rows(rows), MAX_ROWS)
    tiling = TILINGS[tile_rows][split]
    if too_few(tiling):
        tiling = TILINGS[max(tile_rows, IN_MORE_SHARES)][split]
    for columns, num_warps in NARROWER:
        if too_few(tiling):
            tiling = tiling._replace(columns=columns, depth=128, num_warps=num_warps)
    return tiling if inputs % (tiling.depth * tiling.splits) == 0 else tiling._replace(depth=64)


def _tile_rows(rows: int) -> int:
    return max(16, pl.next_power_of_2(rows))


@functools.partial(jax.jit, static_argnames=("tiling", "relu", "dtype", "interpret"))
def launch(
    x: Array,  # [rows, inputs]
    weight: Array,  # [inputs, outputs]
    bias: Array | None,  # [outputs]
    *,
    tiling: Tiling,
    relu: bool,
    dtype: jnp.dtype,
    interpret: bool,
) -> Array:
    """[rows, outputs], or shares [splits, rows, outputs], of this type; see
    `pallas_kernels.linear`."""
    (rows, inputs), outputs = x.shape, weight.shape[1]
    shares = (tiling.splits,) if tiling.splits > 1 else ()
    kernel = functools.partial(
        _kernel,
        tiling=tiling,
        share=inputs // tiling.splits,
        relu=relu,
        biased=bias is not None,
    )
    return pl.pallas_call(
        kernel,
        grid=(outputs // tiling.columns, tiling.splits),
        out_shape=jax.ShapeDtypeStruct((*shares, rows, outputs), dtype),
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


def _kernel(x_ref, weight_ref, *refs, tiling: Tiling, share: int, relu: bool, biased: bool):
    bias_ref, out_ref = refs if biased else (None, *refs)
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
    place = (row[:, None], column[None, :])
    place = (split, *place) if tiling.splits > 1 else place
    plgpu.store(out_ref.at[place], total.astype(out_ref.dtype), mask=mask)
