"""Narrow weights as compressed-tensors, which transformers and other engines load.

Reference: github.com/vllm-project/compressed-tensors.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from emsjax.models.narrow_layouts import IN_WORD, OFFSET
from pallas_kernels.matmul import narrow
from pallas_kernels.matmul.narrow import GROUP, NarrowWeight


def split(
    weight: NarrowWeight, sizes: Sequence[int], columns: Sequence[int] | None
) -> list[NarrowWeight]:
    """The weights that `joined` puts side by side, of these numbers of outputs."""
    outputs = slice(None) if columns is None else np.argsort(columns)
    ends = np.cumsum(sizes[:-1])
    cut = lambda x, axis: jnp.split(x.take(outputs, axis) if columns is not None else x, ends, axis)
    values, scales = cut(weight.values, 0), cut(weight.scales, 1)
    zeros = [None] * len(sizes) if weight.zeros is None else cut(weight.zeros, 1)
    change = functools.partial(dataclasses.replace, weight)
    parts = zip(values, scales, zeros, strict=True)
    return [change(values=one, scales=two, zeros=three) for one, two, three in parts]


def in_blocks(weights: Iterable[NarrowWeight]) -> bool:
    """Whether the scales of a model's weights are those of blocks of inputs and outputs."""
    return any(len(weight.scales) > 1 and not weight.kind.is_packed for weight in weights)


def to_compressed_tensors(weight: NarrowWeight, *, blocks: bool) -> dict[str, np.ndarray]:
    """The tensors of a linear layer, by what they follow its name with.

    Args:
        weight: the layer's.
        blocks: see `in_blocks`.
    """
    scales = np.asarray(weight.scales)
    if not weight.kind.is_packed:
        scales = scales[:, ::GROUP] if blocks else scales
        return {"weight": np.asarray(weight.values), "weight_scale": np.ascontiguousarray(scales.T)}
    values = np.asarray(narrow.unpack(weight.values))[:, : weight.inputs]
    found = {
        "weight_scale": np.ascontiguousarray(scales.T),
        "weight_shape": np.array(values.shape, np.int64),
    }
    if weight.order is not None:
        order = np.asarray(weight.order)
        groups = np.empty(weight.inputs, np.int32)
        groups[order] = np.arange(weight.inputs) // GROUP
        found["weight_g_idx"] = groups
        values = values[:, np.argsort(order)]
    found["weight_packed"] = to_words(values, axis=1)
    if weight.zeros is not None:
        found["weight_zero_point"] = to_words(np.asarray(weight.zeros).T, axis=0)
    return found


def to_words(values: np.ndarray, *, axis: int) -> np.ndarray:
    """Values of -8 to 7 as `half_bytes` takes them apart."""
    values = np.moveaxis(values.astype(np.int32) + OFFSET, axis, -1).astype(np.uint32)
    missing = -values.shape[-1] % IN_WORD
    values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
    shifted = values.reshape(*values.shape[:-1], -1, IN_WORD) << np.arange(
        0, 32, 4, dtype=np.uint32
    )
    words = np.bitwise_or.reduce(shifted, axis=-1).view(np.int32)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis))


def description(weight: NarrowWeight, *, blocks: bool) -> dict[str, Any]:
    """`quantization_config` of a folder; the arguments are those of `to_compressed_tensors`."""
    kind = weight.kind
    number = {"num_bits": 4 if kind.is_packed else 8, "symmetric": True}
    number["type"] = "float" if weight.format == "fp8" else "int"
    weights, rows = number | {"dynamic": False, "strategy": "channel"}, None
    if kind.is_packed:
        weights |= {"strategy": "group", "group_size": GROUP, "symmetric": weight.zeros is None}
        weights |= {} if weight.order is None else {"actorder": "group"}
    elif blocks:
        weights |= {"strategy": "block", "block_structure": [GROUP, GROUP]}
    if kind.rounds_rows:
        rows = number | {"dynamic": True, "strategy": "token"}
        rows |= {"strategy": "group", "group_size": GROUP} if blocks else {}
    formats = {"fp8": "float-quantized", "int4": "pack-quantized"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.get(weight.format, "int-quantized"),
        "config_groups": {"group_0": group | {"output_activations": None}},
        "ignore": ["lm_head"],
    }
