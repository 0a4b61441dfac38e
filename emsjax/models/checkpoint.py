"""Hugging Face checkpoints, read in any published format."""

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from emsjax.device import available_bytes, readable
from emsjax.models import narrow_layouts, parameters, quantised, values
from emsjax.models.config import DecoderConfig, check_supported
from emsjax.models.families import FAMILIES, family_of
from emsjax.models.family import Family
from emsjax.models.hub import CONFIG, GENERATION_CONFIG, folder_of
from emsjax.models.linears import LINEARS, narrow_linear
from emsjax.models.parameters import Parameter, Parameters
from emsjax.models.splitting import Placement
from emsjax.models.stored import READABLE_DTYPES, StoredTensor, read_json
from emsjax.models.weight_files import choose_format, first_files, open_weights
from emsjax.tensor_parallel import TensorParallel
from pallas_kernels.matmul import narrow
from pallas_kernels.matmul.narrow import NarrowWeight

LoadedModel = TypeVar("LoadedModel", bound=nnx.Module)
DTYPES = ("bfloat16", "float16", "float32")
SHOWN_PROBLEMS = 8  # of a checkpoint that does not fit its config
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load(
    cls: Callable[..., LoadedModel],
    path_or_repo_id: str | PathLike,
    *,
    dtype,
    revision: str | None = None,
    allow_nonfinite: bool = False,
    quantize: str | None = None,
    mesh: Mesh | None = None,
    families: Mapping[str, Family] = FAMILIES,
) -> LoadedModel:
    """A model from a local folder or a repository of the Hugging Face hub.

    The first of these formats that exists is read, in one file or in shards: safetensors, PyTorch
    .bin, and for OPT Flax msgpack. Names and shapes are compared with the config before any tensor
    is read. Tensors are transferred to the device one by one. The end, start and padding tokens are
    those of generation_config.json; what it lacks is taken from config.json.

    Args:
        cls: makes a model, as `emsjax.Decoder` does.
        path_or_repo_id: a folder, or a hub id such as "Qwen/Qwen3-0.6B".
        dtype: dtype of the model, bfloat16, float16 or float32.
        revision: a branch, tag or commit of the repository.
        allow_nonfinite: whether weights may be infinite or NaN.
        quantize: the format of the layers' weights, which are rounded as they are read; None: they
            have the dtype.
        mesh: the devices over which the model is split: see `emsjax.Decoder.split`. One parameter
            at a time is read by the host and cut into parts on a device; None: one device.
        families: the families that the model may be of, by `model_type`.

    Raises:
        ValueError: the dtype or the format is another one; the path is neither a folder nor a
            repository; there is no config.json or there are no weights; a file is malformed,
            truncated, or does not fit the config; the weights are quantised in a way that is not
            read, or already although a format is given; they are not finite, in the file or in the
            dtype; there is a head that differs from the embeddings; the device has no room for the
            weights; the model cannot be divided by the devices of the mesh.
    """
    check_dtype(dtype)
    parallel = None if mesh is None else TensorParallel.over(mesh)
    if quantize is not None:
        narrow.check_format(quantize)
    folder = folder_of(path_or_repo_id, revision)
    config = read_config(folder, families)
    family = family_of(config)
    known = [name for form, name in first_files() if form.torch_layout or family.has_flax]
    present = [name for name in known if os.path.lexists(folder / name)]
    form, first = choose_format(present, str(folder))
    source = folder / first

    make = lambda config: cls(config, rngs=nnx.Rngs(0), dtype=dtype)
    tensors, stored_narrow = published(open_weights(form, source), family, source), {}
    if (scheme := quantised.scheme_of(read_json(folder / CONFIG))) is not None:
        if quantize is not None:
            raise ValueError(f"{folder} is quantised already ({scheme.method}): leave quantize out")
        quantize = scheme.format
        tensors, stored_narrow = quantised.gather(tensors, scheme)
    stored_as = {"torch_layout": form.torch_layout}
    config, tensors = settle_head(config, tensors, family, dtype=dtype, **stored_as)
    layout = parameters.parameters_of(make, config, family, **stored_as)
    layers = len(config.architecture.layers)
    check(layout, layers, tensors, source)

    model = nnx.eval_shape(lambda: make(config))
    planned = model
    if quantize is not None:
        planned = nnx.eval_shape(lambda: make(config).quantize(quantize))
    place = Placement(config.architecture, parallel)
    check_weights_fit(planned, folder, place)

    def read(weight: Parameter) -> Array | NarrowWeight:
        if all(name in stored_narrow for name in weight.names) and is_linear(weight.path):
            return read_narrow(weight, stored_narrow)
        value = values.read(weight, tensors, dtype=dtype, finite=not allow_nonfinite)
        if scheme is None and quantize is not None and is_linear(weight.path):
            return narrow.quantize(value, format=quantize)
        return value

    arrays = {}
    with jax.default_device(place.first_device):
        for weight in layout.of_layers(layers):
            value = place.put(weight.path, read(weight))
            if isinstance(value, NarrowWeight):
                narrow_linear(model.layers[weight.path[1]], weight.path[2], value)
            else:
                arrays[weight.path] = value
    model.quantization = quantize
    place.set_structure(model)
    graph, state = nnx.split(model)
    variables = dict(nnx.to_flat_state(state))
    variables |= {path: variables[path].replace(value) for path, value in arrays.items()}
    return nnx.merge(graph, nnx.from_flat_state(variables))


