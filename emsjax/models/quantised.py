"""Folders whose weights are quantised already: how each method stores a linear layer.

Read are compressed-tensors (int8, fp8, packed int4), GPTQ and AWQ (4 bits, groups of 128), and fp8
in blocks of 128 x 128, as the method's own packages write them.

References: github.com/vllm-project/compressed-tensors, arXiv 2210.17323 (GPTQ) and 2306.00978
(AWQ), and the config.json of published folders.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from emsjax.models.schema import shown
from emsjax.models.stored import StoredTensor
from pallas_kernels.matmul import narrow
from pallas_kernels.matmul.narrow import GROUP, NarrowWeight

CONFIGS = ("quantization_config", "compression_config")  # the first is transformers' name
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns each half byte holds
IN_WORD = 8  # half bytes of a 32-bit word
OFFSET = 8  # unsigned 4-bit values minus this are those of `narrow.pack`


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How the linear layers of a folder are stored.

    Attributes:
        method: as messages name it.
        format: a name in `narrow.FORMATS`.
        names: the stored tensors of a layer, by what they follow its name with: those that each
            layer has.
        optional: further ones that it may have.
        read: makes the weight of a layer from arrays by these names.
        shape: the layer's outputs and inputs, from the tensors by these names.
    """

    method: str
    format: str
    names: tuple[str, ...]
    read: Callable[[Mapping[str, np.ndarray]], NarrowWeight]
    shape: Callable[[Mapping[str, StoredTensor]], tuple[int, int]]
    optional: tuple[str, ...] = ()


def scheme_of(contents: Mapping[str, Any]) -> Scheme | None:
    """The scheme that a config.json describes; None: the weights are not quantised.

    Raises:
        ValueError: it is one that is not read; the message names it.
    """
    found = next((contents[name] for name in CONFIGS if contents.get(name) is not None), None)
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise refused(found, "it is not an object")
    method = found.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise refused(method, f"read are {', '.join(METHODS)}")
    return METHODS[method](found)


def refused(what: Any, why: str) -> ValueError:
    """The error for weights that are quantised in another way."""
    return ValueError(
        f"{CONFIGS[0]} says that the weights are quantised by a method that emsjax does not read "
        f"({shown(what)}): {why}"
    )


def expect(found: Mapping[str, Any], method: str, **wanted: Sequence[Any]) -> None:
    """Raises ValueError unless each field is absent or has one of the wanted values."""
    for name, values in wanted.items():
        if name in found and found[name] not in values:
            known = ", ".join(map(str, values))
            raise refused(method, f"{name} must be {known}, not {shown(found[name])}")


def compressed_tensors(found: Mapping[str, Any]) -> Scheme:
    """compressed-tensors: one group of linear layers, quantised alike."""
    method = "compressed-tensors"
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise refused(method, "config_groups must hold one group")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise refused(method, "the group must describe its weights")
    rows = group.get("input_activations")
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    strategy = weights.get("strategy")
    if rows is not None:
        expect(rows, method, num_bits=(bits,), type=(kind,), dynamic=(True,), symmetric=(True,))
        expect(rows, method, strategy=("token", "group"))
    if (bits, kind) == (4, "int") and rows is None:
        expect(weights, method, strategy=("group", "channel"))
        if strategy == "group":
            expect(weights, method, group_size=(GROUP,))
        names = ("weight_packed", "weight_scale", "weight_shape")
        optional = ("weight_zero_point", "weight_g_idx")
        return Scheme(method, "int4", names, packed_rows, shape_of_packed, optional)
    expect(weights, method, strategy=("channel", "tensor", "block"), symmetric=(True,))
    names = ("weight", "weight_scale")
    formats = {
        (8, "int", True): "int8",
        (8, "int", False): "int8-weights",
        (8, "float", True): "fp8",
    }
    format = formats.get((bits, kind, rows is not None))
    if format is None:
        rounded = "with" if rows is not None else "without"
        raise refused(method, f"{shown(bits)} bits, {shown(kind)}, {rounded} rounded activations")
    read = functools.partial(by_outputs, format=format)
    if strategy == "block":
        expect(weights, method, type=("float",), block_structure=([GROUP, GROUP],))
        read = functools.partial(by_blocks, scales="weight_scale")
    return Scheme(method, format, names, read, shape_of_weight)


