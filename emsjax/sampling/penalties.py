"""The settings of `Sampling` that change logits, as logits processors.

The definitions are those of transformers and vLLM; `Sampling` says where they differ.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from emsjax.sampling.processors import LogitsContext, LogitsProcessor
from emsjax.sampling.settings import Controls
from emsjax.values import pytree
from pallas_kernels.common.indexing import take


def processors_for(controls: Controls | None) -> tuple[LogitsProcessor, ...]:
    """The processors of the settings that are in use, in the order in which they are applied."""
    if controls is None:
        return ()
    found: list[LogitsProcessor] = []
    if controls.bias_tokens is not None:
        found.append(LogitBias())
    if controls.repetition_penalty is not None:
        found.append(RepetitionPenalty(controls.vocab_size))
    if controls.presence_penalty is not None or controls.frequency_penalty is not None:
        found.append(CountPenalties(controls.vocab_size))
    if controls.min_new_tokens is not None:
        found.append(MinNewTokens())
    if controls.suppressed is not None:
        found.append(SuppressTokens())
    return tuple(found)


@pytree
class LogitBias(LogitsProcessor):
    """Adds each slot's biases."""

    def __call__(self, state, logits, context: LogitsContext):
        tokens = take(context.controls.bias_tokens, context.samples)
        values = take(context.controls.bias_values, context.samples)
        return logits.at[_rows(logits), tokens].add(values, mode="drop")


@pytree
class SuppressTokens(LogitsProcessor):
    """Forbids each slot's suppressed tokens."""

    def __call__(self, state, logits, context: LogitsContext):
        tokens = take(context.controls.suppressed, context.samples)
        return logits.at[_rows(logits), tokens].set(-jnp.inf, mode="drop")


@pytree
class MinNewTokens(LogitsProcessor):
    """Forbids end tokens until each slot has its least number of new tokens."""

    def __call__(self, state, logits, context: LogitsContext):
        least = context.controls.min_new_tokens - (context.lengths - context.prompt_lengths)
        too_early = context.num_drafted < take(least, context.samples)
        ends = context.end_token_ids
        kept = jnp.where(too_early[:, None], -jnp.inf, logits[:, ends])
        return logits.at[:, ends].set(kept)


@pytree
class RepetitionPenalty(LogitsProcessor):
    """Divides positive logits of tokens in a row's context, and multiplies the others.

    The state says which tokens each slot's prompt and emitted tokens hold. [b, v]
    """

    vocab_size: int = dataclasses.field(metadata={"static": True})

    def init(self, prompts, prompt_lengths) -> Bool[Array, "b v"]:
        seen = jnp.zeros((len(prompts), self.vocab_size), bool)
        return self.advance(seen, prompts, prompt_lengths)

    def __call__(self, state, logits, context: LogitsContext):
        seen = take(state, context.samples)
        for is_token in _drafted_before(logits, context):
            seen |= is_token
        penalty = take(context.controls.repetition_penalty, context.samples)[:, None]
        penalised = jnp.where(logits < 0, logits * penalty, logits / penalty)
        return jnp.where(seen, penalised, logits)

    def advance(self, state, tokens, counts):
        return state.at[_emitted(state, tokens, counts)].set(True, mode="drop")


@pytree
class CountPenalties(LogitsProcessor):
    """Subtracts the presence and the frequency penalty of tokens that were emitted.

    The state counts how often each slot has emitted each token. [b, v]
    """

    vocab_size: int = dataclasses.field(metadata={"static": True})

    def init(self, prompts, prompt_lengths) -> Int32[Array, "b v"]:
        return jnp.zeros((len(prompts), self.vocab_size), jnp.int32)

    def __call__(self, state, logits, context: LogitsContext):
        counts = take(state, context.samples)
        for is_token in _drafted_before(logits, context):
            counts += is_token.astype(jnp.int32)
        for penalty, times in (
            (context.controls.frequency_penalty, counts),
            (context.controls.presence_penalty, counts > 0),
        ):
            if penalty is not None:
                logits -= take(penalty, context.samples)[:, None] * times.astype(logits.dtype)
        return logits

    def advance(self, state, tokens, counts):
        return state.at[_emitted(state, tokens, counts)].add(1, mode="drop")


def _rows(logits: Array) -> Array:
    return jnp.arange(logits.shape[0])[:, None]


def _drafted_before(logits: Array, context: LogitsContext) -> list[Bool[Array, "r v"]]:
    """For each place of the draft, the token that a row's slot has drafted there before the row."""
    drafted = take(context.drafted, context.samples)
    index = jnp.arange(logits.shape[1])
    places = range(drafted.shape[1])
    is_before = [(place < context.num_drafted)[:, None] for place in places]
    return [is_before[place] & (index == drafted[:, place, None]) for place in places]


def _emitted(state: Array, tokens: Array, counts: Array) -> tuple[Any, Any]:
    """Places of the slots' first counts[s] tokens in a state [b, v]; others are out of range."""
    is_emitted = jnp.arange(tokens.shape[1]) < counts[:, None]
    return _rows(state), jnp.where(is_emitted, tokens, state.shape[1])
