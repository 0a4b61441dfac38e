"""Attention in float64 numpy, row by row, written from the definition without shared code."""

import math

import numpy as np


def ragged_attention(
    query,
    key,
    value,
    key_cache,
    value_cache,
    segment_ids,
    positions,
    lengths,
    ancestors=None,
    scale=None,
    cache_mask=None,
    window=None,
):
    """For every row and query head, gather the visible keys, exponentiate and divide."""
    out = np.zeros(query.shape, np.float64)
    for row, sample in enumerate(segment_ids):
        if sample == len(lengths):
            continue
        siblings = [other for other in range(len(segment_ids)) if segment_ids[other] == sample]
        if ancestors is None:
            mine = [other for other in siblings if positions[other] <= positions[row]]
        else:
            mine = [other for place, other in enumerate(siblings) if ancestors[row][place]]
        old = np.arange(lengths[sample])
        if cache_mask is not None:
            old = old[cache_mask[sample][: len(old)]]
        if window is not None:
            where = {entry: place for place, entry in enumerate(old)}  # gaps hold no position
            if cache_mask is not None:
                where = {entry: int(cache_mask[sample][:entry].sum()) for entry in old}
            old = np.array([n for n in old if positions[row] - where[n] < window], int)
            mine = [other for other in mine if positions[row] - positions[other] < window]
        for head in range(query.shape[1]):
            shared = head // (query.shape[1] // key.shape[1])  # its K/V head
            keys = [*key_cache[sample, old, shared], *key[mine, shared]]
            values = [*value_cache[sample, old, shared], *value[mine, shared]]
            scores = [
                math.fsum(
                    np.float64(a) * np.float64(b) for a, b in zip(query[row, head], k, strict=True)
                )
                * (1 / math.sqrt(query.shape[2]) if scale is None else scale)
                for k in keys
            ]
            weights = np.exp(np.array(scores) - max(scores))
            out[row, head] = weights / weights.sum() @ np.array(values, np.float64)
    return out
