"""A conformance suite for all implementations of the cache update."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    BATCH,
    COMPILED,
    DTYPES,
    HEAD_DIM,
    HEAD_DIMS,
    HEADS,
    MAX_LEN,
    ROWS,
    case,
    every_implementation,
    lower_for_cuda,
)

import pallas_kernels
from pallas_kernels import cache_update

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("implementation", ["reference", "xla", "triton"])
@pytest.mark.parametrize("spoiled", range(6))
def test_an_update_of_other_shapes_raises_an_error(implementation, spoiled):
    _, key, value, key_cache, value_cache, segment_ids, positions, _ = case([1] * 4, [1] * 4)
    arrays = [key_cache, value_cache, key, value, segment_ids, positions]
    arrays[spoiled] = np.concatenate([arrays[spoiled]] * 2)
    options = {"implementation": implementation, "interpret": not COMPILED}
    with pytest.raises(ValueError, match=r"^\w+ must be \[.*\] with .*, not \["):
        pallas_kernels.update_kv_cache(*map(jnp.asarray, arrays), **options)


@every_implementation
@settings(max_examples=15)
@given(
    counts=st.lists(st.integers(0, 10), min_size=BATCH, max_size=BATCH),
    starts=st.lists(st.integers(0, MAX_LEN - 10), min_size=BATCH, max_size=BATCH),
    kept=st.integers(0, 10),
)
def test_update_writes_real_rows_and_nothing_else(implementation, counts, starts, kept):
    inputs = case(counts, starts)
    _, key, value, key_cache, value_cache, segment_ids, positions, _ = inputs
    dropped = positions - np.array([*starts, 0])[segment_ids] >= kept
    segment_ids = np.where(dropped, BATCH, segment_ids).astype(np.int32)
    expected = [key_cache.copy(), value_cache.copy()]
    for row, sample in enumerate(segment_ids):
        if sample < BATCH:
            expected[0][sample, positions[row]] = key[row]
            expected[1][sample, positions[row]] = value[row]
    update = functools.partial(
        pallas_kernels.update_kv_cache, implementation=implementation, interpret=not COMPILED
    )
    out = jax.jit(update)(
        *map(jnp.asarray, (key_cache, value_cache, key, value, segment_ids, positions))
    )
    for new, old in zip(out, expected, strict=True):
        # Compared bit for bit, NaN payloads included.
        np.testing.assert_array_equal(np.asarray(new).view(np.int32), old.view(np.int32))


@every_implementation
def test_rows_outside_of_the_caches_write_nothing(implementation):
    """Otherwise a kernel would write to arrays that lie beside the caches."""
    inputs = case([3] * BATCH, [1] * BATCH)
    _, key, value, key_cache, value_cache, segment_ids, positions, _ = inputs
    outside = [(0, MAX_LEN), (BATCH - 1, MAX_LEN), (1, -1), (-1, 2), (BATCH + 1, 2), (2, 2**30)]
    for row, place in enumerate(outside):
        segment_ids[row], positions[row] = place
    inside = np.arange(len(segment_ids)) >= len(outside)
    expected = key_cache.copy(), value_cache.copy()
    rows = [row for row in np.flatnonzero(inside) if segment_ids[row] < BATCH]
    for cache, new in zip(expected, (key, value), strict=True):
        cache[segment_ids[rows], positions[rows]] = new[rows]
    arrays = map(jnp.asarray, (key_cache, value_cache, key, value, segment_ids, positions))
    options = {"implementation": implementation, "interpret": not COMPILED}
    out = pallas_kernels.update_kv_cache(*arrays, **options)
    for new, old in zip(out, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(new).view(np.int32), old.view(np.int32))


@every_implementation
def test_many_caches_are_updated_as_each_one_alone(implementation, monkeypatch):
    sizes = cache_update.triton.Sizes(arrays=3, numbers=HEAD_DIM, arrays_of_launch=8)
    monkeypatch.setattr(cache_update.triton, "WIDE", sizes)
    monkeypatch.setattr(cache_update.triton, "NARROW", sizes)
    _, key, value, key_cache, value_cache, segment_ids, positions, _ = map(
        jnp.asarray, case([3, 0, 1, 8], [0, 5, 2, 9])
    )
    factors = range(1, 6)
    each = lambda x: [x * factor for factor in factors]
    options = {"implementation": implementation, "interpret": not COMPILED}
    places = (segment_ids, positions)
    keys, values = pallas_kernels.update_kv_caches(
        each(key_cache), each(value_cache), each(key), each(value), *places, **options
    )
    for factor, new_keys, new_values in zip(factors, keys, values, strict=True):
        one = [x * factor for x in (key_cache, value_cache, key, value)]
        expected = pallas_kernels.update_kv_cache(*one, *places, **options)
        np.testing.assert_array_equal(new_keys, expected[0])
        np.testing.assert_array_equal(new_values, expected[1])
    for group in (1, 2, 4, 8):
        query = jnp.full((ROWS, group * HEADS, HEAD_DIM), jnp.nan)
        packed = each(jnp.concatenate([query, key, value], axis=1))
        of_packed = pallas_kernels.update_kv_caches(
            each(key_cache), each(value_cache), packed, None, *places, **options
        )
        for new, apart in zip([*of_packed[0], *of_packed[1]], [*keys, *values], strict=True):
            np.testing.assert_array_equal(new, apart)
    empty = [pallas_kernels.NarrowRows.zeros(key_cache.shape, "int8")] * len(factors)
    narrow = pallas_kernels.update_kv_caches(
        empty, empty, each(key), each(value), *places, **options
    )
    for factor, caches in zip(factors, zip(*narrow, strict=True), strict=True):
        one = [x * factor for x in (key, value)]
        expected = pallas_kernels.update_kv_caches(
            empty[:1], empty[:1], *([x] for x in one), *places, **options
        )
        for new, ((alone,), row) in zip(caches, zip(expected, one, strict=True), strict=True):
            np.testing.assert_array_equal(new.words, alone.words)
            np.testing.assert_array_equal(new.scales, alone.scales)
            sample, position = segment_ids[0], positions[0]
            rounded = pallas_kernels.round_rows(row[:1], "int8")
            np.testing.assert_array_equal(new.words[sample, position], rounded.words[0])


def test_an_update_is_in_place():
    """The output reuses the donated cache's buffer, and no second one is allocated."""
    inputs = case([3, 0, 1, 8], [0, 5, 2, 9])
    _, key, value, key_cache, value_cache, segment_ids, positions, _ = map(jnp.asarray, inputs)
    update = jax.jit(
        functools.partial(
            pallas_kernels.update_kv_cache, implementation="triton" if COMPILED else "xla"
        ),
        donate_argnums=(0, 1),
    )
    arguments = (key_cache, value_cache, key, value, segment_ids, positions)
    memory = update.lower(*arguments).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 2 * key_cache.nbytes
    assert memory.temp_size_in_bytes < key_cache.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_triton_update_lowers_for_cuda(dtype, head_dim):
    update = lambda *args: cache_update.triton.update_kv_caches(
        args[:2], args[2:4], args[4:6], args[6:-2] or None, *args[-2:]
    )
    caches, ints = [(3, 64, 12, head_dim, dtype)] * 4, [(10, "int32")] * 2
    lower_for_cuda(update, *caches, *[(10, 12, head_dim, dtype)] * 4, *ints)
    for group in (1, 4):
        packed = (10, 12 * (group + 2), head_dim, dtype)
        lower_for_cuda(update, *caches, *[packed] * 2, *ints)
