"""Selects the kernels of the forward and the commit."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Bool, Int32

import pallas_kernels
from pallas_kernels.attention import IMPLEMENTATIONS as ATTENTIONS
from pallas_kernels.cache_update import IMPLEMENTATIONS as UPDATES
from pallas_kernels.common.implementations import choose


@dataclasses.dataclass(frozen=True)
class OwnAttention:
    """This library's attention with a chosen implementation; equal instances compile once."""

    implementation: str

    def __call__(self, *args, **options) -> Array:
        return pallas_kernels.ragged_attention(*args, implementation=self.implementation, **options)


@dataclasses.dataclass(frozen=True)
class OwnUpdate:
    """This library's cache update with a chosen implementation."""

    implementation: str | None

    def __call__(self, *args) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        return pallas_kernels.update_kv_caches(*args, implementation=self.implementation)


class Kernels(NamedTuple):
    """The attention and the cache update of one run; static."""

    attention: Callable
    update: Callable


class Visible(NamedTuple):
    """Which committed entries attention sees.

    Attributes:
        lengths: entries from here on are undefined.
        mask: visible entries; None: all.
    """

    lengths: Int32[Array, "b"]
    mask: Bool[Array, "b l"] | None = None


def resolve_kernels(attention_implementation: str | Callable | None) -> Kernels:
    """Resolves a name, None (the device's default) or the user's own attention to kernels.

    Raises:
        ValueError: an unknown name, or one that the device cannot run.
    """
    if callable(attention_implementation) and not isinstance(attention_implementation, type):
        return Kernels(attention_implementation, OwnUpdate(None))
    try:
        name = choose(attention_implementation, ATTENTIONS)
    except ValueError as error:
        # A kernel called by itself can be interpreted; a run cannot.
        advice = str(error).removesuffix(" or interpret=True")
        raise ValueError(f"attention_{advice}") from None
    return Kernels(OwnAttention(name), OwnUpdate(name if name in UPDATES else None))
