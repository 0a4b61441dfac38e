"""Numbers that are not finite end a training run before they are saved or measured."""

from typing import Any

import jax
import jax.numpy as jnp


class NonFiniteError(FloatingPointError):
    """A loss, a gradient, a model's parameters or its logits are NaN or infinite."""


@jax.jit
def all_finite(tree: Any) -> jax.Array:
    """Whether all floating-point numbers of a pytree are finite, as a boolean on the device."""
    numbers = (x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating))
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in numbers], bool))


def check_finite(what: str, tree: Any) -> None:
    """Check the floating-point numbers of a pytree.

    Args:
        what: subject of the error message, in the plural.

    Raises:
        NonFiniteError: one of them is not finite.
    """
    if not all_finite(tree):
        raise NonFiniteError(f"{what} are not finite")


def check_ends(name: str, finish_reasons: list[str]) -> None:
    """Check that a model could continue all its prompts.

    Args:
        name: the argument that holds the prompts.

    Raises:
        NonFiniteError: the model's logits are not finite for one of them.
    """
    bad = [i for i, reason in enumerate(finish_reasons) if reason == "error"]
    if bad:
        raise NonFiniteError(
            f"the target's logits are not finite for {len(bad)} of {len(finish_reasons)} "
            f"{name}; the first is {name}[{bad[0]}]"
        )
