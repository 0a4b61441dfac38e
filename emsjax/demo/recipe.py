"""How the embedded target and draft were trained: `python -m emsjax.demo.recipe --output DIR`.

Stage `prepare` reads the running Python's standard library and trains the
tokenizer; stage `train` trains the target, then the draft on the target's
distribution, evaluates both on the held-out modules and exports them. Weights
are float32 during training, matrix products bfloat16.
"""

import argparse
import functools
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int32

from emsjax.demo import corpus
from emsjax.opt import OPT, OPTConfig
from emsjax.packing import pack

WINDOW = 1024  # tokens
BATCH = 32  # windows
CROSS_ENTROPY_WEIGHT = 0.1  # of the draft's loss; the rest is the divergence from the target
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
WEIGHT_DECAYS = {"target": 1.0, "draft": 0.1}  # some twenty epochs would overfit the target


def build(name: str, *, vocab_size: int = 4096, window: int = WINDOW) -> OPT:
    """A fresh float32 model whose linear layers compute in bfloat16."""
    config = OPTConfig(
        vocab_size=vocab_size,
        max_position_embeddings=window,
        pad_token_id=corpus.PAD_ID,
        bos_token_id=corpus.END_ID,
        eos_token_id=corpus.END_ID,
        **SHAPES[name],
    )
    model = OPT(config, rngs=nnx.Rngs(0), dtype=jnp.float32)
    model.dtype = jnp.dtype(jnp.bfloat16)  # frees the head from full float32 products
    for _, module in nnx.iter_modules(model):
        if isinstance(module, nnx.Linear):
            module.dtype, module.precision = jnp.bfloat16, None
    return model


def causal_attention(query, key, value, *_unused, max_rows_per_sample: int):
    """`pallas_kernels.ragged_attention` where every sample has as many rows and no cache."""
    blocks = [x.reshape(-1, max_rows_per_sample, *x.shape[1:]) for x in (query, key, value)]
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    out = jax.nn.dot_product_attention(*blocks, is_causal=True, implementation=implementation)
    return out.reshape(query.shape)


def forward(model: OPT, tokens: Int32[Array, "b t"]) -> Float[Array, "b t v"]:
    """float32 logits of whole windows."""
    batch, length = tokens.shape
    starts = jnp.zeros(batch, jnp.int32)
    rows = pack(starts, jnp.full(batch, length, jnp.int32), batch * length)
    hidden, _ = model(
        tokens.reshape(-1),
        rows,
        model.init_cache(batch, 0),
        attention=causal_attention,
        max_rows_per_sample=length,
    )
    return model.logits(hidden).reshape(batch, length, -1)


def cross_entropy(logits: Float[Array, "b t v"], labels: Int32[Array, "b t"]) -> Float[Array, ""]:
    """Mean over all tokens, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def distillation_loss(
    logits: Float[Array, "b t v"],
    labels: Int32[Array, "b t"],
    target_logits: Float[Array, "b t v"],
) -> Float[Array, ""]:
    """w * CE(labels, draft) + (1 - w) * KL(target || draft), w = CROSS_ENTROPY_WEIGHT."""
    target_log_probs = jax.nn.log_softmax(target_logits)
    divergence = optax.losses.kl_divergence_with_log_targets(
        jax.nn.log_softmax(logits), target_log_probs
    ).mean()
    weight = CROSS_ENTROPY_WEIGHT
    return weight * cross_entropy(logits, labels) + (1 - weight) * divergence


def training_windows(
    tokens: np.ndarray, window: int, batch: int, seed: int = 0
) -> Iterator[Int32[np.ndarray, "b window+1"]]:
    """Endless batches; each epoch cuts the stream [n] at another offset and shuffles."""
    generator = np.random.default_rng(seed)
    while True:
        shifted = tokens[generator.integers(window) :]
        starts = np.arange((len(shifted) - 1) // window) * window
        generator.shuffle(starts)
        for chosen in np.split(starts, range(batch, len(starts), batch)):
            if len(chosen) == batch:
                yield shifted[chosen[:, None] + np.arange(window + 1)].astype(np.int32)


def evaluation_windows(
    ids: np.ndarray, window: int, stride: int
) -> tuple[Int32[np.ndarray, "n window+1"], np.ndarray]:
    """Windows over a document [t], and which labels count, bool [n, window].

    Every token counts once, and from the second window on it is predicted from
    at least `window - stride` tokens. The end token comes before the first.
    """
    ids = np.concatenate([[corpus.END_ID], ids]).astype(np.int32)
    labels = len(ids) - 1
    starts = np.arange(0, max(labels - (window - stride), 1), stride)
    padded = np.pad(ids, (0, window), constant_values=corpus.PAD_ID)
    windows = padded[starts[:, None] + np.arange(window + 1)]
    counted = starts[:, None] + np.arange(window) < labels
    counted[1:, : window - stride] = False
    return windows, counted


def optimizer(steps: int, peak: float, weight_decay: float) -> optax.GradientTransformation:
    """AdamW that decays matrices and tables alone; warm-up, cosine, clipped gradients."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, peak, warmup_steps=min(300, steps // 10 + 1), decay_steps=steps, end_value=peak / 50
    )
    decayed = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=decayed),
    )


