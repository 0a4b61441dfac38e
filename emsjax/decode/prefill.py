"""Prefill: fills a cache with known tokens in chunks of packed rows."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from emsjax.decode.base import Drafter, Model, ObservedRows
from emsjax.decode.cache import KVCache
from emsjax.decode.kernels import Kernels
from emsjax.decode.pack import AcceptedPath, pack
from emsjax.decode.row_counts import chunk_rows
from emsjax.returned import check_state
from pallas_kernels.common.indexing import take


def prefill(
    model: Model,
    cache: KVCache,
    tokens: Int32[Array, "b t"],
    lengths: Int32[Array, "b"],
    *,
    kernels: Kernels,
) -> KVCache:
    """Commit tokens[s, cache.lengths[s] : lengths[s]] of every sample; computes no logits.

    One chunk's activations exist at a time, however long the prompts are.
    """
    return prefill_observed(model, cache, tokens, lengths, None, (), kernels=kernels)[0]


def prefill_observed(
    model: Model,
    cache: KVCache,
    tokens: Int32[Array, "b t"],
    lengths: Int32[Array, "b"],
    drafter: Drafter | None,
    drafter_state: Any,
    *,
    kernels: Kernels,
) -> tuple[KVCache, Any]:
    """As `prefill`, and a drafter with `taps` observes the rows; returns cache and its state."""
    rows_per_chunk = chunk_rows(*tokens.shape)
    taps = () if drafter is None else drafter.taps

    def advance(carry):
        cache, drafter_state = carry
        rows = pack(cache.lengths, lengths - cache.lengths, rows_per_chunk)
        token_ids = take(tokens, rows.samples, rows.positions)
        out = model(token_ids, rows, cache, attention=kernels.attention, taps=taps)
        if taps:
            observed = ObservedRows(token_ids, rows.segment_ids, rows.positions)
            before = drafter_state
            drafter_state = drafter.observe(before, observed, out.taps)
            check_state("the drafter's", "observe", before, drafter_state)
        path = AcceptedPath.prefix(rows, rows.counts)
        return cache.commit(out.fresh, rows, path, kernels.update), drafter_state

    unfinished = lambda carry: jnp.any(carry[0].lengths < lengths)
    return lax.while_loop(unfinished, advance, (cache, drafter_state))
