"""PyTorch .bin files, read without torch.

`torch.save` writes a pickle of the state dict, in which a tensor is a call of a function of torch
with a storage, and the storages' numbers: since torch 1.6 as files of an uncompressed zip archive,
before that one after the other behind the pickle.
"""

import dataclasses
import io
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from emsjax.models.pickles import Name, Pickle
from emsjax.models.schema import is_whole, shown
from emsjax.models.stored import (
    MAX_HEADER_BYTES,
    StoredTensor,
    checked_name,
    checked_shape,
    listed,
    readable_name,
)

ZIP_START = b"PK\x03\x04"
LOCAL_HEADER = "<26xHH"  # of a file in an archive: lengths of its name and of the extra field
MAGIC_NUMBER = 0x1950A86A20F9469CFC6C  # the first object of a file that is not an archive
MAX_ELEMENTS = 2**62
MAX_DIRECTORY_BYTES = 8 << 20  # of an archive: more than 50,000 storages
STORAGE_DTYPES = {
    "FloatStorage": np.dtype("float32"),
    "HalfStorage": np.dtype("float16"),
    "BFloat16Storage": np.dtype(jnp.bfloat16),
    "DoubleStorage": np.dtype("float64"),
    "LongStorage": np.dtype("int64"),
    "IntStorage": np.dtype("int32"),
    "ShortStorage": np.dtype("int16"),
    "CharStorage": np.dtype("int8"),
    "ByteStorage": np.dtype("uint8"),
    "BoolStorage": np.dtype("bool"),
}


@dataclasses.dataclass
class Storage:
    """Consecutive numbers in a file.

    Attributes:
        size: how many there are.
        start: their offset in the file in bytes, or None as long as it is not known.
    """

    dtype: np.dtype
    size: int
    start: int | None = None


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A view of a storage; offset and strides in numbers."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def open_torch(path: Path) -> dict[str, StoredTensor]:
    """Tensors of a state dict that `torch.save` wrote.

    Raises:
        ValueError: the file holds something else.
        Exception: the file is corrupt.
    """
    content = np.memmap(path, np.uint8, mode="r")
    is_archive = content[:4].tobytes() == ZIP_START
    state = read_archive(path, content) if is_archive else read_sequence(content)
    strangers = {} if isinstance(state, dict) else {"the file": state}
    strangers = strangers or {k: v for k, v in state.items() if not isinstance(v, Tensor)}
    if strangers:
        kinds = [f"{readable_name(k)} ({type(v).__name__})" for k, v in strangers.items()]
        raise ValueError(f"it must hold a dictionary of tensors only; it has {listed(kinds)}")
    tensors = {checked_name(name): locate(tensor, content) for name, tensor in state.items()}
    # A storage may be shared, by a head and the embedding table, but not without limit.
    total = sum(tensor.numbers * np.dtype(tensor.dtype).itemsize for tensor in tensors.values())
    if total > 2 * len(content):
        raise ValueError(f"its tensors have {total} bytes, and the file {len(content)}")
    return tensors


def locate(tensor: Tensor, content: np.ndarray) -> StoredTensor:
    """The tensor as a view of the file's content."""
    storage = tensor.storage
    dtype, shape = storage.dtype, tensor.shape
    # Every index is within the storage, and the storage within the file.
    last = sum((n - 1) * stride for n, stride in zip(shape, tensor.strides, strict=True))
    if 0 not in shape and tensor.offset + last >= storage.size:
        raise ValueError(f"a tensor of shape {shape} is outside of its storage")
    if storage.start is None or storage.start + storage.size * dtype.itemsize > len(content):
        raise ValueError(f"{storage.size} numbers of a storage are not in the file")

    def read() -> np.ndarray:
        if 0 in shape:
            return np.zeros(shape, dtype)
        start = storage.start + tensor.offset * dtype.itemsize
        flat = content[start : start + (last + 1) * dtype.itemsize].view(dtype)
        strides = [stride * dtype.itemsize for stride in tensor.strides]
        return np.lib.stride_tricks.as_strided(flat, shape, strides, writeable=False)

    return StoredTensor(shape, dtype.name, read)


class DirectoryReader(io.FileIO):
    """An archive of which only the directory is read, so that reads are limited."""

    def read(self, size: int = -1) -> bytes:
        size = size if size >= 0 else os.fstat(self.fileno()).st_size - self.tell()
        if size > MAX_DIRECTORY_BYTES:
            raise ValueError(f"its directory has {size} bytes")
        return super().read(size)


