"""`python -m emsjax.benchmarks.step`: time of a decoding step beside the least the device allows.

A step is draft, forward, verify and commit of the library's own device loop, here with random
bfloat16 weights and a drafter whose proposals are always rejected: at a shape BxR every step
feeds R rows of each of B samples and emits one token per sample. The state is put back before
every run, so all runs work at the same contexts; the time of a step is that of 13 steps less
that of 3, over 10. The floor counts what no step can avoid: every product takes the longer of
reading its weights and computing, and the committed keys and values are read once.

The JSON file holds `command`, `hardware`, `versions`, `xla_flags`, `commit`, `settings`, `rates`
and one entry of `shapes` per shape: the runs' times in ms by steps (`runs_ms`), those of a step
(`best_ms`: of the fastest runs; `median_ms`: of the differences), the floor in ms and the times
over it at the reference and the measured rates (`floor_ms`, `best_ratio`, `median_ratio`), what
the loop's counters say of the rows really fed, seconds of prefill and compilation (`setup_s`),
and on a GPU a `profile` of device time per step by kernel class.
"""

import argparse
import dataclasses
import json
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import emsjax
from emsjax.benchmarks import Rates, kernel_times, kernels_per_step, measured_rates, surroundings
from emsjax.cli import positive_int
from emsjax.config import OPTConfig
from emsjax.decoding import DecodeState, decode_loop
from emsjax.kernels import resolve_kernels

SHORT, LONG = 3, 13  # steps of the two runs whose difference is timed
REPETITIONS = 7
MAX_NEW_TOKENS = 128  # the cache has room for a whole completion, as in real use
ITEM_BYTES = 2  # bfloat16
MODELS = {
    "opt-6.7b": OPTConfig(
        hidden_size=4096, ffn_dim=16384, num_hidden_layers=32, num_attention_heads=32
    ),
    "tiny": OPTConfig(
        vocab_size=128, hidden_size=64, ffn_dim=256, num_hidden_layers=2, num_attention_heads=4
    ),
}


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class RejectedDrafter:
    """Always proposes as many tokens as it may, all of them `token_id`."""

    token_id: int
    max_draft_tokens: int

    def init(self, prompts, prompt_lengths, max_len):
        return ()

    def propose(self, state, tokens, lengths, draft_lengths, keys, sampling):
        shape = (tokens.shape[0], self.max_draft_tokens)
        return emsjax.Draft(jnp.full(shape, self.token_id, jnp.int32), draft_lengths), state

    def commit(self, state, lengths):
        return state


def floor_ms(config: OPTConfig, batch: int, rows: int, context: float, rates: Rates) -> float:
    """The least time of a step: `rows` rows of each of `batch` samples with `context` tokens."""
    size, ffn, layers = config.hidden_size, config.ffn_dim, config.num_hidden_layers
    layer = [(size, 3 * size), (size, size), (size, ffn), (ffn, size)]
    products = layer * layers + [(config.word_embed_proj_dim, config.vocab_size)]
    seconds = sum(
        max(n * m * ITEM_BYTES / rates.read, 2 * batch * rows * n * m / rates.matmul)
        for n, m in products
    )
    keys_and_values = 2 * layers * batch * context * size * ITEM_BYTES
    return 1e3 * (seconds + keys_and_values / rates.read)


def random_model(config: OPTConfig) -> emsjax.OPT:
    """Random bfloat16 weights under which the last token id is never chosen."""
    # Not under jit: that compiles the random draws of every layer anew, for longer than they take.
    model = emsjax.OPT(config, rngs=nnx.Rngs(0))
    table = model.embed_tokens.embedding
    # A zero embedding has logit 0, below the largest of the others, and loses a tie.
    table[...] = table[...].at[-1].set(0)
    return model


