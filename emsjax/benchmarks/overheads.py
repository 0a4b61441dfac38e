"""`emsjax bench overheads`: the cost of sampling, of drafting and of the loop itself.

There are five comparisons on random bfloat16 weights; the sides of each take turns within one
process:

- `sampling`: steps that sample with temperature 0.8 and top-p 0.9, beside greedy steps, at
  24 samples x 8 rows with deterministic drafts;
- `controls`: the same with temperature, min-p and all penalties;
- `drafting`: steps in which a draft model proposes 4 tokens, beside steps whose drafts cost
  nothing, at 8 samples and greedy. The draft model does all its work, and its tokens are replaced
  by rejected ones;
- `plain`: `drafter=None` beside a decode loop without any speculation, at 1, 8 and 24 samples;
- `calls`: a call of the loop for each step, beside one call for all steps, at 24 samples x 8 rows:
  once of one state, and once of two states in turns, as each prompt set has its own.

The JSON file has an entry of `comparisons` for each: the shape, times of both sides in ms (see
`emsjax.benchmarks.runs`), the `ratio` of the best times, for drafting also `draft_step_ms` and its
`share` of a step, and on a GPU the profiles of both sides.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from emsjax.benchmarks.registry import BENCHMARKS
from emsjax.benchmarks.results import add_entry, begin
from emsjax.benchmarks.runs import (
    LONG,
    REPETITIONS,
    StepRun,
    TimedRun,
    kernel_profile,
    random_model,
    time_steps,
)
from emsjax.benchmarks.shapes import MODELS
from emsjax.decode.cache import KVCache
from emsjax.decode.kernels import resolve_kernels
from emsjax.decode.pack import AcceptedPath, PackedRows
from emsjax.decode.state import DecodeState
from emsjax.drafters import DraftModel
from emsjax.models.decoder import Decoder
from emsjax.sampling import Sampling

SAMPLED = Sampling(temperature=0.8, top_p=0.9)
CONTROLLED = Sampling(
    temperature=0.8,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.2,
)
SAMPLING_SHAPE = (24, 8)
DRAFTED_BATCH, DRAFT_TOKENS = 8, 4
PLAIN_BATCHES = (1, 8, 24)
KERNELS_LISTED = 12


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlainState:
    """The part of `emsjax.DecodeState` that plain greedy decoding needs."""

    tokens: Int32[Array, "b t"]
    logprobs: Float[Array, "b t"]
    lengths: Int32[Array, "b"]
    length_limits: Int32[Array, "b"]
    active: Bool[Array, "b"]
    end_token_ids: Int32[Array, "m"]
    cache: KVCache
    num_steps: Int32[Array, ""]


@functools.partial(jax.jit, static_argnames="attention", donate_argnames="state")
def plain_loop(model: Decoder, state: PlainState, max_steps, *, attention) -> PlainState:
    """Greedy decoding with one row per sample: no drafts, buckets, verification or counters."""
    kernels, batch = resolve_kernels(attention), state.lengths.shape[0]
    slots = jnp.arange(batch, dtype=jnp.int32)

    def advance(state: PlainState) -> PlainState:
        counts = state.active.astype(jnp.int32)
        last = state.lengths - 1
        rows = PackedRows(jnp.where(state.active, slots, batch), last, slots, counts)
        out = model(
            state.tokens[slots, last],
            rows,
            state.cache,
            attention=kernels.attention,
            max_rows_per_sample=1,
        )
        path = AcceptedPath.prefix(rows, counts)
        logits = model.logits(out.hidden)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logprob = jnp.max(jax.nn.log_softmax(logits), axis=-1)
        at = jnp.where(state.active, state.lengths, state.tokens.shape[1])
        lengths = state.lengths + counts
        ended = jnp.any(token[:, None] == state.end_token_ids, axis=1)
        return dataclasses.replace(
            state,
            tokens=state.tokens.at[slots, at].set(token, mode="drop"),
            logprobs=state.logprobs.at[slots, at].set(logprob, mode="drop"),
            lengths=lengths,
            active=state.active & ~ended & (lengths < state.length_limits),
            cache=state.cache.commit(out.fresh, rows, path, kernels.update),
            num_steps=state.num_steps + 1,
        )

    last_step = state.num_steps + max_steps
    unfinished = lambda state: jnp.any(state.active) & (state.num_steps < last_step)
    return lax.while_loop(unfinished, advance, state)


class PlainRun(TimedRun):
    """`plain_loop`, started from the same state as the library's loop."""

    def __init__(self, model: Decoder, state: DecodeState, attention):
        names = [field.name for field in dataclasses.fields(PlainState)]
        shared = {name: getattr(state, name) for name in names if hasattr(state, name)}
        super().__init__(model, PlainState(**shared, num_steps=jnp.int32(0)), attention)

    def call(self, steps: int):
        return plain_loop, (self.model, self.state, steps), {"attention": self.attention}


