"""Filling a cache with tokens that are known already, in chunks of packed rows."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from emsjax.decode.cache import KVCache
from emsjax.decode.kernels import Kernels
from emsjax.decode.pack import pack
from emsjax.decode.row_counts import chunk_rows
from emsjax.models.opt import OPT
from pallas_kernels.common.indexing import take


def prefill(
    model: OPT,
    cache: KVCache,
    tokens: Int32[Array, "b t"],
    lengths: Int32[Array, "b"],
    *,
    kernels: Kernels,
) -> KVCache:
    """Commit tokens[s, cache.lengths[s] : lengths[s]] of every sample; computes no logits.

    One chunk's activations exist at a time, however long the prompts are.
    """
    rows_per_chunk = chunk_rows(*tokens.shape)

    def advance(cache: KVCache) -> KVCache:
        rows = pack(cache.lengths, lengths - cache.lengths, rows_per_chunk)
        token_ids = take(tokens, rows.samples, rows.positions)
        _, fresh = model(token_ids, rows, cache, attention=kernels.attention)
        return cache.commit(fresh, rows, rows.counts, kernels.update)

    unfinished = lambda cache: jnp.any(cache.lengths < lengths)
    return lax.while_loop(unfinished, advance, cache)
