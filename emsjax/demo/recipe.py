"""The training of the embedded models: `python -m emsjax.demo.recipe --output DIR`.

Stage `prepare` reads the running Python's standard library and trains the tokenizer. Stage `train`
trains the target, then the draft on the target's distribution, evaluates both on the held-out
modules and exports them. Stage `texts` writes the embedded target's training and held-out modules
for `emsjax distil`. Stage `eagle3` writes them too, and trains an EAGLE-3 drafter with that command
for the embedded target. It is also the last part of all stages, for the target that they trained.
"""

import argparse
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from emsjax.demo import corpus
from emsjax.distillation import Batch, Trainer, make_optimizer, train
from emsjax.distillation.losses import cross_entropy
from emsjax.distillation.passes import forward
from emsjax.distillation.pruning import num_parameters
from emsjax.embedded import FOLDER
from emsjax.models.decoder import Decoder
from emsjax.models.opt import OPTConfig
from emsjax.records.writing import to_json

WINDOW = 1024  # tokens
BATCH = 32  # windows
LOSSES = {"target": {"cross-entropy": 1.0}, "draft": {"cross-entropy": 0.1, "forward-kl": 0.9}}
SHAPES = {
    "target": {
        "hidden_size": 320,
        "num_attention_heads": 5,
        "num_hidden_layers": 7,
        "ffn_dim": 1280,
    },
    "draft": {
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "ffn_dim": 512,
    },
}
PEAK_LEARNING_RATES = {"target": 2e-3, "draft": 4e-3}
WARM_UP_STEPS = 300
WEIGHT_DECAYS = {"target": 1.0, "draft": 0.1}  # some twenty epochs would overfit the target
EAGLE3_OPTIONS = (
    "--kind eagle3 --taps 2,4,7 --unroll 5 --share-head --draft-tokens 4 --steps 5000 "
    "--warm-up-steps 200 --learning-rate 2e-3 --batch-size 16 --sequence-length 1024 "
    "--generations 3072 --max-new-tokens 128 --temperature 0 --held-out 48"
)


def build(name: str, *, vocab_size: int = 4096, window: int = WINDOW) -> Decoder:
    """A fresh float32 model."""
    config = OPTConfig(
        vocab_size=vocab_size,
        max_position_embeddings=window,
        pad_token_id=corpus.PAD_ID,
        bos_token_id=corpus.END_ID,
        eos_token_id=corpus.END_ID,
        **SHAPES[name],
    )
    return Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.float32)


class TrainingWindows:
    """Batches of windows; each epoch cuts the stream [n] at another offset and shuffles.

    A window is one segment, across the ends of modules.
    """

    def __init__(self, tokens: np.ndarray, window: int, batch: int):
        self.tokens, self.window, self.batch = tokens, window, batch
        self.per_epoch = (len(tokens) - window) // window // batch
        self.epoch, self.windows = -1, np.zeros((0, window), np.int32)

    def __getitem__(self, step: int) -> Batch:
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self.epoch:
            rng = np.random.default_rng(epoch)
            shifted = self.tokens[rng.integers(self.window) :]
            count = len(shifted) // self.window
            windows = shifted[: count * self.window].reshape(count, self.window)
            self.epoch, self.windows = epoch, rng.permutation(windows).astype(np.int32)
        return whole(self.windows[index * self.batch : (index + 1) * self.batch])


def whole(tokens: Int32[np.ndarray, "b t"]) -> Batch:
    """A batch of sequences with one segment each."""
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    return Batch(tokens, np.zeros_like(tokens), positions)


def evaluation_windows(
    ids: np.ndarray, window: int, stride: int
) -> tuple[Int32[np.ndarray, "n window+1"], np.ndarray]:
    """Windows over a document [t], and the labels that count, bool [n, window].

    Every token counts once, and from the second window on it is predicted from at least
    `window - stride` tokens. The end token precedes the first token.
    """
    ids = np.concatenate([[corpus.END_ID], ids]).astype(np.int32)
    labels = len(ids) - 1
    starts = np.arange(0, max(labels - (window - stride), 1), stride)
    padded = np.pad(ids, (0, window), constant_values=corpus.PAD_ID)
    windows = padded[starts[:, None] + np.arange(window + 1)]
    counted = starts[:, None] + np.arange(window) < labels
    counted[1:, : window - stride] = False
    return windows, counted


