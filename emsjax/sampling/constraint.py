"""A logits processor that allows only what a token automaton reads."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from emsjax.sampling.automaton import REFUSED, TokenAutomaton
from emsjax.sampling.processors import LogitsContext, LogitsProcessor
from emsjax.values import pytree
from pallas_kernels.common.indexing import take, take_in_rows

FREE = -2  # the state of a prompt that is not confined; the automaton stays in it


@pytree
class Constraint(LogitsProcessor):
    """Confines new tokens to an automaton; an end token may follow where its text is complete.

    The state is the automaton's. `emsjax.constraints` makes constraints.

    Attributes:
        automaton: reads the new tokens.
        only: the token of each state that allows no other and is not final; -1 for other states.
        starts: the state in which each prompt enters the automaton, `FREE` for a prompt that is not
            confined; entries of -1 at the end stand for no prompt. None: all enter state 0.
    """

    automaton: TokenAutomaton
    only: Int32[Array | np.ndarray, "s"]
    starts: Int32[Array | np.ndarray, "p"] | None = None

    @classmethod
    def of(cls, automaton: TokenAutomaton, starts: np.ndarray | None = None) -> "Constraint":
        """The constraint of an automaton, in host arrays."""
        table, classes = np.asarray(automaton.table), np.asarray(automaton.classes)
        members = np.bincount(classes, minlength=table.shape[1])
        allowed = table >= 0
        is_forced = (allowed @ members == 1) & ~np.asarray(automaton.final)
        first = np.zeros(table.shape[1], np.int32)  # a token of each class
        first[classes[::-1]] = np.arange(len(classes), dtype=np.int32)[::-1]
        return cls(automaton, np.where(is_forced, first[allowed.argmax(axis=1)], -1), starts)

    @property
    def num_prompts(self) -> int | None:
        """*Host.* Number of prompts that have starts of their own; None: all enter state 0."""
        return None if self.starts is None else int((np.asarray(self.starts) != REFUSED).sum())

    def init(self, prompts, prompt_lengths) -> Int32[Array, "b"]:
        return jnp.zeros(len(prompts), jnp.int32)

    def init_for(self, prompts, prompt_lengths, requests) -> Int32[Array, "b"]:
        if self.starts is None:
            return self.init(prompts, prompt_lengths)
        return take(jnp.asarray(self.starts), requests)

    def __call__(self, state, logits, context: LogitsContext):
        walked = self.automaton.walk(state, context.drafted)
        places = jnp.clip(context.num_drafted, 0, walked.shape[1] - 1)
        states = take(walked, context.samples, places)
        allowed, width = self.automaton.allowed(states), logits.shape[1]
        missing = max(0, width - allowed.shape[1])  # a model's vocabulary may be padded
        allowed = jnp.pad(allowed, ((0, 0), (0, missing)))[:, :width]
        is_free = (states == FREE)[:, None]
        confined = jnp.where(allowed | is_free, logits, -jnp.inf)
        ends, may_end = context.end_token_ids, self.automaton.is_final(states)[:, None] | is_free
        return confined.at[:, ends].set(jnp.where(may_end, logits[:, ends], -jnp.inf))

    def advance(self, state, tokens, counts):
        walked = self.automaton.walk(state, tokens)
        return take_in_rows(walked, counts[:, None])[:, 0]

    def force(self, state, tokens):
        forced = []
        for place in range(tokens.shape[1]):
            only = jnp.where(state >= 0, take(jnp.asarray(self.only), jnp.maximum(state, 0)), -1)
            forced.append(only >= 0)
            tokens = tokens.at[:, place].set(jnp.where(only >= 0, only, tokens[:, place]))
            state = self.automaton.step(state, tokens[:, place])
        return tokens, jnp.stack(forced, axis=1) if forced else jnp.zeros(tokens.shape, bool)

    def check_requests(self, end_token_ids: np.ndarray) -> None:
        """Raises ValueError unless a complete text can end."""
        is_used = self.starts is None or (np.asarray(self.starts) >= 0).any()
        if is_used and not end_token_ids.size:
            raise ValueError(
                "a constraint needs an end token, which follows a complete text: eos_token_ids is "
                "empty"
            )
