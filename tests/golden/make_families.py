"""Writes families.npz: what torch and transformers compute for the tiny models of every family.

python tests/golden/make_families.py
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from golden import make_golden, tiny_families
from golden.tiny_families import GOLDEN, MAX_NEW_TOKENS, VARIANTS

LEAST_MARGIN = 2e-4  # between the two best logits; rounding changes these by 1e-5 at most


def torch_model(config: dict, seed: int = tiny_families.SEED):
    """The model of transformers with the weights of a seed."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_families.write_checkpoint(Path(folder), config, tiny_families.tensors(config, seed))
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def greedy(model, prompts) -> tuple[np.ndarray, float]:
    """New tokens [n, MAX_NEW_TOKENS], padded with 0 after an end token, and the least margin."""
    model.config.pad_token_id = model.generation_config.pad_token_id = 0
    model.config.eos_token_id = model.generation_config.eos_token_id
    tokens, _, margin = make_golden.greedy(model, prompts, MAX_NEW_TOKENS)
    return tokens, margin


if __name__ == "__main__":
    values = {}
    for name, config in VARIANTS.items():
        model, prompts = torch_model(config), tiny_families.prompts()
        values[f"{name}.logits"] = make_golden.logits(model, prompts)
        values[f"{name}.tokens"], margin = greedy(model, prompts)
        print(f"{name}: least margin {margin:.4f}")
        if margin < LEAST_MARGIN:
            sys.exit("the tokens depend on rounding: choose another seed")
    np.savez_compressed(GOLDEN, **values)
