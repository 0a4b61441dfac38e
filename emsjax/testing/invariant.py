"""A check that the bits of a sequence do not depend on what is computed beside it.

Axis legend: see `emsjax.decode.pack`; s = the last tokens of a sequence, whose logits are compared.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jaxtyping import Array, Int32

from emsjax.configured import configured
from emsjax.decode.base import Drafter, DraftLength, Model
from emsjax.decode.cache import KVCache
from emsjax.decode.pack import AcceptedPath, pack
from emsjax.decode.row_counts import round_up_length
from emsjax.decode.run import Run
from emsjax.engine.adapt import make_run
from emsjax.engine.output import GenerateOutput
from emsjax.engine.preparation import check
from emsjax.generation import generate
from emsjax.sampling import log_softmax
from emsjax.streaming import stream
from emsjax.tensor_parallel import AXIS
from emsjax.testing.lossless import check_comparable
from emsjax.values import comparable
from pallas_kernels.common.indexing import take

TAIL = 8  # last tokens of a sequence that are fed one by one, and together
PADDING_ROWS = 24
NEW_TOKENS = 16
Bits = list[np.ndarray]  # of one operation after the other, [n, bytes] each


@comparable
class Invariant:
    """Result of a check that passed.

    Attributes:
        num_rows: rows whose values were compared, in all layers.
        num_tokens: emitted tokens that were compared, with their log-probabilities.
    """

    num_rows: int
    num_tokens: int


@configured
def assert_invariant(
    model: Model,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter | None = None,
    attention_implementation: str | Callable | None = None,
    *,
    draft_length: DraftLength | None = None,
    max_new_tokens: int = NEW_TOKENS,
    sampling: Any = None,
    key: jax.Array | None = None,
    numerics: str | None = "invariant",
) -> Invariant:
    """Computes sequences in many ways, and fails unless their bits are always the same.

    Prompts are fed alone and together, whole, in their last rows and row by row, in another order,
    beside padding rows, with caches of other lengths. Compared are the inputs of all layers,
    queries, keys and values, the results of attention, logits and log-probabilities. Then each
    prompt is completed alone by plain decoding, and all of them together with the drafter, at once
    and in refilled slots: tokens and log-probabilities must be equal.

    The values of all rows and layers are copied to the host, so choose a few prompts of up to some
    hundred tokens, of different lengths.

    Args:
        model: the target.
        prompts: ragged token ids; for these and the other arguments see `emsjax.generate`.
        drafter: your drafter, or None.
        attention_implementation: your attention, or None.
        sampling: with a temperature above 0, the drafter must not draw its tokens.
        numerics: those that are checked; with "fast" the check tells what depends on what.

    Raises:
        AssertionError: bits differ; the message names the first layer and operation.
        ValueError: `emsjax.generate` rejects the arguments, or samples cannot be compared.
    """
    options = {"attention_implementation": attention_implementation, "draft_length": draft_length}
    run = make_run(model, drafter, **options)
    asked = {"max_new_tokens": max_new_tokens, "sampling": sampling, "key": key}
    run, requests = check(run, prompts, **asked)
    prompts = requests.prompts
    num_rows = _check_rows(run, prompts)
    if requests.sampling is not None:
        check_comparable(run, prompts)
        fold = jax.vmap(jax.random.fold_in, (None, 0))
        asked["key"] = fold(key, jnp.arange(len(prompts))) if key.ndim == 0 else key
    num_tokens = _check_tokens(model, prompts, drafter, options, asked)
    return Invariant(num_rows, num_tokens)


@dataclasses.dataclass(frozen=True, eq=False)  # a cached program would write to another list
class Recording:
    """Attention that copies its results to the host, in the order of the layers.

    Attributes:
        func: the attention.
        is_split: whether each of several devices has some of the heads.
        results: where they are put, by device.
    """

    func: Callable
    is_split: bool = False
    results: dict[int, list[np.ndarray]] = dataclasses.field(default_factory=dict)

    def __call__(self, *args, **options) -> Array:
        out = self.func(*args, **options)
        device = lax.axis_index(AXIS) if self.is_split else jnp.int32(0)
        # The next layer needs what comes back, so that each device's results come in order.
        return io_callback(self.keep, jax.ShapeDtypeStruct(out.shape, out.dtype), device, out)

    def keep(self, device: Array, out: Array) -> Array:
        self.results.setdefault(int(device), []).append(np.asarray(out))
        return out

    @property
    def of_layers(self) -> list[np.ndarray]:
        """The results of each layer, all heads together."""
        layers = zip(*(self.results[device] for device in sorted(self.results)), strict=True)
        return [np.concatenate(parts, axis=1) for parts in layers]


class Fed(NamedTuple):
    """Rows of sequences as they were computed in one way.

    Attributes:
        way: a description for the message.
        of: for each sequence, the position of the first row, the bits of its rows and those of its
            last rows' logits.
    """

    way: str
    of: dict[int, tuple[int, Bits, Bits]]


def _check_rows(run: Run, prompts: Sequence[np.ndarray]) -> int:
    """Compares all ways of feeding the prompts; returns the number of rows that were compared."""
    feed = Feeder(run, prompts)
    alone = Fed("fed whole and alone", {})
    for i in range(len(prompts)):
        alone.of.update(feed("", [i], [0]).of)
    tails = [max(0, len(prompt) - TAIL) for prompt in prompts]
    every, order = list(range(len(prompts))), list(range(len(prompts)))[::-1]
    ways = [feed("fed whole, all together", every, [0] * len(every), padding=PADDING_ROWS)]
    starts = [tails[i] for i in order]
    ways.append(feed(f"whose last {TAIL} rows are fed, all together", order, starts, bounded=True))
    for i in every:
        way = f"whose last {TAIL} rows are fed, alone"
        ways.append(feed(way, [i], [tails[i]], bounded=True))
        for at in range(tails[i], len(prompts[i])):
            ways.append(feed("fed row by row", [i], [at], bounded=True, count=1))
    return sum(feed.compare(alone, fed) for fed in ways)


class Feeder:
    """Feeds prompts to the target in different ways.

    Args:
        run: has the model and the kernels.
        prompts: the sequences.
    """

    def __init__(self, run: Run, prompts: Sequence[np.ndarray]):
        self.run, self.prompts = run, prompts
        self.attention = Recording(run.kernels.attention, getattr(run.model, "is_split", False))

    def __call__(
        self,
        way: str,
        sequences: Sequence[int],
        starts: Sequence[int],
        *,
        padding: int = 0,
        bounded: bool = False,
        count: int | None = None,
    ) -> Fed:
        """Feeds sequences from these places on, after all tokens before them.

        Args:
            padding: number of padding rows.
            bounded: whether a bound of the rows of a sample is given, as in decoding.
            count: rows of each sequence; None: all.
        """
        prompts = [self.prompts[i] for i in sequences]
        counts = [
            count or len(prompt) - start for prompt, start in zip(prompts, starts, strict=True)
        ]
        width = round_up_length(max(map(len, prompts)) + (0 if len(prompts) == 1 else 64))
        tokens = np.zeros((len(prompts), width), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        cache = self.run.model.init_cache(len(prompts), width)
        feed = functools.partial(
            _feed, self.run.model, tokens=jnp.asarray(tokens), update=self.run.kernels.update
        )
        if any(starts):
            before = jnp.asarray(starts, jnp.int32)
            plain = {"attention": self.run.kernels.attention, "bound": None}
            cache = feed(cache, counts=before, num_rows=round_up_length(sum(starts)), **plain)[1]
        self.attention.results.clear()
        values, _ = feed(
            cache,
            counts=jnp.asarray(counts, jnp.int32),
            num_rows=sum(counts) + padding,
            attention=self.attention,
            bound=max(counts) if bounded else None,
        )
        inputs, fresh, *scores = jax.device_get(values)
        jax.effects_barrier()
        layers = zip(inputs[:-1], fresh, self.attention.of_layers, strict=True)
        rows = [_bits(x) for layer in layers for x in layer] + [_bits(inputs[-1])]
        of, first = {}, 0
        for place, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
            own = slice(first, first + counts[place])
            last = min(TAIL, counts[place])
            tail = [_bits(x[place])[:last] for x in scores]
            of[sequence] = start, [x[own] for x in rows], tail
            first += counts[place]
        return Fed(way, of)

    def compare(self, alone: Fed, fed: Fed) -> int:
        """Returns the number of rows that are equal.

        Raises:
            AssertionError: some are not.
        """
        total, names = 0, _operations(len(next(iter(alone.of.values()))[1]))
        for sequence, (start, rows, tail) in fed.of.items():
            _, expected, expected_tail = alone.of[sequence]
            count, length = len(rows[0]), len(self.prompts[sequence])
            total += count
            pairs = [(x, y[start : start + count]) for x, y in zip(rows, expected, strict=True)]
            # Logits of the last tokens, the last one first.
            skipped = length - start - count
            behind = [
                (x, y[skipped : skipped + len(x)]) for x, y in zip(tail, expected_tail, strict=True)
            ]
            pairs += [(x[: len(y)], y) for x, y in behind]
            for name, (actual, wanted) in zip(names, pairs, strict=True):
                differs = np.flatnonzero((actual != wanted).any(axis=1))
                if len(differs):
                    of_logits = name in names[-2:]
                    at = start + count - 1 - differs[0] if of_logits else start + differs[0]
                    raise AssertionError(
                        f"{name}: of prompt {sequence}, the row at position {at} has other bits if "
                        f"the prompt is {alone.way} than in a prompt {fed.way}"
                    )
        return total


@functools.partial(jax.jit, static_argnames=("num_rows", "bound", "attention", "update"))
def _feed(
    model: Model,
    cache: KVCache,
    *,
    tokens: Int32[Array, "b t"],
    counts: Int32[Array, "b"],
    num_rows: int,
    bound: int | None,
    attention: Callable,
    update: Callable,
):
    """Feeds each sample's next tokens: what each layer computes, logits, and the new cache."""
    rows = pack(cache.lengths, counts, num_rows)
    out = model(
        take(tokens, rows.samples, rows.positions),
        rows,
        cache,
        attention=attention,
        max_rows_per_sample=bound,
        taps=tuple(range(len(cache.layers) + 1)),
    )
    last = (rows.offsets + rows.counts - 1)[:, None] - jnp.arange(TAIL)  # [b, s]
    logits = model.logits(take(out.hidden, jnp.maximum(last, 0).reshape(-1)))
    logits = logits.reshape(*last.shape, -1)
    scores = log_softmax(logits.reshape(-1, logits.shape[-1])).reshape(logits.shape)
    cache = cache.commit(out.fresh, rows, AcceptedPath.prefix(rows, rows.counts), update)
    return (out.taps, out.fresh, logits, scores), cache