class StepRun:
    """The device loop of one shape, restarted at the same contexts for every run."""

    def __init__(self, model: emsjax.OPT, batch: int, rows: int, context: int, attention):
        vocab = model.config.vocab_size
        # The middle of the timed steps, which follow SHORT others, is to have this context.
        length = context - (SHORT + LONG) // 2 + 2
        if length < 1:
            raise ValueError(f"--context must be at least {context + 1 - length}, not {context}")
        prompts = np.random.default_rng(0).integers(5, vocab - 1, (batch, length))
        self.shape = (batch, rows)
        self.model, self.attention = model, attention
        self.drafter = RejectedDrafter(vocab - 1, rows - 1) if rows > 1 else None
        self.lengths = np.full(batch, length, np.int32)
        self.state = emsjax.init_state(
            model,
            self.drafter,
            list(prompts),
            max_new_tokens=max(MAX_NEW_TOKENS, LONG + rows),
            eos_token_ids=(),
            attention_implementation=attention,
        )

    def rewind(self) -> None:
        """Back to the prompts: what a cache holds beyond its lengths does not count."""
        cache = dataclasses.replace(self.state.cache, lengths=jnp.array(self.lengths - 1))
        state = dataclasses.replace(self.state, lengths=jnp.array(self.lengths), cache=cache)
        self.state: DecodeState = jax.block_until_ready(state)

    def advance(self, steps: int) -> float:
        """Run so many steps from the prompts on; seconds."""
        self.rewind()
        start = time.perf_counter()
        self.state = decode_loop(
            self.model,
            self.drafter,
            self.state,
            None,
            steps,
            attention_implementation=self.attention,
        )
        jax.block_until_ready(self.state)
        return time.perf_counter() - start

    def fed(self) -> dict[str, Any]:
        """What the counters say of all steps so far, and the contexts of the timed ones.

        Raises:
            RuntimeError: a step fed other rows than the shape says, or a draft was accepted.
        """
        batch, rows = self.shape
        counters = self.state.counters
        calls, accepted = int(counters.model_calls), int(counters.num_accepted.sum())
        if int(counters.real_rows) != calls * batch * rows or accepted:
            raise RuntimeError(
                f"{calls} steps of shape {batch}x{rows} fed {counters.real_rows} rows, of which "
                f"{accepted} drafts were accepted: their time is not that of the shape"
            )
        ends = np.asarray(self.state.cache.lengths)  # after LONG steps
        return {
            "steps_run": calls,
            "rows_per_step": int(counters.real_rows) / calls,
            "padding_rows_per_step": int(counters.padding_rows) / calls,
            "accepted_tokens": accepted,
            "mean_context": float(ends.mean()) - (LONG - SHORT + 1) / 2,
            "cache_length": self.state.tokens.shape[1],
        }


def measure(model, shape, context, attention, rates: dict[str, Rates], top: int) -> dict[str, Any]:
    """Everything about one shape, as it stands in the JSON file."""
    start = time.perf_counter()
    run = StepRun(model, *shape, context, attention)
    run.advance(LONG)  # compiles
    setup = time.perf_counter() - start
    seconds = np.array([[run.advance(n) for n in (SHORT, LONG)] for _ in range(REPETITIONS)])
    # Not the least difference: a slow short run would make that too small.
    best = 1e3 * float(np.diff(seconds.min(axis=0))[0]) / (LONG - SHORT)
    median = 1e3 * float(np.median(np.diff(seconds))) / (LONG - SHORT)
    fed = run.fed()
    floors = {
        name: floor_ms(model.config, *shape, fed["mean_context"], rate)
        for name, rate in rates.items()
    }
    return {
        "shape": f"{shape[0]}x{shape[1]}",
        "batch": shape[0],
        "rows_per_sample": shape[1],
        **fed,
        "runs_ms": {str(n): (1e3 * seconds[:, i]).tolist() for i, n in enumerate((SHORT, LONG))},
        "best_ms": best,
        "median_ms": median,
        "floor_ms": floors,
        "best_ratio": {name: best / floor for name, floor in floors.items()},
        "median_ratio": {name: median / floor for name, floor in floors.items()},
        "setup_s": setup,
        "profile": profile(run, top) if top and jax.default_backend() == "gpu" else None,
    }


def profile(run: StepRun, top: int) -> dict[str, Any]:
    """Device time of a step by kernel class, and its `top` longest kernels."""
    short, long = (kernel_times(lambda n=n: run.advance(n)) for n in (SHORT, LONG))
    return kernels_per_step(short, long, LONG - SHORT, top)


