"""Tiny models of every family, which together use every switch of the shared decoder.

The weights come from a seed, under the names that the published checkpoints have, written out here
and not taken from the library.
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

GOLDEN = Path(__file__).with_name("families.npz")
VOCAB, POSITIONS, LAYERS, SIZE, FFN, SEED = 61, 64, 3, 32, 48, 12
LENGTHS = (1, 2, 17, 40)  # prompts; the longest is far longer than any window
MAX_NEW_TOKENS = 16
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_positions": POSITIONS,
    "n_layer": LAYERS,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
NEOX = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
VARIANTS = {  # contents of config.json
    "llama": {**LLAMA, "model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "llama_biases_tied": {
        **LLAMA,
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "eos_token_id": [1, 5],
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "llama_yarn": {
        **LLAMA,
        "model_type": "llama",
        "num_key_value_heads": 4,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral": {**LLAMA, "model_type": "mistral", "sliding_window": 5},
    "qwen2": {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 1},
    "qwen2_windows": {
        **LLAMA,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "qwen3": {
        **LLAMA,
        "model_type": "qwen3",
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "gemma3": {
        **LLAMA,
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 5,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 20,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "final_logit_softcapping": 4.0,
    },
    "gpt2": {**GPT2, "model_type": "gpt2", "n_embd": SIZE},
    "gpt2_by_depth": {
        **GPT2,
        "model_type": "gpt2",
        "n_embd": SIZE,
        "n_inner": FFN,
        "scale_attn_by_inverse_layer_idx": True,
        "activation_function": "relu",
    },
    "pythia": {**NEOX, "model_type": "gpt_neox", "num_attention_heads": 2},
    "neox_sequential": {
        **NEOX,
        "model_type": "gpt_neox",
        "num_attention_heads": 2,
        "rotary_pct": 0.5,
        "use_parallel_residual": False,
    },
    "codegen": {**GPT2, "model_type": "codegen", "n_embd": 64, "rotary_dim": 8},
}


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Shapes by PyTorch name, in the layout of the published checkpoints."""
    kind = config["model_type"]
    layout = {"gpt2": _gpt2, "codegen": _codegen, "gpt_neox": _neox}.get(kind, _llama)
    return layout(config)


def _linear(name, outputs, inputs, bias=False):
    return {f"{name}.weight": (outputs, inputs)} | ({f"{name}.bias": (outputs,)} if bias else {})


def _norm(name, size, bias=True):
    return {f"{name}.weight": (size,)} | ({f"{name}.bias": (size,)} if bias else {})


def _llama(config):
    kind, size, inner = config["model_type"], config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", size // heads)
    shapes = {"model.embed_tokens.weight": (VOCAB, size), "model.norm.weight": (size,)}
    if not config.get("tie_word_embeddings", kind == "gemma3_text"):
        shapes["lm_head.weight"] = (VOCAB, size)
    bias = config.get("attention_bias", False)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            name = f"{layer}.self_attn.{part}_proj"
            shapes |= _linear(name, count * head_dim, size, bias or kind == "qwen2")
        shapes |= _linear(f"{layer}.self_attn.o_proj", size, heads * head_dim, bias)
        for name, outputs, inputs in (
            ("gate", inner, size),
            ("up", inner, size),
            ("down", size, inner),
        ):
            own = config.get("mlp_bias", False)
            shapes |= _linear(f"{layer}.mlp.{name}_proj", outputs, inputs, own)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if kind == "gemma3_text":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for name in norms:
            shapes |= _norm(f"{layer}.{name}", size, bias=False)
        if kind in ("qwen3", "gemma3_text"):
            for name in ("q_norm", "k_norm"):
                shapes |= _norm(f"{layer}.self_attn.{name}", head_dim, bias=False)
    return shapes


def _gpt2(config):
    size = config["n_embd"]
    inner = config.get("n_inner", 4 * size)
    shapes = {"wte.weight": (VOCAB, size), "wpe.weight": (POSITIONS, size)}
    shapes |= _norm("ln_f", size)
    turned = lambda *args: {name: shape[::-1] for name, shape in _linear(*args, True).items()}
    for i in range(LAYERS):
        shapes |= _norm(f"h.{i}.ln_1", size) | _norm(f"h.{i}.ln_2", size)
        shapes |= turned(f"h.{i}.attn.c_attn", 3 * size, size)
        shapes |= turned(f"h.{i}.attn.c_proj", size, size)
        shapes |= turned(f"h.{i}.mlp.c_fc", inner, size) | turned(f"h.{i}.mlp.c_proj", size, inner)
        shapes[f"h.{i}.attn.bias"] = (1, 1, POSITIONS, POSITIONS)  # a mask, not a weight
    return shapes  # published without the prefix "transformer."


def _codegen(config):
    size = config["n_embd"]
    shapes = {"transformer.wte.weight": (VOCAB, size)} | _norm("transformer.ln_f", size)
    for i in range(LAYERS):
        layer = f"transformer.h.{i}"
        shapes |= _norm(f"{layer}.ln_1", size)
        shapes |= _linear(f"{layer}.attn.qkv_proj", 3 * size, size)
        shapes |= _linear(f"{layer}.attn.out_proj", size, size)
        shapes |= _linear(f"{layer}.mlp.fc_in", 4 * size, size, True)
        shapes |= _linear(f"{layer}.mlp.fc_out", size, 4 * size, True)
        shapes[f"{layer}.attn.causal_mask"] = (1, 1, POSITIONS, POSITIONS)
    return shapes | _linear("lm_head", VOCAB, size, True)


def _neox(config):
    size, inner = config["hidden_size"], config["intermediate_size"]
    shapes = {"gpt_neox.embed_in.weight": (VOCAB, size), "embed_out.weight": (VOCAB, size)}
    shapes |= _norm("gpt_neox.final_layer_norm", size)
    for i in range(LAYERS):
        layer = f"gpt_neox.layers.{i}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes |= _norm(f"{layer}.{name}", size)
        shapes |= _linear(f"{layer}.attention.query_key_value", 3 * size, size, True)
        shapes |= _linear(f"{layer}.attention.dense", size, size, True)
        shapes |= _linear(f"{layer}.mlp.dense_h_to_4h", inner, size, True)
        shapes |= _linear(f"{layer}.mlp.dense_4h_to_h", size, inner, True)
    return shapes


def tensors(config: dict, seed: int = SEED) -> dict[str, np.ndarray]:
    """float32 values large enough that logits, and greedy continuations, differ.

    They come from RandomState, whose stream numpy promises never to change.
    """
    random = np.random.RandomState(seed)
    values = {}
    for name, shape in tensor_shapes(config).items():
        scale = 1.7 / shape[-1] ** 0.5 if len(shape) == 2 else 0.2
        value = random.standard_normal(shape) * scale
        parts = name.split(".")
        is_norm = "norm" in parts[-2] or parts[-2].startswith("ln_")
        if is_norm and parts[-1] == "weight" and config["model_type"] != "gemma3_text":
            value += 1
        values[name] = value.astype(np.float32)
    return values


def prompts(seed: int = SEED, lengths=LENGTHS) -> list[list[int]]:
    """Random prompts of the given lengths."""
    random = np.random.RandomState(seed)
    return [random.randint(6, VOCAB, length).tolist() for length in lengths]


def write_checkpoint(folder: Path, config: dict, values: dict[str, np.ndarray]) -> None:
    """Write a folder with config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
