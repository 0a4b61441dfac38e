"""Linear layers of decoders, with weights of 16 or 32 bits or in narrow formats.

Axis legend: see `emsjax.decode.pack`; i = inputs of a linear layer, o = outputs.
"""

from flax import nnx
from jaxtyping import Array, Float

import pallas_kernels
from pallas_kernels.common.implementations import matmul_precision
from pallas_kernels.common.numerics import is_invariant
from pallas_kernels.matmul import narrow
from pallas_kernels.matmul.narrow import NarrowWeight

LINEARS = ("qkv_proj", "out_proj", "up_proj", "down_proj")  # of a decoder layer
NARROW_ARRAYS = ("values", "scales", "zeros", "order")  # of a NarrowWeight


class NarrowVariable(nnx.Variable):
    """An array of a narrow weight, which is not trained."""


class NarrowLinear(nnx.Module):
    """A linear layer with a narrow weight, and a bias [o] unless it is None."""

    def __init__(self, weight: NarrowWeight, bias: nnx.Param | None):
        for name in NARROW_ARRAYS:
            array = getattr(weight, name)
            setattr(self, name, None if array is None else NarrowVariable(array))
        self.format, self.inputs, self.bias = weight.format, weight.inputs, bias

    @property
    def weight(self) -> NarrowWeight:
        """The weight, as the kernels take it."""
        variables = (getattr(self, name) for name in NARROW_ARRAYS)
        arrays = (None if one is None else one[...] for one in variables)
        return NarrowWeight(*arrays, format=self.format, inputs=self.inputs)


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


def weight_and_bias(
    module: nnx.Linear | NarrowLinear,
) -> tuple[Array | NarrowWeight, Array | None]:
    """Returns a linear layer's parameters; the bias is None if the layer has none."""
    weight = module.weight if isinstance(module, NarrowLinear) else module.kernel[...]
    return weight, None if module.bias is None else module.bias[...]


def dense_weight(module: nnx.Linear | NarrowLinear) -> Float[Array, "i o"]:
    """Returns a linear layer's matrix; it is float32 if its weight is narrow."""
    weight, _ = weight_and_bias(module)
    return weight.dense() if isinstance(weight, NarrowWeight) else weight


def narrow_linear(layer: nnx.Module, name: str, weight: NarrowWeight) -> None:
    """Gives a layer's linear layer a narrow weight; its bias stays."""
    setattr(layer, name, NarrowLinear(weight, getattr(layer, name).bias))


def copy_to_quantize(model: nnx.Module, format: str):
    """A copy of a model or network that shares its arrays, for layers with narrow weights.

    Raises:
        ValueError: the format is unknown, or the weights are narrow already.
    """
    narrow.check_format(format)
    if model.quantization is not None:
        raise ValueError(f"the weights are in {model.quantization} already")
    copied = nnx.merge(*nnx.split(model))
    copied.quantization = format
    return copied


def quantize_layer(layer: nnx.Module, format: str) -> None:
    """Gives a decoder layer weights in a narrow format."""
    for name in LINEARS:
        narrow_linear(layer, name, narrow.quantize(getattr(layer, name).kernel[...], format=format))


def linear(
    module: nnx.Linear | NarrowLinear,
    x: Float[Array, "r i"],
    *,
    activation: str | None = None,
    gated: bool = False,
):
    """Applies a linear layer with its bias to rows: see `pallas_kernels.linear`. [r, o]"""
    weight, bias = weight_and_bias(module)
    options = {"activation": activation, "gated": gated}
    return pallas_kernels.linear(x, weight, bias, **options)


def project(module: nnx.Linear, x: Float[Array, "r i"]):
    """Applies a linear layer outside of the decoder layers to rows. [r, o]"""
    return linear(module, x) if is_invariant() else module(x)
