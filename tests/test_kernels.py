"""A conformance suite for all implementations of attention.

Triton kernels are compiled if the device runs them, otherwise interpreted.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import (
    BATCH,
    BLOCK,
    COMPILED,
    DTYPES,
    HEAD_DIM,
    HEAD_DIMS,
    HEADS,
    IMPLEMENTATIONS,
    MAX_LEN,
    ROWS,
    case,
    every_implementation,
    in_turn,
    lower_for_cuda,
)

import pallas_kernels
from pallas_kernels import attention
from pallas_kernels.attention import combine, tilings, work_items

pytestmark = pytest.mark.gpu
TILINGS = {
    name: value for name, value in vars(tilings).items() if isinstance(value, tilings.Tiling)
}
MASKS = ("ancestors", "cache_mask")
every_number_of_splits = pytest.mark.parametrize("programs", [1, 64], ids=["whole", "split"])
# Only Triton's kernel splits keys. Invariant numerics take keys in parts.
KINDS = {
    "reference": ("reference", 64),
    "xla": ("xla", 64),
    "triton-whole": ("triton", 1),
    "triton-split": ("triton", 64),
    "xla-parts": ("xla invariant", 64),
    "triton-parts-whole": ("triton invariant", 1),
    "triton-parts-split": ("triton invariant", 64),
}
# Triton's kinds, of which pairs take turns: both have keys that are whole and split, and in parts.
TURNS = ("triton-whole", "triton-parts-split"), ("triton-split", "triton-parts-whole")
of_kinds = functools.partial(pytest.mark.parametrize, ("implementation", "programs"))
every_kind = of_kinds(list(KINDS.values()), ids=list(KINDS))
every_kind_and_bound = pytest.mark.parametrize(
    ("implementation", "programs", "bound"),
    [  # without a bound no keys are split
        pytest.param(*KINDS[kind], bound, id=f"{kind}-{bound}")
        for bound in (10, None)
        for kind in KINDS
        if bound or not kind.endswith("split")
    ],
)
every_implementation_and_split = of_kinds(list(KINDS.values())[:4], ids=list(KINDS)[:4])


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Blocks and tiles so small that the short caches and the few rows here need several."""
    with pytest.MonkeyPatch.context() as patch:
        for name, tiling in TILINGS.items():
            tiling = tiling._replace(keys=BLOCK)
            if name.startswith("PREFILL") and not COMPILED:  # a GPU needs 16 rows at least
                tiling = tiling._replace(rows=8)
            patch.setattr(tilings, name, tiling)
        if not COMPILED:
            patch.setattr(tilings, "FEW_ROWS", 2)
            patch.setattr(combine, "MERGED_PARTS", 2)
        for module in (tilings, attention.xla_parts):
            patch.setattr(module, "PART_KEYS", BLOCK)
        patch.setattr(tilings, "DECODE_TILES", 2)  # so that ROWS rows are a prefill
        patch.setattr(attention.xla, "MAX_DECODE_ROWS", 10)
        patch.setattr(attention.xla, "TILE", 10)
        yield


@functools.cache
def compiled(implementation, max_rows_per_sample, programs=64, scale=None, window=None):
    def attention(*args, **kwargs):
        with pytest.MonkeyPatch.context() as patch:  # the number is read while tracing
            patch.setattr(tilings, "PROGRAMS_WANTED", programs)
            patch.setattr(tilings, "PROGRAMS_WITH_PARTS", programs)
            name, _, numerics = implementation.partition(" ")
            return pallas_kernels.ragged_attention(
                *args,
                **kwargs,
                implementation=name,
                numerics=numerics or None,
                max_rows_per_sample=max_rows_per_sample,
                scale=scale,
                window=window,
                interpret=not COMPILED,
            )

    return jax.jit(attention)


SIZES = ("tile", "block", "splits", "max_tiles", "window")
plan = jax.jit(work_items.plan, static_argnames=SIZES)


def check(
    implementation, inputs, bound, rtol=2e-6, *, programs=64, packed=False, static=(), **masks
):
    """Compare an implementation with the float64 oracle.

    Args:
        inputs: the positional arguments of the oracle.
        bound: `max_rows_per_sample`.
        programs: the number of programs that Triton aims at; if it is small, keys are not split.
        packed: pass queries, keys and values as one array.
        static: scale and window, if they are given.
    """
    arrays = list(map(jnp.asarray, inputs))
    if packed:
        arrays[:3] = jnp.concatenate(arrays[:3], axis=1), None, None
    static = dict(static)
    out = compiled(implementation, bound, programs, **static)(*arrays, **masks)
    assert out.dtype == inputs[0].dtype
    expected = oracle.ragged_attention(*inputs, **masks, **static)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=rtol, atol=rtol * 4)


