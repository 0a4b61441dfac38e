"""PyTorch files of every kind are read as torch reads them, without torch; others do nothing."""

import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
from checkpoint_files import VALUES, load, write

from emsjax.models.pickles import MAX_OBJECTS
from emsjax.models.torch_files import MAGIC_NUMBER, open_torch
from emsjax.models.weight_files import PYTORCH, open_file

torch = pytest.importorskip("torch")
layouts = pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "older"])
protocols = pytest.mark.parametrize("protocol", [2, 3, 4, 5])


def save(state, path, *, is_zip, protocol=2):
    torch.save(state, path, _use_new_zipfile_serialization=is_zip, pickle_protocol=protocol)
    return path


def state_dict():
    """Tensors of every dtype, views, parameters, shared storages and attributes of the dict."""
    base = torch.arange(24.0).reshape(4, 6)
    linear = torch.nn.Linear(3, 2)
    state = OrderedDict(linear.state_dict())  # with the attribute _metadata
    state |= {
        "transposed": base.T,
        "rows": base[1:3],
        "columns": base[:, 2:5],
        "same": base,
        "parameter": torch.nn.Parameter(torch.full((2, 2), 7.0)),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 5),
        "module": linear.weight,
    }
    for name in (
        "float16",
        "bfloat16",
        "float64",
        "int8",
        "uint8",
        "int16",
        "int32",
        "int64",
        "bool",
    ):
        state[name] = torch.arange(5).to(getattr(torch, name))
    return state


@layouts
@protocols
def test_tensors_are_those_that_torch_reads(tmp_path, is_zip, protocol):
    path = save(state_dict(), tmp_path / "a.bin", is_zip=is_zip, protocol=protocol)
    found = open_torch(path)
    expected = torch.load(path, weights_only=False)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        stored = found[name]
        assert stored.dtype == str(tensor.dtype).removeprefix("torch.")
        assert stored.shape == tuple(tensor.shape)
        values = stored.read().astype(np.float64)
        np.testing.assert_array_equal(values, tensor.detach().to(torch.float64).numpy())


@layouts
def test_a_checkpoint_of_either_layout_loads_without_torch(tmp_path, is_zip):
    path = write(tmp_path, "bin")
    save({name: torch.from_numpy(v) for name, v in VALUES.items()}, path, is_zip=is_zip)
    code = (
        "import sys; sys.modules['torch'] = None; import emsjax, numpy as np; "
        f"model = emsjax.OPT.from_pretrained({str(tmp_path)!r}, dtype='float32'); "
        "np.save(sys.argv[1], model.embed_tokens.embedding[...])"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "table.npy"], check=True)
    table = VALUES["model.decoder.embed_tokens.weight"]
    np.testing.assert_array_equal(np.load(tmp_path / "table.npy"), table)


@layouts
def test_a_tied_head_that_shares_its_storage_is_read(tmp_path, is_zip):
    tensors = {name: torch.from_numpy(v) for name, v in VALUES.items()}
    head = {"lm_head.weight": tensors["model.decoder.embed_tokens.weight"]}
    path = write(tmp_path, "bin")
    save(tensors | head, path, is_zip=is_zip)
    load(tmp_path)


@layouts
def test_only_tensors_that_are_read_are_in_memory(tmp_path, is_zip):
    state = {str(i): torch.zeros(1 << 20) for i in range(40)}
    path = save(state, tmp_path / "a.bin", is_zip=is_zip)
    tracemalloc.start()
    try:
        found = open_torch(path)
        assert not found["3"].read().any()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20 < path.stat().st_size  # less than a third: a header of the older layout


# Files that are no state dicts


class Calls:
    """An object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def archive(path, content, entries=(), compression=zipfile.ZIP_STORED):
    """Write an archive with this pickle and other entries."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("a/data.pkl", content)
        for name, data in entries:
            file.writestr(f"a/{name}", data)
    return path


