"""What a checkpoint folder says counts: its tokens, its head, its layers, numbers and tokenizer."""

import dataclasses
import json
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import CONFIG, VALUES, formats, load, write
from flax import nnx
from golden import tiny_models
from toy import tiny_model

import emsjax
from emsjax import OPT, distillation
from emsjax.demo import TARGET
from emsjax.models import checkpoint, parameters
from emsjax.models.families import FAMILIES
from emsjax.models.schema import Config, flag
from emsjax.models.stored import StoredTensor

TABLE = "model.decoder.embed_tokens.weight"
LAYER = "model.decoder.layers."


def write_json(path, contents) -> None:
    path.write_text(json.dumps(contents))


# Tokens


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"eos_token_id": [7, 8, 9], "pad_token_id": 3, "bos_token_id": 4}, ((7, 8, 9), 3, 4)),
        ({"eos_token_id": 7}, ((7,), 1, 2)),
        ({"eos_token_id": None, "pad_token_id": 5, "temperature": 0.6}, ((2,), 5, 2)),
        ({}, ((2,), 1, 2)),
        (None, ((2,), 1, 2)),
    ],
    ids=["all", "end", "padding", "none", "no file"],
)
def test_tokens_are_those_of_the_generation_config_and_then_of_the_config(
    tmp_path, generation, expected
):
    write(tmp_path)
    if generation is not None:
        write_json(tmp_path / "generation_config.json", generation)
    config = load(tmp_path).config
    assert (config.eos_token_ids, config.pad_token_id, config.bos_token_id) == expected
    assert checkpoint.load_config(tmp_path) == config


def test_a_loaded_model_ends_and_pads_as_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers import OPTForCausalLM

    prompts, new = tiny_models.prompts(CONFIG, 0, [4, 9, 2]), 16
    write(tmp_path, config={**CONFIG, "pad_token_id": None})
    free = emsjax.generate(load(tmp_path), prompts, max_new_tokens=new, eos_token_ids=()).tokens
    ends = [int(free[0, 5]), int(free[1, 7])]
    write_json(tmp_path / "generation_config.json", {"eos_token_id": ends})
    theirs, ours = OPTForCausalLM.from_pretrained(tmp_path), load(tmp_path)
    out = emsjax.generate(ours, prompts, max_new_tokens=new)
    assert (out.lengths[:2] < new).all()
    for prompt, tokens, length in zip(prompts, out.tokens, out.lengths, strict=True):
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
        expected = theirs.generate(ids, max_new_tokens=new, **options)[0, len(prompt) :].tolist()
        assert tokens[:length].tolist() == expected
        assert set(tokens[length:].tolist()) <= {ends[0]}


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"eos_token_id": [2, 61]}, "eos_token_id must be a token id in 0..60"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id in 0..60"),
        ({"pad_token_id": [1]}, "pad_token_id must be a token id in 0..60"),
        ([1], "must hold a JSON object"),
    ],
)
def test_a_wrong_generation_config_is_an_error_that_names_it(tmp_path, contents, message):
    write(tmp_path)
    write_json(tmp_path / "generation_config.json", contents)
    with pytest.raises(ValueError, match=f"generation_config.json:? {message}"):
        load(tmp_path)


def test_a_saved_folder_has_the_generation_config_with_its_other_settings(tmp_path):
    write(tmp_path / "a")
    settings = {"eos_token_id": [7, 8], "temperature": 0.6, "do_sample": True}
    write_json(tmp_path / "a" / "generation_config.json", settings)
    model = load(tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    saved = json.loads((tmp_path / "b" / "generation_config.json").read_text())
    assert saved == {**settings, "bos_token_id": 2, "pad_token_id": 1}
    assert load(tmp_path / "b").config == model.config
    from transformers import GenerationConfig

    theirs = GenerationConfig.from_pretrained(tmp_path / "b")
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.temperature) == ([7, 8], 1, 0.6)


