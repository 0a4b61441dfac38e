"""Folders that are broken in some way: mutations of a good one, which any family of models joins.

A mutation is a function of a generator of random numbers, a folder with a good checkpoint of a
`Family`, and that family. It changes the folder. `True` as its result means that the model must
load as before.
"""

import dataclasses
import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.serialization
import numpy as np
from checkpoint_files import FILE_NAMES, write

from emsjax.models.stored import MAX_HEADER_BYTES

JSON_FILES = ("config.json", "generation_config.json")


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models, by a small example.

    Attributes:
        config: contents of its config.json.
        values: its tensors by their names in PyTorch's layout.
        load: loads a folder.
        logits: float arrays that depend on every weight of a loaded model.
        tables: a name of a table of embeddings, and one of a matrix that is not square.
    """

    config: dict[str, Any]
    values: dict[str, np.ndarray]
    load: Callable[[Path], Any]
    logits: Callable[[Any], np.ndarray]
    table: str
    matrix: str


VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 64, 10**9, 2**31, 2**40, 10**30, -(2**63)),
    *(0.0, 0.5, 1.0, -1.5, 1e30, 1e308, math.nan, math.inf, -math.inf),
    *("", "1", "false", "relu", "gelu", "gelu_new", "opt", "\0", "\ud800", "é" * 9, "x" * 10**6),
    *([], [1], [[]], [None] * 9, {}, {"a": 1}, [2, 5], {"quant_method": "gptq"}, [1e9], ["2"]),
]


def some(rng: np.random.Generator, items):
    return items[int(rng.integers(len(items)))]


def config_field(rng, folder, family):
    """A field has any value; a model that loads anyway is not compared."""
    name = some(rng, [*family.config, "quantization_config", "tie_word_embeddings", "init_std"])
    contents = {**family.config, name: some(rng, VALUES)}
    (folder / "config.json").write_text(json.dumps(contents))


def absent_field(rng, folder, family):
    contents = dict(family.config)
    del contents[some(rng, list(contents))]
    (folder / "config.json").write_text(json.dumps(contents))


def token_field(rng, folder, family):
    name = some(rng, ["eos_token_id", "pad_token_id", "bos_token_id"])
    contents = {name: some(rng, VALUES), "temperature": some(rng, VALUES)}
    (folder / some(rng, JSON_FILES[1:])).write_text(json.dumps(contents))


def unknown_field(rng, folder, family):
    """Fields of no meaning, in any order and any white space, behind a byte-order mark."""
    fields = {**family.config, "unknown": some(rng, VALUES), "dropout": some(rng, VALUES)}
    names = rng.permutation(list(fields))
    text = json.dumps({name: fields[name] for name in names}, indent=int(rng.integers(9)))
    (folder / "config.json").write_bytes(some(rng, [b"", b"\xef\xbb\xbf", b"\n "]) + text.encode())
    return "\ufeff" not in text


def broken_json(rng, folder, family):
    path = folder / some(rng, JSON_FILES)
    good = json.dumps(family.config).encode()
    path.write_bytes(
        some(
            rng,
            [
                *(b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b"{}" * 2, good[:-3], good + b"x"),
                *(b"[" * 10**6, b'{"a":' * 10**5, b'{"a":' + b"[" * 10**5 + b"]" * 10**5 + b"}"),
                *(good.decode().encode("utf-16"), b'{"vocab_size": ' + b"9" * 10**5 + b"}"),
                *(b"\0" * 100, b" " * (MAX_HEADER_BYTES + 1), good.replace(b'"', b"'")),
            ],
        )
    )


def truncated(rng, folder, family):
    path = some(rng, weight_files(folder))
    size = path.stat().st_size
    os.truncate(path, some(rng, [0, 1, 8, size - 1, size // 2, int(rng.integers(size))]))


def flipped(rng, folder, family):
    """Bits of a header, or of numbers: the latter may load."""
    path = some(rng, weight_files(folder))
    content = bytearray(path.read_bytes())
    where = len(content) if rng.random() < 0.2 else min(len(content), 2000)
    for place in rng.integers(where, size=int(rng.integers(1, 9))):
        content[place] ^= 1 << int(rng.integers(8))
    path.write_bytes(content)


def other_bytes(rng, folder, family):
    path = some(rng, weight_files(folder))
    length = int(rng.integers(1, 4000))
    start = some(rng, [b"", b"PK\x03\x04", b"\x80\x02", struct.pack("<Q", length), b"\x81\xa1a"])
    path.write_bytes(start + rng.bytes(length))


def weight_files(folder) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if "model" in path.name]


def no_file(rng, folder, family):
    """Something else stands where a file belongs."""
    path = some(rng, [*weight_files(folder), folder / "config.json", folder / JSON_FILES[1]])
    path.unlink(missing_ok=True)
    kind = some(rng, ["folder", "loop", "/dev/zero", "/dev/null", "pipe", "broken", "absent"])
    if kind != "absent":
        put_no_file(path, kind)
    return True if kind == "absent" and path.name == JSON_FILES[1] else None


def put_no_file(path, kind):
    """A folder, a loop of links, a pipe, or a link to `kind`."""
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path.name if kind == "loop" else kind)


def bad_index(rng, folder, family):
    """An index with a wrong entry; entries may be missing as well."""
    index = write(folder, some(rng, list(FILE_NAMES)), shards=3, values=family.values)
    for form in FILE_NAMES.values():
        (folder / form).unlink(missing_ok=True)
    contents = json.loads(index.read_text())
    shards = contents["weight_map"]
    name, other = some(rng, list(shards)), some(rng, list(shards.values()))
    wrong = [
        *(other, "absent", "../config.json", "/etc/passwd", "", ".", "..", "a\0b", "x" * 5000),
        *(3, None, [other], {"a": other}, "config.json", "\ud800", " ", "a" * 255),
    ]
    change = int(rng.integers(4))
    if change == 0:
        del shards[name]
    elif change == 1:
        contents["weight_map"] = some(rng, VALUES)
    elif change == 2:
        shards[name + some(rng, ["", "/x", ".x", "\n"])] = other
    else:
        shards[name] = some(rng, wrong)
    index.write_text(json.dumps(contents))


def other_tensors(rng, folder, family):
    """A tensor is missing, has another shape or type, or one more is there."""
    values = dict(family.values)
    name = some(rng, list(values))
    value = values.pop(name)
    changed = [
        *(value[:-1], value[None], value.ravel(), value.astype(np.int32), value.astype(bool)),
        *(value * np.nan, np.zeros(0, np.float32), np.zeros((0, 2**20), np.float32)),
    ]
    added = some(rng, [name + "x", "lm_head.weight", "model.decoder.layers.99999999.fc1.bias"])
    if rng.random() < 0.7:
        values[some(rng, [name, added])] = some(rng, changed)
    replace_weights(rng, folder, family, values)


def same_tensors(rng, folder, family):
    """Another format, shards, types that hold the same numbers, and a copy of the table."""
    values = {
        name: value.astype(np.float64) if rng.random() < 0.3 else value
        for name, value in family.values.items()
    }
    if rng.random() < 0.5:
        values["lm_head.weight"] = values[family.table]
    replace_weights(rng, folder, family, values, shards=some(rng, [1, 3]))
    return True


def replace_weights(rng, folder, family, values, shards=1):
    for path in weight_files(folder):
        path.unlink()
    write(folder, some(rng, list(FILE_NAMES)), values, shards, family.config)


def safetensors_header(rng, folder, family):
    """A header with a wrong entry, in front of the same numbers."""
    (path,) = write_only(folder, family, "safetensors")
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    entry = header[some(rng, [name for name in header if name != "__metadata__"])]
    entry[some(rng, ["shape", "dtype", "data_offsets"])] = some(
        rng,
        [
            *([-1, 4], [1.5, 2], [2**63, 2**63], [2**31, 2**31, 0], ["3"], [0] * 99, "F32", "F64"),
            *("I32", "X9", "F4", [0, 2**60], [8, 4], [0, 4], *VALUES[:20]),
        ],
    )
    text = json.dumps(header).encode() + b" " * int(rng.integers(9))
    length = some(rng, [len(text)] * 9 + [len(text) + 1, 2**63, 0, 2**25 + 1, 2**64 - 1])
    path.write_bytes(struct.pack("<Q", length) + text + content[end:])


def msgpack_header(rng, folder, family):
    """Arrays whose shapes and types are wrong, and other objects in their place."""
    (path,) = write_only(folder, family, "msgpack")
    wrong = flax.serialization.msgpack_serialize
    shape, name = b"\x92\x20\x30", b"\xa7float32"  # [32, 48] and its type
    changes = [
        *(
            (shape, new)
            for new in (b"\x92\xff\x30", b"\x92\xcb" + bytes(8) + b"\x30", b"\x92\xc3\x30")
        ),
        *((shape, new) for new in (b"\x92\xce\xff\xff\xff\xff\x30", b"\xc0", b"\x92\xa1a\x30")),
        *(
            (name, new)
            for new in (b"\xa3>f4", b"\xa1O", b"\xa3V99", b"\x90", b"\xc0", b"\xa5<f4,i")
        ),
        *((b"\xc5", new) for new in (b"\xdf", b"\xdd", b"\xc6\xff\xff\xff\xff", b"\xc1")),
    ]
    old, new = some(rng, changes)
    content = path.read_bytes().replace(old, new, int(rng.integers(1, 3)))
    deep: Any = np.zeros(2)
    for _ in range(2000):
        deep = {"a": deep}
    others = [
        *(
            b"\xdf\xff\xff\xff\xff",
            b"\x81\xa1a" * 5000,
            b"\xdd\xff\xff\xff\xff",
            b"\xc9" + b"\xff" * 5,
        ),
        *(wrong({"a" * 5000: np.zeros(2)}), wrong({"a": {1: "b"}}), wrong({"": 1}), wrong({})),
        *(b"\xdf\x00\x01\xff\xff" + b"\xa1a\xc0" * 0x1FFFF, wrong(family.values[family.table])),
    ]
    path.write_bytes(some(rng, [content, content, some(rng, others)]))


def write_only(folder, family, form) -> list[Path]:
    for path in weight_files(folder):
        path.unlink()
    return [write(folder, form, family.values, config=family.config)]


def turned_matrix(rng, folder, family):
    values = {**family.values, family.matrix: np.ascontiguousarray(family.values[family.matrix].T)}
    replace_weights(rng, folder, family, values)


def other_files(rng, folder, family):
    """Files that no reader of the model opens."""
    for name in ("model.safetensors.bak", "notes", "é", "tokenizer.json", "x" * 200, "modeling.py"):
        (folder / name).write_bytes(rng.bytes(int(rng.integers(99))))
    (folder / "generation_config.json").write_text('{"top_k": 3, "eos_token_id": null}')
    return True


MUTATIONS = {  # with the number of folders
    config_field: 40,
    absent_field: 6,
    token_field: 12,
    unknown_field: 4,
    broken_json: 16,
    truncated: 18,
    flipped: 30,
    other_bytes: 12,
    no_file: 20,
    bad_index: 24,
    other_tensors: 16,
    same_tensors: 6,
    safetensors_header: 24,
    msgpack_header: 24,
    turned_matrix: 3,
    other_files: 2,
}
