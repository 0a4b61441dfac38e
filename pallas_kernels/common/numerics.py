"""Whether the bits of a row may depend on the rows beside it.

Floating-point sums depend on their order. "fast" takes whatever order is fastest for the shapes of
a call. "invariant" has one order for each row, whatever the number of rows, the batch or the place
in it: the bits of a row then depend on its own sequence alone.
"""

import contextlib

import jax

FAST, INVARIANT = "fast", "invariant"
NUMERICS = (FAST, INVARIANT)

# A part of the key of JAX's caches, so that a function is compiled for each value.
_chosen = jax.make_user_context(default_value=FAST)


def numerics(name: str | None) -> contextlib.AbstractContextManager[None]:
    """A context in which operations use these numerics, as `jax.default_matmul_precision` is one.

    Args:
        name: "fast" or "invariant"; None: those of the context around it, which are fast if there
            is none.

    Raises:
        ValueError: the name is another.
    """
    check_numerics(name)
    return contextlib.nullcontext() if name is None else _chosen(name)


def check_numerics(name: str | None) -> None:
    """Raises ValueError unless these are known numerics, or None."""
    if name is not None and not (isinstance(name, str) and name in NUMERICS):
        known = " or ".join(map(repr, NUMERICS))
        raise ValueError(f"numerics must be {known}, or None for the context's, not {name!r}")


def current_numerics() -> str:
    """The numerics that operations use now: "fast" or "invariant"."""
    return _chosen.value


def is_invariant(name: str | None = None) -> bool:
    """Whether these numerics are "invariant"; None: the context's."""
    check_numerics(name)
    return (current_numerics() if name is None else name) == INVARIANT