def older(path, *objects, raw=b""):
    path.write_bytes(b"".join(pickle.dumps(one, 2) for one in objects) + raw)
    return path


def refused(path, reason=""):
    with pytest.raises(ValueError, match=rf"{path.name} is truncated, corrupt or not .*{reason}"):
        open_file(PYTORCH, path)


@layouts
@pytest.mark.parametrize("function", [os.system, eval, print, pickle.loads, bytearray, torch.load])
def test_no_function_is_called_or_imported(tmp_path, is_zip, function):
    marker = tmp_path / "marker"
    state = {"a": Calls(function, f"touch {marker}"), "b": torch.zeros(2)}
    path = save(state, tmp_path / "a.bin", is_zip=is_zip)
    refused(path, "which is no part of tensors")
    assert not marker.exists()


@layouts
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_that_are_not_plain_numbers_are_refused(tmp_path, is_zip):
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    strangers = {
        "complex": torch.zeros(2, dtype=torch.complex64),
        "sparse": torch.eye(3).to_sparse(),
        "quantised": quantized,
        "meta": torch.zeros(3, device="meta"),
        "float8": torch.zeros(3).to(torch.float8_e4m3fn),
        "conjugate": torch.zeros(2, dtype=torch.complex64).conj(),
        "negative": torch.zeros(2, dtype=torch.complex64).conj().imag,
    }
    for tensor in strangers.values():
        refused(save({"a": tensor}, tmp_path / "a.bin", is_zip=is_zip))


STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"


def tensor_pickle(size=b"K\x06", offset=b"K\x00", shape=b"K\x02K\x03", strides=b"K\x03K\x01"):
    """The pickle of a dict with a tensor whose numbers are these operations."""
    return (
        b"\x80\x02}X\x01\x00\x00\x00actorch._utils\n_rebuild_tensor_v2\n("
        + STORAGE
        + size
        + b"tQ"
        + offset
        + b"("
        + shape
        + b"t("
        + strides
        + b"t\x89}tRs."
    )


NUMBERS = np.arange(6, dtype=np.float32)
HUGE = b"\x8a\x09" + (2**62).to_bytes(9, "little")


def test_a_tensor_written_by_hand_is_read(tmp_path):
    path = archive(tmp_path / "a.bin", tensor_pickle(), [("data/0", NUMBERS.tobytes())])
    np.testing.assert_array_equal(open_torch(path)["a"].read(), NUMBERS.reshape(2, 3))


