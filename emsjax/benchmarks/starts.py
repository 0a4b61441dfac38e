"""States from which timed steps start: prompts whose keys and values are arbitrary.

A step takes the same time with any, and a prefill would have to be compiled for each batch size.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from emsjax.decode.cache import HEADS, KVCache, LayerCache
from emsjax.decode.layout import Layout
from emsjax.decode.state import DecodeState
from emsjax.engine.adapt import make_run
from emsjax.engine.group import begin_group
from emsjax.engine.preparation import check, check_memory
from emsjax.sampling import Sampling
from emsjax.tensor_parallel import TensorParallel
from pallas_kernels.common.narrow_rows import NarrowRows, round_rows


class MostRows(Layout):
    """No padding, and a single program, for steps that all feed the most rows that they may."""

    def row_counts(self, batch: int, k1: int) -> tuple[int, ...]:
        return (batch * k1,)


def arbitrary_state(
    model: Any,
    drafter: Any,
    prompts: np.ndarray,
    *,
    layout: Layout,
    attention: Any,
    draft_length: Any = None,
    max_new_tokens: int,
    sampling: Sampling | None = None,
) -> DecodeState:
    """A state as `emsjax.init_state` returns it, which decodes prompts without end tokens.

    Prompts are prefilled only if the drafter reads hidden states of them.

    Args:
        prompts: token ids, [slots, length].
        layout, attention, draft_length, max_new_tokens, sampling: as for `emsjax.init_state`.

    Raises:
        ValueError: see `emsjax.init_state`.
    """
    options = {"attention_implementation": attention, "layout": layout}
    run = make_run(model, drafter, draft_length, **options)
    asked = {"sampling": sampling, "key": jax.random.key(0), "eos_token_ids": ()}
    run, requests = check(run, list(prompts), max_new_tokens=max_new_tokens, **asked)
    slots, length = prompts.shape
    cache_length = check_memory(run, requests, slots)
    cache = None
    if not run.taps:
        lengths = jnp.full(slots, length - 1, jnp.int32)
        cache = random_cache(run.model.init_cache(slots, cache_length), lengths)
    return begin_group(run, requests, np.arange(slots), slots, cache_length, cache)


def random_cache(cache: KVCache, lengths: jax.Array) -> KVCache:
    """The cache with random keys and values, and so many tokens; the old one is donated."""
    parallel = cache.parallel

    def fill(array, place):
        # One at a time: what the calls in flight need beside the cache adds up.
        return jax.block_until_ready(_fill(array, place, parallel=parallel))

    layers = tuple(
        LayerCache(fill(layer.keys, (i, 0)), fill(layer.values, (i, 1)))
        for i, layer in enumerate(cache.layers)
    )
    if parallel is not None:
        lengths = jax.device_put(lengths, cache.lengths.sharding)
    return KVCache(layers, lengths, parallel)


# An argument that is not used is left out by default, and its memory is not taken over then.
@functools.partial(jax.jit, static_argnames="parallel", donate_argnames="array", keep_unused=True)
def _fill(array: jax.Array | NarrowRows, place: tuple[int, int], parallel: TensorParallel | None):
    """One layer's keys or values; random numbers of the layer and of the one or the other."""
    is_narrow = isinstance(array, NarrowRows)
    key = functools.reduce(jax.random.fold_in, place, jax.random.key(0))
    made = jax.random.normal(key, array.shape, jnp.bfloat16 if is_narrow else array.dtype)
    made = round_rows(made, array.format) if is_narrow else made
    if parallel is None:
        return made
    return lax.with_sharding_constraint(made, parallel.sharding(HEADS))
