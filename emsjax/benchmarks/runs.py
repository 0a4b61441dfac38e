"""The device loop at a fixed shape and context, run repeatedly to be timed.

Weights are random and drafts always rejected, so every step feeds the same number of rows and
emits one token per sample. The state is reset before every run, so all runs have the same
contexts. The time of a step follows from the difference between a long and a short run.
"""

import abc
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from emsjax.benchmarks.device_times import kernel_times, kernels_per_step
from emsjax.benchmarks.rejected import RejectedDrafter
from emsjax.benchmarks.scripted import assign
from emsjax.benchmarks.starts import MostRows, arbitrary_state
from emsjax.decode.cache import KVCache
from emsjax.decode.layout import UNPADDED
from emsjax.decode.row_counts import round_up_length
from emsjax.decode.run import Run
from emsjax.decode.state import DecodeState
from emsjax.decode.step import decode_loop
from emsjax.drafters import DraftModel
from emsjax.engine.adapt import as_drafter, make_run
from emsjax.models.config import DecoderConfig
from emsjax.models.decoder import Decoder
from emsjax.models.numbers import BFLOAT16, NumberFormats
from emsjax.policies.lengths import FixedLength
from emsjax.sampling import Sampling
from pallas_kernels.common.numerics import current_numerics, numerics

SHORT, LONG = 3, 13  # steps of the two runs whose difference is timed
REPETITIONS = 7
MAX_NEW_TOKENS = 128  # the cache has room for a whole completion, as in real use


def at_once(function: Callable, arguments: Iterable[Any], threads: int | None = None) -> list[Any]:
    """The function's values, computed in threads: compilation takes most of their time."""
    chosen = current_numerics()  # other threads begin without this one's

    def call(argument: Any) -> Any:
        with numerics(chosen):
            return function(argument)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(call, arguments))


def random_model(config: DecoderConfig, numbers: NumberFormats = BFLOAT16) -> Decoder:
    """A model of random weights whose most likely token is never the last token id."""
    # Not under jit: compiling the random draws of every layer takes longer than the draws.
    model = numbers.model(config)
    table = (model.lm_head or model.embed_tokens).embedding
    # A zero embedding has logit 0, which is below the largest of the others and loses a tie.
    # The parts of a split table are filled up with copies of the last token's.
    assign(table, table[...].at[config.vocab_size - 1 :].set(0))
    return model


class TimedRun(abc.ABC):
    """A decode loop that starts from the same prompts every time.

    Attributes:
        state: has `lengths` and a `cache`, as `emsjax.DecodeState` does.
        lengths: the prompts' lengths in tokens, [b].
        long: steps of the longer of the two runs whose difference is timed.
    """

    long = LONG

    def __init__(self, model: Decoder, state: Any, attention):
        self.model, self.state, self.attention = model, state, attention
        self.lengths = np.asarray(state.lengths)

    @abc.abstractmethod
    def call(self, steps: int) -> tuple[Callable, tuple[Any, ...], dict[str, Any]]:
        """A jitted function that runs this many steps, its arguments and its options."""

    def decode(self, steps: int) -> Any:
        """The state after this many steps; the old state is donated."""
        function, arguments, options = self.call(steps)
        return function(*arguments, **options)

    def compile(self) -> None:
        """Compile the loop, which `decode` uses as well; nothing runs on the device meanwhile."""
        function, arguments, options = self.call(SHORT)
        function.lower(*arguments, **options).compile()

    def rewind(self) -> Any:
        """The state reset to the prompts: cache entries beyond its lengths are never read."""
        cache = dataclasses.replace(self.state.cache, lengths=jnp.array(self.lengths - 1))
        return dataclasses.replace(self.state, lengths=jnp.array(self.lengths), cache=cache)

    def advance(self, steps: int) -> float:
        """Run this many steps from the prompts on; returns the seconds."""
        self.state = jax.block_until_ready(self.rewind())
        # Before the clock starts: `generate` flattens a model once, and not in each of its calls.
        function, arguments, options = self.call(steps)
        start = time.perf_counter()
        self.state = jax.block_until_ready(function(*arguments, **options))
        return time.perf_counter() - start