def gptq(found: Mapping[str, Any]) -> Scheme:
    expect(found, "gptq", bits=(4,), group_size=(GROUP, -1))
    expect(found, "gptq", checkpoint_format=("gptq", "gptq_v2"))
    shift = 0 if found.get("checkpoint_format") == "gptq_v2" else 1
    names = ("qweight", "qzeros", "scales")
    read = functools.partial(packed_columns, zero_shift=shift)
    return Scheme("gptq", "int4", names, read, shape_of_gptq, ("g_idx",))


def awq(found: Mapping[str, Any]) -> Scheme:
    expect(found, "awq", bits=(4,), w_bit=(4,), group_size=(GROUP,), q_group_size=(GROUP,))
    expect(found, "awq", version=("gemm", "GEMM"), zero_point=(True,))
    return Scheme("awq", "int4", ("qweight", "qzeros", "scales"), interleaved, shape_of_awq)


def fp8(found: Mapping[str, Any]) -> Scheme:
    expect(found, "fp8", activation_scheme=("dynamic",), fmt=("e4m3",))
    expect(found, "fp8", weight_block_size=([GROUP, GROUP], (GROUP, GROUP)))
    if "weight_block_size" not in found:
        raise refused("fp8", "weight_block_size is missing")
    read = functools.partial(by_blocks, scales="weight_scale_inv")
    return Scheme("fp8", "fp8", ("weight", "weight_scale_inv"), read, shape_of_weight)


METHODS = {"compressed-tensors": compressed_tensors, "gptq": gptq, "awq": awq, "fp8": fp8}


@dataclasses.dataclass(frozen=True)
class StoredNarrow:
    """The tensors of a linear layer, by what they follow its name with."""

    scheme: Scheme
    tensors: dict[str, StoredTensor]

    def read(self) -> NarrowWeight:
        """The weight on the device.

        Raises:
            ValueError: the tensors do not fit each other, or scales are not finite.
        """
        arrays = {name: tensor.read() for name, tensor in self.tensors.items()}
        outputs, inputs = self.scheme.shape(self.tensors)
        try:
            weight = self.scheme.read(arrays)
            fits = weight.shape == (inputs, outputs) and weight.scales.shape in (
                (1, outputs),
                (math.ceil(inputs / GROUP), outputs),
            )
            fits &= weight.zeros is None or weight.zeros.shape == weight.scales.shape
            if not fits:
                raise ValueError(f"a weight of {outputs} outputs and {inputs} inputs")
        except (ValueError, TypeError, IndexError, AttributeError) as error:
            shapes = ", ".join(f"{name} {one.shape}" for name, one in self.tensors.items())
            raise ValueError(f"tensors that do not fit each other ({shapes}): {error}") from error
        if not bool(jnp.isfinite(weight.scales).all()):
            raise ValueError("scales that are not finite")
        return weight

    def dense(self) -> np.ndarray:
        """The matrix [outputs, inputs], for layers that take no narrow weights."""
        return np.asarray(self.read().dense().T)


def gather(
    tensors: Mapping[str, StoredTensor], scheme: Scheme
) -> tuple[dict[str, StoredTensor], dict[str, StoredNarrow]]:
    """The tensors of a folder with one matrix in place of the parts of each linear layer.

    Returns:
        The tensors, and by the name of each such matrix where it comes from.
    """
    parts = (*scheme.names, *scheme.optional)
    layers: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        stem, _, last = name.rpartition(".")
        if last in parts:
            layers.setdefault(stem, {})[last] = tensor
    whole = {stem: own for stem, own in layers.items() if own.keys() >= {*scheme.names}}
    is_part = lambda stem, _, last: last in whole.get(stem, ())
    kept = {name: of for name, of in tensors.items() if not is_part(*name.rpartition("."))}
    found = {f"{stem}.weight": StoredNarrow(scheme, own) for stem, own in whole.items()}
    for name, source in found.items():
        file = next(iter(source.tensors.values())).file
        shape = scheme.shape(source.tensors)
        kept[name] = StoredTensor(shape, "float32", source.dense, file)
    return kept, found


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
