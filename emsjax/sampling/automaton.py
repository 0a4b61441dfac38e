"""Deterministic automata over tokens, as arrays on the device."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from emsjax.values import pytree
from emsjax.verification import leading
from pallas_kernels.common.indexing import take

REFUSED = -1  # the state after a token that is not allowed; other negative states also remain


@pytree
class TokenAutomaton:
    """A deterministic automaton that reads tokens.

    Tokens that behave alike in every state form a class, so the table has a column per class
    instead of one per token.

    Axis legend: v = vocabulary, c = classes of tokens, s = states.

    Attributes:
        classes: the class of each token.
        table: the state after a state and a token of a class; -1: the token is not allowed there.
        final: states in which what was read is complete.
    """

    classes: Int32[Array, "v"]
    table: Int32[Array, "s c"]
    final: Bool[Array, "s"]

    def step(self, states: Int32[Array, "*n"], tokens: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
        """The states after one token each. Negative states remain; tokens may have any value."""
        known = (states >= 0) & (tokens >= 0) & (tokens < self.classes.shape[0])
        classes = take(self.classes, jnp.clip(tokens, 0, self.classes.shape[0] - 1))
        after = take(self.table, jnp.maximum(states, 0), classes)
        return jnp.where(known, after, jnp.minimum(states, REFUSED))

    def walk(self, states: Int32[Array, "b"], tokens: Int32[Array, "b n"]) -> Int32[Array, "b n1"]:
        """The states before the first token and after each token; n1 = n + 1."""
        walked = [states]
        for place in range(tokens.shape[1]):
            walked.append(self.step(walked[-1], tokens[:, place]))
        return jnp.stack(walked, axis=1)

    def is_final(self, states: Int32[Array, "*n"]) -> Bool[Array, "*n"]:
        """Whether what was read up to these states is complete; False in negative states."""
        return (states >= 0) & take(self.final, jnp.maximum(states, 0))

    def search(
        self, states: Int32[Array, "b"], tokens: Int32[Array, "b n"], ignored: Int32[Array, "b"]
    ) -> tuple[Int32[Array, "b n1"], Int32[Array, "b"]]:
        """Finds the first token after which what was read is complete.

        Args:
            ignored: sample s cannot be complete after its first ignored[s] tokens.

        Returns:
            The states before the first token and after each, and the number of tokens up to that
            token, itself included; n + 1 if there is none.
        """
        walked, count = self.walk(states, tokens), jnp.arange(1, tokens.shape[1] + 1)
        complete = self.is_final(walked[:, 1:]) & (count > ignored[:, None])
        return walked, leading(~complete) + 1

    def allowed(self, states: Int32[Array, "r"]) -> Bool[Array, "r v"]:
        """The tokens that may follow; none in negative states."""
        after = take(self.table, jnp.maximum(states, 0))  # [r, c]
        return (states >= 0)[:, None] & (jnp.take(after, self.classes, axis=1, mode="clip") >= 0)