class LoopRun(TimedRun):
    """The library's own loop.

    Args:
        state: from `emsjax.init_state`, with this drafter and this policy or one of its kind.
        draft_length: the policy. It may be replaced between two runs, and so may the drafter and
            the layout.
    """

    layout = UNPADDED

    def __init__(self, model, drafter, state: DecodeState, attention, draft_length=None):
        self.drafter, self.draft_length = drafter, draft_length
        self.weights = make_run(model, None).flat().model
        # Counts of the drafter's own, such as the lengths of a cache. The rest need not be reset.
        leaves = enumerate(jax.tree.leaves(state.drafter_state))
        self.counts = {i: jnp.copy(leaf) for i, leaf in leaves if leaf.ndim <= 1}
        super().__init__(model, state, attention)

    def call(self, steps: int):
        return _loop, (self.assembled(), self.state, steps), {}

    def assembled(self) -> Run:
        """The library's run, with the drafter, the policy and the layout of now."""
        options = {"attention_implementation": self.attention, "layout": self.layout}
        run = make_run(self.model, self.drafter, self.draft_length, **options)
        return dataclasses.replace(run, model=self.weights).flat()

    def rewind(self) -> DecodeState:
        state = super().rewind()
        leaves, kind = jax.tree.flatten(state.drafter_state)
        for i, count in self.counts.items():
            leaves[i] = jnp.copy(count)  # the loop takes it over
        drafter_state = kind.unflatten(leaves)
        policy_state = ()
        if self.drafter is not None:
            drafter_state = as_drafter(self.drafter).commit(drafter_state, state.lengths)
        if self.draft_length is not None:
            batch, k1 = state.counters.accepted_histogram.shape
            policy_state = self.draft_length.init(batch, k1 - 1)
        return dataclasses.replace(
            state,
            active=state.sequence_ids >= 0,
            end=jnp.zeros_like(state.end),
            drafter_state=drafter_state,
            policy_state=policy_state,
            counters=jax.tree.map(jnp.zeros_like, state.counters),
        )


class _Loop:
    """`decode_loop` without a queue, whose only output is the state."""

    def __call__(self, *arguments) -> DecodeState:
        return decode_loop(*arguments)[0]

    def lower(self, *arguments):
        return decode_loop.lower(*arguments)


_loop = _Loop()


class StepRun(LoopRun):
    """The device loop of one shape: `rows` rows of each of `batch` samples.

    Args:
        shape: samples, and rows of each sample in every step.
        context: mean cached tokens per sample in the timed steps.
        drafts: fields of the `RejectedDrafter`: a `source` that does its work in every step, and
            the `branches` of trees.
        sampling: None: greedy.
        draft_length: allows for fewer rows, see `feed`. The cache then has room for `long` steps
            only, as several such runs exist at once.
        long: see `TimedRun`.

    Raises:
        ValueError: the context is too short, or `emsjax.init_state` refuses the arguments.
    """

    def __init__(
        self,
        model: Decoder,
        shape: tuple[int, int],
        context: int,
        attention,
        *,
        drafts: Mapping[str, Any] = MappingProxyType({}),
        sampling: Sampling | None = None,
        draft_length: FixedLength | None = None,
        long: int = LONG,
    ):
        self.shape, self.long = shape, long
        batch, rows = shape
        vocab = model.config.vocab_size
        # The middle of the timed steps, which follow SHORT others, has this context.
        length = context - (SHORT + long) // 2 + 2
        if length < 1:
            raise ValueError(f"--context must be at least {context + 1 - length}, not {context}")
        prompts = np.random.default_rng(0).integers(5, vocab - 1, (batch, length))
        drafter = None
        if rows > 1:
            drafter = RejectedDrafter(vocab - 1, rows - 1, **drafts)
        room = long + rows if draft_length is not None else max(MAX_NEW_TOKENS, long + rows)
        if draft_length is None:  # every step feeds all rows
            self.layout = MostRows()
        state = arbitrary_state(
            model,
            drafter,
            prompts,
            layout=self.layout,
            attention=attention,
            draft_length=draft_length,
            max_new_tokens=room,
            sampling=sampling,
        )
        super().__init__(model, drafter, state, attention, draft_length)

    def feed(self, rows: int) -> None:
        """Feed this many rows of each sample from now on, without a new compilation.

        The run must have been created with a `draft_length` and with at least as many rows.
        """
        self.shape = (self.shape[0], rows)
        self.draft_length = FixedLength(rows - 1)

    def fed(self) -> dict[str, Any]:
        """Rows of the last run's steps by the loop's counters, and the timed steps' context.

        Raises:
            RuntimeError: a step fed another number of rows than the shape has, or drafts were
                accepted (when sampling, more than one in a hundred).
        """
        batch, rows = self.shape
        counters = self.state.counters
        calls, accepted = int(counters.model_calls), int(counters.num_accepted.sum())
        allowed = 0 if self.state.sampling is None else calls * batch * (rows - 1) // 100
        if int(counters.real_rows) != calls * batch * rows or accepted > allowed:
            raise RuntimeError(
                f"{calls} steps of shape {batch}x{rows} fed {counters.real_rows} rows, of which "
                f"{accepted} drafts were accepted: their time is not that of the shape"
            )
        ends = np.asarray(self.state.cache.lengths)  # after `long` steps
        return {
            "steps_run": calls,
            "rows_per_step": int(counters.real_rows) / calls,
            "padding_rows_per_step": int(counters.padding_rows) / calls,
            "accepted_tokens": accepted,
            "mean_context": float(ends.mean()) - (self.long - SHORT + 1) / 2,
            "cache_length": self.state.tokens.shape[1],
        }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafting:
    """The texts that a draft model continues, and its cache."""

    tokens: Any
    lengths: Any
    cache: KVCache


