"""Rotary positions and the normalisation of heads: every implementation against float64 numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import DTYPES, in_turn, lower_for_cuda
from test_linear import close, every_implementation, random

import pallas_kernels

pytestmark = pytest.mark.gpu


def expected_heads(x, cos, sin, scales, kv_heads, offset):
    """The plainest way to write it: one pair of numbers of one head at a time."""
    x = x.copy()
    turned, pairs = x.shape[1] - kv_heads, cos.shape[1]
    for head in range(turned):
        if scales:
            scale = np.float64(scales[head >= turned - kv_heads]) + offset
            mean = np.mean(x[:, head] ** 2, axis=1, keepdims=True)
            x[:, head] = x[:, head] / np.sqrt(mean + 1e-6) * scale
        for i in range(pairs):
            one, other = x[:, head, i].copy(), x[:, head, pairs + i].copy()
            x[:, head, i] = one * cos[:, i] - other * sin[:, i]
            x[:, head, pairs + i] = other * cos[:, i] + one * sin[:, i]
    return x


KINDS = [(False, None), (True, None), (False, 1), (True, 3)]  # normalised; shares
# Heads, K/V heads, numbers of a head, pairs that turn.
SIZES = [(4, 2, 16, 8), (9, 3, 80, 40), (6, 6, 64, 8), (2, 1, 12, 0), (16, 4, 32, 6)]


@every_implementation
@pytest.mark.parametrize(("kind", "sizes", "dtype"), in_turn(DTYPES, KINDS, SIZES))
def test_heads_equal_numpy(options, kind, sizes, dtype):
    (normalised, shares), (heads, kv_heads, head_dim, pairs) = kind, sizes
    shape = (heads + 2 * kv_heads, head_dim)
    qkv = random(*(() if shares is None else (shares,)), 5, *shape, dtype=dtype)
    bias = None if shares is None else random(*shape, dtype=dtype, seed=4)
    angles = random(5, pairs, seed=1) * 100
    scales = [random(head_dim, dtype=dtype, seed=seed) for seed in (2, 3)] if normalised else []
    offset = 1.0 if normalised else 0.0
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    rotate = functools.partial(pallas_kernels.rotate_heads, kv_heads=kv_heads, offset=offset)
    out = jax.jit(functools.partial(rotate, **options))(qkv, bias, cos, sin, *scales)
    assert out.dtype == qkv.dtype
    product = np.float64(qkv) if shares is None else np.float64(qkv).sum(axis=0) + np.float64(bias)
    expected = expected_heads(product, np.float64(cos), np.float64(sin), scales, kv_heads, offset)
    close(out, expected, dtype, scale=8)


@every_implementation
def test_the_result_is_rounded_once(options):
    """Neither the normalised heads nor the sum of the shares are rounded in between."""
    qkv, angles = random(2, 4, 6, 64), random(4, 32, seed=1)
    arguments = (
        qkv,
        None,
        jnp.cos(angles),
        jnp.sin(angles),
        random(64, seed=2),
        random(64, seed=3),
    )
    rotate = functools.partial(pallas_kernels.rotate_heads, kv_heads=2, **options)
    exact, rounded = rotate(*arguments), rotate(*arguments, dtype=jnp.bfloat16)
    np.testing.assert_array_equal(rounded, exact.astype(jnp.bfloat16))


@every_implementation
def test_scores_depend_on_differences_of_positions_alone(options):
    """The property that rotary positions are for; heads of queries and keys turn alike."""
    qkv = jnp.tile(random(1, 3, 64), (6, 1, 1))
    positions = jnp.array([0.0, 3, 100, 103, 1000, 1003])
    angles = positions[:, None] * 10000.0 ** -(jnp.arange(32.0) / 32)
    turns = jnp.cos(angles), jnp.sin(angles)
    out = pallas_kernels.rotate_heads(qkv, None, *turns, kv_heads=1, **options)
    scores = jnp.sum(out[0::2, 0] * out[1::2, 1], axis=-1)
    np.testing.assert_allclose(scores, scores[0], atol=1e-2)
    assert abs(scores[0] - jnp.sum(qkv[0, 0] * qkv[0, 1])) > 0.1  # they do depend on them


@pytest.mark.parametrize("interpret", [False, True], ids=["xla", "triton"])
def test_gradients_equal_those_of_the_plain_formula(interpret):
    options = {"implementation": "triton", "interpret": True} if interpret else {}
    qkv, bias, angles = random(2, 3, 4, 8), random(4, 8, seed=4), random(3, 3, seed=1)
    scales = [random(8, seed=seed) for seed in (2, 3)]

    def plain(qkv, bias, cos, sin, query_scale, key_scale):
        qkv = qkv.sum(axis=0) + bias

        def heads(x, scale):
            x = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale
            a, b, rest = x[..., :3], x[..., 3:6], x[..., 6:]
            c, s = cos[:, None], sin[:, None]
            return jnp.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)

        parts = heads(qkv[:, :2], query_scale), heads(qkv[:, 2:3], key_scale), qkv[:, 3:]
        return jnp.sum(jnp.sin(jnp.concatenate(parts, axis=1)))

    rotate = functools.partial(pallas_kernels.rotate_heads, kv_heads=1, **options)
    arguments = (qkv, bias, jnp.cos(angles), jnp.sin(angles), *scales)
    ours = lambda *args: jnp.sum(jnp.sin(rotate(*args)))
    actual, expected = (jax.grad(f, argnums=range(6))(*arguments) for f in (ours, plain))
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_wrong_shapes_are_errors():
    qkv, angles = random(3, 4, 8), random(3, 4)
    rotate = functools.partial(pallas_kernels.rotate_heads, kv_heads=1)
    with pytest.raises(ValueError, match="cos has 5 pairs, more than half of the 8 numbers"):
        rotate(qkv, None, random(3, 5), random(3, 5))
    with pytest.raises(ValueError, match=r"sin must be \[rows, pairs\]"):
        rotate(qkv, None, angles, angles[:, :2])
    with pytest.raises(ValueError, match="two arrays, or both None"):
        rotate(qkv, None, angles, angles, random(8))
    with pytest.raises(ValueError, match=r"key_scale must be \[head_dim\] with head_dim = 8"):
        rotate(qkv, None, angles, angles, random(8), random(4))
    with pytest.raises(ValueError, match="qkv must hold queries, keys and values"):
        rotate(qkv, None, angles, angles, kv_heads=2)
    with pytest.raises(ValueError, match=r"bias must be \[heads, head_dim\]"):
        rotate(qkv, random(3, 8), angles, angles)


@pytest.mark.parametrize("rows", [1, 192])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "pairs", "normalised"),
    [(32, 8, 128, 64, True), (8, 4, 256, 128, True), (32, 32, 128, 16, False)],
)
def test_the_kernel_lowers_for_cuda(
    rows, heads, kv_heads, head_dim, pairs, normalised, monkeypatch
):
    monkeypatch.setattr("pallas_kernels.common.implementations.runs_triton", lambda: True)
    rotate = functools.partial(
        pallas_kernels.rotate_heads, kv_heads=kv_heads, implementation="triton"
    )
    scales = [(head_dim, "bfloat16")] * 2 if normalised else []
    shape, angles = (heads + 2 * kv_heads, head_dim, "bfloat16"), (rows, pairs, "float32")
    lower_for_cuda(rotate, (rows, *shape), shape, angles, angles, *scales)
    lower_for_cuda(rotate, (4, rows, *shape), shape, angles, angles, *scales)
