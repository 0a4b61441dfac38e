"""Caches in 8 bits: rounding, kernels beside a wide cache with the same numbers, and decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import COMPILED, lower_for_cuda
from toy import compiled_step, ragged_prompts, shallow_model, tiny_model

import emsjax
import pallas_kernels
from emsjax.engine.memory import MemoryPlan
from emsjax.testing import assert_invariant, assert_lossless
from pallas_kernels import attention, cache_update
from pallas_kernels.common.narrow_rows import (
    FORMATS,
    SMALLER,
    TO_BFLOAT16,
    NarrowRows,
    pack,
    round_packed,
    round_rows,
    unpack,
)

FORMAT = pytest.mark.parametrize("format", FORMATS)
ROWS, BATCH, LENGTH, KV_HEADS, GROUP, DIM = 9, 3, 24, 2, 2, 16
LENGTHS, COUNTS = np.array([20, 0, 11], np.int32), (4, 2, 2)  # and a padding row
LOOKUP = emsjax.PromptLookup(match_length=1, search_generated=True)


def normal(seed, *shape, dtype=jnp.bfloat16):
    # Rows of very different sizes.
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** rng.integers(-12, 12, shape[:-1])
    return jnp.asarray(rng.normal(size=shape) * sizes[..., None], dtype)


@FORMAT
def test_rounded_rows_are_near_and_rounding_them_changes_nothing(format):
    x = normal(0, 200, 1, DIM, dtype=jnp.float32)
    narrow = round_rows(x, format)
    wide = narrow.widen(jnp.float32)
    largest = np.abs(x).max(axis=-1, keepdims=True)
    error = np.abs(wide - x)
    if format == "int8":
        assert (error <= largest / 126).all()
    else:
        assert (error <= np.maximum(np.abs(x) / 16, largest * 2.0**-16)).all()
    np.testing.assert_array_equal(narrow.widen(jnp.bfloat16).astype(jnp.float32), wide)
    again = round_rows(wide, format)
    np.testing.assert_array_equal(again.values, narrow.values)
    np.testing.assert_array_equal(again.scales, narrow.scales)
    mantissas, _ = np.frexp(np.asarray(narrow.scales, np.float32))
    assert set(mantissas.ravel().tolist()) == {0.5}


@FORMAT
def test_rows_of_zeros_and_rows_that_are_not_finite(format):
    x = jnp.zeros((3, 1, DIM)).at[1, 0, 2].set(jnp.nan).at[2, 0, 3].set(jnp.inf)
    wide = round_rows(x, format).widen(jnp.float32)
    np.testing.assert_array_equal(wide[0], 0)
    assert np.isnan(wide[1:]).all()
    np.testing.assert_array_equal(NarrowRows.zeros((2, 1, DIM), format).widen(jnp.float32), 0)


@FORMAT
def test_instructions_that_widen_two_words_are_exact(format):
    codes = np.arange(256, dtype=np.uint8)
    numbers = jnp.asarray(codes.view(FORMATS[format].dtype))
    words = pack(numbers, numbers[::-1], format)
    exact = [np.asarray(half, np.float32) for half in unpack(words, format)]
    words = np.asarray(words)
    np.testing.assert_array_equal(exact[0], np.asarray(numbers, np.float32))
    np.testing.assert_array_equal(exact[1], exact[0][::-1])
    for program, numbers in zip(TO_BFLOAT16[format], exact, strict=True):
        found = run_ptx(program, words.view(np.uint32)).view(jnp.bfloat16)
        numbers = numbers / np.float32(SMALLER[format])
        usable = np.abs(numbers) <= FORMATS[format].largest / SMALLER[format]
        assert usable.sum() > 230
        np.testing.assert_array_equal(np.asarray(found, np.float32)[usable], numbers[usable])


def run_ptx(program, words):
    """The result $0 of inline assembly with the instructions used here; $1 is `words`."""
    of = {"$1": words.astype(np.uint64)}
    value = lambda name: of[name] if name in of else np.uint64(int(name, 0))
    lanes = lambda x: np.asarray(x, np.uint32).view(jnp.bfloat16).astype(np.float32)

    def multiplied(a, b, c):
        arrays = (np.broadcast_to(x, words.shape).astype(np.uint32) for x in (a, b, c))
        a, b, c = map(lanes, arrays)
        return (a * b + c).astype(jnp.bfloat16).view(np.uint32).astype(np.uint64)

    def chosen_bytes(a, b, selector):
        both, shift = a | (b << np.uint64(32)), np.uint64(8)
        chosen = ((both >> shift * np.uint64(int(selector) >> 4 * i & 15)) & 255 for i in range(4))
        return sum(byte << shift * np.uint64(i) for i, byte in enumerate(chosen))

    operations = {
        "mov.b32": lambda a: a,
        "shr.b32": lambda a, n: a >> n,
        "shl.b32": lambda a, n: (a << n) & np.uint64(0xFFFFFFFF),
        "and.b32": lambda a, b: a & b,
        "prmt.b32": chosen_bytes,
        "lop3.b32": lambda a, b, c, table: {0xEA: (a & b) | c}[int(table)],
        "fma.rn.bf16x2": multiplied,
    }
    for line in program.strip("{}\n").split(";"):
        if (line := line.strip()) and not line.startswith(".reg"):
            name, _, rest = line.partition(" ")
            target, *arguments = (part.strip() for part in rest.split(","))
            of[target] = operations[name](*map(value, arguments))
    return of["$0"].astype(np.uint32)


def arrays(format):
    """Fresh rows, a cache in 8 bits, and places; entries beyond the lengths hold NaN."""
    shape = BATCH, LENGTH, KV_HEADS, DIM
    beyond = (np.arange(LENGTH) >= LENGTHS[:, None])[..., None, None]
    caches = [round_rows(jnp.where(beyond, jnp.nan, normal(i, *shape)), format) for i in (1, 2)]
    segments = np.repeat(np.arange(BATCH + 1), (*COUNTS, 1)).astype(np.int32)
    positions = np.concatenate([n + np.arange(c) for n, c in zip(LENGTHS, COUNTS, strict=True)])
    places = segments, np.append(positions, 0).astype(np.int32), LENGTHS
    qkv = normal(3, ROWS, KV_HEADS * (GROUP + 2), DIM) / 2**6
    return qkv, caches, [jnp.asarray(x) for x in places]


def attention_with(implementation, **options):
    """Jitted attention of `arrays` by this implementation."""
    return jax.jit(
        functools.partial(
            pallas_kernels.ragged_attention,
            implementation=implementation,
            interpret=implementation == "triton" and not COMPILED,
            max_rows_per_sample=max(COUNTS),
            **options,
        )
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("format", "numerics", "implementation", "window"),
    [
        ("int8", "fast", "triton", None),
        ("int8", "invariant", "triton", 5),
        ("int8", "fast", "xla", 5),
        ("int8", "invariant", "xla", None),
        ("fp8", "fast", "triton", 5),
        ("fp8", "invariant", "triton", None),
        ("fp8", "fast", "xla", None),
        ("fp8", "invariant", "xla", 5),
    ],
)
def test_attention_has_the_bits_of_a_wide_cache(format, numerics, implementation, window):
    qkv, caches, places = arrays(format)
    attend = attention_with(implementation, numerics=numerics, window=window)
    wide = [x.widen(qkv.dtype) for x in caches]
    out = attend(qkv, None, None, *caches, *places)
    rounded = round_packed(qkv, caches[0])
    assert np.any(rounded != qkv)
    np.testing.assert_array_equal(out, attend(rounded, None, None, *wide, *places))
    separate = qkv[:, : -2 * KV_HEADS], qkv[:, -2 * KV_HEADS : -KV_HEADS], qkv[:, -KV_HEADS:]
    np.testing.assert_array_equal(out, attend(*separate, *caches, *places))
    assert np.isfinite(np.asarray(out, np.float32)).all()


@pytest.mark.gpu
@FORMAT
@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize(
    ("implementation", "numerics"), [("triton", "fast"), ("triton", "invariant"), ("xla", "fast")]
)
def test_a_fresh_row_that_is_not_finite_reaches_the_rows_that_see_it(
    format, part, implementation, numerics
):
    qkv, caches, places = arrays(format)
    attend = attention_with(implementation, numerics=numerics)
    head = KV_HEADS * GROUP + (KV_HEADS if part == "value" else 0)
    spoilt = qkv.at[1, head, 3].set(jnp.inf)  # of the first sample, whose rows are 0 to 3
    out, expected = (attend(x, None, None, *caches, *places) for x in (spoilt, qkv))
    out, expected = (np.array(x, np.float32) for x in (out, expected))
    assert np.isnan(out[1:4, :GROUP]).all()
    out[1:4, :GROUP] = expected[1:4, :GROUP]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.gpu
@FORMAT
@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_a_cache_may_have_no_entry(format, implementation):
    qkv, caches, (segments, positions, lengths) = arrays(format)
    attend = attention_with(implementation)
    places = segments, positions, 0 * lengths
    empty = [NarrowRows.zeros((BATCH, 0, KV_HEADS, DIM), format)] * 2
    of_empty = attend(qkv, None, None, *empty, *places)
    unseen = attend(qkv, None, None, *caches, *places)
    np.testing.assert_array_equal(of_empty, unseen)


@pytest.mark.gpu
@FORMAT
@pytest.mark.parametrize("implementation", ["triton", "xla", "reference"])
def test_updates_write_rounded_rows(format, implementation):
    qkv, caches, (segments, positions, _) = arrays(format)
    interpret = implementation == "triton" and not COMPILED
    update = functools.partial(
        pallas_kernels.update_kv_caches, implementation=implementation, interpret=interpret
    )
    update = jax.jit(update, static_argnums=3)
    (keys,), (values,) = update(caches[:1], caches[1:], [qkv], None, segments, positions)
    fresh = round_rows(qkv[:, -2 * KV_HEADS :], format)
    for found, before, first in zip((keys, values), caches, (0, KV_HEADS), strict=True):
        at = segments[:-1], positions[:-1]
        heads = slice(first, first + KV_HEADS)
        expected = before.values.at[at].set(fresh.values[:-1, heads])
        np.testing.assert_array_equal(found.values, expected)
        expected = before.row_scales.at[at].set(fresh.row_scales[:-1, heads])
        np.testing.assert_array_equal(found.row_scales, expected)


@FORMAT
@pytest.mark.parametrize("invariant", [False, True])
def test_the_kernels_lower_for_cuda(format, invariant):
    def both(qkv, words, scales, segments, positions, lengths):
        caches = [NarrowRows(words, scales, format)] * 2
        places = segments, positions, lengths
        options = {"invariant": invariant, "max_rows_per_sample": 4}
        out = attention.triton.ragged_attention(qkv, None, None, *caches, *places, **options)
        one = caches[:1]
        return out, cache_update.triton.update_kv_caches(one, one, [qkv], None, *places[:2])

    qkv, words, scales = (9, 12, 128, "bfloat16"), (3, 64, 2, 64, "int16"), (3, 1, 2, 64, "float32")
    lower_for_cuda(both, qkv, words, scales, (9, "int32"), (9, "int32"), (3, "int32"))


@FORMAT
def test_decoding_is_lossless(format):
    prompts = ragged_prompts([5, 14, 3])
    model = shallow_model()
    options = {"max_new_tokens": 8, "kv_dtype": format}
    checked = assert_lossless(model, LOOKUP, prompts, **options)
    assert np.any(checked.output.stats.num_accepted)
    wide = emsjax.generate(model, prompts, LOOKUP, max_new_tokens=8)
    assert not np.array_equal(wide.logprobs, checked.output.logprobs)


def test_bits_do_not_depend_on_the_batch():
    narrow = shallow_model().astype("bfloat16").with_kv_dtype("fp8")
    assert_invariant(narrow, ragged_prompts([5, 14]), LOOKUP, max_new_tokens=4)


def test_every_entry_takes_a_cache_in_8_bits():
    model, prompts = shallow_model(), ragged_prompts([5, 9])
    options = {"max_new_tokens": 5, "kv_dtype": "int8"}
    expected = emsjax.generate(model, prompts, **options)
    streamed = {c.prompt: c.tokens for c in emsjax.stream(model, prompts, batch_size=1, **options)}
    engine = emsjax.Engine(model, batch_size=1, max_len=40, kv_dtype="int8")
    served = {c.prompt: c.tokens for c in engine.stream(prompts, max_new_tokens=5)}
    state = emsjax.init_state(model, None, prompts, **options)
    assert state.cache.layers[0].keys.values.dtype == jnp.int8
    for _ in range(5):
        state, _ = compiled_step(model, None, state)
    for i, prompt in enumerate(prompts):
        tokens = expected.tokens[i, : expected.lengths[i]]
        np.testing.assert_array_equal(streamed[i], tokens)
        np.testing.assert_array_equal(served[i], tokens)
        n = len(prompt)
        np.testing.assert_array_equal(state.tokens[i, n : n + len(tokens)], tokens)


def test_the_memory_plan_knows_the_cache():
    model = tiny_model().astype("bfloat16")
    plan = lambda model: MemoryPlan.for_run(
        model, slots=2, prompt_slots=2, max_len=64, max_draft_tokens=3
    )
    wide, narrow = plan(model), plan(model.with_kv_dtype("int8"))
    head_dim = model.architecture.head_dim
    assert narrow.caches / wide.caches == (head_dim + 4) / (2 * head_dim)


@pytest.mark.parametrize("kv_dtype", ["int4", "", 8, True])
def test_unknown_formats_are_an_error(kv_dtype):
    with pytest.raises(ValueError, match="kv_dtype must be None, 'int8' or 'fp8', not"):
        emsjax.generate(tiny_model(), ragged_prompts([3]), kv_dtype=kv_dtype)
