"""Products of few rows, as in decoding, as a Pallas Triton kernel limited by memory bandwidth."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.common.implementations import matmul_precision, stages_that_fit
from pallas_kernels.matmul.activations import ACTIVATIONS


class Tiling(NamedTuple):
    """Sizes of one launch."""

    columns: int  # columns of a program's tile of the weights
    depth: int  # size of a block along the contracted axis
    splits: int  # shares of the contracted axis
    num_warps: int
    num_stages: int

    @property
    def multiples(self) -> tuple[int, int]:
        """The numbers of which inputs and outputs must be multiples."""
        return self.depth * self.splits, self.columns


# The tilings of whole products and of sums in shares, by the padded number of rows. They were
# found by measurement on an H200, at the sizes of OPT-6.7B.
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
# With more programs than multiprocessors, fewer stages let two programs share one: 49 us in place
# of 51 for 4096 x 24576 weights and 1 row, 52 of 57 for 64 rows, in steps of Qwen3-8B.
MULTIPROCESSORS = 132
SHARED = {"num_warps": 4, "num_stages": 4}
# If a tiling makes too few programs, the one for this number of rows is used, which has more
# shares, and if there are still too few, narrower ones.
IN_MORE_SHARES = 32
NARROWER = ((64, 4), (32, 2))  # columns, warps
PROGRAMS_WANTED = 90  # for 132 multiprocessors
MAX_ROWS = max(TILINGS)  # with more rows the arithmetic dominates, and other kernels are faster
ROW_MULTIPLE, ITEM_BYTES = 1, (2, 4)  # bytes of a number
TAKES = f"at most {MAX_ROWS} rows"


def tiling_for(
    rows: int, inputs: int, outputs: int, *, split: bool = False, gated: bool = False
) -> Tiling:
    """The tiling of a product; `split`: whether its sums may be left in shares."""
    del gated  # both halves of a gated product's weights have the same tiles
    too_few = lambda tiling: outputs // tiling.columns * tiling.splits < PROGRAMS_WANTED
    tile_rows = min(_tile_rows(rows), MAX_ROWS)
    tiling = TILINGS[tile_rows][split]
    if outputs // tiling.columns * tiling.splits > MULTIPROCESSORS and tiling.splits == 1:
        tiling = tiling._replace(**SHARED)
    if too_few(tiling):
        tiling = TILINGS[max(tile_rows, IN_MORE_SHARES)][split]
    for columns, num_warps in NARROWER:
        if too_few(tiling):
            tiling = tiling._replace(columns=columns, depth=128, num_warps=num_warps)
    return tiling if inputs % (tiling.depth * tiling.splits) == 0 else tiling._replace(depth=64)


def _tile_rows(rows: int) -> int:
    return max(16, pl.next_power_of_2(rows))


@functools.partial(jax.jit, static_argnames=("tiling", "activation", "gated", "dtype", "interpret"))
def launch(
    x: Array,  # [rows, inputs]
    weight: Array,  # [inputs, columns]
    bias: Array | None,  # [columns]
    *,
    tiling: Tiling,
    activation: str | None = None,
    gated: bool = False,
    dtype: jnp.dtype,
    interpret: bool,
) -> Array:
    """[rows, outputs], or shares [splits, rows, outputs]: see `pallas_kernels.linear`."""
    (rows, inputs), columns = x.shape, weight.shape[1]
    outputs = columns // 2 if gated else columns
    shares = (tiling.splits,) if tiling.splits > 1 else ()
    kernel = functools.partial(
        _kernel,
        tiling=tiling,
        share=inputs // tiling.splits,
        activation=activation,
        gated=gated,
        biased=bias is not None,
    )
    return pl.pallas_call(
        kernel,
        grid=(columns // tiling.columns, tiling.splits),
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


def _kernel(
    x_ref,  # [rows, inputs]
    weight_ref,  # [inputs, columns]
    *refs,  # bias [columns] if biased; out [rows, outputs], or [splits, rows, outputs]
    tiling: Tiling,
    share: int,
    activation: str | None,
    gated: bool,
    biased: bool,
):
    bias_ref, out_ref = refs if biased else (None, *refs)
    tile, split = pl.program_id(0), pl.program_id(1)
    rows = x_ref.shape[0]
    row = jnp.arange(_tile_rows(rows))
    width = tiling.columns // 2 if gated else tiling.columns
    column = tile * width + jnp.arange(width)
    parts = (column, column + weight_ref.shape[1] // 2) if gated else (column,)
    # Rows beyond the last are masked, not clamped: otherwise every program would read the same
    # last row many times, and wait for the others that read it.
    is_row = row[:, None] < rows

    def block(i, totals):
        depth = split * share + i * tiling.depth + jnp.arange(tiling.depth)
        mask = jnp.broadcast_to(is_row, (row.shape[0], tiling.depth))
        x = plgpu.load(x_ref.at[row[:, None], depth[None, :]], mask=mask, other=0)

        def add(total, columns):
            weight = plgpu.load(weight_ref.at[depth[:, None], columns[None, :]])
            return total + jnp.dot(
                x,
                weight,
                precision=matmul_precision(x.dtype),
                preferred_element_type=jnp.float32,
            )

        return tuple(map(add, totals, parts))

    totals = (jnp.zeros((row.shape[0], width), jnp.float32),) * len(parts)
    totals = lax.fori_loop(0, share // tiling.depth, block, totals)
    if biased:
        biases = (plgpu.load(bias_ref.at[columns]).astype(jnp.float32) for columns in parts)
        totals = tuple(total + bias[None, :] for total, bias in zip(totals, biases, strict=True))
    out = totals[0] if activation is None else ACTIVATIONS[activation](totals[0])
    out = out * totals[1] if gated else out
    mask = jnp.broadcast_to(is_row, out.shape)
    place = (row[:, None], column[None, :])
    place = (split, *place) if tiling.splits > 1 else place
    plgpu.store(out_ref.at[place], out.astype(out_ref.dtype), mask=mask)