def shapes(text: str) -> list[tuple[int, int]]:
    """Batch and rows per sample of each shape in, for instance, "8x1,24x8"."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(,[1-9]\d*x[1-9]\d*)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"must be like 8x1,24x8 (batch x rows per sample, both at least 1), not {text!r}"
        )
    return [tuple(map(int, part.split("x"))) for part in text.split(",")]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m emsjax.benchmarks.step",
        description="Time of a decoding step with random weights, beside its floor.",
    )
    add = parser.add_argument
    add("--shapes", type=shapes, default="1x1,1x8,8x1,8x8,24x1,24x8", help="default: %(default)s")
    add("--model", choices=MODELS, default="opt-6.7b", help="default: %(default)s")
    add("--layers", type=positive_int, help="of another depth; the floor is that model's")
    add(
        "--context",
        type=positive_int,
        default=900,
        help="mean cached tokens of a sample (default: 900)",
    )
    add("--attention", choices=("None", "triton", "xla"), default="None", help="default: None")
    add("--read-rate", type=float, default=4.35, help="TB/s of the floor (default: %(default)s)")
    add("--matmul-rate", type=float, default=790, help="TFLOP/s of the floor (default: 790)")
    add("--profile-top", type=int, default=25, help="kernels listed (default: 25; 0: no profile)")
    add("--output", type=Path, help="JSON file")
    add("--commit", help="of the measured code (default: the checkout's)")
    return parser


def report(entry: dict[str, Any]) -> None:
    """One shape's figures, as text."""
    print(
        f"{entry['shape']:>6}  best {entry['best_ms']:.3f} ms, median {entry['median_ms']:.3f} ms"
        + "".join(
            f"; floor at {name} rates {floor:.3f} ms, best/floor {entry['best_ratio'][name]:.2f}"
            for name, floor in entry["floor_ms"].items()
        )
        + f"; {entry['rows_per_step']:g} rows, mean context {entry['mean_context']:g}",
        flush=True,
    )
    if entry["profile"]:
        line = lambda name, at: print(f"{at['ms']:12.4f} ms {at['launches']:7.1f}x  {name}")
        line("kernels, per step", entry["profile"])
        for name, times in entry["profile"]["classes"].items():
            line(f"class {name}", times)
        for kernel in entry["profile"]["top"]:
            line(f"{kernel['name'][:90]} ({kernel['class']})", kernel)


def run(options: argparse.Namespace, command: str) -> None:
    """Measure and print every shape; the JSON file grows with each.

    Raises:
        ValueError: a model, context or shape that the library refuses.
        RuntimeError: a step did not feed the rows of its shape.
    """
    config = MODELS[options.model]
    if options.layers is not None:
        config = dataclasses.replace(config, num_hidden_layers=options.layers)
    attention = None if options.attention == "None" else options.attention
    rates = {
        "reference": Rates(options.read_rate * 1e12, options.matmul_rate * 1e12),
        "measured": measured_rates(large=jax.default_backend() == "gpu"),
    }
    settings = {
        "model": options.model,
        "config": dataclasses.asdict(config),
        "dtype": "bfloat16",
        "context": options.context,
        "repetitions": REPETITIONS,
        "attention": resolve_kernels(attention).attention.keywords["implementation"],
    }
    results = {"command": command, **surroundings(options.commit), "settings": settings}
    results["rates"] = {name: rate.describe() for name, rate in rates.items()}
    results["shapes"] = []
    save = lambda: options.output and options.output.write_text(json.dumps(results, indent=1))
    save()  # a place that cannot be written shows before the work
    model = random_model(config)
    for shape in options.shapes:
        entry = measure(model, shape, options.context, attention, rates, options.profile_top)
        report(entry)
        results["shapes"].append(entry)
        save()


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    options = make_parser().parse_args(arguments)
    run(options, shlex.join(["python", "-m", "emsjax.benchmarks.step", *arguments]))


if __name__ == "__main__":
    main()
