"""Weight files on disk, which are opened without reading their tensors.

Opening a file reads only names, shapes and dtypes. The contents are mapped, so the host holds
only the tensor that is being read.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import safetensors

from emsjax.models.msgpack_files import open_msgpack
from emsjax.models.schema import shown
from emsjax.models.stored import (
    MAX_HEADER_BYTES,
    StoredTensor,
    checked_name,
    checked_shape,
    file_size,
    listed,
    read_json,
    readable_name,
    reason,
)
from emsjax.models.torch_files import open_torch

FLOAT8 = "F8_E4M3"
SAFETENSORS_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
SAFETENSORS_DTYPES |= {"I8": "int8", "I32": "int32", "I64": "int64", FLOAT8: "float8_e4m3fn"}


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """A file format of weights.

    Attributes:
        file_name: name of the file of an unsharded checkpoint.
        open: returns the tensors of a file by name, nested names joined by dots; raises any
            exception if the file is truncated or corrupt.
        torch_layout: whether names and kernels [out, in] are PyTorch's; otherwise they are
            Flax's, and kernels are [in, out].
    """

    file_name: str
    open: Callable[[Path], dict[str, StoredTensor]]
    torch_layout: bool

    @property
    def index_name(self) -> str:
        """Name of the file that maps tensors to shards."""
        return f"{self.file_name}.index.json"


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    with open(path, "rb") as content:
        length = int.from_bytes(content.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header has {length} bytes")
    file = safetensors.safe_open(path, framework="numpy")
    headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118

    def read(name: str) -> np.ndarray:
        if headers[name].get_dtype() != FLOAT8:
            return file.get_tensor(name)
        return map_float8(path, name, length)

    return {
        checked_name(name): StoredTensor(
            checked_shape(header.get_shape()),
            SAFETENSORS_DTYPES.get(header.get_dtype(), header.get_dtype()),
            functools.partial(read, name),
        )
        for name, header in headers.items()
    }


def map_float8(path: Path, name: str, header_bytes: int) -> np.ndarray:
    """A tensor of a type that numpy has no name for, from a file whose header has been checked."""
    with open(path, "rb") as content:
        content.seek(8)
        header = json.loads(content.read(header_bytes))[name]
    start, end = header["data_offsets"]
    values = np.memmap(path, np.uint8, "r", offset=8 + header_bytes + start, shape=end - start)
    return values.view(jnp.dtype(jnp.float8_e4m3fn)).reshape(header["shape"])


SAFETENSORS = WeightFormat("model.safetensors", open_safetensors, torch_layout=True)
PYTORCH = WeightFormat("pytorch_model.bin", open_torch, torch_layout=True)
MSGPACK = WeightFormat("flax_model.msgpack", open_msgpack, torch_layout=False)
FORMATS = (SAFETENSORS, PYTORCH, MSGPACK)  # in order of preference; some families lack the last


def first_files() -> list[tuple[WeightFormat, str]]:
    """The names that weights may have in a folder, in order of preference: a file or an index."""
    return [(form, name) for form in FORMATS for name in (form.file_name, form.index_name)]


def choose_format(names: Collection[str], place: str) -> tuple[WeightFormat, str]:
    """The preferred format among a folder's file names, and the file to open first.

    Raises:
        ValueError: there are no weights.
    """
    for form, name in first_files():
        if name in names:
            return form, name
    looked_for = ", ".join(name for _, name in first_files())
    raise ValueError(f"{place} has no weights: looked for {looked_for}")


def read_index(path: Path) -> Mapping[str, str]:
    """Shard file name by tensor name, from the index of a sharded checkpoint."""
    shards = read_json(path).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{path} has no weight_map")
    for shard in shards.values():
        if not is_file_name(shard):
            raise ValueError(f"{path} names a shard {shown(shard)}, which is not a file name")
    return shards


def is_file_name(name: object) -> bool:
    """Whether it can be the name of a file in a folder, and of none outside of it."""
    if not isinstance(name, str) or not name.isprintable() or name in ("", ".", ".."):
        return False
    return Path(name).name == name and len(os.fsencode(name)) <= 255


def open_file(form: WeightFormat, path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file.

    Raises:
        ValueError: it is no regular file, or is truncated or corrupt.
    """
    file_size(path)
    try:
        tensors = form.open(path)
    except Exception as error:  # what is wrong in a file decides which of the readers' it is
        raise ValueError(
            f"{path} is truncated, corrupt or not a file of weights: {reason(error)}"
        ) from error
    return {name: dataclasses.replace(one, file=path) for name, one in tensors.items()}


def open_weights(form: WeightFormat, path: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint, given its only file or its index.

    Raises:
        ValueError: a file is truncated or corrupt, or the index names missing files or tensors.
    """
    if path.name == form.file_name:
        return open_file(form, path)
    named = read_index(path)
    index = {name.replace("/", "."): shard for name, shard in named.items()}
    if len(index) < len(named):
        raise ValueError(f"{path} names tensors twice, with slashes and with dots")
    shards = sorted(set(index.values()))
    if absent := [shard for shard in shards if not os.path.lexists(path.parent / shard)]:
        raise ValueError(f"{path} names missing shards: {listed(absent)}")
    contents = {shard: open_file(form, path.parent / shard) for shard in shards}
    if absent := [
        f"{readable_name(name)} in {shard}"
        for name, shard in index.items()
        if name not in contents[shard]
    ]:
        raise ValueError(f"{path} names missing tensors: {listed(absent)}")
    return {name: contents[shard][name] for name, shard in index.items()}
