"""Folders of drafters that read the target's hidden states: their weights, read and written."""

import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from emsjax.device import best_dtype
from emsjax.drafters.feature_drafter import FeatureDrafter, Shared
from emsjax.drafters.feature_network import FeatureConfig, FeatureNetwork
from emsjax.engine.adapt import check_is_model
from emsjax.models import parameters, values
from emsjax.models.checkpoint import SHOWN_PROBLEMS, check_dtype, published
from emsjax.models.family import Family
from emsjax.models.hub import CONFIG, folder_of
from emsjax.models.llama import MODULES as LLAMA_MODULES
from emsjax.models.llama import LlamaConfig
from emsjax.models.qwen import QWEN3
from emsjax.models.saving import write_json
from emsjax.models.schema import shown
from emsjax.models.stored import StoredTensor, listed, read_json
from emsjax.models.weight_files import PYTORCH, SAFETENSORS, open_weights
from pallas_kernels.matmul import narrow

IDS = "d2t"  # the target's id of each draft token, less the draft token's own id
MARKS = "t2d"  # which of the target's tokens can be drafted
INTEGERS = ("int32", "int64")
MODULES = {
    name: tuple(
        one.removeprefix("model.") for one in ((stored,) if isinstance(stored, str) else stored)
    )
    for name, stored in (LLAMA_MODULES | QWEN3.modules).items()
} | {"final_norm": "norm", "fc": "fc"}


@dataclasses.dataclass(frozen=True)
class DrafterFormat:
    """How drafters of a kind are stored.

    Attributes:
        network: makes a network of a config.
        parse: the config in the contents of a config.json; the second argument is the number of
            the target's layers, or None if no target was given.
        modules: the stored names of the network's modules, besides those of `MODULES`.
        renamed: beginnings of stored names, and what is read in their place.
    """

    network: Callable[..., FeatureNetwork]
    parse: Callable[[Mapping[str, Any], int | None], FeatureConfig]
    modules: Mapping[str, str]
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def family(self) -> Family:
        """The stored names, as `emsjax.models.parameters` takes them."""
        return Family(
            model_type="",
            class_name="",
            config=LlamaConfig,
            modules=MODULES | self.modules,
            ignored=rf".*rotary_emb\.inv_freq|{MARKS}|verifier_(lm_head|norm)\..*",
        )


def load_drafter(
    make: Callable[..., FeatureDrafter],
    form: DrafterFormat,
    path_or_repo_id: str | PathLike,
    target: Any,
    *,
    dtype: DTypeLike | None,
    revision: str | None,
    quantize: str | None,
    **settings: Any,
) -> FeatureDrafter:
    """A drafter from its folder.

    Args:
        make: its class.
        settings: other arguments of the class.

    Raises:
        ValueError: see `emsjax.Eagle3.from_pretrained`.
    """
    if quantize is not None:
        narrow.check_format(quantize)
    network, *rest = load(form, path_or_repo_id, target, dtype=dtype, revision=revision)
    network = network if quantize is None else network.quantize(quantize)
    drafter = make(network, *rest, **settings)
    if target is not None:
        drafter.check_target(target.config, 0)
    return drafter


def load(
    form: DrafterFormat,
    path_or_repo_id: str | PathLike,
    target: Any,
    *,
    dtype: DTypeLike | None,
    revision: str | None,
) -> tuple[FeatureNetwork, Array | None, Shared]:
    """A network, the ids of its draft tokens, and what it shares with the target.

    Raises:
        ValueError: see `emsjax.Eagle3.from_pretrained`.
    """
    if target is not None:
        check_is_model("target", target)
    if dtype is None:
        dtype = best_dtype() if target is None else target.dtype
    check_dtype(dtype)
    folder = folder_of(path_or_repo_id, revision)
    contents = read_json(folder / CONFIG)
    theirs = getattr(getattr(target, "config", None), "architecture", None)
    try:
        config = form.parse(contents, None if theirs is None else len(theirs.layers))
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error
    tensors, source = _open(form, folder)
    ids = _draft_ids(tensors.pop(IDS, None), config, source)
    config = config.changed(
        owns_embeddings="embed_tokens.weight" in tensors, owns_head="lm_head.weight" in tensors
    )
    shared = shared_arrays(config, target, str(folder))
    make = lambda: form.network(config, rngs=nnx.Rngs(0), dtype=dtype)
    network = nnx.eval_shape(make)
    weights = parameters.weights_of(network, form.family, torch_layout=True)
    _check(weights, tensors, source)
    arrays = {
        weight.path: values.read(weight, tensors, dtype=dtype, finite=True) for weight in weights
    }
    graph, state = nnx.split(network)
    variables = dict(nnx.to_flat_state(state))
    variables = {path: variables[path].replace(value) for path, value in arrays.items()}
    return nnx.merge(graph, nnx.from_flat_state(variables)), ids, shared


