"""Logits processors: what changes logits before a token is chosen, at every verified row.

Axis legend: b = slots, k = draft tokens of a slot, r = rows of logits, v = vocabulary.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from emsjax.returned import check_alike, check_state
from emsjax.sampling.settings import Controls, Settings
from emsjax.verification import leading
from pallas_kernels.common.indexing import take


class LogitsContext(NamedTuple):
    """What a logits processor knows about each row of logits.

    The row's tokens are tokens[samples[r], :lengths[samples[r]]], the prompt and the emitted
    tokens, followed by the first num_drafted[r] entries of drafted[samples[r]].

    Attributes:
        tokens: the slots' tokens; arbitrary from `lengths` on.
        lengths: tokens of each slot, draft tokens not included.
        prompt_lengths: tokens of each slot's prompt.
        end_token_ids: tokens that end a sequence.
        controls: the slots' settings, or None.
        drafted: the slots' draft tokens.
        samples: slot of each row.
        num_drafted: draft tokens before the token that each row predicts.
    """

    tokens: Int32[Array, "b t"]
    lengths: Int32[Array, "b"]
    prompt_lengths: Int32[Array, "b"]
    end_token_ids: Int32[Array, "m"]
    controls: Controls | None
    drafted: Int32[Array, "b k"] | None = None
    samples: Int32[Array, "r"] | None = None
    num_drafted: Int32[Array, "r"] | None = None

    def last(self, count: int) -> Int32[Array, "r n"]:
        """The last `count` tokens before each row's own, in order; -1 where there are fewer."""
        lengths = take(self.lengths, self.samples)[:, None]
        places = lengths + self.num_drafted[:, None] + jnp.arange(-count, 0)
        samples = self.samples[:, None]
        before = take(self.tokens, samples, jnp.clip(places, 0, self.tokens.shape[1] - 1))
        drafted = jnp.pad(self.drafted, ((0, 0), (0, 1)))  # a place, also without a drafter
        after = take(drafted, samples, jnp.clip(places - lengths, 0, drafted.shape[1] - 1))
        return jnp.where(places < 0, -1, jnp.where(places < lengths, before, after))


class LogitsProcessor:
    """Changes the logits from which tokens are chosen, with a state for each sequence.

    All methods are pure functions on arrays, traced once into the device loop. The processor may be
    a pytree (its arrays are then arguments of the compiled loop) or any other object (then it is a
    constant of it). It is applied to the target's logits at every row, before anything is drawn or
    compared, and to a draft model's logits, so that speculative output is that of plain decoding
    with the same processor.

    Only `__call__` has to be written.

    Attributes:
        num_prompts: *host.* number of prompts for which it has values of their own, as many as the
            call has; None: it is the same for all.
    """

    num_prompts: int | None = None

    def init(self, prompts: Int32[Array, "b t"], prompt_lengths: Int32[Array, "b"]) -> Any:
        """The state before the first new token: arrays whose first axis is the slots'."""
        return ()

    def init_for(
        self,
        prompts: Int32[Array, "b t"],
        prompt_lengths: Int32[Array, "b"],
        requests: Int32[Array, "b"],
    ) -> Any:
        """`init` for a processor with `num_prompts`.

        Args:
            requests: the place of each slot's prompt among the prompts of the call; arbitrary in
                slots without a sequence.
        """
        return self.init(prompts, prompt_lengths)

    def __call__(
        self, state: Any, logits: Float[Array, "r v"], context: LogitsContext
    ) -> Float[Array, "r v"]:
        """The logits that the rows' tokens are chosen from; -inf: a token that is not allowed.

        Args:
            state: the state of each slot after its emitted tokens, without draft tokens; those are
                in `context.drafted`.
            logits: of r rows, in float32.
        """
        raise NotImplementedError(f"{type(self).__name__} must define __call__")

    def advance(self, state: Any, tokens: Int32[Array, "b n"], counts: Int32[Array, "b"]) -> Any:
        """The state after slot s has emitted tokens[s, :counts[s]]; no tokens change nothing."""
        return state

    def force(
        self, state: Any, tokens: Int32[Array, "b k"]
    ) -> tuple[Int32[Array, "b k"], Bool[Array, "b k"]]:
        """A draft in which tokens that are the only ones allowed have replaced others.

        They are drafted for nothing, whatever the drafter.

        Args:
            tokens: the draft.

        Returns:
            The tokens, and which places have such tokens.
        """
        return tokens, jnp.zeros(tokens.shape, bool)

    def check_requests(self, end_token_ids: np.ndarray) -> None:
        """*Host.* Raises ValueError for end tokens with which this processor cannot work."""


