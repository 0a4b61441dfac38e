"""Tiny OPT models of every architecture, made from a seed, and paths of the embedded models."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from emsjax.demo import DRAFT, PROMPTS, TARGET

GOLDEN = Path(__file__).with_name("golden.npz")
POSITIONS = 40
LOGIT_LENGTHS = (17, 1, POSITIONS, 2)  # prompts; the longest fills every position
MAX_NEW_TOKENS = 24
# n prompt tokens and m new ones take n + m - 1 positions. The last sequence takes all.
GREEDY_LENGTHS = (*range(1, 16), POSITIONS + 1 - MAX_NEW_TOKENS)
EMBEDDED = {"target": TARGET, "draft": DRAFT}
MAX_NEW_TOKENS_EMBEDDED = 32
SMALL = {
    "model_type": "opt",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "ffn_dim": 48,
    "max_position_embeddings": POSITIONS,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 32,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "activation_function": "relu",
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
VARIANTS = {
    "pre_norm": {**SMALL, "num_hidden_layers": 2},
    "post_norm_projected": {
        **SMALL,
        "num_hidden_layers": 2,
        "do_layer_norm_before": False,
        "word_embed_proj_dim": 16,
    },
    "no_final_norm": {**SMALL, "_remove_final_layer_norm": True},
    "gelu_two_ends": {**SMALL, "activation_function": "gelu", "eos_token_id": [2, 5]},
    "no_biases": {**SMALL, "enable_bias": False},
    "plain_norms": {**SMALL, "layer_norm_elementwise_affine": False},
    "head_dim_64": {
        **SMALL,
        "hidden_size": 128,
        "word_embed_proj_dim": 128,
        "num_attention_heads": 2,
    },
    "head_dim_80": {
        **SMALL,
        "hidden_size": 160,
        "word_embed_proj_dim": 160,
        "num_attention_heads": 2,
    },
}


def demo_prompts() -> list[str]:
    return [prompt["prompt"] for prompt in json.loads(PROMPTS.read_text())]


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Shapes by PyTorch name, in the layout of the published checkpoints."""
    size, inner, width = config["hidden_size"], config["ffn_dim"], config["word_embed_proj_dim"]
    shapes = {
        "embed_tokens.weight": (config["vocab_size"], width),
        "embed_positions.weight": (config["max_position_embeddings"] + 2, size),
    }
    linears, norms = {}, []
    if width != size:
        shapes |= {"project_in.weight": (size, width), "project_out.weight": (width, size)}
    if config["do_layer_norm_before"] and not config["_remove_final_layer_norm"]:
        norms.append("final_layer_norm")
    for i in range(config["num_hidden_layers"]):
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            linears[f"layers.{i}.self_attn.{name}"] = (size, size)
        linears[f"layers.{i}.fc1"] = (inner, size)
        linears[f"layers.{i}.fc2"] = (size, inner)
        norms += [f"layers.{i}.self_attn_layer_norm", f"layers.{i}.final_layer_norm"]
    for name, shape in linears.items():
        shapes[f"{name}.weight"] = shape
        if config["enable_bias"]:
            shapes[f"{name}.bias"] = shape[:1]
    if config["layer_norm_elementwise_affine"]:
        shapes |= {f"{name}.{leaf}": (size,) for name in norms for leaf in ("weight", "bias")}
    return {f"model.decoder.{name}": shape for name, shape in shapes.items()}


def tensors(config: dict, seed: int) -> dict[str, np.ndarray]:
    """float32 values large enough that logits, and greedy continuations, differ.

    They come from RandomState, whose stream numpy promises never to change.
    """
    random = np.random.RandomState(seed)
    scale = 1.7 / config["hidden_size"] ** 0.5
    values = {}
    for name, shape in tensor_shapes(config).items():
        value = random.standard_normal(shape) * (scale if len(shape) == 2 else 0.2)
        if "embed_positions" in name:  # small, so that continuations repeat themselves
            value *= 0.4
        is_norm_scale = "layer_norm" in name and name.endswith("weight")
        values[name] = (value + is_norm_scale).astype(np.float32)
    return values


def prompts(config: dict, seed: int, lengths) -> list[list[int]]:
    """Random prompts of the given lengths."""
    random = np.random.RandomState(seed)
    return [random.randint(3, config["vocab_size"], length).tolist() for length in lengths]


def write_checkpoint(folder, config: dict, values: dict[str, np.ndarray]) -> None:
    """Write a folder with config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {**config, "architectures": ["OPTForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(contents))
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
