"""Hugging Face OPT checkpoints, read in any published format and written as safetensors."""

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TypeVar

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from jax import Array

from emsjax.device import available_bytes, readable, tree_bytes
from emsjax.models.config import OPTConfig
from emsjax.models.weight_files import (
    FORMATS,
    StoredTensor,
    choose_format,
    open_weights,
    read_index,
    read_json,
)

LoadedModel = TypeVar("LoadedModel", bound=nnx.Module)
DTYPES = ("bfloat16", "float16", "float32")
READABLE_DTYPES = (*DTYPES, "float64")
MAX_SHARD_BYTES = 2 << 30

# Modules and leaves have their published names, with these exceptions.
STORED_MODULES = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out_proj": ("self_attn.out_proj",),
}
TORCH_LEAVES = {"embedding": "weight", "kernel": "weight", "scale": "weight"}
TIED_HEADS = ("lm_head.weight", "lm_head.kernel")  # copies of the embedding table


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of the model and the stored tensors that are concatenated on its last axis.

    Attributes:
        path: path in the model's state.
        names: names of the stored tensors, without the leading "model.".
        shape: shape of each stored tensor.
        transposed: whether they are stored with their axes swapped.
    """

    path: tuple
    names: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool


def weights_of(model: nnx.Module, *, torch_layout: bool) -> list[Parameter]:
    """The stored tensors of every parameter of a (possibly abstract) model."""
    weights = []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        *scope, module, leaf = map(str, path)
        stored_modules = STORED_MODULES.get(module, (module,))
        stored_leaf = TORCH_LEAVES.get(leaf, leaf) if torch_layout else leaf
        names = tuple(".".join(["decoder", *scope, name, stored_leaf]) for name in stored_modules)
        transposed = torch_layout and leaf == "kernel"
        shape = (*variable.shape[:-1], variable.shape[-1] // len(names))
        weights.append(Parameter(path, names, shape[::-1] if transposed else shape, transposed))
    return weights


def load(
    cls: type[LoadedModel], path_or_repo_id: str | PathLike, *, dtype, revision: str | None = None
) -> LoadedModel:
    """A model from a local folder or a repository of the Hugging Face hub.

    The first of these formats that exists is read, in one file or in shards:
    safetensors, Flax msgpack, PyTorch .bin. Tensors are transferred to the device one by one.

    Args:
        cls: the model's class.
        path_or_repo_id: a folder, or a hub id such as "facebook/opt-125m".
        dtype: dtype of the model, bfloat16, float16 or float32.
        revision: a branch, tag or commit of the repository.

    Raises:
        ValueError: the dtype is another one; the path is neither a folder nor a repository; there
            is no config.json or there are no weights; a file is malformed, truncated, or does not
            fit the config; the device has no room for the weights.
        ImportError: the weights exist only as .bin, and torch is not installed.
    """
    check_dtype(dtype)
    is_folder = os.path.isdir(path_or_repo_id)  # Path("") would be the current folder
    folder = Path(path_or_repo_id) if is_folder else download(path_or_repo_id, revision)
    config = read_config(folder / "config.json")
    names = [file.name for file in folder.iterdir() if file.is_file()]
    form, first = choose_format(names, str(folder))

    model = nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0), dtype=dtype))
    weights = weights_of(model, torch_layout=form.torch_layout)
    tensors = published(open_weights(form, folder / first), folder / first)
    check(weights, tensors, folder / first)
    check_weights_fit(model)

    graph, state = nnx.split(model)
    variables = dict(nnx.to_flat_state(state))
    for weight in weights:
        value = read(weight, [tensors[name] for name in weight.names], dtype)
        variables[weight.path] = variables[weight.path].replace(value)
    return nnx.merge(graph, nnx.from_flat_state(variables))


def check_weights_fit(model: nnx.Module) -> None:
    """Raises ValueError unless the device has room for an abstract model's weights."""
    needed, available = tree_bytes(model), available_bytes()
    if available is not None and needed > available:
        raise ValueError(
            f"the model's weights need {readable(needed)} in {jnp.dtype(model.dtype).name}, but "
            f"only {readable(available)} are free"
        )


def check_dtype(dtype) -> None:
    """Raises a ValueError unless models can have this dtype."""
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {name}")


def download(repo_id: str | PathLike, revision: str | None) -> Path:
    """Download the config and the files of one weight format; returns the cached folder."""
    if not isinstance(repo_id, str) or Path(repo_id).exists() or looks_like_path(repo_id):
        raise ValueError(f"{str(repo_id)!r} is not a folder")
    problem = f"{repo_id!r} is neither a folder nor a repository of the Hugging Face hub"
    try:
        names = huggingface_hub.list_repo_files(repo_id, revision=revision)
    except OfflineModeIsEnabled as error:
        return cached(repo_id, revision, error)
    except HFValidationError as error:
        raise ValueError(f"{problem}: {error}") from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{repo_id!r} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise ValueError(problem) from error
    except Exception as error:  # depends on the library that sends the request
        return cached(repo_id, revision, error)
    if "config.json" not in names:
        raise ValueError(f"{repo_id!r} has no config.json")
    form, first = choose_format(names, repr(repo_id))
    wanted = {"config.json", first}
    if first == form.index_name:
        index = huggingface_hub.hf_hub_download(repo_id, first, revision=revision)
        wanted |= set(read_index(Path(index)).values())
    return Path(
        huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=sorted(wanted))
    )


