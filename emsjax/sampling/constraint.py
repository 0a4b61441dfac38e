"""A logits processor that allows only what a token automaton reads."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from emsjax.sampling.automaton import TokenAutomaton
from emsjax.sampling.processors import LogitsContext, LogitsProcessor
from emsjax.values import pytree
from pallas_kernels.common.indexing import take, take_in_rows


@pytree
class Constraint(LogitsProcessor):
    """Confines new tokens to an automaton; an end token may follow where its text is complete.

    The state is the automaton's. `emsjax.constraints` makes constraints.

    Attributes:
        automaton: reads the new tokens from state 0 on.
        only: the token of each state that allows no other and is not final; -1 for other states.
    """

    automaton: TokenAutomaton
    only: Int32[Array | np.ndarray, "s"]

    @classmethod
    def of(cls, automaton: TokenAutomaton) -> "Constraint":
        """The constraint of an automaton in host arrays."""
        table, classes = np.asarray(automaton.table), np.asarray(automaton.classes)
        members = np.bincount(classes, minlength=table.shape[1])
        allowed = table >= 0
        is_forced = (allowed @ members == 1) & ~np.asarray(automaton.final)
        first = np.zeros(table.shape[1], np.int32)  # a token of each class
        first[classes[::-1]] = np.arange(len(classes), dtype=np.int32)[::-1]
        return cls(automaton, np.where(is_forced, first[allowed.argmax(axis=1)], -1))

    def init(self, prompts, prompt_lengths) -> Int32[Array, "b"]:
        return jnp.zeros(len(prompts), jnp.int32)

    def __call__(self, state, logits, context: LogitsContext):
        walked = self.automaton.walk(state, context.drafted)
        places = jnp.clip(context.num_drafted, 0, walked.shape[1] - 1)
        states = take(walked, context.samples, places)
        allowed, width = self.automaton.allowed(states), logits.shape[1]
        missing = max(0, width - allowed.shape[1])  # a model's vocabulary may be padded
        allowed = jnp.pad(allowed, ((0, 0), (0, missing)))[:, :width]
        confined = jnp.where(allowed, logits, -jnp.inf)
        ends, is_final = context.end_token_ids, self.automaton.is_final(states)[:, None]
        return confined.at[:, ends].set(jnp.where(is_final, logits[:, ends], -jnp.inf))

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
        if not end_token_ids.size:
            raise ValueError(
                "a constraint needs an end token, which follows a complete text: eos_token_ids is "
                "empty"
            )
