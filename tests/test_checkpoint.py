"""Checkpoints load from every format, save for transformers, and raise helpful errors."""

import json
import shutil
import tracemalloc
from pathlib import Path

import flax.serialization
import huggingface_hub
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from checkpoint_files import CONFIG, FILE_NAMES, VALUES, formats, layouts, load, write
from flax import nnx
from golden import tiny_models
from golden.tiny_models import VARIANTS
from huggingface_hub.errors import (
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from safetensors.numpy import load_file
from toy import tiny_model

from emsjax import OPT
from emsjax.models import checkpoint, saving
from emsjax.models import values as stored_values
from emsjax.models.layers import Norm

# Modules that have another name than on disk, within layers (2) and outside (0).
MODULES = {
    (2, "fc1"): "up_proj",
    (2, "fc2"): "down_proj",
    (2, "self_attn_layer_norm"): "attention_norm",
    (2, "final_layer_norm"): "ffn_norm",
    (0, "final_layer_norm"): "final_norm",
}


def assert_holds(model: OPT, values, dtype=jnp.float32) -> None:
    """The model has every stored value, cast to `dtype`, in its place, and no other values."""
    model_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    assert model_bytes == sum(v.size for v in values.values()) * jnp.dtype(dtype).itemsize
    size = model.config.hidden_size
    for name, value in values.items():
        *scope, module, leaf = name.removeprefix("model.decoder.").split(".")
        owner = model.layers[int(scope[1])] if scope else model
        columns = slice(None)
        if module in ("q_proj", "k_proj", "v_proj"):
            start = "qkv".index(module[0]) * size
            module, columns = "qkv_proj", slice(start, start + size)
        owner = getattr(owner, MODULES.get((len(scope), module), module))
        if leaf == "bias":
            variable = owner.bias
        elif isinstance(owner, nnx.Embed):
            variable = owner.embedding
        elif isinstance(owner, Norm):
            variable = owner.scale
        else:
            variable, value = owner.kernel, value.T
        assert variable.dtype == dtype
        np.testing.assert_array_equal(variable[..., columns], jnp.asarray(value).astype(dtype))


@layouts
@formats
@pytest.mark.parametrize("variant", ["pre_norm", "post_norm_projected"])
def test_every_format_loads_the_stored_weights(tmp_path, variant, form, shards):
    config = VARIANTS[variant]
    values = tiny_models.tensors(config, seed=1)
    write(tmp_path, form, values, shards, config)
    assert_holds(load(tmp_path), values)


@pytest.mark.parametrize("max_shard_bytes", [2 << 30, 10_000], ids=["single", "sharded"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_saved_model_loads_with_the_same_weights(tmp_path, variant, max_shard_bytes):
    config = VARIANTS[variant]
    values = tiny_models.tensors(config, seed=1)
    write(tmp_path / "a", values=values, config=config)
    model = load(tmp_path / "a")
    saving.save(model, tmp_path / "b", max_shard_bytes=max_shard_bytes)
    again = load(tmp_path / "b")
    assert again.config == model.config
    assert_holds(again, values)
    assert (tmp_path / "b" / "model.safetensors").exists() == (max_shard_bytes > 10_000)


@formats
@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32", "float64"])
def test_every_stored_dtype_loads_as_every_model_dtype(tmp_path, form, stored):
    values = {name: value.astype(jnp.dtype(stored)) for name, value in VALUES.items()}
    write(tmp_path, form, values)
    expected = {name: value.astype(np.float32) for name, value in values.items()}
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        assert_holds(load(tmp_path, dtype), expected, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_saved_dtypes_are_those_of_the_model(tmp_path, dtype):
    write(tmp_path / "a")
    load(tmp_path / "a", dtype).save_pretrained(tmp_path / "b")
    saved = load_file(tmp_path / "b" / "model.safetensors")
    assert {value.dtype.name for value in saved.values()} == {dtype}
    assert {name: value.shape for name, value in saved.items()} == tiny_models.tensor_shapes(CONFIG)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == dtype


@formats
def test_names_may_lack_the_model_prefix(tmp_path, form):
    write(tmp_path, form, {name.removeprefix("model."): value for name, value in VALUES.items()})
    assert_holds(load(tmp_path), VALUES)


def test_chunked_arrays_of_flax_are_joined(tmp_path, monkeypatch):
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 1000)
    path = write(tmp_path, "msgpack")
    assert b"__msgpack_chunked_array__" in path.read_bytes()
    assert_holds(load(tmp_path), VALUES)


def test_formats_are_preferred_in_their_order(tmp_path):
    scaled = lambda factor: {name: value * factor for name, value in VALUES.items()}
    write(tmp_path, "bin", scaled(2), shards=3)
    (tmp_path / "flax_model.msgpack").write_bytes(b"never read")
    assert_holds(load(tmp_path), scaled(2))
    write(tmp_path, "bin", scaled(3))
    assert_holds(load(tmp_path), scaled(3))
    write(tmp_path, "safetensors", scaled(4), shards=3)
    assert_holds(load(tmp_path), scaled(4))
    write(tmp_path, "safetensors", scaled(5))
    assert_holds(load(tmp_path), scaled(5))


@pytest.mark.parametrize("form", ["safetensors", "msgpack"])
def test_the_host_holds_one_tensor_at_a_time(tmp_path, form):
    config = {**CONFIG, "hidden_size": 512, "ffn_dim": 4096, "num_hidden_layers": 4}
    config["word_embed_proj_dim"] = 512
    values = {
        name: np.ones(shape, np.float32)
        for name, shape in tiny_models.tensor_shapes(config).items()
    }
    write(tmp_path, form, values, config=config)
    sizes = [value.nbytes for value in values.values()]
    load(tmp_path)  # compiles
    tracemalloc.start()
    try:
        load(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(sizes) > 10 * max(sizes)
    assert peak < 2 * max(sizes)  # room for small tensors and for tracing


@formats
def test_a_loaded_model_does_not_depend_on_its_file(tmp_path, form):
    path = write(tmp_path, form)
    model = load(tmp_path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(size))
    assert_holds(model, VALUES)


def test_loading_never_initialises_random_weights(tmp_path):
    write(tmp_path)
    is_abstract = []

    class Recording(OPT):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            is_abstract.append(isinstance(self.embed_tokens.embedding[...], jax.core.Tracer))

    model = Recording.from_pretrained(tmp_path, dtype=jnp.float32)
    assert isinstance(model, Recording)
    assert is_abstract
    assert all(is_abstract)


def test_a_loaded_model_is_an_argument_of_jit(tmp_path):
    write(tmp_path)
    model = load(tmp_path)
    hidden = jax.jit(lambda model, ids: model.logits(model.embed_tokens(ids)))(
        model, jnp.zeros(3, jnp.int32)
    )
    assert hidden.shape == (3, CONFIG["vocab_size"])


# Saving


@pytest.mark.parametrize("max_shard_bytes", [2 << 30, 10_000], ids=["single", "sharded"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_transformers_loads_a_saved_model(tmp_path, variant, max_shard_bytes):
    torch = pytest.importorskip("torch")
    from transformers import OPTForCausalLM

    config = VARIANTS[variant]
    values = tiny_models.tensors(config, seed=1)
    write(tmp_path / "a", values=values, config=config)
    saving.save(load(tmp_path / "a"), tmp_path / "b", max_shard_bytes=max_shard_bytes)
    loaded, info = OPTForCausalLM.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(info.values())
    assert loaded.dtype == torch.float32
    state = loaded.state_dict()
    for name, value in values.items():
        np.testing.assert_array_equal(state[name].numpy(), value)
    for field, value in config.items():
        assert getattr(loaded.config, field) == value, field


def test_shards_are_below_their_limit_and_in_the_index(tmp_path):
    write(tmp_path / "a")
    saving.save(load(tmp_path / "a"), tmp_path / "b", max_shard_bytes=20_000)
    shards = {path.name: load_file(path) for path in (tmp_path / "b").glob("*.safetensors")}
    total = [sum(value.nbytes for value in shard.values()) for shard in shards.values()]
    assert max(total) <= 20_000
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(total)
    assert index["weight_map"] == {name: file for file in shards for name in shards[file]}


def test_saving_overwrites_only_files_of_the_same_names(tmp_path):
    write(tmp_path, values={name: value + 1 for name, value in VALUES.items()})
    model = load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("kept")
    write(tmp_path)
    model.save_pretrained(tmp_path)
    assert_holds(load(tmp_path), {name: value + 1 for name, value in VALUES.items()})
    assert (tmp_path / "tokenizer.json").read_text() == "kept"


def test_shards_are_not_saved_if_other_weights_would_be_loaded(tmp_path):
    before = write(tmp_path).read_bytes()
    with pytest.raises(ValueError, match=r"model\.safetensors would be loaded in place of"):
        saving.save(load(tmp_path), tmp_path, max_shard_bytes=10_000)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_saving_to_a_file_is_an_error(tmp_path):
    path = write(tmp_path)
    with pytest.raises(ValueError, match=r"path .* is a file"):
        load(tmp_path).save_pretrained(path)


# The hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub whose only repository is a folder; downloads are copied to another folder."""
    remote, cache = tmp_path / "remote", tmp_path / "cache"
    remote.mkdir()
    cache.mkdir()
    revisions = set()

    def list_repo_files(repo_id, *, revision=None):
        if str(repo_id) != "someone/tiny":
            huggingface_hub.utils.validate_repo_id(repo_id)
            raise RepositoryNotFoundError.__new__(RepositoryNotFoundError)
        revisions.add(revision)
        return sorted(path.name for path in remote.iterdir())

    def hf_hub_download(repo_id, name, *, revision=None):
        revisions.add(revision)
        return shutil.copy(remote / name, cache / name)

    def snapshot_download(repo_id, *, revision=None, allow_patterns=(), local_files_only=False):
        revisions.add(revision)
        for name in allow_patterns:
            shutil.copy(remote / name, cache / name)
        return str(cache)

    for function in (list_repo_files, hf_hub_download, snapshot_download):
        monkeypatch.setattr(huggingface_hub, function.__name__, function)
    return remote, cache, revisions


@layouts
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_only_one_format_is_downloaded_from_the_hub(hub, form, shards):
    remote, cache, revisions = hub
    write(remote, form, shards=shards)
    (remote / "generation_config.json").write_text("{}")
    (remote / "tokenizer.json").write_text("{}")
    wanted = {path.name for path in remote.iterdir()}
    (remote / "flax_model.msgpack").write_bytes(b"never read")
    (remote / "README.md").write_text("never read")
    model = OPT.from_pretrained("someone/tiny", dtype=jnp.float32, revision="v2")
    assert_holds(model, VALUES)
    assert {path.name for path in cache.iterdir()} == wanted
    assert revisions == {"v2"}


def test_a_config_alone_is_read_without_downloading_weights(hub):
    remote, cache, revisions = hub
    write(remote)
    (remote / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    (remote / "tokenizer.json").write_text("{}")
    assert checkpoint.load_config("someone/tiny", "v2").eos_token_ids == (7, 8)
    assert {path.name for path in cache.iterdir()} == {"config.json", "generation_config.json"}
    assert revisions == {"v2"}


class UnreachableError(Exception):
    """An error of a library that sends requests."""


@pytest.mark.parametrize("error", [OfflineModeIsEnabled, UnreachableError("no route")])
def test_offline_the_cached_files_are_loaded(hub, monkeypatch, error):
    _, cache, _ = hub
    write(cache)

    def offline(repo_id, *, revision=None):
        raise error

    monkeypatch.setattr(huggingface_hub, "list_repo_files", offline)
    assert_holds(load("someone/tiny"), VALUES)

    def not_cached(*_, **__):
        raise LocalEntryNotFoundError("not there")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", not_cached)
    with pytest.raises(ValueError, match="'someone/tiny' is not in the cache, and the Hugging"):
        load("someone/tiny")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_repository_without_config_or_weights_is_an_error(hub, missing):
    remote, cache, _ = hub
    write(remote)
    (remote / missing).unlink()
    with pytest.raises(ValueError, match=rf"someone/tiny.*{missing}"):
        load("someone/tiny")
    assert not list(cache.iterdir())


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./a", "~/b", "a/b/c", ""])
def test_a_path_that_is_not_a_folder_is_not_looked_up_on_the_hub(monkeypatch, name):
    monkeypatch.setattr(huggingface_hub, "list_repo_files", None)
    with pytest.raises(ValueError, match=f"^'{name}' is not a folder$"):
        load(name)


@pytest.mark.parametrize("name", ["someone/else", "no such?"])
def test_a_name_of_neither_a_folder_nor_a_repository_is_an_error(hub, name):
    with pytest.raises(ValueError, match="neither a folder nor a repository"):
        load(name)


def test_a_path_object_is_never_a_repository(hub, tmp_path):
    with pytest.raises(ValueError, match=r"is not a folder$"):
        load(Path("someone/tiny"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"is not a folder$"):
        load(str(tmp_path / "file"))


# Invalid folders


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("{", "config.json is not valid JSON"),
        ("[]", "config.json must hold a JSON object, not list"),
        ('{"model_type": "gpt-2"}', "config.json: model_type must be one of opt, not 'gpt-2'"),
        ('{"model_type": "opt", "hidden_size": 0}', "config.json: hidden_size must be"),
    ],
)
def test_an_invalid_config_is_an_error(tmp_path, content, message):
    write(tmp_path)
    path = tmp_path / "config.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_an_unsupported_dtype_is_an_error(tmp_path):
    write(tmp_path)
    for dtype, name in ((jnp.int8, "int8"), ("fp32", "'fp32'"), (None, "float64")):
        with pytest.raises(ValueError, match=f"dtype must be one of .*, not {name}$"):
            load(tmp_path, dtype)


def test_missing_weights_are_an_error_that_lists_the_known_files(tmp_path):
    write(tmp_path).unlink()
    with pytest.raises(ValueError, match="has no weights: looked for") as caught:
        load(tmp_path)
    for name in FILE_NAMES.values():
        assert f"{name}, {name}.index.json" in str(caught.value)


@formats
def test_all_misfits_are_reported_at_once_before_any_tensor_is_read(tmp_path, form, monkeypatch):
    values = dict(VALUES)
    layer = "model.decoder.layers.1"
    del values[f"{layer}.self_attn.k_proj.weight"], values[f"{layer}.fc2.bias"]
    values["model.decoder.layers.2.fc1.bias"] = np.zeros(3, np.float32)
    values[f"{layer}.fc1.bias"] = np.zeros(5, np.float32)
    values[f"{layer}.self_attn.v_proj.bias"] = np.zeros(32, np.int64)
    path = write(tmp_path, form, values)
    monkeypatch.setattr(stored_values, "read", lambda *_, **__: pytest.fail("a tensor was read"))
    with pytest.raises(ValueError, match="does not fit its config") as caught:
        load(tmp_path)
    message = str(caught.value)
    kernel = "kernel" if form == "msgpack" else "weight"
    assert str(path) in message
    for problem in (
        f"layers.1.self_attn.k_proj.{kernel} is missing",
        "layers.1.fc2.bias is missing",
        "layers.2.fc1.bias is not a part of this model",
        "layers.1.fc1.bias has shape (5,) instead of (48,)",
        "layers.1.self_attn.v_proj.bias is int64",
    ):
        assert problem in message
    assert message.count("\n") == 5


def test_transposed_kernels_are_misfits(tmp_path):
    name = "model.decoder.layers.0.fc1.weight"
    write(tmp_path, values={**VALUES, name: np.ascontiguousarray(VALUES[name].T)})
    with pytest.raises(ValueError, match=r"fc1.weight has shape \(32, 48\) instead of \(48, 32\)"):
        load(tmp_path)


def test_a_tensor_with_both_of_its_names_is_an_error(tmp_path):
    short = {"decoder.final_layer_norm.bias": np.zeros(32, np.float32)}
    write(tmp_path, values=VALUES | short)
    with pytest.raises(ValueError, match=r"has both decoder.final_layer_norm.bias and model"):
        load(tmp_path)


@formats
@pytest.mark.parametrize("kept", [0.0, 1e-5, 0.01, 0.3, 0.9, 0.99999])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path, form, kept):
    path = write(tmp_path, form)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ValueError, match=rf"{path.name} is truncated") as caught:
        load(tmp_path)
    if form == "msgpack" and kept == 0.9:
        assert "bytes early" in str(caught.value)


@formats
def test_a_file_of_another_kind_is_an_error_that_names_it(tmp_path, form):
    path = write(tmp_path, form)
    path.write_bytes(np.random.RandomState(0).bytes(10_000))
    with pytest.raises(ValueError, match=rf"{path.name} is truncated"):
        load(tmp_path)


@pytest.mark.parametrize(
    "tree",
    [
        {"decoder": {"embed_tokens": {"embedding": "text"}}},
        {"decoder": [1, 2]},
        {"__msgpack_chunked_array__": True, "shape": {"0": 3}, "chunks": {"0": np.zeros(2)}},
        {"__msgpack_chunked_array__": True},
        {"decoder": 1 + 2j},
    ],
    ids=["string", "list", "short chunks", "no chunks", "complex"],
)
def test_a_msgpack_file_with_another_value_instead_of_an_array_is_an_error(tmp_path, tree):
    path = write(tmp_path, "msgpack")
    path.write_bytes(flax.serialization.msgpack_serialize(tree))
    with pytest.raises(ValueError, match=r"flax_model\.msgpack is truncated, corrupt"):
        load(tmp_path)


def test_numbers_as_names_are_misfits(tmp_path):
    path = write(tmp_path, "msgpack")
    path.write_bytes(flax.serialization.msgpack_serialize({1: np.zeros(2)}))
    with pytest.raises(ValueError, match="does not fit its config"):
        load(tmp_path)


def test_a_msgpack_file_with_trailing_bytes_is_an_error(tmp_path):
    path = write(tmp_path, "msgpack")
    path.write_bytes(path.read_bytes() + b"1234")
    with pytest.raises(ValueError, match=r"flax_model\.msgpack .*4 bytes left over"):
        load(tmp_path)


def test_an_array_with_another_size_than_its_shape_is_an_error(tmp_path):
    path = write(tmp_path, "msgpack")
    shape, wrong = msgpack.packb((48,)), msgpack.packb((47,))
    content = path.read_bytes()
    assert shape in content
    path.write_bytes(content.replace(shape, wrong))
    with pytest.raises(ValueError, match=r"an array of \(47,\) float32 has 192 bytes"):
        load(tmp_path)


def test_a_bin_file_with_other_values_than_tensors_is_an_error(tmp_path):
    torch = pytest.importorskip("torch")
    path = write(tmp_path, "bin")
    torch.save({"epoch": 3}, path)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin .* it must hold .* epoch \(int\)"):
        load(tmp_path)
    torch.save([torch.zeros(2)], path)
    with pytest.raises(
        ValueError, match=r"pytorch_model\.bin .* it must hold .* the file \(list\)"
    ):
        load(tmp_path)


@formats
def test_an_index_that_names_missing_files_or_tensors_is_an_error(tmp_path, form):
    index = write(tmp_path, form, shards=3)
    good = json.loads(index.read_text())["weight_map"]
    shards = sorted(set(good.values()))
    name = next(name for name, shard in good.items() if shard == shards[0])
    for weight_map, message in [
        ({**good, name: shards[1]}, "names missing tensors"),
        ({**good, "extra": shards[1]}, "names missing tensors: extra in"),
        ({**good, name: "absent"}, "names missing shards: absent"),
        ({**good, name: f"../{shards[0]}"}, "which is not a file name"),
        ({**good, name: 3}, "which is not a file name"),
        ({n: shard for n, shard in good.items() if n != name}, "is missing"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
    ]:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=message):
            load(tmp_path)
    index.write_text("{")
    with pytest.raises(ValueError, match=r"index.json is not valid JSON"):
        load(tmp_path)


def test_saved_files_have_the_same_modes_as_other_new_files(tmp_path):
    saving.save(tiny_model(), tmp_path)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    (tmp_path / "other").touch()
    assert set(modes.values()) == {(tmp_path / "other").stat().st_mode & 0o777}
