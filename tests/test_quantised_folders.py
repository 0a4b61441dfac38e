"""Folders that are quantised already, whose bytes the tests lay out by hand."""

import functools
import json

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from golden import tiny_families
from golden.tiny_families import VARIANTS
from safetensors.numpy import save_file

import emsjax
from emsjax.models.linears import dense_weight

CONFIG = VARIANTS["llama"] | {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
}
ROWS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def words(values, axis, order=range(8)):
    """4-bit values in 32-bit words along an axis, the number order[k] of each eight in bits 4 k."""
    values = np.moveaxis(np.asarray(values, np.uint64), axis, -1)
    values = values.reshape(*values.shape[:-1], -1, 8)
    out = np.zeros(values.shape[:-1], np.uint64)
    for place, number in enumerate(order):
        out |= values[..., number] << np.uint64(4 * place)
    return np.ascontiguousarray(np.moveaxis(out.astype(np.uint32), -1, axis)).view(np.int32)


def compressed(bits, kind, rows, **weights):
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "channel"} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": rows}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def eight_bits(rng, outputs, inputs):
    values = rng.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    scales = rng.uniform(0.5, 1, (outputs, 1)).astype(np.float32) / 1000
    return {"weight": values, "weight_scale": scales}, values * scales.astype(np.float64)