def read_narrow(weight: Parameter, stored: Mapping[str, quantised.StoredNarrow]) -> NarrowWeight:
    """A linear layer's weight from a folder that is quantised already.

    Raises:
        ValueError: its tensors do not fit each other.
    """
    try:
        parts = [stored[name].read() for name in weight.names]
        return narrow_layouts.joined(parts, weight.columns)
    except ValueError as error:
        raise ValueError(f"{', '.join(weight.names)}: {error}") from error


def is_linear(path: tuple) -> bool:
    """Whether a parameter is the matrix of a linear layer within a decoder layer."""
    return path[0] == "layers" and path[-2] in LINEARS and path[-1] == "kernel"


def check_weights_fit(model: nnx.Module, folder: Path, place: Placement) -> None:
    """Raises ValueError unless each device has room for its part of an abstract model's weights."""
    needed, available = place.bytes_on_device(model), available_bytes(place.first_device)
    if available is not None and needed > available:
        raise ValueError(
            f"{folder}: the model's weights need {readable(needed)}{place.on_each} in "
            f"{jnp.dtype(model.dtype).name}, but only {readable(available)} are free"
        )


def check_dtype(dtype) -> None:
    """Raises a ValueError unless models can have this dtype."""
    try:
        name = (
            repr(dtype)
            if isinstance(dtype, np.ndarray | np.generic | Array)
            else jnp.dtype(dtype).name
        )
    except TypeError:
        name = repr(dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {name}")


def load_config(path_or_repo_id: str | PathLike, revision: str | None = None) -> DecoderConfig:
    """The config of a model, without its weights; the arguments and errors are those of `load`."""
    return read_config(folder_of(path_or_repo_id, revision, weights=False))


def read_config(folder: Path, families: Mapping[str, Family] = FAMILIES) -> DecoderConfig:
    """The config in a folder, with the tokens of generation_config.json.

    Args:
        folder: the folder.
        families: the families that the model may be of, by `model_type`.

    Raises:
        ValueError: a file is malformed, or says what is not supported.
    """
    path = folder / CONFIG
    contents = read_json(path)
    try:
        check_supported(contents, families)
        config = families[contents["model_type"]].config.from_json(contents)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    path = folder / GENERATION_CONFIG
    if os.path.lexists(path):
        contents = read_json(path)
        ids = {name: contents[name] for name in TOKEN_IDS if contents.get(name) is not None}
        try:
            config = config.changed(**ids)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return config.changed(folder.absolute())


def published(
    tensors: Mapping[str, StoredTensor], family: Family, source: Path
) -> dict[str, StoredTensor]:
    """`tensors` without the family's prefix of their names, and without those that are ignored."""
    stripped: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix(family.prefix)
        if short in stripped:
            raise ValueError(f"{source} has both {short} and {family.prefix}{short}")
        if family.ignored is None or not re.fullmatch(family.ignored, short):
            stripped[short] = tensor
    return stripped


def settle_head(
    config: DecoderConfig,
    tensors: dict[str, StoredTensor],
    family: Family,
    *,
    dtype,
    torch_layout: bool,
) -> tuple[DecoderConfig, dict[str, StoredTensor]]:
    """The config and the tensors of a model whose config says that its head is tied.

    Many checkpoints store such a head as well. As in transformers, it is dropped if it equals the
    table of embeddings, it is the table if there is no other, and is kept if it differs.

    Raises:
        ValueError: it differs, and models of this family have no other head than the table.
    """
    table, name = parameters.table_and_head(family, torch_layout=torch_layout)
    if not config.tie_word_embeddings or name not in tensors:
        return config, tensors
    head, rest = tensors[name], {k: v for k, v in tensors.items() if k != name}
    if not torch_layout:
        turned = lambda: tensors[name].read().T
        head = dataclasses.replace(head, shape=head.shape[::-1], read=turned)
    if table not in tensors:
        return config, rest | {table: head}
    if not {head.dtype, tensors[table].dtype} <= set(READABLE_DTYPES):
        return config, tensors  # an error later
    if values.same_values(head, tensors[table], dtype):
        return config, rest
    if family.can_untie:
        return config.changed(tie_word_embeddings=False), tensors
    raise ValueError(
        f"{head.file}: {name} differs from {table}, and {family.model_type} models have one table "
        "for both, so their tokens would be others"
    )


def check(
    layout: Parameters, layers: int, tensors: Mapping[str, StoredTensor], source: Path
) -> None:
    """Raises a ValueError with the likely cause and the first problems unless the tensors fit."""
    problems = parameters.misfits(layout, layers, tensors)
    shown = list(itertools.islice(problems, SHOWN_PROBLEMS))
    if not shown:
        return
    if more := sum(1 for _ in problems):
        shown.append(f"and {more} more")
    causes = parameters.likely_causes(layout, layers, tensors)
    summary = f"{source} does not fit its {CONFIG}: {'; '.join(causes)}".rstrip(": ")
    raise ValueError("\n  ".join([summary, *shown]))