def cached(repo_id: str, revision: str | None, error: Exception) -> Path:
    """The cached folder of a repository that cannot be reached."""
    options = {"revision": revision, "local_files_only": True}
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, **options))
    except LocalEntryNotFoundError:
        raise ValueError(
            f"{repo_id!r} is not in the cache, and the Hugging Face hub cannot be reached: {error}"
        ) from error


def looks_like_path(text: str) -> bool:
    """Whether it cannot be a repository id, which is a name, or an owner and a name."""
    return text.startswith((".", "~", "/")) or text.count("/") > 1


def read_config(path: Path) -> OPTConfig:
    values = read_json(path)
    try:
        return OPTConfig.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def published(tensors: Mapping[str, StoredTensor], source: Path) -> dict[str, StoredTensor]:
    """`tensors` without the optional "model." prefix of their names, and without the tied head."""
    stripped = {}
    for name, tensor in tensors.items():
        if name not in TIED_HEADS:
            short = name.removeprefix("model.")
            if short in stripped:
                raise ValueError(f"{source} has both {short} and model.{short}")
            stripped[short] = tensor
    return stripped


def check(weights: Sequence[Parameter], tensors: Mapping[str, StoredTensor], source: Path) -> None:
    """Raises a ValueError with all problems unless the stored tensors fit the model."""
    shapes = {name: weight.shape for weight in weights for name in weight.names}
    problems = [f"{name} is missing" for name in shapes if name not in tensors]
    for name, tensor in tensors.items():
        if name not in shapes:
            problems.append(f"{name} is not a part of this model")
            continue
        if tensor.shape != shapes[name]:
            problems.append(f"{name} has shape {tensor.shape} instead of {shapes[name]}")
        if tensor.dtype not in READABLE_DTYPES:
            problems.append(f"{name} is {tensor.dtype}, not one of {', '.join(READABLE_DTYPES)}")
    if problems:
        raise ValueError(f"{source} does not fit its config.json:\n  " + "\n  ".join(problems))


def read(weight: Parameter, stored: Sequence[StoredTensor], dtype) -> Array:
    """The parameter's value on the device; the host holds one tensor at a time."""
    parts = []
    for tensor in stored:
        values = tensor.read()
        if values.dtype == np.float64:  # which JAX does not have by default
            values = values.astype(np.float32)
        # A copy, because the CPU backend would otherwise keep the file mapped. Wait for it,
        # because pending transfers keep their source in host memory.
        parts.append(jnp.array(values, copy=True).block_until_ready())
    return join(parts, transposed=weight.transposed, dtype=jnp.dtype(dtype)).block_until_ready()


@functools.partial(jax.jit, static_argnames=("transposed", "dtype"))
def join(parts: Sequence[Array], *, transposed: bool, dtype) -> Array:
    parts = [(part.T if transposed else part).astype(dtype) for part in parts]
    return jnp.concatenate(parts, axis=-1)


@functools.partial(jax.jit, static_argnames=("count", "transposed"))
def split(value: Array, *, count: int, transposed: bool) -> list[Array]:
    """Inverse of `join`."""
    return [part.T if transposed else part for part in jnp.split(value, count, axis=-1)]


def save(
    model: nnx.Module, path: str | PathLike, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write a model as a folder that transformers and `load` can read.

    Files of the same names are overwritten, others are kept.

    Args:
        model: the model.
        path: the folder, created if it does not exist.
        max_shard_bytes: largest size of a weight file; a larger tensor gets a file of its own.

    Raises:
        ValueError: `path` is a file, or the folder has unsharded weights, which would be loaded
            instead of the shards.
    """
    folder, form = Path(path), FORMATS[0]
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"path {folder} is a file, not a folder")
    shards = plan_shards(model, max_shard_bytes)
    if len(shards) > 1 and (folder / form.file_name).exists():
        raise ValueError(
            f"{folder / form.file_name} would be loaded in place of the {len(shards)} shards to "
            "be written: remove it, or choose another path"
        )
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
    write_json(
        folder / "config.json",
        {
            **dataclasses.asdict(model.config),
            "model_type": "opt",
            "architectures": ["OPTForCausalLM"],
            "dtype": model.dtype.name,
        },
    )
    for name in set(index.values()):  # safetensors writes files that other users cannot read
        shutil.copymode(folder / "config.json", folder / name)


def stored_tensors(model: nnx.Module, weights: Iterable[Parameter]) -> Iterator[tuple[str, Array]]:
    """Names and values of these weights as in a PyTorch checkpoint."""
    variables = dict(nnx.to_flat_state(nnx.state(model)))
    for weight in weights:
        value, count = variables[weight.path][...], len(weight.names)
        parts = split(value, count=count, transposed=weight.transposed)
        yield from zip((f"model.{name}" for name in weight.names), parts, strict=True)


def plan_shards(model: nnx.Module, max_shard_bytes: int) -> list[list[Parameter]]:
    """The parameters of each file, in order; q, k and v are in the same file."""
    shards, filled = [[]], 0
    for weight in weights_of(model, torch_layout=True):
        size = len(weight.names) * int(np.prod(weight.shape)) * model.dtype.itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(weight)
        filled += size
    return shards


def write_json(path: Path, contents: Mapping) -> None:
    path.write_text(json.dumps(contents, indent=2, allow_nan=False) + "\n", encoding="utf-8")