def floats(rng, outputs, inputs):
    values = rng.normal(size=(outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.5, 1, (outputs, 1)).astype(np.float32) / 10
    return {"weight": values, "weight_scale": scales}, values.astype(np.float64) * scales


def float_blocks(rng, outputs, inputs):
    values = rng.normal(size=(outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.05, 0.1, (-(-outputs // 128), -(-inputs // 128))).astype(np.float32)
    spread = np.repeat(np.repeat(scales, 128, axis=0)[:outputs], 128, axis=1)[:, :inputs]
    return {"weight": values, "weight_scale_inv": scales}, values.astype(np.float64) * spread


def four_bits(rng, outputs, inputs):
    groups = inputs // 128
    values = rng.integers(0, 16, (outputs, inputs))
    zeros, scales = (
        rng.integers(1, 16, (outputs, groups)),
        rng.uniform(0.01, 0.02, (outputs, groups)),
    )
    return values, zeros, scales.astype(np.float16)


def in_inputs(groups):
    return np.repeat(groups.astype(np.float64), 128, axis=1)


def packed(rng, outputs, inputs):
    values, _, scales = four_bits(rng, outputs, inputs)
    shape = np.array([outputs, inputs], np.int64)
    tensors = {"weight_packed": words(values, 1), "weight_scale": scales, "weight_shape": shape}
    return tensors, (values - 8) * in_inputs(scales)


def packed_with_zeros(rng, outputs, inputs):
    values, zeros, scales = four_bits(rng, outputs, inputs)
    shape = np.array([outputs, inputs], np.int64)
    tensors = {"weight_packed": words(values, 1), "weight_scale": scales, "weight_shape": shape}
    tensors["weight_zero_point"] = words(zeros, 0)
    return tensors, (values - in_inputs(zeros)) * in_inputs(scales)


def gptq(rng, outputs, inputs, order=None):
    values, zeros, scales = four_bits(rng, outputs, inputs)
    groups = np.arange(inputs) // 128 if order is None else order(inputs)
    tensors = {"qweight": words(values.T, 0), "qzeros": words(zeros.T - 1, 1)}
    tensors |= {"scales": np.ascontiguousarray(scales.T), "g_idx": groups.astype(np.int32)}
    return tensors, (values - zeros[:, groups]) * scales.astype(np.float64)[:, groups]


def gptq_in_order_of_activations(rng, outputs, inputs):
    order = lambda inputs: np.random.default_rng(inputs).permutation(np.arange(inputs) // 128)
    return gptq(rng, outputs, inputs, order)


def awq(rng, outputs, inputs):
    values, zeros, scales = four_bits(rng, outputs, inputs)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": words(values.T, 1, order), "qzeros": words(zeros.T, 1, order)}
    tensors["scales"] = np.ascontiguousarray(scales.T)
    return tensors, (values - in_inputs(zeros)) * in_inputs(scales)


GROUPED = {"strategy": "group", "group_size": 128}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
METHODS = {
    "int8": (compressed(8, "int", ROWS), eight_bits, "int8"),
    "int8-weights": (compressed(8, "int", None), eight_bits, "int8-weights"),
    "fp8": (compressed(8, "float", ROWS | {"type": "float"}), floats, "fp8"),
    "fp8-blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        float_blocks,
        "fp8",
    ),
    "packed": (compressed(4, "int", None, **GROUPED), packed, "int4"),
    "packed-zeros": (
        compressed(4, "int", None, symmetric=False, **GROUPED),
        packed_with_zeros,
        "int4",
    ),
    "gptq": (GPTQ, gptq, "int4"),
    "gptq-order": (GPTQ | {"desc_act": True}, gptq_in_order_of_activations, "int4"),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, awq, "int4"),
}


def write(folder, how, make):
    """Writes a folder; returns the matrices [outputs, inputs] of the linear layers by name."""
    rng, tensors, exact = np.random.default_rng(0), {}, {}
    for name, value in tiny_families.tensors(CONFIG).items():
        stem, _, _ = name.rpartition(".")
        if value.ndim == 2 and ".layers." in name:
            parts, exact[stem] = make(rng, *value.shape)
            tensors |= {f"{stem}.{part}": array for part, array in parts.items()}
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": how}))
    return exact


def side_by_side(exact, stem, *names):
    return np.concatenate([exact[f"{stem}.{name}"] for name in names]).T


@pytest.mark.parametrize("method", METHODS)
def test_folders_hold_what_their_methods_mean(method, tmp_path):
    how, make, format = METHODS[method]
    exact = write(tmp_path, how, make)
    model = emsjax.from_pretrained(tmp_path, dtype="float32")
    assert model.quantization == format
    for number, layer in enumerate(model.layers):
        stem = f"model.layers.{number}"
        of = functools.partial(side_by_side, exact, stem)
        attention = [f"self_attn.{part}_proj" for part in "qkv"]
        parts = {
            "qkv_proj": of(*attention),
            "out_proj": of("self_attn.o_proj"),
            "up_proj": of("mlp.gate_proj", "mlp.up_proj"),
            "down_proj": of("mlp.down_proj"),
        }
        for name, expected in parts.items():
            found = getattr(layer, name)
            assert found.weight.format == format
            np.testing.assert_allclose(dense_weight(found), expected, rtol=1e-6, atol=1e-9)
    model.save_pretrained(tmp_path / "saved")
    again = emsjax.from_pretrained(tmp_path / "saved", dtype="float32")
    assert again.quantization == format
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(model))
    config = json.loads((tmp_path / "saved" / "config.json").read_bytes())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    tokens = [emsjax.generate(one, [[5, 6, 7]], max_new_tokens=4).tokens for one in (model, again)]
    np.testing.assert_array_equal(*tokens)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            r"\('bitsandbytes'\): read are compressed-tensors, gptq",
        ),
        (GPTQ | {"bits": 3}, "'gptq'.*bits must be 4, not 3"),
        (GPTQ | {"group_size": 64}, "group_size must be 128, -1, not 64"),
        (METHODS["awq"][0] | {"version": "gemv"}, "version must be gemm, GEMM, not 'gemv'"),
        (compressed(4, "int", ROWS | {"num_bits": 4}), "4 bits, 'int', with rounded activations"),
        (compressed(8, "int", ROWS | {"dynamic": False}), "dynamic must be True, not False"),
        ("int8", r"quantised in a way that emsjax does not read \('int8'\)"),
        ({"quant_method": "gptq", "bits": 4}, "group_size is missing"),
    ],
)
def test_other_methods_are_errors_that_name_them(how, message, tmp_path):
    write(tmp_path, how, eight_bits)
    with pytest.raises(ValueError, match=message):
        emsjax.from_pretrained(tmp_path, dtype="float32")


def test_a_quantised_folder_is_not_quantised_again(tmp_path):
    write(tmp_path, *METHODS["int8"][:2])
    with pytest.raises(ValueError, match=r"is quantised already \(compressed-tensors\)"):
        emsjax.from_pretrained(tmp_path, dtype="float32", quantize="int8")


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("weight_scale", np.ones((3, 1), np.float32), "tensors that do not fit each other"),
        ("weight_scale", np.full((128, 1), np.nan, np.float32), "scales that are not finite"),
        ("weight_scale", None, "weight_scale is missing|does not fit its config.json"),
    ],
)
def test_tensors_that_do_not_fit_are_errors(part, value, message, tmp_path):
    def spoilt(rng, outputs, inputs):
        tensors, exact = eight_bits(rng, outputs, inputs)
        if value is None:
            del tensors[part]
        else:
            tensors[part] = value
        return tensors, exact

    write(tmp_path, METHODS["int8"][0], spoilt)
    with pytest.raises(ValueError, match=message):
        emsjax.from_pretrained(tmp_path, dtype="float32")