@every_kind_and_bound
@settings(max_examples=12)
@given(
    counts=st.lists(st.sampled_from([0, 1, 2, 9, 10]), min_size=BATCH, max_size=BATCH),
    lengths=st.lists(
        st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, MAX_LEN]),
        min_size=BATCH,
        max_size=BATCH,
    ),
    order=st.permutations(range(BATCH)),
)
def test_equals_the_float64_oracle_and_reads_no_nan(
    implementation, programs, bound, counts, lengths, order
):
    check(implementation, case(counts, lengths, order), bound, programs=programs)


@every_kind_and_bound
def test_a_cache_may_have_no_entry(implementation, programs, bound):
    inputs = case([9, 0, 2, 1], [0] * BATCH)
    inputs = tuple(x[:, :0] if x.ndim == 4 else x for x in inputs)
    check(implementation, inputs, bound, programs=programs)
    if "invariant" not in implementation:  # it takes no mask
        mask = np.zeros((BATCH, 0), bool)
        check(implementation, inputs, bound, programs=programs, cache_mask=mask)


@pytest.mark.parametrize(
    ("implementation", "most_scores"),
    [("reference", 0), ("triton", 0), ("xla", 0), ("xla", 1 << 20)],
    ids=["reference", "triton", "xla-tiled", "xla-at-once"],
)
@pytest.mark.parametrize("columns", [7, 20])
def test_samples_that_leave_no_room_may_have_many_rows(
    implementation, most_scores, columns, monkeypatch
):
    """Four samples of up to 10 rows share 40 rows, and 10 are more than a decoding tile has."""
    monkeypatch.setattr(attention.xla, "MAX_DECODE_ROWS", 3)
    monkeypatch.setattr(attention.xla, "MOST_SCORES", most_scores)
    compiled.cache_clear()
    for counts in ([10, 10, 10, 10], [10, 7, 10, 0], [1, 10, 3, 9]):
        inputs = case([min(n, columns) for n in counts], [BLOCK + 1, 0, 3, MAX_LEN], [2, 3, 1, 0])
        own = inputs[6] - np.append(inputs[7], 0)[inputs[5]]
        ancestors = np.random.default_rng(0).random((ROWS, columns)) < 0.5
        ancestors |= np.arange(columns) == own[:, None]
        for masks in ({}, {"ancestors": ancestors}):
            check(implementation, inputs, 10, **masks)
            check(implementation, inputs, 10, **masks, static={"window": 5})
    compiled.cache_clear()


@every_kind_and_bound
@settings(max_examples=8)
@given(
    counts=st.lists(st.sampled_from([0, 1, 2, 9, 10]), min_size=BATCH, max_size=BATCH),
    seed=st.integers(0, 100),
)
def test_fresh_rows_see_only_their_ancestors(implementation, programs, bound, counts, seed):
    rng = np.random.default_rng(seed)
    ancestors = np.zeros((ROWS, 10), bool)
    row = 0
    for count in counts:
        for place in range(count):
            if place and rng.random() < 0.8:  # copies a parent's ancestors; otherwise a root
                ancestors[row] = ancestors[row - place + rng.integers(place)]
            ancestors[row, place] = True
            row += 1
    inputs = case(counts, [BLOCK + 1, 0, 3, 2 * BLOCK], seed=seed)
    inputs[6][:] = 0  # positions do not matter
    check(implementation, inputs, bound, programs=programs, ancestors=ancestors)


@every_implementation_and_split
@pytest.mark.parametrize("bound", [10, None], ids=["decode", "unbounded"])
@settings(max_examples=8)
@given(
    counts=st.lists(st.sampled_from([0, 1, 2, 9, 10]), min_size=BATCH, max_size=BATCH),
    lengths=st.lists(
        st.sampled_from([0, 1, BLOCK, BLOCK + 1, MAX_LEN]), min_size=BATCH, max_size=BATCH
    ),
    visible=st.sampled_from([0.0, 0.1, 0.9]),
    seed=st.integers(0, 100),
)
def test_masked_entries_of_the_cache_are_not_read(
    implementation, programs, bound, counts, lengths, visible, seed
):
    mask = np.random.default_rng(seed).random((BATCH, MAX_LEN)) < visible
    inputs = case(counts, lengths, seed=seed)
    for cache in inputs[3:5]:
        cache[~mask] = np.nan
    check(implementation, inputs, bound, programs=programs, cache_mask=mask)


