"""Building blocks of decoder layers: linear layers, layer norms and the residual stream.

The residual stream is passed from layer to layer as two terms x and y: the layer norm that
follows adds them in the same pass.

Axis legend: see `emsjax.decode.pack`; i = inputs of a linear layer, o = outputs.
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
    """The weight matrix of a linear layer, passed as one object to where it is used.

    Attributes:
        values: the matrix [i, o].
        scales: quantisation scales of narrower types; None: the values are not scaled.
    """

    values: Float[Array, "i o"]
    scales: Float[Array, "..."] | None = None


class Addend(NamedTuple):
    """A term that the following layer norm adds to the residual stream."""

    sums: Float[Array, "... r e"]  # as `pallas_kernels.linear_sums` returns them
    bias: Float[Array, "e"] | None


def new_linear(inputs: int, outputs: int, *, bias: bool, init, dtype, rngs: nnx.Rngs) -> nnx.Linear:
    """Makes a linear layer of these sizes with random weights."""
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
    """Makes a layer norm of this size."""
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
    """Returns a linear layer's parameters; the bias is None if the layer has none."""
    return Weight(module.kernel[...]), None if module.bias is None else module.bias[...]


def scale_and_bias(norm: nnx.LayerNorm) -> tuple[Array | None, Array | None]:
    """Returns a layer norm's scale and bias; each is None if the norm does not have it."""
    return tuple(
        None if parameter is None else parameter[...] for parameter in (norm.scale, norm.bias)
    )


def linear(
    module: nnx.Linear,
    x: Float[Array, "r i"],
    *,
    activation: str | None = None,
    gated: bool = False,
):
    """Applies a linear layer with its bias to rows: see `pallas_kernels.linear`. [r, o]"""
    weight, bias = weight_and_bias(module)
    options = {"activation": activation, "gated": gated}
    return pallas_kernels.linear(x, weight.values, bias, **options)


def linear_addend(module: nnx.Linear, x: Float[Array, "r i"]) -> Addend:
    """Applies a linear layer to rows and returns the result as a term of the residual stream."""
    weight, bias = weight_and_bias(module)
    return Addend(pallas_kernels.linear_sums(x, weight.values), bias)


def add_norm(norm: nnx.LayerNorm, x: Float[Array, "r e"], y: Addend):
    """Returns x + y and its layer norm."""
    options = {"epsilon": norm.epsilon, "dtype": norm.dtype}
    return pallas_kernels.add_layer_norm(x, *y, *scale_and_bias(norm), **options)


def check_taps(taps: tuple[int, ...], num_layers: int) -> None:
    """Raises ValueError for a tap that is not 0 (the embeddings) to the number of layers."""
    outside = [tap for tap in taps if not 0 <= tap <= num_layers]
    if outside:
        raise ValueError(f"taps must lie in 0..{num_layers} for this model, not {outside[0]}")


# It is compiled by itself, so that layers of the same shapes are traced and lowered once.
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
    """Runs one layer on the residual stream x + y; its rows attend to the cache and themselves.

    Returns:
        The next x and y, and the rows' queries, keys and values [r, h, d].
    """
    see = lambda qkv: attend(attention, qkv, cached, rows, visible, max_rows_per_sample)
    return layer(x, y, rows, see)
