"""Folders whose weights are quantised already: how each method stores a linear layer.

Read are compressed-tensors (int8, fp8, packed int4), GPTQ and AWQ (4 bits, groups of 128), and fp8
in blocks of 128 x 128, as the method's own packages write them.

References: github.com/vllm-project/compressed-tensors, arXiv 2210.17323 (GPTQ) and 2306.00978
(AWQ), and the config.json of published folders.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from emsjax.models import narrow_layouts as layouts
from emsjax.models.schema import shown
from emsjax.models.stored import StoredTensor
from pallas_kernels.matmul.narrow import GROUP, NarrowWeight

CONFIGS = ("quantization_config", "compression_config")  # the first is transformers' name


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
    name = next((name for name in CONFIGS if contents.get(name) is not None), None)
    if name is None:
        return None
    try:
        found = contents[name]
        method = found.get("quant_method") if isinstance(found, Mapping) else found
        if not isinstance(method, str) or method not in METHODS or found is method:
            raise refused(method, f"read are {', '.join(METHODS)}")
        return METHODS[method](found)
    except ValueError as error:
        raise ValueError(f"{name} says that the weights are quantised {error}") from error


def refused(what: Any, why: str) -> ValueError:
    """The end of the error for weights that are quantised in another way."""
    return ValueError(f"in a way that emsjax does not read ({shown(what)}): {why}")


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
        return Scheme(method, "int4", names, layouts.packed_rows, layouts.shape_of_packed, optional)
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
    read = functools.partial(layouts.by_outputs, format=format)
    if strategy == "block":
        expect(weights, method, type=("float",), block_structure=([GROUP, GROUP],))
        read = functools.partial(layouts.by_blocks, scales="weight_scale")
    return Scheme(method, format, names, read, layouts.shape_of_weight)


def require(found: Mapping[str, Any], method: str, *names: str) -> None:
    """Raises ValueError unless one of these fields is there."""
    if not any(name in found for name in names):
        raise refused(method, f"{' or '.join(names)} is missing")


def gptq(found: Mapping[str, Any]) -> Scheme:
    require(found, "gptq", "bits")
    require(found, "gptq", "group_size")
    expect(found, "gptq", bits=(4,), group_size=(GROUP, -1))
    expect(found, "gptq", checkpoint_format=("gptq", "gptq_v2"))
    shift = 0 if found.get("checkpoint_format") == "gptq_v2" else 1
    names = ("qweight", "qzeros", "scales")
    read = functools.partial(layouts.packed_columns, zero_shift=shift)
    return Scheme("gptq", "int4", names, read, layouts.shape_of_gptq, ("g_idx",))


def awq(found: Mapping[str, Any]) -> Scheme:
    require(found, "awq", "bits", "w_bit")
    require(found, "awq", "group_size", "q_group_size")
    expect(found, "awq", bits=(4,), w_bit=(4,), group_size=(GROUP,), q_group_size=(GROUP,))
    expect(found, "awq", version=("gemm", "GEMM"), zero_point=(True,))
    return Scheme(
        "awq", "int4", ("qweight", "qzeros", "scales"), layouts.interleaved, layouts.shape_of_awq
    )


def fp8(found: Mapping[str, Any]) -> Scheme:
    expect(found, "fp8", activation_scheme=("dynamic",), fmt=("e4m3",))
    expect(found, "fp8", weight_block_size=([GROUP, GROUP], (GROUP, GROUP)))
    require(found, "fp8", "weight_block_size")
    read = functools.partial(layouts.by_blocks, scales="weight_scale_inv")
    return Scheme("fp8", "fp8", ("weight", "weight_scale_inv"), read, layouts.shape_of_weight)


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
