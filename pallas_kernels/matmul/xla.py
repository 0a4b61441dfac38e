"""Products in XLA operations, whole or in shares of the contracted axis."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from pallas_kernels.common.blocks import in_blocks
from pallas_kernels.common.implementations import matmul_precision
from pallas_kernels.matmul.activations import ACTIVATIONS


def linear(
    x: Array,  # [rows, inputs]
    weight: Array,  # [inputs, columns]
    bias: Array | None,  # [columns]
    *,
    activation: str | None,
    gated: bool,
) -> Array:  # [rows, outputs]
    """See `pallas_kernels.linear`."""
    y = dot(x, weight)
    return activate(y if bias is None else y + bias, activation, gated)


def activate(y: Array, activation: str | None, gated: bool) -> Array:
    """What follows a product with its bias, computed in float32."""
    if activation is None and not gated:
        return y
    if activation == "relu" and not gated:
        return ACTIVATIONS[activation](y)  # exact in any type, and XLA makes it part of the product
    out, up = jnp.split(y.astype(jnp.float32), 2, axis=-1) if gated else (y.astype(jnp.float32), 1)
    out = out if activation is None else ACTIVATIONS[activation](out)
    return (out * up).astype(y.dtype)


def dot(x: Array, weight: Array, dtype=None, *, transposed: bool = False) -> Array:
    """The product, in this dtype or in that of its factors.

    If it is `transposed`, the weight is [outputs, inputs].
    """
    options = {} if dtype is None else {"preferred_element_type": dtype}
    options["precision"] = matmul_precision(x.dtype)
    if transposed:
        return jnp.einsum("rw,vw->rv", x, weight, **options)
    return jnp.dot(x, weight, **options)


def widened_dot(x: Array, weight: Array, *, transposed: bool = False) -> Array:
    """The product in float32, whose gradient is computed from factors in x's dtype."""
    return dot(x, weight, transposed=transposed).astype(jnp.float32)


def in_row_blocks(product: Callable[..., Array]) -> Callable[..., Array]:
    """product(x, ...), computed for a fixed number of rows of x at a time."""
    return lambda x, *rest: in_blocks(lambda block: product(block, *rest), x)


def dot_in_shares(x: Array, weight: Array, shares: int) -> Array:
    """The product's shares, [shares, rows, outputs]: see `pallas_kernels.linear_sums`."""
    x = x.reshape(x.shape[0], shares, -1)
    weight = weight.reshape(shares, -1, weight.shape[1])
    precision = matmul_precision(x.dtype)
    kinds = {"precision": precision, "preferred_element_type": sums_dtype(x.dtype, shares)}
    return jnp.einsum("rsi,sio->sro", x, weight, **kinds)


def sums_dtype(dtype, shares: int) -> jnp.dtype:
    """The dtype in which `pallas_kernels.linear_sums` returns the product of factors of `dtype`.

    Shares in float16 might be infinite where the product is not.
    """
    return jnp.dtype(jnp.bfloat16 if dtype == jnp.bfloat16 and shares > 1 else jnp.float32)
