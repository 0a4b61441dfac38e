"""Products with narrow weights in XLA operations."""

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.matmul import xla
from pallas_kernels.matmul.narrow import Format, NarrowWeight, in_groups
from pallas_kernels.matmul.rounding import round_groups


def linear(
    x: Array,  # [rows, inputs]
    weight: NarrowWeight,  # [inputs, columns]
    bias: Array | None,  # [columns]
    *,
    activation: str | None,
    gated: bool,
) -> Array:  # [rows, outputs]
    """The product in XLA operations: see `pallas_kernels.linear`."""
    y = dot(x, weight)
    y = y if bias is None else y + bias.astype(y.dtype)
    return xla.activate(y, activation, gated).astype(x.dtype)


def dot(x: Array, weight: NarrowWeight) -> Array:
    """The product with rows that are rounded if the format has it so, float32 [rows, outputs].

    Both factors are float32 if rows are rounded, otherwise they have the type of the rows.
    """
    x, weight = weight.ordered(x), dataclasses.replace(weight, order=None)
    if weight.kind.rounds_rows:
        x = round_rows(x, weight.kind)
    return xla.dot(x, weight.dense(x.dtype), dtype=jnp.float32)


def round_rows(x: Array, kind: Format) -> Array:
    """The rounded numbers of rows [r, i], float32."""
    groups = in_groups(x.astype(jnp.float32))
    # Without the barrier XLA would leave out both conversions of numbers in fp8.
    rounded = lax.optimization_barrier(round_groups(groups, kind))
    values, second = (term.astype(jnp.float32) for term in (rounded.values, rounded.second_values))
    wide = (values + second * kind.second_step) * rounded.scales[..., None]
    return wide.reshape(len(x), -1)[:, : x.shape[1]]
