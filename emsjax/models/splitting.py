"""Which part of each parameter a device has when a model is split over several.

Products whose outputs are split (queries, keys and values; up and gate projections) are followed by
products whose inputs are split, and these by a sum over the devices. The embedding and output
matrices are split by vocabulary. Everything else lies on every device.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from emsjax.device import is_of_one_process, tree_bytes
from emsjax.models.architecture import Architecture
from emsjax.models.linears import (
    LINEARS,
    NARROW_ARRAYS,
    NarrowLinear,
    NarrowVariable,
    narrow_linear,
)
from emsjax.tensor_parallel import AXIS, TensorParallel
from pallas_kernels.matmul import narrow
from pallas_kernels.matmul.narrow import GROUP, NarrowWeight

# The axis on which an array is split, by the names of its module and of itself.
SPLIT_OUTPUTS = {"kernel": 1, "bias": 0, "values": 0, "scales": 1, "zeros": 1}
SPLIT_INPUTS = {"kernel": 0, "values": 1, "scales": 0, "zeros": 0, "order": 0}
SPLIT_TOKENS = {"embedding": 0}
AXES = {
    "qkv_proj": SPLIT_OUTPUTS,
    "up_proj": SPLIT_OUTPUTS,
    "out_proj": SPLIT_INPUTS,
    "down_proj": SPLIT_INPUTS,
    "embed_tokens": SPLIT_TOKENS,
    "lm_head": SPLIT_TOKENS,
    "lm_head_bias": {"": 0},
}


def split_axis(path: tuple) -> int | None:
    """The axis on which the parameter with this path is split; None: it is not split."""
    module, name = (path[-1], "") if len(path) == 1 else path[-2:]
    return AXES.get(module, {}).get(name)


def specs_of(model: nnx.Module, parallel: TensorParallel) -> Any:
    """The layout of each array of a model, as a pytree of the model's structure."""

    def spec(path, array):
        names = tuple(str(getattr(key, "name", getattr(key, "idx", key))) for key in path)
        axis = split_axis(names[:-1])  # the last is the variable's value
        is_whole = axis is None or array.shape[axis] == 1  # scales of columns
        return parallel.on_axis(None if is_whole else axis)

    return jax.tree_util.tree_map_with_path(spec, model)


class Entries(NamedTuple):
    """Where the entries of the parts are in the whole.

    Attributes:
        axis: the axis that is split; None: every device has the whole.
        index: [devices, entries] places of each part's entries on the whole's axis.
    """

    axis: int | None
    index: np.ndarray | None = None

    def part(self, whole: Array, device: int) -> Array:
        """One device's part of an array."""
        return whole if self.axis is None else whole.take(self.index[device], axis=self.axis)

    def whole(self, parts: Array) -> np.ndarray:
        """The array of which `parts` are the parts, side by side."""
        if self.axis is None:
            return np.asarray(parts)
        _, first = np.unique(self.index, return_index=True)
        return np.asarray(parts).take(first, axis=self.axis)


