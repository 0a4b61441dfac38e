"""The arrays of quantised linear layers, as each method lays them out, and as one weight.

References: github.com/vllm-project/compressed-tensors, arXiv 2210.17323 (GPTQ) and 2306.00978
(AWQ).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from emsjax.models.stored import StoredTensor
from pallas_kernels.matmul import narrow
from pallas_kernels.matmul.narrow import GROUP, NarrowWeight

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns each half byte holds
IN_WORD = 8  # half bytes of a 32-bit word
OFFSET = 8  # unsigned 4-bit values minus this are those of `narrow.pack`


def by_outputs(arrays: Mapping[str, np.ndarray], *, format: str) -> NarrowWeight:
    """Values [o, i], and scales [o, 1] or [1]."""
    values, scales = arrays["weight"], arrays["weight_scale"].reshape(1, -1)
    scales = np.broadcast_to(scales, (1, len(values)))
    return made(values, scales.astype(np.float32), format=format)


def by_blocks(arrays: Mapping[str, np.ndarray], *, scales: str) -> NarrowWeight:
    """Values [o, i], and scales of blocks [o / GROUP, i / GROUP] by this name."""
    values, of_blocks = arrays["weight"], arrays[scales].astype(np.float32)
    return made(values, np.repeat(of_blocks, GROUP, axis=0)[: len(values)].T, format="fp8")


def packed_rows(arrays: Mapping[str, np.ndarray]) -> NarrowWeight:
    """compressed-tensors: words along the inputs [o, i / 8], and scales [o, groups]."""
    outputs, inputs = (int(n) for n in arrays["weight_shape"])
    values = half_bytes(arrays["weight_packed"], axis=1)[:, :inputs]
    zeros = arrays.get("weight_zero_point")
    zeros = None if zeros is None else half_bytes(zeros, axis=0)[:outputs].T
    return in_groups(values, arrays["weight_scale"].T, zeros, arrays.get("weight_g_idx"))


def packed_columns(arrays: Mapping[str, np.ndarray], *, zero_shift: int) -> NarrowWeight:
    """GPTQ: words along the inputs [i / 8, o], scales [groups, o], zeros [groups, o / 8]."""
    values = half_bytes(arrays["qweight"], axis=0).T
    zeros = half_bytes(arrays["qzeros"], axis=1) + np.int8(zero_shift)
    return in_groups(values, arrays["scales"], zeros, arrays.get("g_idx"))


def interleaved(arrays: Mapping[str, np.ndarray]) -> NarrowWeight:
    """AWQ: words along the outputs [i, o / 8], whose columns are in another order."""

    def columns(words):
        found = half_bytes(words, axis=1).reshape(len(words), -1, IN_WORD)
        return found[:, :, np.argsort(AWQ_ORDER)].reshape(len(words), -1)

    return in_groups(
        columns(arrays["qweight"]).T, arrays["scales"], columns(arrays["qzeros"]), None
    )


def half_bytes(words: np.ndarray, *, axis: int) -> np.ndarray:
    """4-bit values of 32-bit words, the lowest bits first along this axis, int8 from 0 to 15."""
    words = np.moveaxis(words.view(np.uint32), axis, -1)
    values = (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
    return np.moveaxis(values.astype(np.int8).reshape(*words.shape[:-1], -1), -1, axis)


def in_groups(values, scales, zeros, groups) -> NarrowWeight:
    """A weight of 4 bits.

    Args:
        values: [o, i], from 0 to 15.
        scales: [groups, o], one group or one for each GROUP of inputs.
        zeros: [groups, o]; None: 8.
        groups: the group of each input, [i]; None: in their order.
    """
    number, inputs = math.ceil(values.shape[1] / GROUP), values.shape[1]
    order = None
    if groups is not None and (groups != np.arange(inputs) // GROUP).any() and len(scales) > 1:
        order = np.argsort(groups, kind="stable")
        values = values[:, order]
        if (groups[order] != np.arange(inputs) // GROUP).any():
            raise ValueError(f"groups of inputs must have {GROUP} each")
    whole = lambda x: np.broadcast_to(x, (number, x.shape[1])) if len(x) == 1 else x
    zeros = None if zeros is None else (whole(zeros) - OFFSET).astype(np.int8)
    packed = narrow.pack(jnp.asarray(values - np.int8(OFFSET)))
    return made(packed, whole(scales), zeros, order, format="int4", inputs=inputs)


def made(values, scales, zeros=None, order=None, *, format: str, inputs: int = 0) -> NarrowWeight:
    """The weight, on the device."""
    device = lambda x, dtype=None: None if x is None else jnp.array(x, dtype, copy=True)
    inputs = inputs or values.shape[1]
    arrays = device(values), device(scales), device(zeros), device(order, jnp.int32)
    return NarrowWeight(*arrays, format=format, inputs=inputs)


def shape_of_weight(tensors: Mapping[str, StoredTensor]) -> tuple[int, ...]:
    return tensors["weight"].shape


def shape_of_packed(tensors: Mapping[str, StoredTensor]) -> tuple[int, ...]:
    stated = tensors["weight_shape"]
    return tuple(int(n) for n in stated.read()) if stated.shape == (2,) else ()


def shape_of_gptq(tensors: Mapping[str, StoredTensor]) -> tuple[int, ...]:
    words, outputs = tensors["qweight"].shape
    return outputs, words * IN_WORD


def shape_of_awq(tensors: Mapping[str, StoredTensor]) -> tuple[int, ...]:
    inputs, words = tensors["qweight"].shape
    return words * IN_WORD, inputs


def joined(weights: Sequence[NarrowWeight], columns: Sequence[int] | None) -> NarrowWeight:
    """Weights side by side.

    Args:
        weights: of the same inputs and format.
        columns: where each output is; None: in their order.

    Raises:
        ValueError: their groups hold other inputs.
    """
    first = weights[0]
    orders = [weight.order for weight in weights]
    same = all((one is None) == (orders[0] is None) for one in orders)
    if not same or any(one is not None and (one != orders[0]).any() for one in orders):
        raise ValueError("layers that are one product have groups of other inputs each")
    groups = max(len(weight.scales) for weight in weights)
    wide = lambda x: jnp.broadcast_to(x, (groups, x.shape[1]))
    zeros = None
    if any(weight.zeros is not None for weight in weights):
        none = lambda weight: jnp.zeros(weight.scales.shape, jnp.int8)
        filled = (none(one) if one.zeros is None else one.zeros for one in weights)
        zeros = jnp.concatenate([wide(one) for one in filled], axis=1)
    values = jnp.concatenate([weight.values for weight in weights])
    scales = jnp.concatenate([wide(weight.scales) for weight in weights], axis=1)
    if columns is not None:
        order = np.asarray(columns)
        values, scales = values[order], scales[:, order]
        zeros = None if zeros is None else zeros[:, order]
    return dataclasses.replace(first, values=values, scales=scales, zeros=zeros)
