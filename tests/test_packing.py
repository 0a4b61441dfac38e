"""Packed rows, buckets, caches, and where verification cuts drafts."""

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import pallas_kernels
from emsjax.decode.cache import KVCache
from emsjax.decode.kernels import resolve_kernels
from emsjax.decode.pack import AcceptedPath, pack
from emsjax.decode.row_counts import round_up_length, row_buckets
from emsjax.models.attention import attend
from emsjax.verification import accepted_counts, first_end, usable_counts

small = st.lists(st.integers(0, 6), min_size=3, max_size=3)


@given(starts=small, counts=small, num_rows=st.sampled_from([1, 7, 20]))
def test_packing_lists_each_samples_rows_in_order(starts, counts, num_rows):
    rows = pack(jnp.array(starts, jnp.int32), jnp.array(counts, jnp.int32), num_rows)
    wanted = [(s, starts[s] + i) for s in range(3) for i in range(counts[s])][:num_rows]
    wanted += [(3, 0)] * (num_rows - len(wanted))
    listed = zip(rows.segment_ids.tolist(), rows.positions.tolist(), strict=True)
    assert list(listed) == wanted
    assert rows.counts.tolist() == [sum(s == i for s, _ in wanted) for i in range(3)]


@given(counts=small)
def test_gather_and_scatter_are_inverse_on_real_rows(counts):
    rows = pack(jnp.zeros(3, jnp.int32), jnp.array(counts, jnp.int32), 20)
    blocks = jnp.arange(18).reshape(3, 6)
    back = rows.scatter(rows.gather(blocks), 6)
    for sample, count in enumerate(counts):
        assert back[sample, :count].tolist() == blocks[sample, :count].tolist()


@given(batch=st.integers(1, 400), width=st.integers(1, 33))
def test_buckets_ascend_to_hold_every_step(batch, width):
    buckets = row_buckets(batch, width)
    assert buckets[-1] == batch * width
    assert list(buckets) == sorted(set(buckets))
    # One row per sample has its own bucket: without drafts no more rows than in plain decoding.
    one_each = buckets.index(min(buckets[-1], max(batch, 16)))
    assert len(buckets[one_each:]) <= 17
    # With drafts there are also smaller buckets, for when most samples have ended.
    below = [rows for rows in (16, 64, 256) if 3 * rows <= 2 * buckets[one_each] and width > 1]
    assert list(buckets[:one_each]) == below
    assert all(rows <= 7 / 8 * buckets[-1] + 8 for rows in buckets[one_each + 1 : -1])
    for fewer, more in itertools.pairwise(buckets[one_each:]):
        assert more >= min(fewer + 16, buckets[-1])
        assert more <= max(1.7 * fewer, fewer + 48)


def test_buckets_are_finer_where_rows_are_expensive():
    assert row_buckets(1, 8) == (8,)
    assert row_buckets(8, 8) == (16, 32, 48, 64)
    assert row_buckets(24, 8) == (16, 24, 64, 96, 136, 152, 168, 192)
    assert row_buckets(32, 8) == (16, 32, 64, 96, 136, 168, 184, 200, 216, 232, 256)
    fine = (328, 344, 360, 376, 392, 408, 424, 440, 456)
    assert row_buckets(64, 8) == (16, 64, 96, 136, 200, 264, *fine, 512)
    fine = (264, 280, 296, 312, 328, 344, 360)
    assert row_buckets(24, 17) == (16, 24, 64, 96, 136, 200, *fine, 408)
    assert row_buckets(8, 17) == (16, 32, 64, 96, 112, 136)
    assert row_buckets(256, 1) == (256,)
    fine = range(704, 929, 32)  # a finer spacing would give too many
    assert row_buckets(64, 17) == (16, 64, 96, 136, 200, 264, 392, 512, *fine, 1088)
    fine = range(1280, 1793, 64)
    assert row_buckets(256, 8) == (16, 64, 256, 392, 512, 768, 1024, *fine, 2048)
    fine = (392, 408, 424, 440, 456, 472, 488, 504)  # 512 is left out
    assert row_buckets(18, 33) == (18, 64, 96, 136, 200, 264, *fine, 594)


def test_rounded_lengths_are_few_and_never_smaller():
    rounded = {round_up_length(n) for n in range(1, 2049)}
    assert all(round_up_length(n) >= n for n in range(1, 2049))
    assert sorted(rounded) == [64, 128, 256, 512, 1024, 1536, 2048]