def _operations(count: int) -> list[str]:
    """Names of what is compared, in the order of computation; `count` of them before the logits."""
    names = ["input", "queries, keys and values", "attention"]
    rows = [f"layer {i // 3}, {names[i % 3]}" for i in range(count - 1)]
    return [*rows, "output of the last layer", "logits", "log-probabilities"]


def _bits(x: Any) -> np.ndarray:
    """The bytes of each row, [n, bytes]."""
    x = np.ascontiguousarray(x)
    return x.reshape(len(x), -1).view(np.uint8)


def _check_tokens(model: Model, prompts, drafter, options, asked) -> int:
    """Compares completions of single prompts with those of all; returns the number of tokens."""
    attention = {"attention_implementation": options["attention_implementation"]}
    masks = [np.ones_like(prompt) for prompt in prompts]
    common = asked | {"attention_mask": masks}
    together = generate(model, prompts, drafter, **options, **common)
    slots = max(1, len(prompts) // 2)
    refilled = list(stream(model, prompts, drafter, batch_size=slots, **options, **common))
    refilled = {one.prompt: one for one in refilled}
    total = 0
    for i, prompt in enumerate(prompts):
        own = asked if asked["key"] is None else asked | {"key": asked["key"][i : i + 1]}
        plain = generate(model, [prompt], attention_mask=[masks[i]], **attention, **own)
        expected = _emitted(plain, 0)
        ways = {
            "all prompts are completed together": _emitted(together, i),
            "slots are refilled": (refilled[i].tokens, refilled[i].logprobs),
        }
        for way, actual in ways.items():
            _check_equal(i, way, expected, actual)
            total += len(actual[0])
    return total


def _emitted(out: GenerateOutput, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a sequence and their log-probabilities."""
    length = int(out.lengths[sequence])
    return np.asarray(out.tokens)[sequence, :length], np.asarray(out.logprobs)[sequence, :length]


def _check_equal(prompt: int, way: str, expected, actual) -> None:
    """Raises an AssertionError unless tokens and log-probabilities are equal."""
    for name, one, other in zip(("token", "log-probability"), expected, actual, strict=True):
        if len(one) != len(other):
            raise AssertionError(
                f"prompt {prompt} has {len(one)} new tokens by plain decoding alone, and "
                f"{len(other)} if {way}"
            )
        differs = np.flatnonzero((_bits(one) != _bits(np.asarray(other, one.dtype))).any(axis=1))
        if len(differs):
            at = differs[0]
            raise AssertionError(
                f"prompt {prompt}: the {name} at position {at} of the new tokens is {one[at]} by "
                f"plain decoding alone, and {other[at]} if {way}"
            )