def test_a_model_without_end_tokens_is_saved_without_them(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    assert "eos_token_id" not in json.loads((tmp_path / "generation_config.json").read_text())
    assert load(tmp_path).config.eos_token_ids == ()


# The head


def named(form, name):
    return name.replace(".weight", ".kernel") if form == "msgpack" else name


@formats
def test_a_head_that_repeats_the_embeddings_is_dropped(tmp_path, form):
    write(tmp_path, form, {**VALUES, "lm_head.weight": VALUES[TABLE]})
    np.testing.assert_array_equal(load(tmp_path).embed_tokens.embedding[...], VALUES[TABLE])


@formats
def test_a_head_that_differs_from_the_embeddings_is_an_error_that_names_it(tmp_path, form):
    head = VALUES[TABLE].copy()
    head[-1, -1] += 1
    path = write(tmp_path, form, {**VALUES, "lm_head.weight": head})
    with pytest.raises(ValueError, match=r"lm_head\.\w+ differs from decoder\.embed_tok") as caught:
        load(tmp_path)
    assert str(path) in str(caught.value)
    assert "opt models have one table" in str(caught.value)


@formats
def test_a_head_of_another_shape_is_an_error(tmp_path, form):
    write(tmp_path, form, {**VALUES, "lm_head.weight": VALUES[TABLE][:-1]})
    with pytest.raises(ValueError, match=r"lm_head\.\w+ differs from"):
        load(tmp_path)


@formats
def test_a_head_alone_is_the_table_as_in_transformers(tmp_path, form):
    values = {name: value for name, value in VALUES.items() if name != TABLE}
    write(tmp_path, form, values | {"lm_head.weight": VALUES[TABLE]})
    np.testing.assert_array_equal(load(tmp_path).embed_tokens.embedding[...], VALUES[TABLE])


def test_a_head_is_compared_in_the_dtype_of_the_model(tmp_path):
    write(tmp_path, values={**VALUES, "lm_head.weight": VALUES[TABLE].astype(jnp.bfloat16)})
    load(tmp_path, jnp.bfloat16)
    with pytest.raises(ValueError, match="differs from"):
        load(tmp_path)


def test_a_family_with_heads_of_their_own_keeps_one_that_differs():
    @dataclasses.dataclass(frozen=True)
    class Untied(Config):
        tie_word_embeddings: bool = flag(True)

    names = dataclasses.replace(FAMILIES["opt"], can_untie=True)
    table = np.ones((3, 2), np.float32)
    stored = lambda values: StoredTensor(values.shape, values.dtype.name, lambda: values)
    tensors = {"decoder.embed_tokens.weight": stored(table), "lm_head.weight": stored(2 * table)}
    settle = lambda tensors: checkpoint.settle_head(
        Untied(), tensors, names, dtype=np.float32, torch_layout=True
    )
    assert settle(tensors) == (Untied(tie_word_embeddings=False), tensors)
    same = tensors | {"lm_head.weight": stored(table)}
    config, kept = settle(same)
    assert config.tie_word_embeddings
    assert list(kept) == ["decoder.embed_tokens.weight"]


# Names, shapes and layers


@pytest.mark.parametrize("layers", [3, 2000, 10_000])
def test_layers_that_the_weights_lack_are_counted_at_once(tmp_path, layers):
    path = write(tmp_path, config={**CONFIG, "num_hidden_layers": layers})
    start = time.perf_counter()
    with pytest.raises(ValueError, match="does not fit its config") as caught:
        load(tmp_path)
    assert time.perf_counter() - start < 2
    first, *problems = str(caught.value).splitlines()
    assert first.startswith(str(path))
    assert first.endswith(f"config.json has {layers} layers, and the weights have 2")
    assert [problem.strip() for problem in problems] == [
        f"{layers - 2} of {layers} layers are missing"
    ]


def test_a_number_of_layers_that_no_model_has_is_named(tmp_path):
    write(tmp_path, config={**CONFIG, "num_hidden_layers": 10**9})
    with pytest.raises(ValueError, match=r"num_hidden_layers must be an integer in 1\.\.10000"):
        load(tmp_path)


def test_layers_that_the_config_lacks_are_misfits_of_a_known_cause(tmp_path):
    write(tmp_path, config={**CONFIG, "num_hidden_layers": 1})
    with pytest.raises(ValueError, match=r"config\.json has 1 layers, and the weights have 2"):
        load(tmp_path)


def test_huge_sizes_are_misfits_at_once(tmp_path):
    most = 2**31 - 1
    sizes = dict.fromkeys(["hidden_size", "ffn_dim", "vocab_size", "word_embed_proj_dim"], most)
    write(tmp_path, config={**CONFIG, **sizes, "num_attention_heads": 1})
    with pytest.raises(ValueError, match=r"has shape \(61, 32\) instead of \(2147483647, 2147"):
        load(tmp_path)


def test_a_long_list_of_misfits_is_cut(tmp_path):
    write(tmp_path, values={f"{name}.other": value for name, value in VALUES.items()})
    with pytest.raises(ValueError, match="does not fit") as caught:
        load(tmp_path)
    lines = str(caught.value).splitlines()
    assert len(lines) == 10
    assert lines[-1].strip() == f"and {2 * len(VALUES) - 8} more"


@pytest.mark.parametrize(
    ("suffix", "cause"),
    [
        *[
            (suffix, "the weights are quantised")
            for suffix in ("qweight", "qzeros", "weight_scale", "SCB")
        ],
        ("lora_A.weight", "those of an adapter"),
    ],
)
def test_the_likely_cause_of_misfits_comes_first(tmp_path, suffix, cause):
    values = {name: value for name, value in VALUES.items() if "fc1" not in name}
    values[f"{LAYER}0.fc1.{suffix}"] = np.zeros((4, 4), np.int32)
    write(tmp_path, values=values)
    with pytest.raises(ValueError, match="does not fit") as caught:
        load(tmp_path)
    assert cause in str(caught.value).splitlines()[0]


def test_names_and_shapes_of_a_config_are_those_of_its_model_without_arrays():
    config = emsjax.OPTConfig(num_hidden_layers=3, hidden_size=64, num_attention_heads=4, ffn_dim=8)
    make = lambda config: OPT(config, rngs=nnx.Rngs(0), dtype=jnp.float32)
    for torch_layout in (True, False):
        stored_as = {"torch_layout": torch_layout}
        whole = parameters.weights_of(
            nnx.eval_shape(lambda: make(config)), FAMILIES["opt"], **stored_as
        )
        layout = parameters.parameters_of(make, config, FAMILIES["opt"], **stored_as)
        key = lambda one: str(one.path)
        assert sorted(layout.of_layers(3), key=key) == sorted(whole, key=key)


# Numbers


@formats
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_an_error_that_names_the_tensor(tmp_path, form, number):
    name = f"{LAYER}1.self_attn.k_proj.weight"
    values = {**VALUES, name: VALUES[name].copy()}
    values[name][3, :5] = number
    path = write(tmp_path, form, values)
    short = named(form, name.removeprefix("model."))
    with pytest.raises(ValueError, match=f"{short} has 5 values that are not finite") as caught:
        load(tmp_path)
    assert str(caught.value).startswith(str(path))
    allowed = OPT.from_pretrained(tmp_path, dtype=jnp.float32, allow_nonfinite=True)
    kernel = allowed.layers[1].qkv_proj.kernel[:, 32:64]
    np.testing.assert_array_equal(kernel, values[name].T)


@pytest.mark.parametrize(
    ("stored", "dtype", "large"),
    [("float32", "float16", 1e5), ("float64", "float32", 1e300), ("float64", "bfloat16", 1e39)],
)
def test_an_overflow_is_told_from_a_number_that_is_not_finite(tmp_path, stored, dtype, large):
    name = f"{LAYER}0.fc2.bias"
    values = {**VALUES, name: VALUES[name].astype(stored)}
    values[name][:2] = large
    write(tmp_path, "msgpack", values)
    with pytest.raises(ValueError, match=f"fc2.bias has 2 values that overflow in {dtype}"):
        load(tmp_path, jnp.dtype(dtype))
    values[name][:1] = np.nan
    write(tmp_path, "msgpack", values)
    with pytest.raises(ValueError, match=r"fc2.bias has 1 values that are not finite"):
        load(tmp_path, jnp.dtype(dtype))


# The tokenizer


@pytest.fixture
def with_tokenizer(tmp_path):
    """A folder with a model and a tokenizer."""
    folder = tmp_path / "model"
    write(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{TARGET}/{name}", folder)
    return folder


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def test_a_saved_model_takes_its_tokenizer_along(with_tokenizer, tmp_path):
    from transformers import AutoTokenizer

    (with_tokenizer / "README.md").write_text("stays")
    model = load(with_tokenizer)
    model.astype(jnp.bfloat16).save_pretrained(tmp_path / "saved")
    own = {"config.json", "generation_config.json", "model.safetensors"}
    assert names_in(tmp_path / "saved") == own | {"tokenizer.json", "tokenizer_config.json"}
    text = "import os"
    ids = [AutoTokenizer.from_pretrained(f)(text).input_ids for f in (TARGET, tmp_path / "saved")]
    assert ids[0] == ids[1]


def test_a_pruned_draft_takes_the_tokenizer_of_its_target_along(with_tokenizer, tmp_path):
    draft = distillation.prune(load(with_tokenizer), layers=1, width=16)
    draft.save_pretrained(tmp_path / "saved")
    assert "tokenizer.json" in names_in(tmp_path / "saved")


def test_a_folder_with_a_tokenizer_keeps_it(with_tokenizer, tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "vocab.json").write_text("kept")
    load(with_tokenizer).save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "vocab.json").read_text() == "kept"
    assert "tokenizer.json" not in names_in(tmp_path / "saved")


def test_links_to_other_files_are_not_copied_as_a_tokenizer(with_tokenizer, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("private")
    (with_tokenizer / "tokenizer.json").unlink()
    (with_tokenizer / "tokenizer.json").symlink_to(secret)
    (with_tokenizer / "merges.txt").symlink_to(secret)
    load(with_tokenizer).save_pretrained(tmp_path / "saved")
    assert not names_in(tmp_path / "saved") & {"tokenizer.json", "merges.txt"}


def test_the_links_of_the_hubs_cache_are_copied(with_tokenizer, tmp_path):
    blobs = tmp_path / "cache" / "blobs"
    snapshot = tmp_path / "cache" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(with_tokenizer.iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    load(snapshot).save_pretrained(tmp_path / "saved")
    content = (with_tokenizer / "tokenizer.json").read_bytes()
    assert (tmp_path / "saved" / "tokenizer.json").read_bytes() == content


def test_models_of_equal_configs_share_compiled_programs_whatever_their_folder(tmp_path):
    for name in "ab":
        write(tmp_path / name)
    traces = []

    @jax.jit
    def run(model):
        traces.append(model)
        return model.embed_tokens.embedding[...].sum()

    for name in "ab":
        run(load(tmp_path / name))
    assert len(traces) == 1
