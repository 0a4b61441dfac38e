"""Hugging Face checkpoints, read in any published format and written as safetensors."""

import dataclasses
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx
from jax import Array

from emsjax.device import available_bytes, readable, tree_bytes
from emsjax.models import parameters, quantised, values
from emsjax.models.config import DecoderConfig, check_supported
from emsjax.models.families import FAMILIES, family_of
from emsjax.models.family import Family
from emsjax.models.hub import CONFIG, GENERATION_CONFIG, folder_of, tokenizer_files
from emsjax.models.layers import LINEARS, NarrowLinear, narrow_linear
from emsjax.models.parameters import Parameter, Parameters
from emsjax.models.stored import READABLE_DTYPES, StoredTensor, read_json
from emsjax.models.weight_files import SAFETENSORS, choose_format, first_files, open_weights
from pallas_kernels.matmul import narrow
from pallas_kernels.matmul.narrow import NarrowWeight

LoadedModel = TypeVar("LoadedModel", bound=nnx.Module)
DTYPES = ("bfloat16", "float16", "float32")
MAX_SHARD_BYTES = 2 << 30
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
        families: the families that the model may be of, by `model_type`.

    Raises:
        ValueError: the dtype or the format is another one; the path is neither a folder nor a
            repository; there is no config.json or there are no weights; a file is malformed,
            truncated, or does not fit the config; the weights are quantised, or not finite, in the
            file or in the dtype; there is a head that differs from the embeddings; the device has
            no room for the weights.
    """
    check_dtype(dtype)
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
    check_weights_fit(planned, folder)
    read = {}
    for weight in layout.of_layers(layers):
        if all(name in stored_narrow for name in weight.names) and is_linear(weight.path):
            value = read_narrow(weight, stored_narrow)
        else:
            value = values.read(weight, tensors, dtype=dtype, finite=not allow_nonfinite)
            if scheme is None and quantize is not None and is_linear(weight.path):
                value = narrow.quantize(value, format=quantize)
        if isinstance(value, NarrowWeight):
            narrow_linear(model.layers[weight.path[1]], weight.path[2], value)
        else:
            read[weight.path] = value
    model.quantization = quantize
    graph, state = nnx.split(model)
    variables = dict(nnx.to_flat_state(state))
    variables |= {path: variables[path].replace(value) for path, value in read.items()}
    return nnx.merge(graph, nnx.from_flat_state(variables))


def read_narrow(weight: Parameter, stored: Mapping[str, quantised.StoredNarrow]) -> NarrowWeight:
    """A linear layer's weight from a folder that is quantised already.

    Raises:
        ValueError: its tensors do not fit each other.
    """
    try:
        parts = [stored[name].read() for name in weight.names]
        return quantised.joined(parts, weight.columns)
    except ValueError as error:
        raise ValueError(f"{', '.join(weight.names)}: {error}") from error


def is_linear(path: tuple) -> bool:
    """Whether a parameter is the matrix of a linear layer within a decoder layer."""
    return path[0] == "layers" and path[-2] in LINEARS and path[-1] == "kernel"


def check_weights_fit(model: nnx.Module, folder: Path) -> None:
    """Raises ValueError unless the device has room for an abstract model's weights."""
    needed, available = tree_bytes(model), available_bytes()
    if available is not None and needed > available:
        raise ValueError(
            f"{folder}: the model's weights need {readable(needed)} in "
            f"{jnp.dtype(model.dtype).name}, but only {readable(available)} are free"
        )


def check_dtype(dtype) -> None:
    """Raises a ValueError unless models can have this dtype."""
    try:
        name = jnp.dtype(dtype).name
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