class DraftRun(TimedRun):
    """A draft model alone, which drafts as many tokens as it may of each sample in every step.

    Args:
        context: cached tokens per sample; their keys and values are arbitrary.
    """

    def __init__(self, drafter: DraftModel, batch: int, context: int):
        self.drafter = drafter
        model, width = drafter.draft_model, context + 1 + drafter.max_draft_tokens
        size = (batch, round_up_length(width))
        tokens = np.random.default_rng(0).integers(5, model.config.vocab_size, size)
        lengths = jnp.full(batch, context + 1, jnp.int32)
        state = Drafting(jnp.array(tokens, jnp.int32), lengths, model.init_cache(*size))
        super().__init__(model, state, drafter.attention_implementation)

    def call(self, steps: int):
        return _draft, (self.drafter, self.state, steps), {}


@functools.partial(jax.jit, donate_argnames=("state",))
def _draft(drafter: DraftModel, state: Drafting, steps) -> Drafting:
    def step(_, state: Drafting) -> Drafting:
        most = jnp.full_like(state.lengths, drafter.max_draft_tokens)
        draft, cache = drafter.propose(
            state.cache, state.tokens, state.lengths, most, keys=None, sampling=None
        )
        # Stored, so that the compiler cannot drop the last draft token.
        tokens = state.tokens.at[:, -draft.tokens.shape[1] :].set(draft.tokens)
        cache = drafter.commit(cache, state.lengths)
        return dataclasses.replace(state, tokens=tokens, cache=cache)

    return lax.fori_loop(0, steps, step, state)


def time_steps(runs: Mapping[Any, TimedRun], repetitions: int = REPETITIONS) -> dict[Any, dict]:
    """Milliseconds of a step of each run. The runs take turns, and must have been compiled.

    Returns:
        By name: `runs_ms`, the times by number of steps; `best_ms`, the time of a step from the
        fastest runs; `median_ms`, the same from the median of the differences.
    """
    seconds = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, run in runs.items():
            seconds[name].append([run.advance(steps) for steps in (SHORT, run.long)])
    return {name: _step_times(np.array(seconds[name]), run.long) for name, run in runs.items()}


def _step_times(seconds: np.ndarray, long: int) -> dict[str, Any]:
    ms, steps = 1e3 * seconds, long - SHORT
    # Not the least difference, which one slow short run would make too small.
    return {
        "runs_ms": {str(n): ms[:, i].tolist() for i, n in enumerate((SHORT, long))},
        "best_ms": float(np.diff(ms.min(axis=0))[0]) / steps,
        "median_ms": float(np.median(np.diff(ms))) / steps,
    }


def kernel_profile(run: TimedRun, top: int) -> dict[str, Any]:
    """Device time of a step by kernel class, and its `top` longest kernels."""
    short, long = (kernel_times(lambda n=n: run.advance(n)) for n in (SHORT, run.long))
    return kernels_per_step(short, long, run.long - SHORT, top)
