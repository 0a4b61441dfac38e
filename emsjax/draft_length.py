"""Policies that limit how many tokens are drafted, per sample and step."""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from emsjax.checks import check_at_least


@runtime_checkable
class DraftLength(Protocol):
    """A draft-length policy: pure functions, run inside the device loop.

    The effective limit is the smaller of the policy's and the drafter's.
    """

    def init(self, batch: int) -> Any:
        """State for `batch` samples."""
        ...

    def lengths(self, state: Any, active: Bool[Array, "b"]) -> Int32[Array, "b"]:
        """How many tokens each sample may draft in this step; 0 drafts nothing."""
        ...

    def update(
        self, state: Any, num_drafted: Int32[Array, "b"], num_accepted: Int32[Array, "b"]
    ) -> Any:
        """State after a step that fed `num_drafted` draft tokens and kept `num_accepted`."""
        ...


@jax.tree_util.register_pytree_node_class
class FixedLength:
    """Up to `k` draft tokens for every sample in every step; 0 switches drafting off.

    The length is traced data: another k needs no new compilation.

    Raises:
        ValueError: k is no integer, or negative.
    """

    def __init__(self, k: int):
        self.k = check_at_least("k", k, 0)

    def tree_flatten(self):
        return (self.k,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        self = object.__new__(cls)
        (self.k,) = children
        return self

    def init(self, batch: int) -> tuple[()]:
        return ()

    def lengths(self, state, active):
        return jnp.full(active.shape, self.k, jnp.int32)

    def update(self, state, num_drafted, num_accepted):
        return state
