"""Weight files on disk, which are opened without reading their tensors.

Opening a file reads only names, shapes and dtypes. The contents are mapped, so the host holds
only the tensor that is being read.
"""

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgpack
import numpy as np
import safetensors


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, which `read` copies or maps."""

    shape: tuple[int, ...]
    dtype: str  # numpy's name of it
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class WeightFormat:
    """A file format of weights.

    Attributes:
        file_name: name of the file of an unsharded checkpoint.
        open: returns the tensors of a file by name, nested names joined by dots; raises a
            ValueError if the file is truncated or corrupt.
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
    dtypes = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
    try:
        file = safetensors.safe_open(path, framework="numpy")
        headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is truncated or corrupt: {error}") from error
    return {
        name: StoredTensor(
            tuple(header.get_shape()),
            dtypes.get(header.get_dtype(), header.get_dtype()),
            lambda name=name: file.get_tensor(name),
        )
        for name, header in headers.items()
    }


def open_torch(path: Path) -> dict[str, StoredTensor]:
    """Tensors of a state dict that `torch.save` wrote.

    Raises:
        ImportError: torch is not installed.
    """
    torch = import_torch()
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # zip, pickle and torch raise different ones
        raise ValueError(f"{path} is truncated, corrupt or unsafe to unpickle: {error}") from error
    strangers = {} if isinstance(state, dict) else {"the file": state}
    strangers = strangers or {k: v for k, v in state.items() if not torch.is_tensor(v)}
    if strangers:
        kinds = ", ".join(f"{name} ({type(v).__name__})" for name, v in strangers.items())
        raise ValueError(f"{path} must hold a dictionary of tensors only; it has {kinds}")

    def read(tensor) -> np.ndarray:
        if tensor.dtype == torch.bfloat16:  # which numpy itself does not have
            return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
        return tensor.numpy()

    return {
        name: StoredTensor(
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            lambda tensor=tensor: read(tensor.detach()),
        )
        for name, tensor in state.items()
    }


def import_torch():
    """The torch module; if it is missing, an ImportError with advice."""
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "this checkpoint's weights are stored only as PyTorch .bin files: install torch, "
            "convert them to safetensors, or choose a repository or revision that has "
            "safetensors or Flax msgpack weights"
        ) from error
    return torch


def open_msgpack(path: Path) -> dict[str, StoredTensor]:
    """Tensors of a file that `flax.serialization.to_bytes` wrote."""
    try:
        content = np.memmap(path, np.uint8, mode="r")
        walker = MsgpackWalker(content)
        tree = walker.next()
        if walker.offset != len(content):
            raise ValueError(f"{len(content) - walker.offset} bytes left over")
        return dict(flat_tensors(tree))
    except (
        *(ValueError, TypeError, LookupError, AttributeError, RecursionError),
        *(struct.error, msgpack.UnpackException),
    ) as error:
        raise ValueError(f"{path} is truncated or corrupt: {error!r}") from error


# msgpack's tags of objects that may be large: maps, extensions and binaries.
LENGTH_FOLLOWS = {  # tag: (kind, struct format of the length)
    **{0xDE: ("map", ">H"), 0xDF: ("map", ">I")},
    **{0xC7: ("ext", ">B"), 0xC8: ("ext", ">H"), 0xC9: ("ext", ">I")},
    **{0xC4: ("bin", ">B"), 0xC5: ("bin", ">H"), 0xC6: ("bin", ">I")},
}
LENGTH_IN_TAG = {  # tag: (kind, length)
    **{0x80 + length: ("map", length) for length in range(16)},
    **{0xD4 + power: ("ext", 1 << power) for power in range(5)},
}
SMALL_BYTES = 4096  # more than the size of any key, scalar or shape
ARRAY_TYPES = (1, 3)  # flax's extension types for an array and a numpy scalar
TRIPLE = 0x93  # msgpack's tag for an array of three items