@pytest.mark.parametrize(
    "changes",
    [
        {"size": b"K\x07"},
        {"size": HUGE},
        {"size": b"J\xff\xff\xff\xff"},
        {"offset": b"K\x01"},
        {"offset": HUGE},
        {"offset": b"J\xff\xff\xff\xff"},
        {"offset": b"G\x3f\xf0\x00\x00\x00\x00\x00\x00"},
        {"offset": b"N"},
        {"shape": b"K\x03K\x03"},
        {"shape": HUGE + HUGE},
        {"shape": b"J\xff\xff\xff\xffK\x03"},
        {"shape": b"G\x40\x00\x00\x00\x00\x00\x00\x00K\x03"},
        {"shape": b"\x88K\x03"},
        {"shape": b"K\x06"},
        {"shape": b"K\x01" * 40, "strides": b"K\x01" * 40},
        {"strides": HUGE + b"K\x01"},
        {"strides": b"J\xff\xff\xff\xffK\x01"},
        {"strides": b"K\x00K\x00", "shape": b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f"},
    ],
    ids=str,
)
def test_numbers_of_a_tensor_that_do_not_fit_its_storage_are_errors(tmp_path, changes):
    content = tensor_pickle(**changes)
    path = archive(tmp_path / "a.bin", content, [("data/0", NUMBERS.tobytes())])
    tracemalloc.start()
    try:
        refused(path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_archives_that_torch_does_not_write_are_errors(tmp_path):
    path, numbers = tmp_path / "a.bin", ("data/0", NUMBERS.tobytes())
    refused(archive(path, tensor_pickle()), "data/0")
    refused(archive(path, tensor_pickle(), [("data/0", b"")]), "has 0 bytes, and 6 numbers")
    refused(archive(path, tensor_pickle(), [numbers, ("byteorder", "big")]), "big-endian")
    refused(archive(path, b"", [numbers]))
    compressed = archive(path, tensor_pickle(), [numbers], zipfile.ZIP_DEFLATED)
    refused(compressed, "compressed")
    archive(path, tensor_pickle(), [numbers] + [(f"{i}" * 40, b"") for i in range(99_999)])
    refused(path, "its directory has")


SYSTEM = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}


def test_older_files_that_torch_does_not_write_are_errors(tmp_path):
    path = tmp_path / "a.bin"
    state = tensor_pickle()
    good = [pickle.dumps(one, 2) for one in (MAGIC_NUMBER, 1001, SYSTEM)]
    end = struct.pack("<q", 6) + NUMBERS.tobytes()
    written = lambda *parts: path.write_bytes(b"".join(parts)) and path
    sized = STORAGE + b"K\x06"
    state = state.replace(sized, sized + b"N")  # no view
    keys = pickle.dumps(["0"], 2)
    found = open_torch(written(*good, state, keys, end))["a"].read()
    np.testing.assert_array_equal(found, NUMBERS.reshape(2, 3))
    for match, parts in {
        "instead of torch's number": (pickle.dumps(3, 2), *good[1:], state, keys, end),
        "big-endian": (
            *good[:2],
            pickle.dumps({**SYSTEM, "little_endian": False}, 2),
            *(state, keys, end),
        ),
        "not in the file": (*good, state, keys, end[:-1]),
        "instead of 6": (*good, state, keys, struct.pack("<q", 5), NUMBERS.tobytes()),
        "instead of 6 ": (*good, state, pickle.dumps(["0", "0"], 2), end, end),
        "KeyError|'1'": (*good, state, pickle.dumps(["1"], 2), end),
        "not in the file ": (*good, state, pickle.dumps([], 2)),
        "a name must be text": (*good, state, pickle.dumps([("0",)], 2), end),
    }.items():
        refused(written(*parts), match.strip())


BOMBS = {
    "operations": b"\x80\x02" + b"N" * (MAX_OBJECTS + 1) + b".",
    "copies": b"\x80\x02]q\x00("
    + b"N" * 300_000
    + b"e"
    + b"ccollections\nOrderedDict\nh\x00\x85R" * 9,
    "nested keys": b"\x80\x02})" + b"q\x00h\x00\x86" * 60 + b"Ns.",  # whose hash takes 2^60 steps
    "long integer": b"\x80\x02}\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20) + b"Ns.",
    "declared text": b"\x80\x02X\xff\xff\xff\x7fabc.",
    "no stop": b"\x80\x02}",
    "empty stack": b"\x80\x02.",
    "two values": b"\x80\x02NN.",
    "lonely mark": b"\x80\x02(.",
    "unmarked": b"\x80\x02}u.",
    "memo": b"\x80\x02h\x05.",
    "unknown operation": b"\x80\x02\x93.",
    "persistent id": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "instance": b"\x80\x02ccollections\nOrderedDict\n)\x81}b.",
    "attribute of a list": b"\x80\x02]}b.",
    "append to a dict": b"\x80\x02}Na.",
    "list in itself": b"\x80\x02]q\x00h\x00a.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_pickles_of_other_kinds_end_soon_in_little_memory(tmp_path, bomb):
    for path in (
        archive(tmp_path / "a.bin", BOMBS[bomb]),
        older(tmp_path / "b.bin", MAGIC_NUMBER, 1001, SYSTEM, raw=BOMBS[bomb]),
    ):
        tracemalloc.start()
        try:
            refused(path)
            assert tracemalloc.get_traced_memory()[1] < 64 << 20
        finally:
            tracemalloc.stop()
