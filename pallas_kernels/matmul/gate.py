"""The gate of a product whose kernel has none, as a Pallas Triton kernel.

It computes what `triton` computes in its products, so that both have the same bits.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.matmul.activations import IN_KERNELS

COLUMNS = 1024  # of a program


@functools.partial(jax.jit, static_argnames=("activation", "interpret"))
def launch(y: Array, *, activation: str | None, interpret: bool) -> Array:
    """activation(y[:, :outputs]) * y[:, outputs:] for y [rows, 2 * outputs], in float32."""
    rows, outputs = y.shape[0], y.shape[1] // 2
    return pl.pallas_call(
        functools.partial(_kernel, activation=activation),
        grid=(rows, pl.cdiv(outputs, COLUMNS)),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), y.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="gate",
    )(y)


def _kernel(y_ref, out_ref, *, activation: str | None):
    row, outputs = pl.program_id(0), out_ref.shape[1]
    column = pl.program_id(1) * COLUMNS + jnp.arange(COLUMNS)
    mask = column < outputs
    load = lambda columns: plgpu.load(y_ref.at[row, columns], mask=mask, other=0)
    out, factor = (load(columns).astype(jnp.float32) for columns in (column, column + outputs))
    out = out if activation is None else IN_KERNELS[activation](out)
    plgpu.store(out_ref.at[row, column], (out * factor).astype(out_ref.dtype), mask=mask)
