"""Which kernels a forward and a commit use."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

import pallas_kernels
from pallas_kernels.attention import IMPLEMENTATIONS as ATTENTIONS
from pallas_kernels.cache_update import IMPLEMENTATIONS as UPDATES
from pallas_kernels.common.implementations import choose


class Kernels(NamedTuple):
    """The attention and the cache update of one run."""

    attention: Callable
    update: Callable


@dataclasses.dataclass(frozen=True)
class AttentionOfThree:
    """Attention whose queries, keys and values lie side by side, [r, 3 * h, d].

    Attributes:
        attention: a callable with the signature of `pallas_kernels.ragged_attention`, which alone
            takes them so; for others they are copied apart, and what they return is checked.
    """

    attention: Callable

    def __call__(self, qkv: Float[Array, "r n d"], *args, **options) -> Float[Array, "r h d"]:
        called = self.attention
        called = called.func if isinstance(called, functools.partial) else called
        if called is pallas_kernels.ragged_attention:
            return self.attention(qkv, None, None, *args, **options)
        query, key, value = jnp.split(qkv, 3, axis=1)
        return checked(self.attention(query, key, value, *args, **options), query)


def checked(output: Any, query: Float[Array, "r h d"]) -> Float[Array, "r h d"]:
    """What attention of a user's has returned for these queries.

    Raises:
        ValueError: no array, or one of another shape or dtype than the queries'.
    """
    is_array = hasattr(output, "dtype") and hasattr(output, "shape")
    kind = lambda x: f"{x.dtype}{list(x.shape)}"
    found = kind(output) if is_array else type(output).__name__
    if found != kind(query):
        raise ValueError(
            "attention_implementation must return [rows, heads, head_dim] in the query's dtype, "
            f"{kind(query)}, not {found}"
        )
    return output


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