class Processing(NamedTuple):
    """The processors of a run with their states: a function of logits within one step.

    Attributes:
        processors: in the order in which they are applied.
        states: one state for each.
        context: what is known of the slots.
        vocab_size: the target's vocabulary size.
    """

    processors: tuple[LogitsProcessor, ...]
    states: tuple[Any, ...]
    context: LogitsContext
    vocab_size: int

    def __call__(
        self,
        logits: Float[Array, "r v"],
        drafted: Int32[Array, "b k"],
        samples: Int32[Array, "r"],
        num_drafted: Int32[Array, "r"],
    ) -> Float[Array, "r v"]:
        """The logits after all processors.

        Args:
            logits: a draft model's may have fewer columns than the target's vocabulary, which
                processors see in full.
            drafted, samples, num_drafted: see `LogitsContext`.

        Raises:
            ValueError: a processor returns another shape or type.
        """
        if not self.processors:
            return logits
        width, rest = logits.shape[1], self.vocab_size - logits.shape[1]
        logits = jnp.pad(logits, ((0, 0), (0, rest)), constant_values=-jnp.inf)
        context = self.context._replace(drafted=drafted, samples=samples, num_drafted=num_drafted)
        for processor, state in zip(self.processors, self.states, strict=True):
            rule = f"{name_of(processor)} must return logits like those it is given"
            logits = check_alike(rule, processor(state, logits, context), logits)
        return logits[:, :width]

    def of_rows(
        self, logits: Float[Array, "r v"], drafted: Int32[Array, "b k"], rows: Any, tree: Any
    ) -> Float[Array, "r v"]:
        """The logits of verified rows after all processors.

        Args:
            drafted: the draft tokens.
            rows: the `PackedRows`.
            tree: the `Tree` of the draft tokens; None: they are chains.
        """
        if tree is None:
            return self(logits, drafted, rows.samples, rows.within)
        # Each row has drafted tokens of its own.
        paths, depths = rows.gather(tree.paths(drafted)), rows.gather(tree.depths)
        return self._with_rows(rows.samples)(logits, paths, jnp.arange(len(paths)), depths)

    def _with_rows(self, samples: Int32[Array, "r"]) -> "Processing":
        """The same with rows as slots: row r has the state and the context of slot samples[r]."""
        slots = self.context.lengths.shape
        of_slots = lambda x: hasattr(x, "shape") and x.shape[:1] == slots
        rows = lambda tree: jax.tree.map(lambda x: take(x, samples) if of_slots(x) else x, tree)
        context = rows(self.context._replace(end_token_ids=None))
        context = context._replace(end_token_ids=self.context.end_token_ids)
        return self._replace(states=rows(self.states), context=context)

    def force(
        self, tokens: Int32[Array, "b k"], counts: Int32[Array, "b"], limits: Int32[Array, "b"]
    ) -> tuple[Int32[Array, "b k"], Bool[Array, "b k"], Int32[Array, "b"]]:
        """A draft in which tokens that are the only ones allowed have replaced others.

        Args:
            tokens: the draft, of which slot s verifies the first counts[s] tokens.
            limits: the most tokens that each slot may verify.

        Returns:
            The tokens, which places have such tokens, and the number of tokens to verify. It grows
            by such tokens. What was drafted behind a replaced token is dropped.
        """
        before, forced = tokens, jnp.zeros(tokens.shape, bool)
        for processor, state in zip(self.processors, self.states, strict=True):
            tokens, found = processor.force(state, tokens)
            forced |= found
        drafted = jnp.arange(tokens.shape[1]) < counts[:, None]
        replaced = forced & ((tokens != before) | ~drafted)
        is_behind = jnp.cumsum(replaced, axis=1) - replaced.astype(jnp.int32) > 0
        usable = leading(forced | (drafted & ~is_behind))
        return tokens, forced, jnp.minimum(usable, limits)

    def advance(self, tokens: Int32[Array, "b n"], counts: Int32[Array, "b"]) -> tuple[Any, ...]:
        """The states after slot s has emitted tokens[s, :counts[s]].

        Raises:
            ValueError: a processor returns a state of another structure, shape or type.
        """
        states = []
        for processor, state in zip(self.processors, self.states, strict=True):
            after = processor.advance(state, tokens, counts)
            check_state(f"{name_of(processor)}'s", "advance", state, after)
            states.append(after)
        return tuple(states)


def name_of(processor: Any) -> str:
    """The processor's class in messages."""
    return f"the processor {type(getattr(processor, 'wrapped', processor)).__name__}"


def initial_states(
    processors: tuple[LogitsProcessor, ...],
    prompts: Int32[Array, "b t"],
    prompt_lengths: Int32[Array, "b"],
    settings: Settings,
) -> tuple[Any, ...]:
    """The processors' states before the first new token.

    Args:
        settings: the slots' rows. Without `request_ids`, either no processor has values for each
            prompt or no slot has a sequence.
    """
    requests = settings.request_ids
    if requests is None:
        requests = jnp.zeros_like(prompt_lengths)
    return tuple(one.init_for(prompts, prompt_lengths, requests) for one in processors)


def prompt_numbers(
    processors: Sequence[LogitsProcessor], num_prompts: int
) -> Int32[np.ndarray, "n"] | None:
    """*Host.* The number of each prompt; None: no processor has values for each.

    Raises:
        ValueError: one has values for another number of prompts.
    """
    for processor in (own := [one for one in processors if one.num_prompts is not None]):
        if processor.num_prompts != num_prompts:
            raise ValueError(
                f"{name_of(processor)} must have values for each prompt: got "
                f"{processor.num_prompts} for {num_prompts} prompts"
            )
    return np.arange(num_prompts, dtype=np.int32) if own else None