@given(counts=small, kept=small)
def test_commit_appends_only_accepted_rows(counts, kept):
    kept = [min(pair) for pair in zip(counts, kept, strict=True)]
    cache = KVCache.init(3, 8, num_layers=2, kv_heads=1, head_dim=1, dtype=jnp.float32)
    cache = dataclasses.replace(cache, lengths=jnp.array([2, 0, 1], jnp.int32))
    rows = pack(cache.lengths, jnp.array(counts, jnp.int32), 20)
    values = jnp.arange(1.0, 21.0)[:, None, None]
    fresh = tuple(
        jnp.concatenate([0 * values, k * values, v * values], axis=1) for k, v in ((1, 2), (3, 4))
    )
    path = AcceptedPath.prefix(rows, jnp.array(kept, jnp.int32))
    after = cache.commit(fresh, rows, path, resolve_kernels(None).update)
    assert after.lengths.tolist() == [2 + kept[0], kept[1], 1 + kept[2]]
    expected = np.zeros((3, 8))
    for sample, start in enumerate([2, 0, 1]):
        first = sum(counts[:sample])
        expected[sample, start : start + kept[sample]] = 1 + first + np.arange(kept[sample])
    arrays = [x for layer in after.layers for x in (layer.keys, layer.values)]
    for array, factor in zip(arrays, (1, 2, 3, 4), strict=True):
        np.testing.assert_array_equal(array[..., 0, 0], expected * factor)


tokens = st.lists(st.integers(0, 3), min_size=5, max_size=5)


@given(target=tokens, draft=tokens, count=st.integers(0, 4))
def test_the_longest_equal_prefix_is_accepted(target, draft, count):
    accepted = 0
    while accepted < count and draft[accepted] == target[accepted]:
        accepted += 1
    as_row = lambda row: jnp.array([row], jnp.int32)
    equal = as_row(target[:4]) == as_row(draft[:4])
    got = accepted_counts(equal, jnp.array([count], jnp.int32))
    assert got.tolist() == [accepted]


@given(row=tokens, count=st.integers(0, 5), ends=st.lists(st.integers(0, 4), max_size=2))
def test_rows_are_cut_after_the_first_end_token(row, count, ends):
    at = [i for i, token in enumerate(row[:count]) if token in ends]
    counts, ended = first_end(
        jnp.array([row], jnp.int32), jnp.array([count], jnp.int32), jnp.array(ends, jnp.int32)
    )
    assert counts.tolist() == [at[0] + 1 if at else count]
    assert ended.tolist() == [bool(at)]


def test_drafts_are_cut_at_limits_invalid_ids_and_end_tokens():
    draft = jnp.array([[1, 2, 3], [1, 9, 3], [-1, 2, 3], [1, 5, 3], [1, 2, 3]], jnp.int32)
    counts = jnp.array([9, 3, 3, 3, -2], jnp.int32)
    limits = jnp.array([2, 3, 3, 3, 3], jnp.int32)
    usable = usable_counts(draft, counts, limits, jnp.array([5], jnp.int32), vocab_size=9)
    assert usable.tolist() == [2, 1, 0, 2, 0]


def test_only_the_librarys_own_attention_receives_queries_keys_and_values_as_one_array(monkeypatch):
    seen = []

    def attention(query, key, value, key_cache, *rest, option=1, **options):
        seen.append([None if x is None else x.shape for x in (query, key, value)])
        return query[:, :2] if key is None else query + option * (2 * key + 4 * value)

    qkv = jnp.arange(5 * 6 * 4.0).reshape(5, 6, 4)
    cache = KVCache.init(2, 8, num_layers=1, kv_heads=2, head_dim=4, dtype=jnp.float32)
    rows = pack(cache.lengths, jnp.array([2, 3], jnp.int32), 5)
    call = lambda attention: attend(
        attention, qkv, cache.layers[0], rows, cache.visible, max_rows_per_sample=3
    )
    np.testing.assert_array_equal(call(attention), qkv[:, :2] + 2 * qkv[:, 2:4] + 4 * qkv[:, 4:])
    monkeypatch.setattr(pallas_kernels, "ragged_attention", attention)
    for own in (attention, functools.partial(attention, option=1)):
        call(own)
    assert seen == [[(5, 2, 4)] * 3] + [[(5, 6, 4), None, None]] * 2


def test_kernels_chosen_alike_are_equal_and_hash_alike():
    assert resolve_kernels("xla") == resolve_kernels("xla") == resolve_kernels(None)
    assert resolve_kernels("xla") != resolve_kernels("reference")
    assert hash(resolve_kernels("xla")) == hash(resolve_kernels("xla"))
