"""Flax .msgpack files, which are opened without reading their arrays."""

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgpack
import numpy as np

from emsjax.models.schema import shown
from emsjax.models.stored import MAX_TENSORS, StoredTensor, checked_name, checked_shape

DTYPES = {
    **{name: np.dtype(name) for name in ("float16", "float32", "float64", "bool")},
    **{name: np.dtype(name) for name in ("int8", "int16", "int32", "int64")},
    **{name: np.dtype(name) for name in ("uint8", "uint16", "uint32", "uint64")},
    "bfloat16": np.dtype(jnp.bfloat16),
}


def open_msgpack(path: Path) -> dict[str, StoredTensor]:
    """Tensors of a file that `flax.serialization.to_bytes` wrote.

    Raises:
        Exception: the file is corrupt.
    """
    content = np.memmap(path, np.uint8, mode="r")
    walker = MsgpackWalker(content)
    tree = walker.next()
    if walker.offset != len(content):
        raise ValueError(f"{len(content) - walker.offset} bytes left over")
    return dict(flat_tensors(tree))


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
        self.content, self.offset, self.left = content, 0, MAX_TENSORS

    def next(self) -> Any:
        """The object at the offset: nested dicts, `StoredTensor`s, or a plain value."""
        self.left -= 1
        if self.left < 0:
            raise ValueError(f"it holds more than {MAX_TENSORS} values")
        kind, length = self.header()
        if kind == "map":
            return {self.small(): self.next() for _ in range(length)}
        if kind == "ext":
            return self.array(length)
        if kind == "bin":
            raise ValueError(f"{length} bytes are not part of an array")
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
        shape, name = checked_shape(self.small()), checked_name(self.small())
        if (dtype := DTYPES.get(name)) is None:
            raise ValueError(f"an array has the type {shown(name)}")
        kind, size = self.header()
        data = self.take(size)
        if kind != "bin" or self.offset != end or size != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"an array of {shape} {name} has {size} bytes")
        return StoredTensor(shape, dtype.name, lambda: data.view(dtype).reshape(shape))


def flat_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, StoredTensor]]:
    """Yields names and tensors; flax's chunks of large arrays are joined."""
    if isinstance(tree, StoredTensor):
        yield prefix, tree
    elif not isinstance(tree, dict):
        raise ValueError(f"{prefix or 'it'} is {type(tree).__name__}, not a tensor")
    elif "__msgpack_chunked_array__" in tree:
        in_order = lambda entries: [entries[str(i)] for i in range(len(entries))]
        shape, chunks = checked_shape(in_order(tree["shape"])), in_order(tree["chunks"])
        if len({chunk.dtype for chunk in chunks}) != 1:
            raise ValueError(f"the chunks of {prefix} differ in type")
        if sum(chunk.numbers for chunk in chunks) != math.prod(shape):
            raise ValueError(f"the chunks of {prefix} do not add up to {shape}")
        read = lambda: np.concatenate([chunk.read() for chunk in chunks]).reshape(shape)
        yield prefix, StoredTensor(shape, chunks[0].dtype, read)
    else:
        for name, subtree in tree.items():
            full = checked_name(f"{prefix}.{name}" if prefix else str(name))
            yield from flat_tensors(subtree, full)
