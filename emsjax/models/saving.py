"""Models written as Hugging Face checkpoints in safetensors."""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from flax import nnx
from jax import Array

from emsjax.device import is_of_one_process, tree_bytes
from emsjax.models import compressed_tensors, parameters, quantised
from emsjax.models.checkpoint import TOKEN_IDS
from emsjax.models.config import DecoderConfig
from emsjax.models.families import family_of
from emsjax.models.hub import CONFIG, GENERATION_CONFIG, tokenizer_files
from emsjax.models.linears import LINEARS, NarrowLinear
from emsjax.models.parameters import Parameter
from emsjax.models.splitting import Placement
from emsjax.models.stored import read_json
from emsjax.models.weight_files import SAFETENSORS
from pallas_kernels.matmul.narrow import NarrowWeight

MAX_SHARD_BYTES = 2 << 30


def save(
    model: nnx.Module, path: str | PathLike, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write a model as a folder that transformers and `checkpoint.load` can read.

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
            instead of the shards; or the model is on devices of several processes.
    """
    folder, form = Path(path), SAFETENSORS
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"path {folder} is a file, not a folder")
    if not is_of_one_process(model):
        raise ValueError("a model on devices of several processes cannot be saved by one of them")
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
        blocks = compressed_tensors.in_blocks(narrow_ones)
        description[quantised.CONFIGS[0]] = compressed_tensors.description(
            narrow_ones[0], blocks=blocks
        )
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
    place = Placement(model.architecture, model.parallel)
    family, blocks = family_of(model.config), compressed_tensors.in_blocks(narrow_weights(model))
    for weight in weights:
        if weight.path in variables:
            parts = weight.split(place.whole(weight.path, variables[weight.path][...]))
            yield from zip(map(family.full_name, weight.names), parts, strict=True)
            continue
        narrow = place.whole(weight.path, narrow_weight(model, weight.path))
        parts = compressed_tensors.split(narrow, weight.sizes, weight.columns)
        for name, part in zip(weight.names, parts, strict=True):
            stem = family.full_name(name).removesuffix("weight")
            for leaf, array in compressed_tensors.to_compressed_tensors(
                part, blocks=blocks
            ).items():
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
    if model.quantization is not None and not family.transposed:
        raise ValueError(f"narrow weights of {family.model_type} models cannot be saved")
    if model.quantization is not None or model.is_split:
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
