"""Which stored tensors a model consists of: their names and shapes, and what is wrong with them."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flax import nnx

from emsjax.models.stored import READABLE_DTYPES, StoredTensor, readable_name


@dataclasses.dataclass(frozen=True)
class Names:
    """How the checkpoints of a family name the parameters of its model.

    Attributes:
        modules: modules of the model that are stored under other names, and those names; several
            are concatenated on their last axis.
        prefix: precedes the names of all modules.
        optional_prefix: precedes that, except in some checkpoints.
        embedding: module of the table of embeddings.
        head: module of the output projection.
        can_untie: whether the model can have a head that differs from the table.
    """

    modules: Mapping[str, tuple[str, ...]]
    prefix: str
    optional_prefix: str = "model."
    embedding: str = "embed_tokens"
    head: str = "lm_head"
    can_untie: bool = False


NAMES = {  # by model type
    "opt": Names(
        {
            "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "out_proj": ("self_attn.out_proj",),
        },
        prefix="decoder.",
    )
}
TORCH_LEAVES = {"embedding": "weight", "kernel": "weight", "scale": "weight"}
LAYER_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
LAYERS = "layers"  # the list of layers, in models and in names
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
    """A parameter of the model and the stored tensors that are concatenated on its last axis.

    Attributes:
        path: path in the model's state.
        names: names of the stored tensors, without the optional prefix.
        shape: shape of each stored tensor.
        transposed: whether they are stored with their axes swapped.
    """

    path: tuple
    names: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool


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
    make: Callable[[Any], nnx.Module], config: Any, names: Names, *, torch_layout: bool
) -> Parameters:
    """The parameters of a model, of which one layer is traced, and no array is made.

    Args:
        make: makes a model of a config.
        config: the config; its number of layers may be anything.
        torch_layout: see `weight_files.WeightFormat`.
    """
    one_layer = dataclasses.replace(config, num_hidden_layers=1)
    weights = weights_of(nnx.eval_shape(lambda: make(one_layer)), names, torch_layout=torch_layout)
    outer = tuple(weight for weight in weights if weight.path[0] != LAYERS)
    layer = tuple(weight for weight in weights if weight.path[0] == LAYERS)
    return Parameters(outer, layer, f"{names.prefix}{LAYERS}.")


def weights_of(model: nnx.Module, names: Names, *, torch_layout: bool) -> list[Parameter]:
    """The stored tensors of every parameter of a (possibly abstract) model."""
    weights = []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        *scope, module, leaf = map(str, path)
        stored_modules = names.modules.get(module, (module,))
        stored_leaf = stored_leaf_of(leaf, torch_layout=torch_layout)
        stored = tuple(
            names.prefix + ".".join([*scope, name, stored_leaf]) for name in stored_modules
        )
        transposed = torch_layout and leaf == "kernel"
        shape = (*variable.shape[:-1], variable.shape[-1] // len(stored))
        weights.append(Parameter(path, stored, shape[::-1] if transposed else shape, transposed))
    return weights


def stored_leaf_of(leaf: str, *, torch_layout: bool) -> str:
    return TORCH_LEAVES.get(leaf, leaf) if torch_layout else leaf


def table_and_head(names: Names, *, torch_layout: bool) -> tuple[str, str]:
    """Stored names of the table of embeddings and of the head."""
    leaf = lambda name: stored_leaf_of(name, torch_layout=torch_layout)
    return (
        f"{names.prefix}{names.embedding}.{leaf('embedding')}",
        f"{names.head}.{leaf('kernel')}",
    )


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
        causes.append(f"num_hidden_layers is {layers}, and the weights have {found} layers")
    return causes


def layers_in(tensors: Mapping[str, StoredTensor], parameters: Parameters) -> list[int]:
    """The numbers of the layers that have tensors, in order."""
    numbers = {parameters.split(name)[0] for name in tensors}
    return sorted(number for number in numbers if number is not None)


def shapes_of(parameters: Sequence[Parameter]) -> dict[str, tuple[int, ...]]:
    return {name: one.shape for one in parameters for name in one.names}


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
