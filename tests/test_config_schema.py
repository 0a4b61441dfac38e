"""Fields of configs: every kind accepts what it describes, and names the field and the limit."""

import dataclasses
import json
import math
from typing import Any, ClassVar

import pytest
from checkpoint_files import CONFIG, load, write

from emsjax.models.opt import OPTConfig
from emsjax.models.schema import (
    MAX_COUNT,
    Config,
    Relation,
    TokenIds,
    choice,
    count,
    flag,
    many,
    multiple,
    nested,
    number,
    token_id,
    token_ids,
)

KINDS = ["full", "sliding"]


@dataclasses.dataclass(frozen=True)
class Scaling(Config):
    """A nested object of another family's config.json."""

    factor: float = number(1.0, least=1.0, most=64.0)
    rope_type: str = choice("default", ["default", "linear"])


@dataclasses.dataclass(frozen=True)
class OtherConfig(Config):
    """Another family's config, with every kind of field."""

    relations: ClassVar = (
        multiple("num_heads", "num_kv_heads"),
        Relation(
            lambda config: config.window is None or config.window <= config.positions,
            "sliding_window ({window}) must be at most n_positions ({positions})",
        ),
    )

    vocab_size: int = count(100)
    num_layers: int = count(2, key="n_layer")
    num_heads: int = count(4, key="n_head")
    num_kv_heads: int = count(None, null=lambda config: config.num_heads)
    positions: int = count(64, key="n_positions")
    window: int | None = count(None, null=None, key="sliding_window")
    tie: bool = flag(True, key="tie_word_embeddings")
    epsilon: float = number(1e-5, least=0.0, key="layer_norm_epsilon")
    rope_scaling: Scaling | None = nested(Scaling)
    layer_types: Any = many(
        None,
        choice(None, KINDS),
        length="num_layers",
        null=lambda config: ("full",) * config.num_layers,
    )
    pad_token_id: int | None = token_id(None)
    eos_token_id: TokenIds = token_ids(None)


GOOD = {
    "vocab_size": 50,
    "n_layer": 3,
    "n_head": 8,
    "num_kv_heads": 2,
    "n_positions": 128,
    "sliding_window": 16,
    "tie_word_embeddings": False,
    "layer_norm_epsilon": 1e-6,
    "rope_scaling": {"factor": 8, "rope_type": "linear", "unknown": 1},
    "layer_types": ["full", "sliding", "full"],
    "pad_token_id": 0,
    "eos_token_id": [1, 49],
}


def test_a_config_has_the_values_of_its_json_under_its_own_names():
    config = OtherConfig.from_json({**GOOD, "dropout": 0.1})
    assert (config.num_layers, config.num_heads, config.window) == (3, 8, 16)
    assert config.rope_scaling == Scaling(8.0, "linear")
    assert config.layer_types == ("full", "sliding", "full")
    assert config.eos_token_id == (1, 49)
    assert hash(config) == hash(OtherConfig.from_json(GOOD))
    assert OtherConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_null_means_what_the_field_says():
    config = OtherConfig.from_json(dict.fromkeys(["num_kv_heads", "layer_types", "eos_token_id"]))
    assert (config.num_kv_heads, config.eos_token_id) == (4, None)
    assert config.layer_types == ("full", "full")
    with pytest.raises(ValueError, match=r"^n_layer must be an integer .*, not None$"):
        OtherConfig.from_json({"n_layer": None})


LONG = 10**5000
NOT_COUNTS = [0, -1, 1.0, 2.5, True, "8", [8], {"a": 8}, MAX_COUNT + 1, math.nan, LONG]
NOT_IDS = [-1, 50, 2**40, 1.0, "1", True, {"a": 1}, [[1]], [1, 50], [1, "2"], [True], [1, None]]
BAD = {
    "n_layer": (NOT_COUNTS, "an integer in 1..2147483647"),
    "sliding_window": (NOT_COUNTS, "an integer in 1..2147483647"),
    "tie_word_embeddings": (["false", "true", 0, 1, None, [], {}], "true or false"),
    "layer_norm_epsilon": (
        [math.nan, math.inf, -1e-9, "1e-5", True, None, [1.0], 10**400, LONG],
        "a finite number >= 0.0",
    ),
    "rope_scaling": (["linear", 3, [], True], "an object"),
    "rope_scaling.factor": ([0.5, 65, "8", None, math.nan], "a finite number in 1.0..64.0"),
    "rope_scaling.rope_type": (["yarn", None, ["linear"], 3], "one of default, linear"),
    "layer_types": (["full", 3, {"a": 1}, True], "a list"),
    "layer_types[1]": (["other", None, 3, ["full"]], "one of full, sliding"),
    "pad_token_id": ([*NOT_IDS, [1]], "a token id in 0..49"),
    "eos_token_id": (NOT_IDS, "a token id in 0..49"),
}


