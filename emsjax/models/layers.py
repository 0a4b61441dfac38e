"""What decoder layers are made of: products, norms and the residual stream between them.

The residual stream is handed from layer to layer as a sum x + y that is not added up yet: the
normalisation that follows does the addition, in one pass.

Axis legend: see `emsjax.decode.pack`; i = inputs of a product, o = outputs.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Float

import pallas_kernels
from emsjax.decode.cache import LayerCache
from emsjax.decode.kernels import Visible, attend
from emsjax.decode.pack import PackedRows
from pallas_kernels.common.implementations import matmul_precision


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weight:
    """The matrix of a product, passed whole to where it is used.

    Attributes:
        values: [i, o].
        scales: of narrower types; None: the values are what they stand for.
    """

    values: Float[Array, "i o"]
    scales: Float[Array, "..."] | None = None


class Addend(NamedTuple):
    """What a layer adds to the residual stream, left to the normalisation that follows."""

    sums: Float[Array, "... r e"]  # as `pallas_kernels.linear_sums` leaves them
    bias: Float[Array, "e"] | None


def new_linear(inputs: int, outputs: int, *, bias: bool, init, dtype, rngs: nnx.Rngs) -> nnx.Linear:
    """A product of these sizes with random weights."""
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=bias,
        kernel_init=init,
        dtype=dtype,
        param_dtype=dtype,
        precision=matmul_precision(dtype),
        rngs=rngs,
    )


def new_layer_norm(size: int, *, epsilon: float, affine: bool, dtype, rngs: nnx.Rngs):
    """A layer normalisation of this size."""
    return nnx.LayerNorm(
        size,
        epsilon=epsilon,
        use_bias=affine,
        use_scale=affine,
        use_fast_variance=False,
        dtype=dtype,
        param_dtype=dtype,
        rngs=rngs,
    )


def weight_and_bias(module: nnx.Linear) -> tuple[Weight, Array | None]:
    """The parameters of a product; the bias is None if it has none."""
    return Weight(module.kernel[...]), None if module.bias is None else module.bias[...]


def scale_and_bias(norm: nnx.LayerNorm) -> tuple[Array | None, Array | None]:
    """The affine part of a normalisation; None for what it does not have."""
    return tuple(
        None if parameter is None else parameter[...] for parameter in (norm.scale, norm.bias)
    )


def linear(module: nnx.Linear, x: Float[Array, "r i"], *, relu: bool = False):
    """The product of rows, with its bias, rectified if asked. [r, o]"""
    weight, bias = weight_and_bias(module)
    return pallas_kernels.linear(x, weight.values, bias, relu=relu)


def linear_addend(module: nnx.Linear, x: Float[Array, "r i"]) -> Addend:
    """The product of rows as a part of the residual stream."""
    weight, bias = weight_and_bias(module)
    return Addend(pallas_kernels.linear_sums(x, weight.values), bias)


def add_norm(norm: nnx.LayerNorm, x: Float[Array, "r e"], y: Addend):
    """x + y, and its normalisation."""
    options = {"epsilon": norm.epsilon, "dtype": norm.dtype}
    return pallas_kernels.add_layer_norm(x, *y, *scale_and_bias(norm), **options)


# Compiled by itself, so that layers of the same shapes are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("attention", "max_rows_per_sample"))
def run_layer(
    layer: nnx.Module,
    x: Float[Array, "r e"],
    y: Addend | None,
    cached: LayerCache,
    rows: PackedRows,
    visible: Visible,
    *,
    attention: Callable,
    max_rows_per_sample: int | None,
):
    """One layer over the residual stream x + y, with attention to its cache and to the rows.

    Returns:
        The next x and y, and queries, keys and values of the rows [r, h, d].
    """
    see = lambda qkv: attend(attention, qkv, cached, rows, visible, max_rows_per_sample)
    return layer(x, y, rows, see)