def train(
    model: OPT,
    batches: Iterator[np.ndarray],
    transformation: optax.GradientTransformation,
    steps: int,
    *,
    target: OPT | None = None,
    log: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[OPT, np.ndarray]:
    """A trained copy of `model` and its losses [steps]; with a `target`, distilled from it."""
    graph, params = nnx.split(model)

    def loss_fn(params, tokens, target):
        logits = forward(nnx.merge(graph, params), tokens[:, :-1])
        if target is None:
            return cross_entropy(logits, tokens[:, 1:])
        return distillation_loss(logits, tokens[:, 1:], forward(target, tokens[:, :-1]))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, tokens, target):
        loss, gradients = jax.value_and_grad(loss_fn)(params, tokens, target)
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = jax.tree.map(jnp.copy, params)  # the step may reuse its arguments' memory
    state, losses = transformation.init(params), []
    for index in range(steps):
        params, state, loss = step(params, state, next(batches), target)
        losses.append(loss)
        if index % 200 == 0 or index == steps - 1:
            log(index, float(loss))
    return nnx.merge(graph, params), np.array(jax.device_get(losses))


@jax.jit
def token_losses(model: OPT, windows: Int32[Array, "b t"]) -> Float[Array, "b t-1"]:
    logits = forward(model, windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])


def bits_per_byte(model: OPT, data: corpus.Corpus, *, window: int = WINDOW) -> float:
    """Of all held-out modules, with overlapping windows."""
    documents = [evaluation_windows(ids, window, window // 2) for ids in data.held_out.values()]
    windows, counted = (np.concatenate(parts) for parts in zip(*documents, strict=True))
    nats = 0.0
    for start in range(0, len(windows), BATCH):
        chunk = slice(start, start + BATCH)
        losses = np.asarray(token_losses(model, windows[chunk]), np.float64)
        nats += losses[counted[chunk]].sum()
    return float(nats / math.log(2) / data.held_out_bytes)


def as_float16(model: OPT) -> OPT:
    """The model to store: the same weights, rounded."""
    stored = OPT(model.config, rngs=nnx.Rngs(0), dtype=jnp.float16)
    nnx.update(stored, jax.tree.map(lambda x: x.astype(jnp.float16), nnx.state(model)))
    return stored


def with_rounded_weights(model: OPT) -> OPT:
    """The training model with the weights that `as_float16` stores, to evaluate them."""
    graph, params = nnx.split(model)
    rounded = jax.tree.map(lambda x: x.astype(jnp.float16).astype(x.dtype), params)
    return nnx.merge(graph, rounded)


def train_pair(output: Path, steps: dict[str, int]) -> dict:
    """Train, evaluate and export both models below `output`; returns the metrics."""
    data = corpus.load(output)
    metrics, models = {"data": data.info, "batch": BATCH, "window": WINDOW}, {}
    for name, count in steps.items():
        start = time.perf_counter()

        def log(index, loss, name=name, start=start):
            print(f"{name} {index:6d} {loss:.4f} {time.perf_counter() - start:.0f} s", flush=True)

        models[name], losses = train(
            build(name, vocab_size=data.info["vocab_size"]),
            training_windows(data.train, WINDOW, BATCH),
            optimizer(count, PEAK_LEARNING_RATES[name], WEIGHT_DECAYS[name]),
            count,
            target=models.get("target"),
            log=log,
        )
        seconds = time.perf_counter() - start
        shutil.copytree(output / "tokenizer", output / name, dirs_exist_ok=True)
        as_float16(models[name]).save_pretrained(output / name)
        metrics[name] = {
            "steps": count,
            "parameters": sum(x.size for x in jax.tree.leaves(nnx.state(models[name]))),
            "seconds": round(seconds, 1),
            "final_loss": float(losses[-100:].mean()),
            "held_out_bits_per_byte": bits_per_byte(with_rounded_weights(models[name]), data),
        }
        print(name, metrics[name], flush=True)
    (output / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    return metrics


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train the embedded target and draft.")
    parser.add_argument("stage", nargs="?", choices=["prepare", "train", "all"], default="all")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=5000, help="of the target")
    parser.add_argument("--draft-steps", type=int, default=12000)
    options = parser.parse_args(arguments)
    if options.stage != "train":
        print(json.dumps(corpus.prepare(options.output), indent=2), flush=True)
    if options.stage != "prepare":
        train_pair(options.output, {"target": options.steps, "draft": options.draft_steps})


if __name__ == "__main__":
    main()
