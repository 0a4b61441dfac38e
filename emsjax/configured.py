"""The settings of JAX that the library needs, whatever a user or the environment has set.

Public entries run under them and restore the user's own, and so does code of users that they call,
such as a drafter's methods or an iterator of prompts.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

import jax

from pallas_kernels.common.numerics import current_numerics, numerics

Result = TypeVar("Result")
# Decoding counts in 32 bits, and the bits of other generators depend on the place in the batch.
NEEDED = {
    "jax_enable_x64": (False, jax.enable_x64),
    "jax_default_prng_impl": ("threefry2x32", jax.default_prng_impl),
    "jax_numpy_rank_promotion": ("allow", jax.numpy_rank_promotion),
    "jax_debug_key_reuse": (False, jax.debug_key_reuse),
}
NO_MESH = jax.sharding.AbstractMesh((), ())


@contextlib.contextmanager
def own_settings(chosen: str | None = None) -> Iterator[None]:
    """Sets what the library needs, for this thread, and restores the user's settings.

    Args:
        chosen: numerics: see `pallas_kernels.numerics`.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(numerics(chosen))
        for name, (needed, setting) in NEEDED.items():
            if getattr(jax.config, name) != needed:
                stack.enter_context(setting(needed))
        if jax.sharding.get_abstract_mesh().axis_names:  # models have their own, if any
            stack.enter_context(jax.sharding.use_abstract_mesh(NO_MESH))
        yield


def configured(function: Callable[..., Result]) -> Callable[..., Result]:
    """The function, run under `own_settings`, with the numerics of its argument of that name."""

    asked = inspect.signature(function).parameters.get("numerics")
    default = None if asked is None else asked.default

    @functools.wraps(function)
    def run(*args, **options):
        with own_settings(options.get("numerics", default)):
            return function(*args, **options)

    return run


def configured_generator(results: Generator[Result, None, None]) -> Generator[Result, None, None]:
    """Yields the results; the generator runs under `own_settings`, its consumer does not.

    It keeps the numerics of now. Closing it closes `results`.
    """
    return _configured(results, current_numerics())


def _configured(
    results: Generator[Result, None, None], chosen: str
) -> Generator[Result, None, None]:
    try:
        while True:
            with own_settings(chosen):
                try:
                    result = next(results)
                except StopIteration:
                    return
            yield result
    finally:
        with own_settings(chosen):
            results.close()