@every_kind_and_bound
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_row_that_is_not_finite_reaches_only_rows_that_see_it(
    implementation, programs, bound, tree
):
    counts, bad = [10, 2, 0, 9], 4  # a row in the middle of the first sample's
    inputs = case(counts, [BLOCK + 1, 0, 3, 2 * BLOCK])
    first = np.repeat([0, 10, 12], [10, 2, ROWS - 12])  # row of each row's sample
    sees = np.arange(10) <= (np.arange(ROWS) - first)[:, None]
    sees[5:10, bad] &= not tree  # in the tree it is a leaf
    masks = {"ancestors": sees} if tree else {}
    attention = compiled(implementation, bound, programs)
    clean = attention(*inputs, **masks)
    for argument, number in itertools.product((0, 1, 2), (np.nan, np.inf, -np.inf)):
        arrays = [x.copy() for x in inputs]
        arrays[argument][bad, :, 3] = number
        out = np.asarray(attention(*arrays, **masks))
        reached = np.arange(ROWS) == bad
        if argument > 0 and not tree:  # a query belongs to its own row alone
            reached[bad:10] = True
        unreached = np.asarray(clean)[~reached]
        np.testing.assert_array_equal(out[~reached], unreached, f"{argument} {number}")
        if argument == 2 or np.isnan(number):
            assert np.isnan(out[reached]).any(axis=-1).all(), (argument, number)


@pytest.mark.parametrize(
    ("kind", "window", "bound"), in_turn((10, None), list(KINDS), [1, 5, BLOCK + 3])
)
@settings(max_examples=8)
@given(
    counts=st.lists(st.sampled_from([0, 1, 2, 9, 10]), min_size=BATCH, max_size=BATCH),
    lengths=st.lists(
        st.sampled_from([0, 1, BLOCK, BLOCK + 1, MAX_LEN]), min_size=BATCH, max_size=BATCH
    ),
    order=st.permutations(range(BATCH)),
)
def test_a_row_sees_the_tokens_of_its_window(kind, window, bound, counts, lengths, order):
    """Every kind has every window, and these take turns to have a bound."""
    implementation, programs = KINDS[kind]
    inputs = case(counts, lengths, order)
    for cache in inputs[3:5]:  # entries that no row sees
        for sample, length in enumerate(lengths):
            cache[sample, : max(0, length - window + 1)] = np.nan
    check(implementation, inputs, bound, programs=programs, static={"window": window})


@pytest.mark.parametrize(
    ("implementation", "window", "group", "bound"),
    [
        (implementation, *sizes, bound)
        for implementation, sizes, bound in in_turn(
            (10, None),
            ("reference", "xla", "triton"),
            [(1, 4), (5, 1), (5, 4), (BLOCK + 3, 4)],
        )
    ],
)
def test_windows_count_positions_in_trees_and_caches_with_gaps(
    implementation, window, group, bound
):
    """Two branches of four rows follow the root; every third entry of the cache is a gap. Every
    implementation has every window, and these take turns to have a bound.
    """
    counts, lengths = [9, 0, 9, 1], [BLOCK + 1, 3, 2 * BLOCK, MAX_LEN]
    inputs = case(counts, lengths, group=group)
    mask = np.arange(MAX_LEN) % 3 != np.arange(BATCH)[:, None] % 3
    ancestors = np.zeros((ROWS, 10), bool)
    ancestors[:, 0] = True
    row = 0
    for sample, count in enumerate(counts):
        root = mask[sample, : lengths[sample]].sum()
        for place in range(count):
            branch, depth = divmod(place - 1, 4) if place else (0, -1)
            inputs[6][row] = root + depth + 1
            ancestors[row, 1 + 4 * branch : 1 + place] = place > 0
            row += 1
    for cache in inputs[3:5]:
        cache[~mask] = np.nan
    options = {"static": {"window": window}, "rtol": 1e-5}
    check(implementation, inputs, bound, ancestors=ancestors, cache_mask=mask, **options)
    for sample, count in enumerate(counts):
        root = mask[sample, : lengths[sample]].sum()
        inputs[6][inputs[5] == sample] = root + np.arange(count)
    check(implementation, inputs, bound, cache_mask=mask, **options)


