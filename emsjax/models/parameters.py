"""Where the parameters of a model are stored: names, shapes and layouts, from a table per family.

A linear layer's kernel is [inputs, outputs] here. Checkpoints store it transposed, in parts, or
with its columns in another order.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from emsjax.models.architecture import Architecture
from emsjax.models.config import DecoderConfig
from emsjax.models.family import LAYER, Family
from emsjax.models.stored import READABLE_DTYPES, StoredTensor, readable_name

TORCH_LEAVES = {"embedding": "weight", "kernel": "weight", "scale": "weight"}
LAYER_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
# What the names of tensors say about a checkpoint that does not fit.
CAUSES = {
    "the weights are quantised, which emsjax does not read": re.compile(
        r"\.(qweight|qzeros|g_idx|weight_scale|weight_scale_inv|weight_packed|SCB|absmax|quant_map|quant_state.*)$"
    ),
    "the weights are those of an adapter (LoRA), to be merged into its model first": re.compile(
        r"\.lora_[AB]\b"
    ),
}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of the model and the stored tensors that it consists of.

    Attributes:
        path: path in the model's state.
        names: names of the stored tensors, without the family's prefix.
        sizes: sizes of the stored tensors on the parameter's last axis.
        shape: the parameter's shape.
        transposed: whether they are stored with their axes swapped.
        columns: where each entry of the last axis is stored; None: in the same order.
    """

    path: tuple
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    transposed: bool = False
    columns: tuple[int, ...] | None = None

    @property
    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each stored tensor, by name."""
        shapes = ((*self.shape[:-1], size) for size in self.sizes)
        turned = (shape[::-1] if self.transposed else shape for shape in shapes)
        return dict(zip(self.names, turned, strict=True))

    def join(self, parts: Sequence[Array], dtype) -> tuple[Array, Array]:
        """The parameter from its stored tensors, and whether each of these is finite in `dtype`."""
        columns = None if self.columns is None else np.array(self.columns)
        return _join(parts, columns, transposed=self.transposed, dtype=jnp.dtype(dtype))

    def split(self, value: Array) -> list[Array]:
        """The stored tensors of a value, in its dtype."""
        order = None if self.columns is None else np.argsort(self.columns)
        return _split(value, order, ends=self.sizes[:-1], transposed=self.transposed)


@functools.partial(jax.jit, static_argnames=("transposed", "dtype"))
def _join(parts, columns, *, transposed: bool, dtype) -> tuple[Array, Array]:
    parts = [(part.T if transposed else part).astype(dtype) for part in parts]
    are_finite = jnp.stack([jnp.isfinite(part).all() for part in parts])
    value = jnp.concatenate(parts, axis=-1)
    return (value if columns is None else jnp.take(value, columns, axis=-1)), are_finite


@functools.partial(jax.jit, static_argnames=("ends", "transposed"))
def _split(value, order, *, ends: tuple[int, ...], transposed: bool) -> list[Array]:
    value = value if order is None else jnp.take(value, order, axis=-1)
    parts = jnp.split(value, np.cumsum(ends), axis=-1)
    return [part.T if transposed else part for part in parts]


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The parameters of a model of any number of layers.

    Attributes:
        outer: those outside of the layers.
        layer: those of one layer, with the layer's number 0.
        layers_prefix: what precedes the layer's number in the names.
    """

    outer: tuple[Parameter, ...]
    layer: tuple[Parameter, ...]
    layers_prefix: str

    def of_layers(self, count: int) -> list[Parameter]:
        """The parameters of a model with this many layers."""
        renumbered = []
        for i in range(count):
            for one in self.layer:
                names = tuple(self.name_in(i, name) for name in one.names)
                path = (one.path[0], i, *one.path[2:])
                renumbered.append(dataclasses.replace(one, path=path, names=names))
        return [*self.outer, *renumbered]

    def split(self, name: str) -> tuple[int | None, str]:
        """The layer's number in a name, and what follows it; (None, name) outside of layers."""
        number, _, rest = name.removeprefix(self.layers_prefix).partition(".")
        if name.startswith(self.layers_prefix) and LAYER_NUMBER.fullmatch(number):
            return int(number), rest
        return None, name

    def name_in(self, layer: int, name: str) -> str:
        """The name in another layer of a tensor of layer 0."""
        return f"{self.layers_prefix}{layer}.{name.removeprefix(f'{self.layers_prefix}0.')}"


def parameters_of(
    make: Callable[[DecoderConfig], nnx.Module],
    config: DecoderConfig,
    family: Family,
    *,
    torch_layout: bool,
) -> Parameters:
    """The parameters of a model, of which one layer is traced, and no array is made.

    Args:
        make: makes a model of a config.
        config: the config.
        family: the config's family.
        torch_layout: see `weight_files.WeightFormat`.
    """
    model = nnx.eval_shape(lambda: make(config.with_layers([0])))
    weights = weights_of(model, family, torch_layout=torch_layout)
    is_outer = lambda weight: weight.path[0] != "layers"
    return Parameters(
        tuple(weight for weight in weights if is_outer(weight)),
        tuple(weight for weight in weights if not is_outer(weight)),
        family.layers_prefix,
    )