@pytest.mark.parametrize("path", BAD)
def test_a_value_of_another_kind_is_an_error_that_names_field_limit_and_value(path):
    values, expected = BAD[path]
    for value in values:
        contents = json.loads(json.dumps(GOOD))
        key, _, inner = path.partition(".")
        if inner:
            contents[key][inner] = value
        elif key.endswith("[1]"):
            contents[key.removesuffix("[1]")][1] = value
        else:
            contents[key] = value
        with pytest.raises(ValueError, match="must be") as caught:
            OtherConfig.from_json(contents)
        message = str(caught.value)
        assert message.startswith(f"{path} must be {expected}")
        assert message.endswith("a large int") if value is LONG else ", not " in message
        assert len(message) < 400


def test_relations_between_fields_are_checked():
    with pytest.raises(
        ValueError, match=r"^num_heads \(8\) must be a multiple of num_kv_heads \(3"
    ):
        OtherConfig.from_json({**GOOD, "num_kv_heads": 3})
    with pytest.raises(
        ValueError, match=r"^sliding_window \(129\) must be at most n_pos.* \(128\)$"
    ):
        OtherConfig.from_json({**GOOD, "sliding_window": 129})
    with pytest.raises(
        ValueError, match=r"^layer_types must be a list of num_layers \(3\) values, n"
    ):
        OtherConfig.from_json({**GOOD, "layer_types": ["full"]})


def test_messages_show_large_values_in_short():
    with pytest.raises(ValueError, match=r"^n_layer must be .*\.\.\.") as caught:
        OtherConfig.from_json({"n_layer": "x" * 10**7})
    assert len(str(caught.value)) < 200


# OPT


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("do_layer_norm_before", "false"),
        ("_remove_final_layer_norm", 0),
        ("enable_bias", "no"),
        ("layer_norm_elementwise_affine", None),
        ("activation_function", ["relu"]),
        ("activation_function", "swiglu"),
        ("init_std", math.nan),
        ("init_std", "0.02"),
        ("pad_token_id", "1"),
        ("pad_token_id", 1.0),
        ("pad_token_id", [1]),
        ("pad_token_id", 2**40),
        ("bos_token_id", CONFIG["vocab_size"]),
        ("eos_token_id", [2, CONFIG["vocab_size"]]),
        ("num_hidden_layers", 10**12),
        ("hidden_size", 33),
        ("tie_word_embeddings", False),
        ("model_type", ["opt"]),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("quantization_config", "gptq"),
        ("compression_config", {"format": "pack-quantized"}),
    ],
    ids=str,
)
def test_a_wrong_field_is_an_error_that_names_the_file_before_weights_are_read(
    tmp_path, field, value
):
    write(tmp_path, config={**CONFIG, field: value}).write_bytes(b"never read")
    with pytest.raises(ValueError, match=f"config.json: {field}"):
        load(tmp_path)


def test_a_quantised_folder_is_refused_in_one_line_that_says_so(tmp_path):
    write(tmp_path, config={**CONFIG, "quantization_config": {"quant_method": "awq"}})
    with pytest.raises(ValueError, match="the weights are quantised") as caught:
        load(tmp_path)
    assert "'awq'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_null_and_unknown_fields_do_not_matter(tmp_path):
    nulls = dict.fromkeys(["quantization_config", "word_embed_proj_dim", "pad_token_id"])
    write(tmp_path, config={**CONFIG, **nulls, "dropout": "much", "use_cache": None})
    config = load(tmp_path).config
    assert (config.word_embed_proj_dim, config.pad_token_id) == (CONFIG["hidden_size"], None)


def test_configs_of_python_are_checked_in_the_same_way():
    with pytest.raises(ValueError, match=r"^do_layer_norm_before must be true or false, n"):
        OPTConfig(do_layer_norm_before="false")
    with pytest.raises(ValueError, match=r"^eos_token_id must be a token id in 0\.\.9"):
        OPTConfig(vocab_size=10, eos_token_id=(2, 10))
    assert OPTConfig(eos_token_id=[2, 5]) == OPTConfig(eos_token_id=(2, 5))
