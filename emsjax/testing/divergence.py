"""The first differences of two greedy runs, and whether they are near-ties.

In 16-bit types the last digits of a row's logits depend on the number of rows in the same call.
If two tokens are nearly tied, this decides which of them is the likelier.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from emsjax.decode.base import Model
from emsjax.decode.kernels import resolve_kernels
from emsjax.decode.pack import pack
from emsjax.decode.prefill import prefill
from emsjax.decode.row_counts import round_up_length
from emsjax.decode.run import Run
from emsjax.engine.output import GenerateOutput
from emsjax.engine.requests import Requests
from emsjax.sampling import LogitsContext
from emsjax.sampling.processors import Processing, initial_states
from pallas_kernels.common.indexing import take_in_rows

NEAR_TIE = 1 / 64  # of the largest absolute logit
PREFIXES_AT_ONCE = 8


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first token in which a sequence differs from plain decoding.

    Attributes:
        sequence: index of the sequence.
        position: index of the token among the new ones, without the prompt.
        expected: the token of plain decoding.
        token: the token of the other run; the padding token if that run has ended.
        margin: difference of their two logits, computed in float32 from the same weights; infinite
            if one of the runs has ended.
        largest: the largest absolute value among the float32 logits at this position.
        likeliest: the two tokens with the largest float32 logits.
        lead: difference of these two logits.
    """

    sequence: int
    position: int
    expected: int
    token: int
    margin: float
    largest: float
    likeliest: tuple[int, int]
    lead: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding may decide: the margin is at most 1/64 of the largest logit."""
        return self.margin <= NEAR_TIE * self.largest


def first_divergences(
    model: Model,
    prompts: Sequence[Sequence[int]],
    expected: GenerateOutput,
    actual: GenerateOutput,
    change: Callable | None = None,
) -> list[Divergence]:
    """The first difference of each sequence of `actual` that is not the expected one.

    Args:
        model: the target of both; if anything differs, a float32 copy of it computes the margins.
        prompts: one for each sequence.
        expected: output of plain greedy decoding.
        actual: another output for the same prompts, limits and end tokens.
        change: a function of logits [n, v], prefixes and their sequences that returns the logits
            that tokens are chosen from: see `processed_logits`. None: the logits themselves.
    """
    index = np.arange(expected.tokens.shape[1])
    emitted = [index < np.asarray(out.lengths)[:, None] for out in (expected, actual)]
    differs = (np.asarray(expected.tokens) != np.asarray(actual.tokens)) & emitted[0]
    differs |= emitted[0] != emitted[1]
    parted = np.flatnonzero(differs.any(axis=1))
    positions = differs.argmax(axis=1)
    prefixes = [
        np.concatenate([np.asarray(prompts[i], np.int32), expected.tokens[i, : positions[i]]])
        for i in parted
    ]
    if not prefixes:
        return []
    logits = float32_logits(model, prefixes)
    if change is not None:
        logits = change(logits, prefixes, parted)
    found = []
    for i, scores in zip(parted, logits, strict=True):
        pair = expected.tokens[i, positions[i]], actual.tokens[i, positions[i]]
        margin = abs(float(scores[pair[0]]) - float(scores[pair[1]]))
        if not all(run[i, positions[i]] for run in emitted):
            margin = float("inf")
        place = (int(i), int(positions[i]), *map(int, pair))
        best = np.argsort(-scores, kind="stable")[:2]
        largest = float(np.abs(scores[np.isfinite(scores)]).max(initial=0))
        lead = float(scores[best[0]] - scores[best[1]])
        found.append(Divergence(*place, margin, largest, tuple(best.tolist()), lead))
    return found


def float32_logits(model: Model, prefixes: Sequence[np.ndarray]) -> np.ndarray:
    """Logits [n, v] after each prefix, computed in float32 from the model's weights."""
    model = model.astype(jnp.float32)
    width = round_up_length(max(map(len, prefixes)))
    logits = []
    for first in range(0, len(prefixes), PREFIXES_AT_ONCE):
        group = prefixes[first : first + PREFIXES_AT_ONCE]
        tokens = np.zeros((PREFIXES_AT_ONCE, width), np.int32)
        lengths = np.ones(PREFIXES_AT_ONCE, np.int32)
        for row, prefix in enumerate(group):
            tokens[row, : len(prefix)], lengths[row] = prefix, len(prefix)
        logits.append(np.asarray(last_logits(model, tokens, lengths))[: len(group)])
    return np.concatenate(logits)


def processed_logits(
    run: Run,
    requests: Requests,
    logits: Float32[np.ndarray, "n v"],
    prefixes: Sequence[np.ndarray],
    sequences: Sequence[int],
) -> Float32[np.ndarray, "n v"]:
    """The logits that the next tokens of some sequences are chosen from.

    Args:
        run: has the logits processors.
        requests: has the prompts and their settings.
        logits: the model's own, after each prefix.
        prefixes: the sequences' tokens so far, each with its prompt.
        sequences: number of the sequence of each prefix.
    """
    prompts = np.asarray(sequences) // requests.num_sequences
    settings = jax.tree.map(lambda x: jnp.asarray(x[prompts]), requests.settings)
    processors = run.all_processors(settings.controls)
    if not processors:
        return logits
    starts = np.array([len(requests.prompts[i]) for i in prompts], np.int32)
    lengths = np.array([len(prefix) for prefix in prefixes], np.int32)
    tokens, new = np.zeros((2, len(prefixes), lengths.max()), np.int32)
    for row, (prefix, start) in enumerate(zip(prefixes, starts, strict=True)):
        tokens[row, : len(prefix)] = prefix
        new[row, : len(prefix) - start] = prefix[start:]
    tokens, lengths, starts = (jnp.asarray(x) for x in (tokens, lengths, starts))
    ends = jnp.asarray(requests.end_token_ids)
    context = LogitsContext(tokens, lengths, starts, ends, settings.controls)
    states = initial_states(processors, tokens, starts, settings)
    process = Processing(processors, states, context, logits.shape[1])
    states = process.advance(jnp.asarray(new), lengths - starts)
    rows = jnp.arange(len(prefixes), dtype=jnp.int32)
    drafted = jnp.zeros((len(prefixes), 0), jnp.int32)
    return np.asarray(process._replace(states=states)(jnp.asarray(logits), drafted, rows, 0 * rows))


@jax.jit
def last_logits(
    model: Model, tokens: Int32[Array, "b t"], lengths: Int32[Array, "b"]
) -> Float[Array, "b v"]:
    """Logits after each sample's last token."""
    kernels = resolve_kernels(None)
    cache = model.init_cache(*tokens.shape)
    cache = prefill(model, cache, tokens, lengths - 1, kernels=kernels)
    rows = pack(lengths - 1, jnp.ones_like(lengths), len(lengths))
    last = take_in_rows(tokens, lengths[:, None] - 1)[:, 0]
    out = model(last, rows, cache, attention=kernels.attention, max_rows_per_sample=1)
    return model.logits(out.hidden)


def check_exact(model: Model) -> None:
    """Raises a ValueError unless the model is in float32."""
    if model.dtype != jnp.float32:
        raise ValueError(
            f"sampled tokens can be compared in float32 only, not {jnp.dtype(model.dtype).name}: "
            "rounding shifts the boundaries between draws"
        )