def save(
    form: DrafterFormat,
    drafter: FeatureDrafter,
    path: str | PathLike,
    description: Mapping[str, Any],
) -> None:
    """Writes a drafter's weights, and this description of it as config.json.

    Raises:
        ValueError: `path` is a file, or weights are narrow.
    """
    folder, network = Path(path), drafter.network
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"path {folder} is a file, not a folder")
    if network.quantization is not None:
        raise ValueError(
            f"a drafter with weights in {network.quantization} cannot be saved: save it before "
            "its weights are rounded"
        )
    variables = dict(nnx.to_flat_state(nnx.state(network)))
    tensors = {}
    for weight in parameters.weights_of(network, form.family, torch_layout=True):
        parts = weight.split(variables[weight.path][...])
        tensors |= {n: np.asarray(part) for n, part in zip(weight.names, parts, strict=True)}
    if drafter.draft_ids is not None:
        ids = np.asarray(drafter.draft_ids, np.int64)
        tensors[IDS] = ids - np.arange(len(ids))
        tensors[MARKS] = np.isin(np.arange(network.architecture.vocab_size), ids)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, dict(description) | {"dtype": network.dtype.name})
    file = folder / SAFETENSORS.file_name
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
    shutil.copymode(folder / CONFIG, file)  # safetensors writes files that others cannot read


def _open(form: DrafterFormat, folder: Path) -> tuple[dict[str, StoredTensor], Path]:
    """The tensors of a folder by name, and the file that was opened first."""
    files = [
        (one, name) for one in (SAFETENSORS, PYTORCH) for name in (one.file_name, one.index_name)
    ]
    present = [(one, name) for one, name in files if os.path.lexists(folder / name)]
    if not present:
        raise ValueError(f"{folder} has no weights: looked for {listed([n for _, n in files])}")
    kind, name = present[0]
    source = folder / name
    tensors = {}
    for stored, tensor in published(open_weights(kind, source), form.family, source).items():
        start = next((one for one in form.renamed if stored.startswith(one)), "")
        new = form.renamed.get(start, "") + stored.removeprefix(start)
        if new in tensors:
            raise ValueError(f"{source} has both {stored} and {new}")
        tensors[new] = tensor
    return tensors, source


def _check(weights: list, tensors: Mapping[str, StoredTensor], source: Path) -> None:
    """Raises ValueError with the first problems unless the tensors are those of a network."""
    expected = parameters.shapes_of(weights)
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    for name, tensor in tensors.items():
        problems += parameters.problems_of(name, tensor, expected.get(name))
    if problems:
        summary = f"{source} does not fit its {CONFIG}"
        raise ValueError(f"{summary}\n  " + listed(problems, "\n  ", SHOWN_PROBLEMS))


def _draft_ids(tensor: StoredTensor | None, config: FeatureConfig, source: Path) -> Array | None:
    """The target's id of each token that can be drafted; None: all, in order.

    Raises:
        ValueError: there are none although only some can be drafted, there is not one for each, or
            they are not different ids of the target.
    """
    size, vocab_size = config.draft_vocab_size, config.architecture.vocab_size
    if tensor is None:
        if size != vocab_size:
            raise ValueError(
                f"{source} has no {IDS}, although config.json has {size} draft tokens for a "
                f"vocabulary of {vocab_size}"
            )
        return None
    if tensor.shape != (size,) or tensor.dtype not in INTEGERS:
        raise ValueError(
            f"{source}: {IDS} must be {size} integers, as config.json has {size} draft tokens, "
            f"not {tensor.dtype} {list(tensor.shape)}"
        )
    ids = np.arange(size, dtype=np.int64) + tensor.read().astype(np.int64)
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ValueError(
            f"{source}: {IDS} maps a draft token to {shown(int(outside[0]))}, outside of the "
            f"target's vocabulary 0..{vocab_size - 1}"
        )
    if len(np.unique(ids)) != size:
        raise ValueError(f"{source}: {IDS} maps several draft tokens to the same id of the target")
    if np.array_equal(ids, np.arange(vocab_size)):
        return None
    return jnp.asarray(ids, jnp.int32)


def shared_arrays(config: FeatureConfig, target: Any, owner: str) -> Shared:
    """The arrays of the target that the network uses; they are not copied.

    Args:
        owner: what uses them, for messages.

    Raises:
        ValueError: they are needed, and there is no target or it has no such arrays.
    """
    needed = {"embeddings": not config.owns_embeddings, "head": not config.owns_head}
    names = " and ".join(name for name, is_needed in needed.items() if is_needed)
    if not names:
        return Shared()
    if target is None:
        raise ValueError(f"{owner} has no {names} of its own: give target, the model whose it uses")
    architecture = getattr(target, "architecture", None)
    embeddings = getattr(target, "embed_tokens", None)
    if architecture is None or embeddings is None:
        raise ValueError(f"{owner} uses the target's {names}, and this target shows no arrays")
    if getattr(target, "parallel", None) is not None:
        raise ValueError(f"{owner} uses the target's {names}, and the target is on a mesh")
    if architecture.embedding_scale != 1 or architecture.logit_cap or architecture.head_bias:
        raise ValueError(
            f"{owner} uses the target's {names}, and the target scales its embeddings, or caps or "
            "shifts its logits, which is not supported"
        )
    head = target.lm_head or embeddings
    tables = {"embeddings": embeddings, "head": head}
    return Shared(
        **{name: tables[name].embedding[...] for name, is_needed in needed.items() if is_needed}
    )
