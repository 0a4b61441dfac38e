"""Checkpoint folders in every format, for tests of their readers."""

import json
from pathlib import Path

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import tiny_models
from golden.tiny_models import VARIANTS
from safetensors.numpy import save_file

from emsjax import OPT

CONFIG = VARIANTS["pre_norm"]
VALUES = tiny_models.tensors(CONFIG, seed=0)
FILE_NAMES = {
    "safetensors": "model.safetensors",
    "msgpack": "flax_model.msgpack",
    "bin": "pytorch_model.bin",
}
formats = pytest.mark.parametrize("form", FILE_NAMES)
layouts = pytest.mark.parametrize("shards", [1, 3], ids=["single", "sharded"])


def flax_tree(values):
    """PyTorch names and values in the nested layout of published Flax files."""
    tree = {}
    for name, value in values.items():
        *scope, module, leaf = name.split(".")
        if leaf == "weight":
            leaf = "scale" if "norm" in module else "embedding" if "embed" in module else "kernel"
        node = tree
        for key in (*scope, module):
            node = node.setdefault(key, {})
        node[leaf] = value.T if leaf == "kernel" else value
    return tree


def write_file(path: Path, values) -> list[str]:
    """Write a weight file in the format of its suffix; returns its tensor names in an index."""
    if path.suffix == ".safetensors":
        save_file({name: np.ascontiguousarray(v) for name, v in values.items()}, path)
    elif path.suffix == ".msgpack":
        tree = flax_tree(values)
        path.write_bytes(flax.serialization.to_bytes(tree))
        return ["/".join(k.key for k in p) for p, _ in jax.tree_util.tree_leaves_with_path(tree)]
    else:
        torch = pytest.importorskip("torch")
        as_torch = lambda v: torch.from_numpy(np.ascontiguousarray(v).view(np.uint8).copy())
        dtype = lambda v: getattr(torch, v.dtype.name)
        view = lambda v: (
            as_torch(v).view(dtype(v)).view(v.shape) if v.size else torch.zeros(v.shape)
        )
        torch.save({name: view(value) for name, value in values.items()}, path)
    return list(values)


def write(folder: Path, form="safetensors", values=VALUES, shards=1, config=CONFIG) -> Path:
    """Write a checkpoint folder; returns its weight file or index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / FILE_NAMES[form]
    if shards == 1:
        write_file(path, values)
        return path
    weight_map, names = {}, list(values)
    for i in range(shards):  # every third tensor, so that q, k and v are in different shards
        shard = f"{path.stem}-{i + 1:05d}-of-{shards:05d}{path.suffix}"
        part = {name: values[name] for name in names[i::shards]}
        weight_map |= dict.fromkeys(write_file(folder / shard, part), shard)
    index = path.with_name(f"{path.name}.index.json")
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return index


def load(folder, dtype=jnp.float32) -> OPT:
    return OPT.from_pretrained(folder, dtype=dtype)