def save(
    model: nnx.Module, path: str | PathLike, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write a model as a folder that transformers and `load` can read.

    Narrow weights are written as compressed-tensors.

    Files of the same names are overwritten, others are kept. The files of the tokenizer are copied
    from the folder that the model was loaded from, unless this one has a tokenizer, and so are the
    other settings of generation_config.json.

    Args:
        model: the model.
        path: the folder, created if it does not exist.
        max_shard_bytes: largest size of a weight file; a larger tensor gets a file of its own.

    Raises:
        ValueError: `path` is a file, or the folder has unsharded weights, which would be loaded
            instead of the shards.
    """
    folder, form = Path(path), SAFETENSORS
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"path {folder} is a file, not a folder")
    config, shards = model.config, plan_shards(model, max_shard_bytes)
    if len(shards) > 1 and (folder / form.file_name).exists():
        raise ValueError(
            f"{folder / form.file_name} would be loaded in place of the {len(shards)} shards to "
            "be written: remove it, or choose another path"
        )
    generation = generation_settings(config)
    folder.mkdir(parents=True, exist_ok=True)
    stem, suffix = form.file_name.split(".")
    index, total = {}, 0
    for number, shard in enumerate(shards, start=1):
        tensors = {name: np.asarray(part) for name, part in stored_tensors(model, shard)}
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.{suffix}"
        name = name if len(shards) > 1 else form.file_name
        safetensors.numpy.save_file(tensors, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    if len(shards) > 1:
        contents = {"metadata": {"total_size": total}, "weight_map": index}
        write_json(folder / form.index_name, contents)
    family = family_of(config)
    description = {
        "model_type": family.model_type,
        "architectures": [family.class_name],
        "dtype": model.dtype.name,
    }
    if model.quantization is not None:
        narrow_ones = list(narrow_weights(model))
        blocks = quantised.in_blocks(narrow_ones)
        description[quantised.CONFIGS[0]] = quantised.description(narrow_ones[0], blocks=blocks)
    write_json(folder / CONFIG, config.to_json() | description)
    write_json(folder / GENERATION_CONFIG, generation)
    for name in set(index.values()):  # safetensors writes files that other users cannot read
        shutil.copymode(folder / CONFIG, folder / name)
    if config.folder is not None and not tokenizer_files(folder):
        for file in tokenizer_files(config.folder):
            shutil.copyfile(file, folder / file.name)


def generation_settings(config: DecoderConfig) -> dict[str, Any]:
    """Contents of generation_config.json: the config's tokens, and what else its folder's has."""
    ids = {name: getattr(config, name) for name in TOKEN_IDS}
    path = None if config.folder is None else config.folder / GENERATION_CONFIG
    kept = read_json(path) if path is not None and os.path.lexists(path) else {}
    settings = {name: value for name, value in kept.items() if name not in TOKEN_IDS}
    return settings | {name: value for name, value in ids.items() if value is not None}


def stored_tensors(model: nnx.Module, weights: Iterable[Parameter]) -> Iterator[tuple[str, Array]]:
    """Names and values of these weights as in a PyTorch checkpoint."""
    variables = dict(nnx.to_flat_state(nnx.state(model)))
    family, blocks = family_of(model.config), quantised.in_blocks(narrow_weights(model))
    for weight in weights:
        if weight.path in variables:
            parts = weight.split(variables[weight.path][...])
            yield from zip(map(family.full_name, weight.names), parts, strict=True)
            continue
        parts = quantised.split(narrow_weight(model, weight.path), weight.sizes, weight.columns)
        for name, part in zip(weight.names, parts, strict=True):
            stem = family.full_name(name).removesuffix("weight")
            for leaf, array in quantised.to_compressed_tensors(part, blocks=blocks).items():
                yield f"{stem}{leaf}", array


def narrow_weight(model: nnx.Module, path: tuple) -> NarrowWeight:
    """The narrow weight in place of the matrix with this path."""
    return getattr(model.layers[path[1]], path[2]).weight


def narrow_weights(model: nnx.Module) -> Iterator[NarrowWeight]:
    """All narrow weights of a model."""
    linears = (getattr(layer, name) for layer in model.layers for name in LINEARS)
    return (linear.weight for linear in linears if isinstance(linear, NarrowLinear))


def plan_shards(model: nnx.Module, max_shard_bytes: int) -> list[list[Parameter]]:
    """The parameters of each file, in order; q, k and v are in the same file.

    Raises:
        ValueError: weights are narrow, and the family stores its matrices in another layout than
            the methods of published folders do.
    """
    shards, filled = [[]], 0
    family = family_of(model.config)
    variables = dict(nnx.to_flat_state(nnx.state(model)))
    dense = model
    if model.quantization is not None:
        if not family.transposed:
            raise ValueError(f"narrow weights of {family.model_type} models cannot be saved")
        make = lambda: type(model)(model.config, rngs=nnx.Rngs(0), dtype=model.dtype)
        dense = nnx.eval_shape(make)
    for weight in parameters.weights_of(dense, family, torch_layout=True):
        if weight.path in variables:
            size = int(np.prod(weight.shape)) * model.dtype.itemsize
        else:
            size = tree_bytes(narrow_weight(model, weight.path))
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(weight)
        filled += size
    return shards


def write_json(path: Path, contents: Mapping) -> None:
    path.write_text(json.dumps(contents, indent=2, allow_nan=False) + "\n", encoding="utf-8")
