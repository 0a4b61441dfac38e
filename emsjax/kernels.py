"""Which kernels a forward and a commit use."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import pallas_kernels
from pallas_kernels.implementations import choose
from pallas_kernels.ragged_attention import IMPLEMENTATIONS as ATTENTIONS
from pallas_kernels.update_kv_cache import IMPLEMENTATIONS as UPDATES


class Kernels(NamedTuple):
    """The attention and the cache update of one run."""

    attention: Callable
    update: Callable


def resolve_kernels(attention_implementation: str | Callable | None) -> Kernels:
    """Kernels by name, the device's default for None, or the user's own attention.

    Raises:
        ValueError: an unknown name, or one that the device cannot run.
    """
    if callable(attention_implementation):
        return Kernels(attention_implementation, pallas_kernels.update_kv_caches)
    try:
        name = choose(attention_implementation, ATTENTIONS)
    except ValueError as error:
        # Whoever calls a kernel can interpret it; a run cannot.
        advice = str(error).removesuffix(" or interpret=True")
        raise ValueError(f"attention_{advice}") from None
    bind = functools.partial
    return Kernels(
        bind(pallas_kernels.ragged_attention, implementation=name),
        bind(pallas_kernels.update_kv_caches, implementation=name if name in UPDATES else None),
    )
