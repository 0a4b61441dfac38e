"""Writes controls.npz: greedy tokens of transformers with settings that change logits.

python tests/golden/make_controls.py
"""

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from golden import make_families, tiny_families
from golden.tiny_families import MAX_NEW_TOKENS, VARIANTS

GOLDEN = Path(__file__).with_name("controls.npz")
END = 1
# The same settings by the names of transformers; presence and frequency penalties are not among
# them.
SETTINGS = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "logit_bias": {"sequence_bias": {(7,): 3.0, (20,): -2.5, (33,): 4.0}},
    "min_new_tokens": {"sequence_bias": {(END,): 6.0}, "min_new_tokens": 9},
    "suppress_tokens": {"suppress_tokens": [3, 12, 33, 48, 50]},
    "all": {
        "repetition_penalty": 0.8,
        "sequence_bias": {(7,): 3.0, (END,): 5.0},
        "min_new_tokens": 5,
        "suppress_tokens": [7, 12],
    },
}


def tokens(model, settings: dict) -> np.ndarray:
    """New tokens [n, MAX_NEW_TOKENS] after each prompt, padded with 0 after an end token."""
    rows = np.zeros((len(tiny_families.LENGTHS), MAX_NEW_TOKENS), np.int64)
    for row, prompt in zip(rows, tiny_families.prompts(), strict=True):
        ids = torch.tensor(np.array(prompt)[None])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            **settings,
        )
        new = out[0, ids.shape[1] :].numpy()
        row[: len(new)] = new
    return rows


if __name__ == "__main__":
    model = make_families.torch_model(VARIANTS["llama"])
    np.savez_compressed(GOLDEN, **{name: tokens(model, s) for name, s in SETTINGS.items()})