class CallsRun(StepRun):
    """Calls of the loop of one step each, of one or several states in turns.

    The arguments are those of `StepRun`.

    Attributes:
        states: the states, of which one is continued in each call.
    """

    def __init__(self, *arguments, states: int, **options):
        super().__init__(*arguments, **options)
        copies = [jax.tree.map(jnp.copy, self.state) for _ in range(states - 1)]
        self.states = [self.state, *copies]

    def advance(self, steps: int) -> float:
        for i, state in enumerate(self.states):
            self.state = state
            self.states[i] = jax.block_until_ready(self.rewind())
        function, (run, *_), options = self.call(1)
        start = time.perf_counter()
        for i in range(steps):
            place = i % len(self.states)
            self.states[place] = function(run, self.states[place], 1, **options)
        jax.block_until_ready(self.states)
        return time.perf_counter() - start


def compare(base: str, runs: Mapping[str, TimedRun]) -> dict[str, Any]:
    """Times of both runs, and the ratio of the other run's best time to that of `base`."""
    for run in runs.values():
        run.advance(LONG)  # compiles
    times = time_steps(runs)
    (other,) = runs.keys() - {base}
    on_gpu = jax.default_backend() == "gpu"
    profiles = {name: kernel_profile(run, KERNELS_LISTED) for name, run in runs.items() if on_gpu}
    ratio = times[other]["best_ms"] / times[base]["best_ms"]
    return {"ratio": ratio, "times": times, "profiles": profiles}


def compare_sampling(
    name: str, sampling: Sampling, model, context: int, attention
) -> dict[str, Any]:
    start = functools.partial(StepRun, model, SAMPLING_SHAPE, context, attention)
    runs = {"greedy": start(), "sampled": start(sampling=sampling)}
    entry = {"comparison": name, "shape": SAMPLING_SHAPE} | compare("greedy", runs)
    return entry | {"fed": {name: run.fed() for name, run in runs.items()}}


def compare_drafting(model, draft_model, context: int, attention) -> dict[str, Any]:
    shape = (DRAFTED_BATCH, DRAFT_TOKENS + 1)
    start = functools.partial(StepRun, model, shape, context, attention)
    drafter = DraftModel(draft_model, DRAFT_TOKENS, attention_implementation=attention)
    runs = {"given": start(), "drafted": start(drafts={"source": drafter})}
    entry = {"comparison": "drafting", "shape": shape} | compare("given", runs)
    given, drafted = (entry["times"][name]["best_ms"] for name in ("given", "drafted"))
    return entry | {
        "share": (drafted - given) / drafted,
        "draft_step_ms": (drafted - given) / DRAFT_TOKENS,
        "fed": {name: run.fed() for name, run in runs.items()},
    }


def compare_plain(model, batch: int, context: int, attention) -> dict[str, Any]:
    start = functools.partial(StepRun, model, (batch, 1), context, attention)
    runs = {"bare": PlainRun(model, start().state, attention), "plain": start()}
    return {"comparison": "plain", "shape": (batch, 1)} | compare("bare", runs)


def compare_calls(states: int, model, context: int, attention) -> dict[str, Any]:
    arguments = (model, SAMPLING_SHAPE, context, attention)
    of_calls = f"{states} state{'s' * (states > 1)}"
    runs = {"loop": StepRun(*arguments), of_calls: CallsRun(*arguments, states=states)}
    return {"comparison": "calls", "shape": SAMPLING_SHAPE} | compare("loop", runs)


def describe(entry: Mapping[str, Any]) -> str:
    """One comparison as a line of text."""
    times = [f"{name} {of['best_ms']:.3f} ms" for name, of in entry["times"].items()]
    line = f"{entry['comparison']:>9}  {entry['shape'][0]}x{entry['shape'][1]}  "
    line += f"{', '.join(times)}, ratio {entry['ratio']:.3f}"
    if "share" in entry:
        line += f", a draft step {entry['draft_step_ms']:.3f} ms, share {entry['share']:.2f}"
    return line


def run(options: argparse.Namespace, command: str) -> int:
    settings = {
        "model": options.model,
        "draft_model": options.draft_model,
        "dtype": "bfloat16",
        "context": options.context,
        "repetitions": REPETITIONS,
        "sampling": dataclasses.asdict(SAMPLED),
        "controls": dataclasses.asdict(CONTROLLED),
    }
    results = begin(options, command, settings, entries="comparisons")
    model = random_model(MODELS[options.model])
    draft_model = random_model(MODELS[options.draft_model])
    rest = options.context, options.attention
    comparisons = [functools.partial(compare_plain, model, batch, *rest) for batch in PLAIN_BATCHES]
    comparisons.append(functools.partial(compare_drafting, model, draft_model, *rest))
    for name, sampling in (("sampling", SAMPLED), ("controls", CONTROLLED)):
        comparisons.append(functools.partial(compare_sampling, name, sampling, model, *rest))
    comparisons += [functools.partial(compare_calls, states, model, *rest) for states in (1, 2)]
    for measure in comparisons:
        add_entry(measure(), results, options.output, "comparisons")
        print(describe(results["comparisons"][-1]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(BENCHMARKS["overheads"].main())