def read_archive(path: Path, content: np.ndarray) -> Any:
    """The object in an archive of `data.pkl` and a file `data/KEY` for each storage."""
    with DirectoryReader(path) as file, zipfile.ZipFile(file) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}

    def start_of(entry: zipfile.ZipInfo) -> int:
        header = content[entry.header_offset :][: struct.calcsize(LOCAL_HEADER)].tobytes()
        return entry.header_offset + len(header) + sum(struct.unpack(LOCAL_HEADER, header))

    def bytes_of(name: str) -> bytes:
        entry = entries[name]
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > MAX_HEADER_BYTES:
            raise ValueError(f"{name} is compressed or too large")
        return content[start_of(entry) :][: entry.file_size].tobytes()

    def storage(class_: Any, key: Any, location: Any, size: Any) -> Storage:
        entry, dtype = entries[f"data/{checked_name(key)}"], dtype_of(class_)
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"storage {shown(key)} is compressed")
        if not is_whole(size, 0, MAX_ELEMENTS) or entry.file_size != size * dtype.itemsize:
            raise ValueError(
                f"storage {shown(key)} has {entry.file_size} bytes, and {shown(size)} numbers"
            )
        return Storage(dtype, size, start_of(entry))

    if "byteorder" in entries and bytes_of("byteorder") != b"little":
        raise ValueError("its numbers are big-endian")
    return Pickle(io.BytesIO(bytes_of("data.pkl")), FUNCTIONS, CLASSES, storage).read()


def read_sequence(content: np.ndarray) -> Any:
    """The object in a file of torch before 1.6: pickles, and then the storages' numbers."""
    storages: dict[str, Storage] = {}

    def storage(class_: Any, key: Any, location: Any, size: Any, view: Any = None) -> Storage:
        if not is_whole(size, 0, MAX_ELEMENTS):
            raise ValueError(f"a storage has {shown(size)} numbers")
        if view is not None:
            raise ValueError("a storage is a view of another one")
        return storages.setdefault(checked_name(key), Storage(dtype_of(class_), size))

    file = io.BytesIO(content[:MAX_HEADER_BYTES].tobytes())
    if (magic := Pickle(file).read()) != MAGIC_NUMBER:
        raise ValueError(f"it starts with {shown(magic)} instead of torch's number")
    _protocol, system = Pickle(file).read(), Pickle(file).read()
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise ValueError("its numbers are big-endian")
    state = Pickle(file, FUNCTIONS, CLASSES, storage).read()
    keys, offset = Pickle(file).read(), file.tell()
    for key in keys:
        found = storages[checked_name(key)]
        (size,) = struct.unpack("<q", content[offset : offset + 8].tobytes())
        if size != found.size or found.start is not None:
            raise ValueError(f"storage {shown(key)} has {size} numbers instead of {found.size}")
        found.start = offset + 8
        offset = found.start + size * found.dtype.itemsize
    return state


def dtype_of(storage_class: Name) -> np.dtype:
    """The type of a storage's numbers, from its class in torch."""
    if storage_class not in CLASSES:
        raise ValueError(f"the storage class {shown(storage_class)} is not read")
    return STORAGE_DTYPES[storage_class.name]


def tensor(storage: Any, offset: Any, shape: Any, strides: Any, *state: Any) -> Tensor:
    """`torch._utils._rebuild_tensor_v2`, whose last arguments are no part of the numbers."""
    shape, strides = checked_shape(shape), checked_strides(strides)
    metadata = state[2:]  # after requires_grad and hooks
    if not isinstance(storage, Storage) or len(shape) != len(strides) or any(metadata):
        raise ValueError("a tensor is not a plain view of a storage")
    if not is_whole(offset, 0, MAX_ELEMENTS):
        raise ValueError(f"a tensor has the offset {shown(offset)}")
    return Tensor(storage, offset, shape, strides)


def checked_strides(strides: Any) -> tuple[int, ...]:
    if isinstance(strides, tuple) and all(is_whole(n, 0, MAX_ELEMENTS) for n in strides):
        return strides
    raise ValueError(f"a tensor has the strides {shown(strides)}")


CLASSES = {Name(place, name) for place in ("torch", "torch.cuda") for name in STORAGE_DTYPES}
FUNCTIONS = {
    Name("torch._utils", "_rebuild_tensor"): tensor,
    Name("torch._utils", "_rebuild_tensor_v2"): tensor,
    Name("torch._utils", "_rebuild_parameter"): lambda data, requires_grad, hooks: data,
}
