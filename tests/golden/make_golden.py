"""Writes golden.npz: what torch and transformers compute for the tiny and the embedded models.

    python tests/golden/make_golden.py

It takes the first seed whose greedy continuations cannot be changed by rounding errors, vary, and
sometimes repeat themselves. Some of them must end early and some must not.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, OPTForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from golden import tiny_models
from golden.tiny_models import (
    EMBEDDED,
    GOLDEN,
    GREEDY_LENGTHS,
    LOGIT_LENGTHS,
    MAX_NEW_TOKENS,
    MAX_NEW_TOKENS_EMBEDDED,
    demo_prompts,
)

LEAST_MARGIN = 2e-3  # between the two best logits, 20 times the parity tolerance


def torch_model(config: dict, seed: int) -> OPTForCausalLM:
    with tempfile.TemporaryDirectory() as folder:
        tiny_models.write_checkpoint(Path(folder), config, tiny_models.tensors(config, seed))
        return OPTForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: OPTForCausalLM, prompts) -> np.ndarray:
    """float32 logits of all prompts' tokens, one prompt after another."""
    return np.concatenate([model(torch.tensor([prompt])).logits[0].numpy() for prompt in prompts])


@torch.no_grad()
def greedy(model: OPTForCausalLM, prompts, max_new_tokens: int):
    """Tokens [n, max_new_tokens] padded after their end, lengths, and the least margin."""
    pad = model.config.pad_token_id
    tokens = np.full((len(prompts), max_new_tokens), pad, np.int32)
    lengths, margins = [], []
    for row, prompt in zip(tokens, prompts, strict=True):
        ids = torch.tensor([prompt])
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            pad_token_id=pad,
            eos_token_id=model.config.eos_token_id,
            return_dict_in_generate=True,
            output_scores=True,
        )
        new = result.sequences[0, len(prompt) :].numpy()
        row[: len(new)] = new
        lengths.append(len(new))
        best = torch.cat(result.scores).topk(2).values
        margins.append(float((best[:, 0] - best[:, 1]).min()))
    return tokens, np.array(lengths, np.int32), min(margins)


def embedded(name: str, max_new_tokens: int):
    """Tokens, lengths and least margin of an embedded model after the demo's prompts."""
    prompts = AutoTokenizer.from_pretrained(EMBEDDED[name])(demo_prompts()).input_ids
    model = OPTForCausalLM.from_pretrained(EMBEDDED[name], dtype=torch.float32).eval()
    return greedy(model, prompts, max_new_tokens)


def num_repeats(sequence: list[int]) -> int:
    """Counts tokens that already followed the same two tokens, which prompt lookup can guess."""
    seen, repeats = {}, 0
    for *pair, token in zip(sequence, sequence[1:], sequence[2:], strict=False):
        repeats += seen.get(tuple(pair)) == token
        seen[tuple(pair)] = token
    return repeats


def is_telling(tokens: np.ndarray, lengths: np.ndarray, margin: float) -> bool:
    distinct = len({row.tobytes() for row in tokens})
    varied = np.median([len(set(row[:n])) for row, n in zip(tokens, lengths, strict=True)])
    early = int((lengths < MAX_NEW_TOKENS).sum())
    repeats = sum(num_repeats(row[:n].tolist()) for row, n in zip(tokens, lengths, strict=True))
    enough = distinct >= 12 and varied >= 4 and 0 < early < 12 and repeats >= 10
    return enough and margin > LEAST_MARGIN


def main():
    golden = {}
    for variant, config in tiny_models.VARIANTS.items():
        for seed in range(1000):
            model = torch_model(config, seed)
            prompts = tiny_models.prompts(config, seed, GREEDY_LENGTHS)
            tokens, lengths, margin = greedy(model, prompts, MAX_NEW_TOKENS)
            if is_telling(tokens, lengths, margin):
                break
        else:
            raise RuntimeError(f"no telling seed for {variant}")
        print(f"{variant}: seed {seed}, margin {margin:.4f}, lengths {lengths.tolist()}")
        golden |= {
            f"{variant}.seed": np.int32(seed),
            f"{variant}.tokens": tokens,
            f"{variant}.lengths": lengths,
            f"{variant}.logits": logits(model, tiny_models.prompts(config, seed, LOGIT_LENGTHS)),
        }
    for name in EMBEDDED:
        tokens, lengths, margin = embedded(name, MAX_NEW_TOKENS_EMBEDDED)
        print(f"{name}: margin {margin:.4f}, lengths {lengths.tolist()}")
        golden |= {f"{name}.tokens": tokens, f"{name}.lengths": lengths}
    np.savez_compressed(GOLDEN, **golden)


if __name__ == "__main__":
    main()