@jax.jit
def token_losses(model: Decoder, windows: Int32[Array, "b t"]) -> Float[Array, "b t-1"]:
    """Cross-entropy of every token except the first, in nats."""
    read, labels = windows[:, :-1], windows[:, 1:]
    segments = jnp.zeros_like(read)
    positions = segments + jnp.arange(read.shape[1], dtype=jnp.int32)
    hidden = forward(model, Batch(read, segments, positions))
    logits = model.logits(hidden.reshape(-1, hidden.shape[-1]))
    return cross_entropy(logits, labels.reshape(-1), None).reshape(labels.shape)


def bits_per_byte(model: Decoder, data: corpus.Corpus, *, window: int = WINDOW) -> float:
    """Bits per byte of all held-out modules, with overlapping windows."""
    documents = [evaluation_windows(ids, window, window // 2) for ids in data.held_out.values()]
    windows, counted = (np.concatenate(parts) for parts in zip(*documents, strict=True))
    nats = 0.0
    for start in range(0, len(windows), BATCH):
        chunk = slice(start, start + BATCH)
        losses = np.asarray(token_losses(model, windows[chunk]), np.float64)
        nats += losses[counted[chunk]].sum()
    return float(nats / math.log(2) / data.held_out_bytes)


def train_pair(output: Path, steps: dict[str, int]) -> dict:
    """Train, evaluate and export both models below `output`; returns the metrics."""
    data = corpus.load(output)
    metrics, models = {"data": data.info, "batch": BATCH, "window": WINDOW}, {}
    for name, count in steps.items():
        start = time.perf_counter()

        target = models.get("target")
        trainer = Trainer(
            build(name, vocab_size=data.info["vocab_size"]),
            make_optimizer(
                count,
                PEAK_LEARNING_RATES[name],
                warm_up=min(WARM_UP_STEPS, count // 10 + 1),
                weight_decay=WEIGHT_DECAYS[name],
            ),
            LOSSES[name],
            target=target,
        )
        windows = TrainingWindows(data.train, WINDOW, BATCH)
        say = lambda line, name=name: print(name, line, flush=True)
        models[name], losses = train(trainer, windows, count, say=say)
        seconds = time.perf_counter() - start
        shutil.copytree(output / "tokenizer", output / name, dirs_exist_ok=True)
        stored = models[name].astype(jnp.float16)
        stored.save_pretrained(output / name)
        metrics[name] = {
            "steps": count,
            "parameters": num_parameters(stored),
            "seconds": round(seconds, 1),
            "final_loss": float(losses[-100:].mean()),
            "held_out_bits_per_byte": bits_per_byte(stored.astype(jnp.float32), data),
        }
        print(name, metrics[name], flush=True)
    (output / "metrics.json").write_text(to_json(metrics, indent=2) + "\n")
    return metrics


def train_eagle3(output: Path, pair: Path) -> None:
    """Train an EAGLE-3 drafter for the target of a pair, and compare it with the pair's draft."""
    texts = output / "texts"
    corpus.write_texts(texts, embedded=pair == FOLDER)
    paths = {
        "--target": pair / "target",
        "--data": texts / "train.jsonl",
        "--held-out-data": texts / "held-out.jsonl",
        "--compare-with": pair / "draft",
        "--output": output / "eagle3",
    }
    files = [str(part) for option in paths.items() for part in option]
    command = [sys.executable, "-m", "emsjax", "distil", *files, *EAGLE3_OPTIONS.split()]
    subprocess.run(command, check=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train the embedded models.")
    stages = ["prepare", "train", "all", "texts", "eagle3"]
    parser.add_argument("stage", nargs="?", choices=stages, default="all")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=5000, help="training steps of the target")
    parser.add_argument("--draft-steps", type=int, default=12000)
    options = parser.parse_args(arguments)
    if options.stage == "texts":
        corpus.write_texts(options.output, embedded=True)
        return
    if options.stage == "eagle3":
        train_eagle3(options.output, FOLDER)
        return
    if options.stage != "train":
        print(to_json(corpus.prepare(options.output), indent=2), flush=True)
    if options.stage != "prepare":
        train_pair(options.output, {"target": options.steps, "draft": options.draft_steps})
    if options.stage == "all":
        train_eagle3(options.output, options.output)


if __name__ == "__main__":
    main()
