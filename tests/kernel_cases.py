"""Inputs of attention and the cache update, and how kernels are lowered without a GPU."""

import contextlib
import itertools

import jax
import numpy as np
import pytest

from pallas_kernels.attention import tilings
from pallas_kernels.common.implementations import runs_triton

COMPILED = runs_triton()
BLOCK = tilings.DECODE.keys if COMPILED else 8
BATCH, MAX_LEN, HEADS, HEAD_DIM, ROWS = 4, 3 * BLOCK, 2, 8, 40  # HEADS: K/V heads
DTYPES, HEAD_DIMS = ("float32", "bfloat16", "float16"), (64, 80, 96, 128, 256)
IMPLEMENTATIONS = ("reference", "xla", "triton")
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def in_turn(few, *lists):
    """All combinations of the lists' values, each with one value of `few`, which take turns."""
    places = itertools.product(*(range(len(values)) for values in lists))
    chosen = lambda place: (values[i] for values, i in zip(lists, place, strict=True))
    return [(*chosen(place), few[sum(place) % len(few)]) for place in places]


def case(
    counts,
    lengths,
    order=None,
    seed=0,
    dtype=np.float32,
    head_dim=HEAD_DIM,
    rows=ROWS,
    width=None,
    group=1,
):
    """Random inputs in which everything that must not be read is NaN.

    Args:
        counts: fresh rows of each sample.
        lengths: committed entries of each sample.
        order: the order of the samples among the rows; None: ascending.
        rows: number of rows, padding included.
        width: length of the caches; None: MAX_LEN.
        group: query heads per K/V head.
    """
    rng, batch, width = np.random.default_rng(seed), len(counts), width or MAX_LEN
    normal = lambda *shape: rng.normal(size=shape).astype(dtype)
    query, key, value = (normal(rows, n * HEADS, head_dim) for n in (group, 1, 1))
    key_cache, value_cache = (normal(batch, width, HEADS, head_dim) for _ in range(2))
    segment_ids, positions = np.full(rows, batch, np.int32), np.zeros(rows, np.int32)
    row = 0
    for sample in range(batch) if order is None else order:
        count = counts[sample]
        segment_ids[row : row + count] = sample
        positions[row : row + count] = lengths[sample] + np.arange(count)
        row += count
    query[row:], key[row:], value[row:] = np.nan, np.nan, np.nan
    for cache in (key_cache, value_cache):
        for sample, length in enumerate(lengths):
            cache[sample, length:] = np.nan
    lengths = np.array(lengths, np.int32)
    return query, key, value, key_cache, value_cache, segment_ids, positions, lengths


def cuda_without_a_gpu():
    """A context in which kernels lower for an H200 on any machine."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    from jax.sharding import AbstractMesh, use_abstract_mesh

    return use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract_gpu()))


def abstract_gpu():
    """An H200 for which kernels lower, in the versions of jax that ask for one."""
    return jax.sharding.AbstractDevice("NVIDIA H200", None, platform="gpu")


def lower_for_cuda(function, *shapes, backend="triton"):
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for *shape, dtype in shapes]
    with cuda_without_a_gpu():
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert backend in lowered.as_text()
