"""Hostile folders: a model that loads is right, and everything else is an error that names a file.

Folders are mutations of good ones with fixed seeds: see `hostile_folders`. A family of models joins
by an entry of FAMILIES.
"""

import functools
import json
import os
import tempfile
import time
import tracemalloc
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import CONFIG, FILE_NAMES, VALUES, load, write
from hostile_folders import JSON_FILES, MUTATIONS, Family, put_no_file, some

import emsjax
from emsjax.models.hub import CONFIG as CONFIG_NAME

PROMPTS = [[3, 4, 5, 6], [7, 8]]


def logprobs(model) -> np.ndarray:
    return emsjax.generate(model, PROMPTS, max_new_tokens=3, eos_token_ids=()).logprobs


FAMILIES = {
    "opt": Family(
        config=CONFIG,
        values=VALUES,
        load=load,
        logits=logprobs,
        table="model.decoder.embed_tokens.weight",
        matrix="model.decoder.layers.0.fc1.weight",
    )
}


@functools.cache
def expected(family_name):
    family = FAMILIES[family_name]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), values=family.values, config=family.config)
        return family.logits(family.load(Path(folder)))


def check_error(error, folder) -> None:
    """The message names the folder and one of its files, and is short and printable."""
    message = str(error)
    assert str(folder) in message
    named = [*JSON_FILES, CONFIG_NAME, *FILE_NAMES.values()]
    assert any(name in message or name.split(".")[0] in message for name in named)
    assert len(message) < 6000
    assert message.replace("\n", "").isprintable()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_loads_right_or_is_an_error_that_names_a_file(tmp_path, name, mutation):
    family = FAMILIES[name]
    for seed in range(MUTATIONS[mutation]):
        rng = np.random.default_rng([zlib.crc32(mutation.__name__.encode()), seed])
        folder = tmp_path / str(seed)
        write(folder, some(rng, list(FILE_NAMES)), family.values, config=family.config)
        is_harmless = mutation(rng, folder, family)
        model, error, peak = attempt(family, folder)
        assert peak < 100 << 20, seed
        if error is not None:
            assert not is_harmless, (seed, error)
            check_error(error, folder)
        elif is_harmless:
            np.testing.assert_array_equal(family.logits(model), expected(name))
        else:
            assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(model)), seed


def attempt(family, folder):
    """The model, or the error, and the bytes of memory that it took."""
    tracemalloc.start()
    try:
        return family.load(folder), None, tracemalloc.get_traced_memory()[1]
    except ValueError as error:
        return None, error, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


FILES = (CONFIG_NAME, JSON_FILES[1], *FILE_NAMES.values(), "model.safetensors.index.json")


@pytest.mark.parametrize("file", FILES)
def test_what_is_no_file_is_an_error_at_once_that_names_it(tmp_path, file):
    for number, kind in enumerate(("folder", "loop", "pipe", "/dev/zero", "/dev/urandom", "/tmp")):
        folder = tmp_path / str(number)
        folder.mkdir()
        if file != CONFIG_NAME:
            (folder / CONFIG_NAME).write_text(json.dumps(CONFIG))
        put_no_file(folder / file, kind)
        start = time.perf_counter()
        with pytest.raises(ValueError, match=r"is not a regular|cannot be read") as caught:
            load(folder)
        assert time.perf_counter() - start < 1
        assert str(folder / file) in str(caught.value)


def test_a_shard_that_is_no_file_is_an_error_that_names_it(tmp_path):
    write(tmp_path, shards=3)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.unlink()
    shard.symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"-00002-of-00003\.safetensors is not a regular file"):
        load(tmp_path)


@pytest.mark.parametrize("path", ["a" * 5000, "/" + "a" * 5000, "a\0b", "\ud800", "./a" * 2000])
def test_a_name_that_no_folder_can_have_is_an_error(path):
    with pytest.raises(ValueError, match="folder") as caught:
        load(path)
    assert len(str(caught.value)) < 500


def test_a_nested_safetensors_header_is_an_error(tmp_path):
    text = b'{"a":' * 10**6
    (tmp_path / CONFIG_NAME).write_text(json.dumps(CONFIG))
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated"):
        load(tmp_path)


@pytest.mark.parametrize("file", [CONFIG_NAME, JSON_FILES[1], "model.safetensors.index.json"])
def test_json_that_is_nested_or_large_is_an_error_at_once(tmp_path, file):
    write(tmp_path).unlink()
    for content, message in {
        b'{"a":' * 10**5: "nested too deeply",
        b"[" * 10**6: "nested too deeply",
        None: "must have at most",
    }.items():
        if content is None:
            os.truncate(tmp_path / file, 1 << 36)  # without blocks on the disk
        else:
            (tmp_path / file).write_bytes(content)
        start = time.perf_counter()
        with pytest.raises(ValueError, match=rf"{file} .*{message}"):
            load(tmp_path)
        assert time.perf_counter() - start < 1