class MsgpackWalker:
    """Reads the nested dictionaries of a msgpack file but only locates its arrays.

    `msgpack.Unpacker` reads an array before it can skip it, so this class decodes the headers of
    objects that may be large.
    """

    def __init__(self, content: np.ndarray):
        self.content, self.offset = content, 0

    def next(self) -> Any:
        """The object at the offset: nested dicts, `StoredTensor`s, or a plain value."""
        kind, length = self.header()
        if kind == "map":
            return {self.small(): self.next() for _ in range(length)}
        if kind == "ext":
            return self.array(length)
        return self.small()

    def header(self) -> tuple[str | None, int]:
        """Kind and length of the next object; (None, 0) without advancing if it is small."""
        tag = int(self.take(1)[0])
        if tag in LENGTH_IN_TAG:
            return LENGTH_IN_TAG[tag]
        if tag in LENGTH_FOLLOWS:
            kind, layout = LENGTH_FOLLOWS[tag]
            return kind, struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        self.offset -= 1
        return None, 0

    def small(self) -> Any:
        unpacker = msgpack.Unpacker(raw=False)
        unpacker.feed(bytes(self.content[self.offset : self.offset + SMALL_BYTES]))
        value = unpacker.unpack()
        self.offset += unpacker.tell()
        return value

    def take(self, count: int) -> np.ndarray:
        taken = self.content[self.offset : self.offset + count]
        if len(taken) < count:
            raise ValueError(f"it ends {count - len(taken)} bytes early")
        self.offset += count
        return taken

    def array(self, length: int) -> StoredTensor:
        """The array in an extension of `length` bytes: packed shape, dtype name and bytes."""
        ext_type = int(self.take(1)[0])
        end = self.offset + length
        if ext_type not in ARRAY_TYPES or int(self.take(1)[0]) != TRIPLE:
            raise ValueError(f"an extension of type {ext_type} is not an array")
        shape, dtype = tuple(self.small()), np.dtype(self.small())
        kind, size = self.header()
        data = self.take(size)
        if kind != "bin" or self.offset != end or size != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"an array of {shape} {dtype.name} has {size} bytes")
        return StoredTensor(shape, dtype.name, lambda: data.view(dtype).reshape(shape))


def flat_tensors(tree: Any, prefix: str = ""):
    """Yields names and tensors; flax's chunks of large arrays are joined."""
    if isinstance(tree, StoredTensor):
        yield prefix, tree
    elif not isinstance(tree, dict):
        raise ValueError(f"{prefix or 'the file'} is {type(tree).__name__}, not a tensor")
    elif "__msgpack_chunked_array__" in tree:
        in_order = lambda entries: [entries[str(i)] for i in range(len(entries))]
        shape, chunks = tuple(in_order(tree["shape"])), in_order(tree["chunks"])
        if sum(math.prod(chunk.shape) for chunk in chunks) != math.prod(shape):
            raise ValueError(f"the chunks of {prefix} do not add up to {shape}")
        read = lambda: np.concatenate([chunk.read() for chunk in chunks]).reshape(shape)
        yield prefix, StoredTensor(shape, chunks[0].dtype, read)
    else:
        for name, subtree in tree.items():
            yield from flat_tensors(subtree, f"{prefix}.{name}" if prefix else str(name))


FORMATS = (  # in order of preference
    WeightFormat("model.safetensors", open_safetensors, torch_layout=True),
    WeightFormat("flax_model.msgpack", open_msgpack, torch_layout=False),
    WeightFormat("pytorch_model.bin", open_torch, torch_layout=True),
)


def choose_format(names: Collection[str], place: str) -> tuple[WeightFormat, str]:
    """The preferred format among a folder's file names, and the file to open first.

    Raises:
        ValueError: there are no weights.
        ImportError: the weights exist only as .bin, and torch is not installed.
    """
    candidates = [(form, name) for form in FORMATS for name in (form.file_name, form.index_name)]
    for form, name in candidates:
        if name in names:
            if form.open is open_torch:
                import_torch()
            return form, name
    looked_for = ", ".join(name for _, name in candidates)
    raise ValueError(f"{place} has no weights: looked for {looked_for}")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: the file does not exist, or is malformed.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent} has no {path.name}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return values


def read_index(path: Path) -> Mapping[str, str]:
    """Shard file name by tensor name, from the index of a sharded checkpoint."""
    shards = read_json(path).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{path} has no weight_map")
    for shard in shards.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{path} names a shard {shard!r}, which is not a file name")
    return shards


def open_weights(form: WeightFormat, path: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint, given its only file or its index.

    Raises:
        ValueError: a file is truncated or corrupt, or the index names missing files or tensors.
    """
    if path.name == form.file_name:
        return form.open(path)
    index = {name.replace("/", "."): shard for name, shard in read_index(path).items()}
    shards = sorted(set(index.values()))
    absent = [shard for shard in shards if not (path.parent / shard).is_file()]
    if absent:
        raise ValueError(f"{path} names missing shards: {', '.join(absent)}")
    contents = {shard: form.open(path.parent / shard) for shard in shards}
    absent = [f"{name} in {shard}" for name, shard in index.items() if name not in contents[shard]]
    if absent:
        raise ValueError(f"{path} names missing tensors: {', '.join(absent)}")
    return {name: contents[shard][name] for name, shard in index.items()}