def weights_of(model: nnx.Module, family: Family, *, torch_layout: bool) -> list[Parameter]:
    """Where each parameter of a (possibly abstract) model is stored.

    Args:
        model: the model.
        family: the model's family.
        torch_layout: see `weight_files.WeightFormat`.
    """
    columns = None
    if family.columns is not None:
        columns = tuple(family.columns(model.config).tolist())
    found = []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        module, leaf = _module_and_leaf(path, family)
        layer = next((str(step) for step in path if isinstance(step, int)), "")
        leaf = TORCH_LEAVES.get(leaf, leaf) if torch_layout else leaf
        names = [name.format(layer) for name in family.stored_modules(module)]
        found.append(
            Parameter(
                path=path,
                names=tuple(f"{name}.{leaf}" if leaf else name for name in names),
                sizes=part_sizes(model.architecture, len(names), variable.shape[-1]),
                shape=variable.shape,
                transposed=torch_layout and family.transposed and path[-1] == "kernel",
                columns=columns if module.endswith("qkv_proj") else None,
            )
        )
    return found


def _module_and_leaf(path: tuple, family: Family) -> tuple[str, str]:
    """The name of a parameter's module in the family's table, and of the leaf within the module."""
    steps = [LAYER if isinstance(step, int) else str(step) for step in path]
    whole = ".".join(steps)
    return (whole, "") if whole in family.modules else (".".join(steps[:-1]), steps[-1])


def part_sizes(architecture: Architecture, parts: int, size: int) -> tuple[int, ...]:
    """Columns of each of the parts that are stored: q, k and v, gate and up, or one of all."""
    return architecture.columns if parts == 3 else (size // parts,) * parts


def table_and_head(family: Family, *, torch_layout: bool) -> tuple[str, str]:
    """Stored names of the table of embeddings and of the head."""
    (table,), head = family.stored_modules("embed_tokens"), family.head
    if torch_layout:
        return f"{table}.weight", f"{head}.weight"
    return f"{table}.embedding", f"{head}.kernel"


def misfits(
    parameters: Parameters, layers: int, tensors: Mapping[str, StoredTensor]
) -> Iterator[str]:
    """Yields what is wrong, one by one, with tensors that are not those of a model.

    Time and memory depend on the number of tensors, not on the number of layers.

    Args:
        parameters: the model's.
        layers: number of layers in config.json.
        tensors: what is stored.
    """
    outer, layer = shapes_of(parameters.outer), shapes_of(parameters.layer)
    present = layers_in(tensors, parameters)
    yield from (f"{name} is missing" for name in outer if name not in tensors)
    within = [number for number in present if number < layers]
    for number in within:
        names = (parameters.name_in(number, name) for name in layer)
        yield from (f"{name} is missing" for name in names if name not in tensors)
    if absent := layers - len(within):
        yield f"{absent} of {layers} layers are missing"
    for name, tensor in tensors.items():
        number, rest = parameters.split(name)
        if number is None:
            expected = outer.get(name)
        else:
            first = f"{parameters.layers_prefix}0.{rest}"
            expected = layer.get(first) if number < layers else None
        yield from problems_of(name, tensor, expected)


def likely_causes(
    parameters: Parameters, layers: int, tensors: Mapping[str, StoredTensor]
) -> list[str]:
    """What probably explains misfits, if there are any; the arguments are those of `misfits`."""
    causes = [text for text, names in CAUSES.items() if any(map(names.search, tensors))]
    found = len(layers_in(tensors, parameters))
    if found != layers:
        causes.append(f"config.json has {layers} layers, and the weights have {found}")
    return causes


def layers_in(tensors: Mapping[str, StoredTensor], parameters: Parameters) -> list[int]:
    """The numbers of the layers that have tensors, in order."""
    numbers = {parameters.split(name)[0] for name in tensors}
    return sorted(number for number in numbers if number is not None)


def shapes_of(parameters: Sequence[Parameter]) -> dict[str, tuple[int, ...]]:
    return {name: shape for one in parameters for name, shape in one.stored_shapes.items()}


def problems_of(name: str, tensor: StoredTensor, expected: tuple[int, ...] | None) -> list[str]:
    """What is wrong with a stored tensor; `expected` is its shape in the model, or None."""
    name = readable_name(name)
    if expected is None:
        return [f"{name} is not a part of this model"]
    found = []
    if tensor.shape != expected:
        found.append(f"{name} has shape {tensor.shape} instead of {expected}")
    if tensor.dtype not in READABLE_DTYPES:
        found.append(f"{name} is {tensor.dtype}, not one of {', '.join(READABLE_DTYPES)}")
    return found