WHOLE = Entries(None)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the arrays of a model lie.

    Attributes:
        architecture: the whole model's.
        parallel: the devices of a mesh; None: the default device.

    Raises:
        ValueError: the model cannot be divided by the devices.
    """

    architecture: Architecture
    parallel: TensorParallel | None

    def __post_init__(self):
        self.architecture.part(self.devices)

    @property
    def devices(self) -> int:
        """Number of devices that share the model."""
        return 1 if self.parallel is None else self.parallel.size

    @property
    def first_device(self) -> jax.Device | None:
        """The first of this process's devices; None: the default one."""
        return None if self.parallel is None else self.parallel.own_devices[0][1]

    @functools.cached_property
    def index(self) -> dict[str, np.ndarray]:
        """By module, the places of each device's entries on the whole's axis, [devices, n]."""
        a, part = self.architecture, self.architecture.part(self.devices)
        device = np.arange(self.devices)[:, None]
        first_key = device * a.kv_heads // self.devices * a.head_dim
        queries = device * part.columns[0] + np.arange(part.columns[0])
        keys = a.columns[0] + first_key + np.arange(part.columns[1])
        inner = device * part.ffn_size + np.arange(part.ffn_size)
        tokens = device * part.vocab_size + np.arange(part.vocab_size)
        tokens = np.minimum(tokens, a.vocab_size - 1)  # the last part is filled up
        return {
            "qkv_proj": np.concatenate([queries, keys, keys + a.columns[1]], axis=1),
            "out_proj": queries,
            "up_proj": np.concatenate([inner, a.ffn_size + inner][: 1 + a.gated], axis=1),
            "down_proj": inner,
            "embed_tokens": tokens,
            "lm_head": tokens,
            "lm_head_bias": tokens,
        }

    def entries(self, path: tuple, weight: NarrowWeight | None = None) -> Entries:
        """Where the parts of an array of the model are.

        Args:
            path: the array's path in the model's state.
            weight: the narrow weight that it belongs to, if it does.

        Raises:
            ValueError: parts of a narrow weight's inputs do not consist of whole groups.
        """
        axis = split_axis(path)
        if axis is None or self.devices == 1:
            return WHOLE
        index = self.index[path[max(-2, -len(path))]]
        if weight is None or AXES[path[-2]] is SPLIT_OUTPUTS:
            return Entries(axis, index)
        if path[-1] in ("scales", "zeros") and len(weight.scales) == 1:
            return WHOLE  # of columns
        size = index.shape[1]
        if weight.order is not None:
            raise ValueError(
                f"the inputs of {path[-2]} are stored in another order, and cannot be divided by "
                "the devices of a mesh"
            )
        in_groups = weight.kind.rounds_rows or weight.kind.is_packed or len(weight.scales) > 1
        if in_groups and size % GROUP:
            raise ValueError(
                f"{path[-2]} has {size} inputs on each device of the mesh, and weights in "
                f"{weight.format} need a multiple of {GROUP}"
            )
        if path[-1] == "values":
            per_byte = 1 + weight.kind.is_packed
            return Entries(axis, index[:, ::per_byte] // per_byte)
        return Entries(axis, index[:, ::GROUP] // GROUP)

    def put(self, path: tuple, whole: Any) -> Any:
        """An array, or the `NarrowWeight` in place of one, with its parts on their devices."""
        if self.parallel is None:
            return whole
        if not isinstance(whole, NarrowWeight):
            return self._put(whole, self.entries(path))
        put = lambda name, array: self._put(array, self.entries((*path[:-1], name), whole))
        return dataclasses.replace(whole, **_of_arrays(put, whole))

    def whole(self, path: tuple, parts: Any) -> Any:
        """The inverse of `put`, on the host; other arrays stay where they are."""
        if self.devices == 1:
            return parts
        if not isinstance(parts, NarrowWeight):
            return self.entries(path).whole(parts)
        inputs = parts.inputs * (1 if AXES[path[-2]] is SPLIT_OUTPUTS else self.devices)
        whole = lambda name, array: self.entries((*path[:-1], name), parts).whole(array)
        return dataclasses.replace(parts, inputs=inputs, **_of_arrays(whole, parts))

    def _put(self, whole: Array, entries: Entries) -> Array:
        return self.parallel.put(functools.partial(entries.part, whole), entries.axis)

    def put_all(self, module: nnx.Module, path: tuple = ()) -> None:
        """Puts the arrays of a model, or of the part of it with this path, on their devices."""
        arrays = {}
        for steps, variable in nnx.to_flat_state(nnx.state(module)):
            weight = None
            if isinstance(variable, NarrowVariable):
                weight = functools.reduce(_step, steps[:-1], module).weight
            put = self._put(variable[...], self.entries((*path, *steps), weight))
            arrays[steps] = variable.replace(put)
        nnx.update(module, nnx.from_flat_state(arrays))

    def set_structure(self, model: nnx.Module) -> None:
        """Gives a model that was made for one device the structure for these devices.

        Its arrays have to follow: those of the parts, side by side.
        """
        if self.parallel is not None:
            model.parallel = self.parallel
            for layer in model.layers:
                self.set_layer(layer)

    def set_layer(self, layer: nnx.Module) -> None:
        """Gives a layer the structure of the part of it that a device has."""
        if self.parallel is None or not self.parallel.is_split:
            return
        part = self.architecture.part(self.devices)
        layer.architecture = dataclasses.replace(part, layers=(), rotaries=())
        layer.axis_name = AXIS
        for name, inputs in (("out_proj", part.columns[0]), ("down_proj", part.ffn_size)):
            if isinstance(getattr(layer, name), NarrowLinear):
                getattr(layer, name).inputs = inputs

    def quantize(self, layer: nnx.Module, format: str) -> None:
        """Gives a layer weights in a narrow format; they are those of the whole layer.

        Raises:
            ValueError: the layer is on devices of several processes.
        """
        if not is_of_one_process(layer):
            raise ValueError(
                "a model on devices of several processes cannot be quantised: load it so, with "
                "from_pretrained(..., quantize=..., mesh=...)"
            )
        with jax.default_device(self.first_device):
            for name in LINEARS:
                path = ("layers", 0, name, "kernel")
                kernel = jnp.asarray(self.whole(path, getattr(layer, name).kernel[...]))
                narrow_linear(layer, name, self.put(path, narrow.quantize(kernel, format=format)))
        self.set_layer(layer)

    def bytes_on_device(self, model: nnx.Module) -> int:
        """Bytes of the part of a whole model, which may be abstract, that a device has."""
        return sum(
            tree_bytes(variable) // (1 if split_axis(path) is None else self.devices)
            for path, variable in nnx.to_flat_state(nnx.state(model))
        )

    @property
    def on_each(self) -> str:
        """What a message adds to a size of the weights."""
        return f" on each of {self.devices} devices" if self.devices > 1 else ""


def _of_arrays(function: Callable[[str, Array], Any], weight: NarrowWeight) -> dict[str, Any]:
    """What a function returns for each array of a weight, by name."""
    arrays = {name: getattr(weight, name) for name in NARROW_ARRAYS}
    return {name: function(name, array) for name, array in arrays.items() if array is not None}


def _step(module: nnx.Module, name: str | int) -> nnx.Module:
    return module[name] if isinstance(name, int) else getattr(module, name)
