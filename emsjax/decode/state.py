"""The state of decoding: what the next step needs, and the one way in which a sequence begins."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Key

from emsjax.decode.cache import Cache, KVCache
from emsjax.decode.run import Run
from emsjax.returned import check_state
from emsjax.sampling import LogitsContext, Sampling, Settings
from emsjax.sampling.automaton import TokenAutomaton
from emsjax.sampling.processors import Processing, initial_states
from emsjax.values import choose_slots, merge_fresh, pytree
from pallas_kernels.common.indexing import take


@pytree
class Counters:
    """Statistics so far; everything except the totals of rows and calls is per sample."""

    num_steps: Int32[Array, "b"]  # steps the sample took part in
    num_drafted: Int32[Array, "b"]  # draft tokens fed to the target
    num_accepted: Int32[Array, "b"]
    num_invalid: Int32[Array, "b"]  # draft tokens whose `probs` are no distributions
    accepted_histogram: Int32[Array, "b k1"]  # steps by number of accepted tokens, 0..k
    model_calls: Int32[Array, ""]
    real_rows: Int32[Array, ""]
    padding_rows: Int32[Array, ""]

    @classmethod
    def init(cls, batch: int, max_draft_tokens: int) -> "Counters":
        zeros = lambda *shape: jnp.zeros(shape, jnp.int32)
        histogram = zeros(batch, max_draft_tokens + 1)
        return cls(*(zeros(batch) for _ in range(4)), histogram, *(zeros() for _ in range(3)))

    @property
    def max_draft_tokens(self) -> int:
        """Static limit of the tokens that a sample drafts in a step."""
        return self.accepted_histogram.shape[1] - 1

    def cleared(self, fresh: Bool[Array, "b"]) -> "Counters":
        """The counters with those of slots with `fresh` reset to 0."""
        zero = lambda x: choose_slots(fresh, jnp.zeros_like(x), x) if x.ndim else x
        return jax.tree.map(zero, self)


@pytree
class Common:
    """What all sequences of a run share.

    Attributes:
        end_token_ids: tokens that end a sequence.
        stops: the automaton that finds stops among new tokens; None: there are none.
        top_logprobs: number n of likeliest tokens to keep at every place; static.
    """

    end_token_ids: Int32[Array | np.ndarray, "m"]
    stops: TokenAutomaton | None = None
    top_logprobs: int = dataclasses.field(default=0, metadata={"static": True})


@pytree
class DecodeState:
    """Everything the next step needs. `cache` holds `lengths - 1` tokens of a sample, or fewer if
    part of its prompt is still to be fed.

    Attributes:
        tokens: prompt and emitted tokens; arbitrary from `lengths` on.
        logprobs: log-probabilities of emitted tokens, at the same places; arbitrary elsewhere.
        lengths: tokens of each sample so far, prompt included.
        prompt_lengths: tokens of each prompt.
        length_limits: the length at which a sample stops.
        active: samples that still decode.
        end: why a sample ended before its limit: see `End`.
        sequence_ids: the sequence each slot serves; -1 for an idle slot.
        keys: the random key of each slot's sequence.
        settings: one row per slot.
        stop_states: the slots' states in the automaton of stops; None: there are no stops.
        top_tokens, top_logprobs: the n likeliest tokens at the places of emitted tokens.
        common: what all sequences share.
        cache: the target model's committed K/V.
        drafter_state, policy_state: the states of the drafter and the policy.
        processor_states: the states of all logits processors.
        counters: statistics.
    """

    tokens: Int32[Array, "b t"]
    logprobs: Float[Array, "b t"]
    lengths: Int32[Array, "b"]
    prompt_lengths: Int32[Array, "b"]
    length_limits: Int32[Array, "b"]
    active: Bool[Array, "b"]
    end: Int32[Array, "b"]
    sequence_ids: Int32[Array, "b"]
    keys: Key[Array, "b"]
    settings: Settings
    stop_states: Int32[Array, "b"] | None
    top_tokens: Int32[Array, "b t n"]
    top_logprobs: Float[Array, "b t n"]
    common: Common
    cache: Cache
    drafter_state: Any
    policy_state: Any
    processor_states: tuple[Any, ...]
    counters: Counters

    @property
    def sampling(self) -> Sampling | None:
        """How tokens are drawn, or None if all slots decode greedily."""
        return self.settings.sampling

    @property
    def end_token_ids(self) -> Int32[Array, "m"]:
        """Tokens that end a sequence."""
        return self.common.end_token_ids

    def processing(self, run: Run) -> Processing:
        """The function through which logits pass in the next step."""
        controls, ends = self.settings.controls, self.end_token_ids
        context = LogitsContext(self.tokens, self.lengths, self.prompt_lengths, ends, controls)
        processors, vocab_size = run.all_processors(controls), run.model.config.vocab_size
        return Processing(processors, self.processor_states, context, vocab_size)


@pytree
class StepInfo:
    """What one step did: diagnostics, not needed by the next step.

    Attributes:
        tokens: sample s emitted the first num_emitted[s] of its row; the others are arbitrary.
        num_drafted: draft tokens that were fed, per sample.
        num_accepted: draft tokens that were accepted.
        num_emitted: new tokens of each sample; 0 for samples that had finished.
        num_rows: rows of the bucket, padding included.
    """

    tokens: Int32[Array, "b k1"]
    num_drafted: Int32[Array, "b"]
    num_accepted: Int32[Array, "b"]
    num_emitted: Int32[Array, "b"]
    num_rows: Int32[Array, ""]


@pytree
class Sequences:
    """Sequences before their first step, n of them, on the device or the host.

    Attributes:
        tokens: prompts, padded.
        prompt_lengths: tokens of each prompt.
        max_new_tokens: tokens that each may emit.
        sequence_ids: sequence i continues prompt i // num_sequences; -1: no sequence.
        keys: random keys.
        settings: one row per sequence.
    """

    tokens: Int32[Array | np.ndarray, "n t"]
    prompt_lengths: Int32[Array | np.ndarray, "n"]
    max_new_tokens: Int32[Array | np.ndarray, "n"]
    sequence_ids: Int32[Array | np.ndarray, "n"]
    keys: Key[Array, "n"]
    settings: Settings

    @classmethod
    def none(cls, keys: Key[Array, "n"], settings: Settings, max_len: int) -> "Sequences":
        """The content of idle slots: arrays of this size without sequences."""
        count = keys.shape[0]
        one = jnp.ones(count, jnp.int32)  # a prompt of one token has nothing to prefill
        tokens = jnp.zeros((count, max_len), jnp.int32)
        return cls(tokens, one, 0 * one, -one, keys, settings)

    def at(self, index: Int32[Array, "m"]) -> "Sequences":
        """Selects sequences by index."""
        return jax.tree.map(lambda x: take(x, index), self)

    def beginning(self) -> dict[str, Any]:
        """The fields of a `DecodeState` that a sequence sets when it begins."""
        return {
            "tokens": self.tokens,
            "lengths": self.prompt_lengths,
            "prompt_lengths": self.prompt_lengths,
            "length_limits": self.prompt_lengths + self.max_new_tokens,
            "active": self.sequence_ids >= 0,
            "end": jnp.zeros(self.sequence_ids.shape, jnp.int32),
            "sequence_ids": self.sequence_ids,
            "keys": self.keys,
            "settings": self.settings,
            "stop_states": self.settings.stop_states,
        }


def begin(
    run: Run,
    sequences: Sequences,
    common: Common,
    cache: KVCache,
    drafter_state: Any,
) -> DecodeState:
    """The state before the first step, with one sequence in each slot; -1 leaves a slot idle.

    Args:
        cache: the cache of the prefilled prompts.
        drafter_state: the state from `Drafter.init`; () without a drafter.
    """
    slots, k = sequences.prompt_lengths.shape[0], run.max_draft_tokens
    settings, tokens = sequences.settings, sequences.tokens
    processors = run.all_processors(settings.controls)
    top = (*tokens.shape, common.top_logprobs)
    return DecodeState(
        **sequences.beginning(),
        logprobs=jnp.zeros(tokens.shape, jnp.float32),
        top_tokens=jnp.zeros(top, jnp.int32),
        top_logprobs=jnp.zeros(top, jnp.float32),
        common=common,
        cache=run.layout.arrange(cache),
        drafter_state=drafter_state,
        policy_state=() if run.policy is None else run.policy.init(slots, k),
        processor_states=initial_states(processors, tokens, sequences.prompt_lengths, settings),
        counters=Counters.init(slots, k),
    )


def admit(
    run: Run, state: DecodeState, sequences: Sequences, fresh: Bool[Array, "b"]
) -> DecodeState:
    """The state in which slots with `fresh` begin new sequences, with nothing cached yet.

    Args:
        sequences: one per slot; sequences of other slots are ignored.
    """
    merge = lambda new, old: choose_slots(fresh, new, old)
    begun = sequences.beginning()
    merged = {name: jax.tree.map(merge, begun[name], getattr(state, name)) for name in begun}
    drafter_state, policy_state = state.drafter_state, state.policy_state
    if run.drafter is not None:
        drafter_state = run.drafter.admit(drafter_state, merged["tokens"], merged["lengths"], fresh)
        check_state("the drafter's", "admit", state.drafter_state, drafter_state)
    if run.policy is not None:
        k = state.counters.max_draft_tokens
        policy_state = admitted_policy_state(run.policy, policy_state, fresh, k)
    settings, cache = merged["settings"], state.cache
    processors = run.all_processors(settings.controls)
    begun_states = initial_states(processors, merged["tokens"], merged["lengths"], settings)
    return dataclasses.replace(
        state,
        **merged,
        cache=dataclasses.replace(cache, lengths=jnp.where(fresh, 0, cache.lengths)),
        drafter_state=drafter_state,
        policy_state=policy_state,
        processor_states=merge_fresh(fresh, begun_states, state.processor_states),
        counters=state.counters.cleared(fresh),
    )


def admitted_policy_state(policy, state: Any, fresh: Bool[Array, "b"], k: int) -> Any:
    """The policy's state in which slots with `fresh` begin new sequences."""
    admitted = policy.admit(state, fresh)
    if admitted is None:  # the default
        return merge_fresh(fresh, policy.init(fresh.shape[0], k), state)
    check_state("the policy's", "admit", state, admitted)
    return admitted


def is_ready(state: DecodeState) -> Bool[Array, "b"]:
    """The active samples whose prompts are cached."""
    return state.active & (state.cache.lengths == state.lengths - 1)