def test_blocks_outside_of_all_windows_are_in_no_share():
    counts, lengths = [3, 0, 1, 10], [40, 40, 9, 37]
    *_, segment_ids, positions, cache_lengths = case(counts, lengths)
    arrays = [jnp.asarray(x) for x in (segment_ids, positions, cache_lengths)]
    for splits, window in itertools.product([1, 5], [1, 4, 5, 12, 100]):
        sizes = {"tile": 4, "block": 4, "splits": splits, "max_tiles": 3, "window": window}
        items = plan(*arrays, **sizes)
        fields = [dict(zip(work_items.FIELDS, f, strict=True)) for f in items.fields.T.tolist()]
        seen = {}
        for item in fields:
            if item["count"]:
                keys = seen.setdefault((item["sample"], item["before"]), [])
                keys += range(item["key_begin"], item["key_end"])
        for (sample, _), keys in seen.items():
            lowest = min(lengths[sample], max(0, lengths[sample] - window + 1))
            assert keys == list(range(lowest // 4 * 4, lengths[sample]))


@pytest.mark.parametrize("window", [0, -1, 2.0, "3"])
def test_a_window_that_is_not_a_positive_integer_raises_an_error(window):
    with pytest.raises(ValueError, match=r"window must be (an integer of )?at least 1"):
        pallas_kernels.ragged_attention(*map(jnp.asarray, case([1] * 4, [1] * 4)), window=window)


@settings(max_examples=30)
@given(
    counts=st.lists(st.integers(0, 10), min_size=BATCH, max_size=BATCH),
    lengths=st.lists(st.integers(0, 40), min_size=BATCH, max_size=BATCH),
    splits=st.sampled_from([1, 2, 5, 40]),
    tile=st.sampled_from([4, 16]),
)
@example(counts=[10] * BATCH, lengths=[40] * BATCH, splits=40, tile=4)
@example(counts=[10] * BATCH, lengths=[40] * BATCH, splits=40, tile=16)
def test_work_items_cover_every_key_once_in_even_shares(counts, lengths, splits, tile):
    block = 4
    *_, segment_ids, positions, cache_lengths = case(counts, lengths)
    sizes = {"tile": tile, "block": block, "splits": splits, "max_tiles": -(-10 // tile)}
    items = plan(*map(jnp.asarray, (segment_ids, positions, cache_lengths)), **sizes)
    rows_of = lambda s: [row for row, sample in enumerate(segment_ids) if sample == s]
    seen = {}  # (row, key) -> times
    fields = [dict(zip(work_items.FIELDS, f, strict=True)) for f in items.fields.T.tolist()]
    total = sum(-(-length // block) for length, count in zip(lengths, counts, strict=True) if count)
    for item in fields:
        assert item["key_end"] - item["key_begin"] <= block * (
            -(-total // splits) if splits > 1 else 40
        )
        for row in range(item["first"], item["first"] + item["count"]):
            assert segment_ids[row] == item["sample"]
            assert rows_of(item["sample"]).index(row) == row - item["first"] + item["before"]
            for key in range(item["key_begin"], item["key_end"]):
                seen[row, key] = seen.get((row, key), 0) + 1
    wanted = [(row, key) for s in range(BATCH) for row in rows_of(s) for key in range(lengths[s])]
    assert seen == dict.fromkeys(wanted, 1)
    assert items.num_real.tolist() == [sum(counts)]
    for row, (first, number, place) in enumerate(items.of_rows.T.tolist()):
        mine = fields[first : first + number]
        assert number == 0 if segment_ids[row] == BATCH else number > 0
        assert all(item["first"] + place == row and place < item["count"] for item in mine)
        assert [bool(item["fresh_end"]) for item in mine] == [False] * (number - 1) + [True] * bool(
            number
        )


@given(
    counts=st.lists(st.integers(0, 10), min_size=BATCH, max_size=BATCH),
    lengths=st.lists(st.integers(0, 40), min_size=BATCH, max_size=BATCH),
    splits=st.sampled_from([1, 5]),
)
def test_items_of_samples_with_the_longest_ones_come_first(counts, lengths, splits):
    """Length counts committed keys and fresh rows; shares of a sample's keys may differ by one."""
    *_, segment_ids, positions, cache_lengths = case(counts, lengths)
    sizes = {"tile": 4, "block": 4, "splits": splits, "max_tiles": 3}
    items = plan(*map(jnp.asarray, (segment_ids, positions, cache_lengths)), **sizes)
    fields = dict(zip(work_items.FIELDS, np.asarray(items.fields), strict=True))
    used = fields["count"] > 0
    assert not np.diff(used.astype(int)).max(initial=0) > 0  # unused items come last
    blocks = -(-(fields["key_end"] - fields["key_begin"]) // 4) + -(-fields["fresh_end"] // 4)
    samples, first = np.unique(fields["sample"][used], return_index=True)
    longest = {s: blocks[used & (fields["sample"] == s)].max() for s in samples.tolist()}
    assert np.all(np.diff([longest[s] for s in samples[np.argsort(first)].tolist()]) <= 0)


@every_implementation
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("tile", [4, 5, 64])
def test_long_segments_are_tiled_correctly(implementation, tile, group, monkeypatch):
    monkeypatch.setattr(attention.xla, "MAX_DECODE_ROWS", 3)
    monkeypatch.setattr(attention.xla, "TILE", tile)
    if not COMPILED:
        for name in TILINGS:
            rows = tile if name.startswith("PREFILL") else 3
            monkeypatch.setattr(tilings, name, getattr(tilings, name)._replace(rows=rows))
    compiled.cache_clear()
    # With 3 query heads per K/V head, 22 rows are one more than 64 lanes hold.
    for counts in ([13, 0, 4, 5], [0, 0, 0, 40], [10, 10, 10, 10], [0, 0, 0, 0], [22, 0, 0, 18]):
        inputs = case(counts, [3, 24, 0, 8], order=[2, 0, 3, 1], group=group)
        check(implementation, inputs, None)
    compiled.cache_clear()


@pytest.mark.parametrize(
    ("kind", "group", "lanes"),
    [
        (kind, *sizes)
        for place, sizes in enumerate([(1, 64), (2, 16), (8, 64)])
        for kind in ("reference", "xla", "xla-parts", *TURNS[place % 2])
    ],
)
def test_a_sample_may_have_a_few_decoding_tiles(kind, group, lanes, monkeypatch):
    implementation, programs = KINDS[kind]
    monkeypatch.setattr(tilings, "DECODE_LANES", lanes)
    compiled.cache_clear()
    for counts in ((20, 0, 17, 2), (16, 1, 3, 20), (2, 3, 0, 1)):
        inputs = case(counts, [BLOCK + 1, 5, 0, 3 * BLOCK], order=[3, 0, 2, 1], group=group)
        check(implementation, inputs, 20, programs=programs)
    compiled.cache_clear()


@every_implementation
@pytest.mark.parametrize("counts", [(17,), (32,), (20, 31)])
def test_every_tile_of_a_few_samples_has_every_share_of_the_keys(implementation, counts):
    # A sample's keys have four shares, and there are no padding rows.
    lengths, rows = [4 * BLOCK] * len(counts), sum(counts)
    inputs = case(counts, lengths, rows=rows, width=4 * BLOCK)
    check(implementation, inputs, max(counts), programs=4 * len(counts) * HEADS)


@pytest.mark.parametrize("group", [1, 4])
def test_more_shares_than_are_combined_at_once(group):
    """One sample has nearly all keys, and so twenty shares or more; another has a single one."""
    assert combine.COMBINED_SHARES < 20
    inputs = case((2, 0, 1), [40 * BLOCK, 0, 3], rows=4, width=40 * BLOCK, group=group)
    check("triton", inputs, 2, programs=40 * HEADS)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "implementation", "bound"),
    [
        (*sizes, (8, None)[place % 2])
        for place, sizes in enumerate(in_turn(IMPLEMENTATIONS, DTYPES, HEAD_DIMS))
    ],
)
def test_every_dtype_and_head_dim(implementation, dtype, head_dim, bound):
    """Every dtype has every head_dim; implementations take turns, and have each of both."""
    inputs = case([3, 1, 0, 8], [17, 0, 24, 5], dtype=jnp.dtype(dtype), head_dim=head_dim)
    # Probabilities are rounded to the cache's dtype before they weigh the values.
    tolerance = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}[dtype]
    check(implementation, inputs, bound, rtol=tolerance)


@every_number_of_splits
@pytest.mark.parametrize("drafted", [[7, 7], [15], [0] * 16, [3, 0, 1]])
def test_rows_of_a_few_samples_of_a_large_batch(drafted, programs):
    """Most samples have ended, or drafted nothing: two to sixteen samples fill the rows."""
    counts, lengths = np.zeros(24, int), np.arange(24) % MAX_LEN
    counts[5 : 5 + len(drafted)] = np.array(drafted) + 1
    check("triton", case(counts, lengths, rows=16), 16, programs=programs)


@pytest.mark.parametrize(
    ("rows", "kv_heads", "cut"),
    [(16, 32, True), (64, 32, False), (32, 8, True), (64, 8, False), (192, 8, False)],
)
def test_keys_are_cut_where_few_samples_of_a_large_batch_have_rows(
    rows, kv_heads, cut, monkeypatch
):
    """With OPT-6.7B's 32 heads two samples would leave most of a device idle, and eight do not."""
    monkeypatch.setattr("pallas_kernels.common.implementations.runs_triton", lambda: True)
    query, key, cache = (
        jnp.zeros(shape) for shape in ((rows, 32, 16), (rows, kv_heads, 16), (24, 64, kv_heads, 16))
    )
    ints = [jnp.zeros(size, jnp.int32) for size in (rows, rows, 24)]
    attend = functools.partial(pallas_kernels.ragged_attention, max_rows_per_sample=8)
    jaxpr = jax.make_jaxpr(attend)(query, key, key, *[cache] * 2, *ints)
    assert ("ragged_attention_combine" in str(jaxpr)) == cut


PACKED = [  # keys that are whole and split take turns
    ("triton-whole", HEAD_DIM, 1, (), 10),
    ("triton-split", HEAD_DIM, 1, (), None),
    ("triton-whole", 5, 1, (), 10),
    ("triton-split", HEAD_DIM, 2, (), None),
    ("triton-split", HEAD_DIM, 4, (), 10),
    ("triton-whole", HEAD_DIM, 8, (), None),
    ("triton-whole", 5, 1, MASKS[:1], None),
    ("triton-split", 5, 1, MASKS[1:], 10),
    ("triton-split", HEAD_DIM, 4, MASKS[:1], 10),
    ("triton-whole", HEAD_DIM, 4, MASKS[1:], None),
]


@pytest.mark.parametrize(
    ("kind", "head_dim", "group", "masked", "bound"),
    [(kind, *sizes) for triton, *sizes in PACKED for kind in ("reference", "xla", triton)],
)
def test_queries_keys_and_values_may_be_packed(kind, bound, head_dim, group, masked):
    implementation, programs = KINDS[kind]
    counts, lengths = [3, 0, 10, 1], [BLOCK + 3, 4, 0, 2 * BLOCK]
    inputs = case(counts, lengths, [2, 3, 1, 0], head_dim=head_dim, group=group)
    masks = {name: random_masks(inputs)[name] for name in masked}
    check(implementation, inputs, bound, programs=programs, packed=True, **masks)


def random_masks(inputs):
    """Random ancestors, with each row among its own, and random entries of the cache."""
    draw = np.random.default_rng(0).random
    own = inputs[6] - np.append(inputs[7], 0)[inputs[5]]  # a row's place among its sample's
    return {
        "ancestors": (draw((ROWS, 10)) < 0.5) | (np.arange(10) == own[:, None]),
        "cache_mask": draw((BATCH, MAX_LEN)) < 0.5,
    }


GROUPS = [  # which fill small tiles, decoding tiles and longer ones, and which do not
    *((group, 10, 2**27) for group in (2, 7, 8)),
    *((group, 10, 0) for group in (4, 7)),
    *((group, None, 0) for group in (2, 7)),
]


@pytest.mark.parametrize(
    ("kind", "masked", "group", "bound", "shared_bytes"),
    [
        (kind, masked, *sizes)
        for place, sizes in enumerate(GROUPS)
        for kinds in (("reference", "xla", "xla-parts"), TURNS[place % 2])
        for kind in kinds
        for masked in [kinds.index(kind) % 2 == (place // 2 if kinds in TURNS else place) % 2]
    ],
)
def test_query_heads_share_keys_and_values_in_groups(
    kind, masked, group, bound, shared_bytes, monkeypatch, request
):
    """Triton's kinds have small tiles, decoding tiles and longer ones each, with groups that fill
    tiles and that do not; keys that are whole and split, and in parts or not, take turns, and one
    of two has masks.
    """
    implementation, programs = KINDS[kind]
    monkeypatch.setattr(tilings, "SHARED_BYTES", shared_bytes)
    compiled.cache_clear()
    request.addfinalizer(compiled.cache_clear)
    lengths = [BLOCK + 3, 4, 0, 2 * BLOCK]
    for counts in ([3, 0, 10, 1], [10, 10, 10, 10], [1, 2, 0, 9]):
        inputs = case(counts, lengths, [2, 3, 1, 0], group=group)
        masks = random_masks(inputs) if masked else {}
        if "invariant" in implementation:  # it takes no mask of the cache
            masks.pop("cache_mask", None)
        for cache in inputs[3:5] if "cache_mask" in masks else ():
            cache[~masks["cache_mask"]] = np.nan
        check(implementation, inputs, bound, programs=programs, **masks)


@pytest.mark.parametrize(
    ("group", "most", "lanes", "tile_rows"),
    [
        (1, 1, 16, 16),
        (1, 48, 16, 16),
        (2, 1, 16, 8),
        (2, 16, 32, 16),
        (4, 8, 32, 8),
        (8, 8, 64, 8),
        (8, 48, 64, 8),
        (7, 1, 16, 2),
        (7, 8, 64, 9),
        (71, 1, 128, 1),
        (1, 49, 64, 64),
        (6, 49, 64, 10),
        (71, 49, 128, 1),
    ],
)
def test_a_tiles_lanes_hold_the_query_heads_of_its_rows(group, most, lanes, tile_rows, monkeypatch):
    for name, tiling in TILINGS.items():
        monkeypatch.setattr(tilings, name, tiling)
    monkeypatch.setattr(tilings, "DECODE_TILES", 3)
    monkeypatch.setattr(tilings, "SHARED_BYTES", 0)
    launch = tilings.launch_for(
        4 * group, (8, 64, 4, 128), 8 * most, most, item_bytes=2, scale=1.0, window=None
    )
    assert launch.tiling.rows == lanes
    assert launch.tiling.rows // launch.group == tile_rows
    assert launch.max_tiles == -(-most // tile_rows)
    assert launch.one_block == (most <= lanes)
    if group == 1 and most <= 48:
        assert launch.tiling == TILINGS["DECODE"]


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    ("group", "batch", "most", "max_len", "small", "small_in_parts"),
    [
        (4, 8, 8, 1024, True, True),
        (4, 24, 8, 1024, True, False),  # 384 small tiles
        (4, 64, 8, 1024, False, False),  # 1,024
        (4, 24, 8, 2048, False, False),  # a long cache
        (4, 8, 17, 1024, False, False),  # many rows read the keys many times
        (8, 8, 8, 1024, True, True),
    ],
)
def test_few_programs_have_small_tiles_that_read_the_same_keys(
    group, batch, most, max_len, small, small_in_parts, invariant, monkeypatch
):
    for name, tiling in TILINGS.items():
        monkeypatch.setattr(tilings, name, tiling)
    heads, shape = 32, (batch, max_len, 32 // group, 128)
    options = {"item_bytes": 2, "scale": 1.0, "window": None, "invariant": invariant}
    launch = tilings.launch_for(heads, shape, batch * most, most, **options)
    is_small = small_in_parts if invariant else small
    lanes = 16 if is_small else min(64, group * min(16, most))
    assert launch.tiling.rows == lanes
    assert launch.max_tiles == -(-most // (lanes // group))
    if is_small:
        assert launch.splits == 1  # a program for each tile


@every_implementation
def test_numbers_of_heads_that_do_not_fit_raise_an_error(implementation):
    options = {"implementation": implementation, "interpret": not COMPILED}
    inputs = list(map(jnp.asarray, case([1] * 4, [1] * 4, group=2)))
    query, key, value, key_cache, value_cache, *places = inputs
    attend = functools.partial(pallas_kernels.ragged_attention, **options)
    for wrong in (query[:, :3], query[:, :1], query[:, :0]):
        with pytest.raises(ValueError, match="query must have a multiple of the caches' 2 K/V"):
            attend(wrong, *inputs[1:])
    update = functools.partial(pallas_kernels.update_kv_caches, **options)
    for heads in (1, 4, 5, 7):
        packed, message = jnp.zeros((ROWS, heads, HEAD_DIM)), "must hold queries, keys and values"
        with pytest.raises(ValueError, match=f"query {message}"):
            attend(packed, None, None, *inputs[3:])
        with pytest.raises(ValueError, match=f"keys {message}"):
            update([key_cache], [value_cache], [packed], None, *places[:2])
    for pair in ((key, None), (None, value)):
        with pytest.raises(ValueError, match="two arrays, or both None"):
            attend(query, *pair, *inputs[3:])


NAMES = ("query", "key", "value", "key_cache", "value_cache", "segment_ids", "positions")
NAMES = (*NAMES, "cache_lengths", "ancestors", "cache_mask")


@every_implementation
@pytest.mark.parametrize("name", NAMES)
def test_errors_name_arrays_of_other_shapes_and_dtypes(implementation, name):
    masks = np.ones((ROWS, 10), bool), np.ones((BATCH, MAX_LEN), bool)
    right = dict(zip(NAMES, (*case([1] * 4, [1] * 4), *masks), strict=True))

    def attend(array):
        arrays = list((right | {name: array}).values())
        options = {"implementation": implementation, "interpret": not COMPILED}
        options |= dict(zip(NAMES[8:], arrays[8:], strict=True))
        pallas_kernels.ragged_attention(*map(jnp.asarray, arrays[:8]), **options)

    for wrong in (right[name][0], right[name][..., None]):
        with pytest.raises(ValueError, match=rf"^{name}\b.* must be \[.*, not \["):
            attend(wrong)
    after = {"query": "key", "key_cache": "value_cache"}.get(name, name)  # it has to fit the former
    with pytest.raises(ValueError, match=rf"^{after} must be \[.*\] with .*, not \["):
        attend(np.concatenate([right[name]] * 2))
    if right[name].dtype == np.int32:
        with pytest.raises(ValueError, match=f"^{name} must hold integers, not float32"):
            attend(np.float32(right[name]))


@every_kind_and_bound
def test_scores_are_multiplied_by_the_scale(implementation, programs, bound):
    inputs = case([3, 0, 10, 1], [BLOCK + 3, 4, 0, 2 * BLOCK])
    check(implementation, inputs, bound, rtol=1e-5, programs=programs, static={"scale": 0.9})


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_scale_that_is_not_positive_raises_an_error(scale):
    with pytest.raises(ValueError, match="scale must be above 0"):
        pallas_kernels.ragged_attention(*map(jnp.asarray, case([1] * 4, [1] * 4)), scale=scale)


@every_implementation
@pytest.mark.parametrize("group", [1, 4])
def test_one_causal_segment_equals_jax_nn_attention(implementation, group):
    inputs = case([0, 20, 0, 0], [0, 0, 0, 0], group=group)
    query, key, value = (jnp.asarray(x[None, :20]) for x in inputs[:3])
    with jax.default_matmul_precision("highest"):
        expected = jax.nn.dot_product_attention(query, key, value, is_causal=True)[0]
    out = compiled(implementation, None)(*map(jnp.asarray, inputs))
    np.testing.assert_allclose(out[:20], expected, rtol=1e-5, atol=1e-5)
    assert (out[20:] == 0).all()


def test_the_xla_path_does_not_gather_the_cache_per_row():
    inputs = [jnp.asarray(x) for x in case([8, 8, 8, 8], [8, 8, 8, 8])]
    for bound in (8, None):
        text = compiled("xla", bound).lower(*inputs).as_text()
        assert f"tensor<{ROWS}x{MAX_LEN}x{HEADS}x{HEAD_DIM}x" not in text
    text = compiled("reference", None).lower(*inputs).as_text()
    assert f"tensor<{ROWS}x{MAX_LEN}x{HEADS}x{HEAD_DIM}x" in text


LAUNCHES = [  # batch, bound of rows per sample, masks
    (24, 8, ()),
    (1, 1, ()),
    (3, 17, ()),
    (3, None, ()),
    (3, 8, ("ancestors",)),
    (24, 8, ("cache_mask",)),
    (1, 8, ("cache_mask",)),
    (3, None, ("ancestors", "cache_mask")),
]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "batch", "bound", "masks"),
    [  # every launch with every head_dim, and each of these with every dtype
        (DTYPES[(i + j) % len(DTYPES)], head_dim, *launch)
        for i, head_dim in enumerate(HEAD_DIMS)
        for j, launch in enumerate(LAUNCHES)
    ],
)
def test_the_triton_attention_lowers_for_cuda(dtype, head_dim, batch, bound, masks, monkeypatch):
    lower_attention(dtype, head_dim, batch, bound, masks, 1, monkeypatch)


@pytest.mark.parametrize("group", [2, 3, 7, 8])
@pytest.mark.parametrize(
    ("batch", "bound", "masks"),
    [(24, 8, ()), (1, 1, ()), (3, None, ()), (3, None, ("ancestors", "cache_mask"))],
)
def test_the_triton_attention_of_grouped_heads_lowers_for_cuda(
    group, batch, bound, masks, monkeypatch
):
    lower_attention("bfloat16", 128 if group < 8 else 80, batch, bound, masks, group, monkeypatch)


PARTS = [(24, 8, (), None), (1, 1, (), 512), (3, None, (), 512), (3, None, ("ancestors",), None)]


@pytest.mark.parametrize(("launch", "head_dim", "group"), in_turn((1, 4), PARTS, [64, 80, 128]))
def test_the_triton_attention_in_parts_lowers_for_cuda(launch, head_dim, group, monkeypatch):
    """Every launch has every head_dim, and these take turns to have groups."""
    batch, bound, masks, window = launch
    monkeypatch.setattr(tilings, "PART_KEYS", 64)
    static = {"window": window, "invariant": True}
    lower_attention("bfloat16", head_dim, batch, bound, masks, group, monkeypatch, **static)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(
    ("batch", "bound", "masks"),
    [(24, 8, ()), (1, 1, ()), (3, None, ()), (3, None, ("ancestors", "cache_mask"))],
)
def test_the_triton_attention_with_a_window_lowers_for_cuda(
    group, batch, bound, masks, monkeypatch
):
    lower_attention("bfloat16", 256, batch, bound, masks, group, monkeypatch, window=512)


def lower_attention(dtype, head_dim, batch, bound, masks, group, monkeypatch, **static):
    for name, tiling in TILINGS.items():
        monkeypatch.setattr(tilings, name, tiling)
    monkeypatch.setattr(tilings, "FEW_ROWS", 16)
    attend = lambda *args: attention.triton.ragged_attention(
        *args[:8], max_rows_per_sample=bound, **dict(zip(masks, args[8:], strict=True)), **static
    )
    heads = lambda number: (48, number, head_dim, dtype)
    ints = [(48, "int32"), (48, "int32"), (batch, "int32")]
    shapes = {"ancestors": (48, 8, "bool"), "cache_mask": (batch, 1024, "bool")}
    cache = (batch, 1024, 8, head_dim, dtype)
    rest = [*[cache] * 2, *ints, *[shapes[mask] for mask in masks]]
    lower_for_cuda(attend, heads(8 * group), heads(8), heads(8), *rest)
    packed = lambda qkv, *args: attend(qkv, None, None, *args)
    lower_for_cuda(packed, heads(8 * group + 16), *rest)
