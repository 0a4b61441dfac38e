"""Invariant numerics: the bits of a row do not depend on the number of rows, nor on its place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_linear import close, every_implementation, random

import pallas_kernels
from emsjax.models.architecture import NormKind
from emsjax.models.layers import Addend, Norm, add_addends, add_norm, residual_stream
from emsjax.sampling import log_softmax, softmax
from pallas_kernels.common.implementations import runs_triton

pytestmark = pytest.mark.gpu
SIZE, COUNTS = 512, (1, 2, 3, 5, 15, 16, 17, 40)
FIRST, ROWS = 77, 300  # the rows that are compared, among all rows
VECTOR = random(SIZE, seed=9)
NORM = {"epsilon": 1e-5}
KINDS = [NormKind(1e-5, centred=True), NormKind(1e-5)]
name_of = lambda function: function.__name__


def layer_norm(x, y, **options):
    return pallas_kernels.add_layer_norm(x, y, VECTOR, VECTOR, VECTOR, **NORM, **options)


def rms_norm(x, y, **options):
    y = jnp.stack([y, y * 3, x])
    return pallas_kernels.add_rms_norm(x, y, VECTOR, VECTOR, VECTOR, **NORM, **options)


def rotary(x, y, **options):
    qkv, cos, sin = jnp.stack([x, y]).reshape(2, -1, 8, 64), y[:, :24], y[:, 24:48]
    scales = VECTOR[:64], VECTOR[64:128]
    return pallas_kernels.rotate_heads(qkv, None, cos, sin, *scales, kv_heads=2, **options)


def unturned_heads(x, y, **options):
    none, scales = x[:, :0], (VECTOR[:64], VECTOR[64:128])
    qkv = x.reshape(-1, 8, 64)
    return pallas_kernels.rotate_heads(qkv, None, none, none, *scales, kv_heads=2, **options)


def cutoff(x, y, **options):
    top_k, top_p = jnp.int32(abs(9 * y[:, 0])), jnp.exp(-abs(y[:, 1]))
    return pallas_kernels.sampling_cutoff(x, top_k, top_p, **options)


def cutoff_of_top_p(x, y, **options):
    return pallas_kernels.sampling_cutoff(x, None, jnp.exp(-abs(y[:, 1])), **options)


def log_sum_exp(x, y, **options):
    return pallas_kernels.log_sum_exp(x / 100, **options)


OPERATIONS = [layer_norm, rms_norm, rotary, unturned_heads]
OPERATIONS += [cutoff, cutoff_of_top_p, log_sum_exp]


def differing(function, counts=COUNTS):
    """The numbers of rows at which a row has other bits than among all rows."""
    x, y = random(ROWS, SIZE), random(ROWS, SIZE, seed=1)
    function = jax.jit(function)
    among_all = function(x, y)

    def differs(count):
        part = lambda x: x[FIRST : FIRST + count]
        alone = function(part(x), part(y))
        same = jax.tree.map(lambda one, many: np.array_equal(one, part(many)), alone, among_all)
        return not all(jax.tree.leaves(same))

    return [count for count in counts if differs(count)]


@every_implementation
@pytest.mark.parametrize("operation", OPERATIONS, ids=name_of)
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(operation, options):
    # XLA compiles interpreted kernels, and a grid of one row as a special case.
    counts = (2, 5) if options.get("interpret") else COUNTS
    assert not differing(functools.partial(operation, numerics="invariant", **options), counts)


@pytest.mark.parametrize("operation", [layer_norm, rms_norm, rotary, log_sum_exp], ids=name_of)
def test_fast_bits_of_a_row_depend_on_the_number_of_rows(operation):
    """Otherwise the comparison would show nothing."""
    if runs_triton():
        pytest.skip("kernels of one program per row have the same bits")
    assert differing(functools.partial(operation, numerics="fast"))


def of_layers(kind):
    """What layers do with the residual stream, in the numerics of the context."""
    norm = Norm(SIZE, kind, dtype=jnp.float32)

    def function(x, y):
        shares, scale = jnp.stack([y, 2 * y]), None if kind.centred else VECTOR
        normalised = Addend(shares, VECTOR, scale)
        both = add_addends(Addend(shares, VECTOR), Addend(y))
        stream = [residual_stream(kind, x, term) for term in (normalised, both)]
        return [add_norm(norm, x, term) for term in (None, normalised, both)], norm(y), stream

    return function


DISTRIBUTIONS = [lambda x, y: log_softmax(x / 100), lambda x, y: softmax(x)]
CALLERS = [*map(of_layers, KINDS), *DISTRIBUTIONS]


@pytest.mark.parametrize("function", CALLERS, ids=["centred", "rms", "log_softmax", "softmax"])
def test_callers_use_the_numerics_of_the_context(function):
    assert runs_triton() or differing(function, (2, 3, 5))
    with pallas_kernels.numerics("invariant"):
        assert not differing(function, (2, 3, 5, 17))


@pytest.mark.parametrize("kind", KINDS, ids=["centred", "rms"])
def test_layers_compute_the_same_function_in_both_numerics(kind):
    x, y = random(5, SIZE), random(5, SIZE, seed=1)
    fast = of_layers(kind)(x, y)
    with pallas_kernels.numerics("invariant"):
        invariant = of_layers(kind)(x, y)
    jax.tree.map(lambda one, other: close(one, other, "float32", scale=4), invariant, fast)


@every_implementation
@pytest.mark.parametrize("operation", [layer_norm, rms_norm, rotary, log_sum_exp], ids=name_of)
def test_invariant_operations_have_gradients(operation, options):
    x, y = random(3, SIZE), random(3, SIZE, seed=1)
    total = lambda x, **options: jnp.sum(jnp.sin(jax.tree.leaves(operation(x, y, **options))[-1]))
    gradient = lambda **options: jax.jit(jax.grad(functools.partial(total, **options)))(x)
    found = gradient(numerics="invariant", **options)
    close(found, gradient(implementation="xla"), "float32", scale=4)


@pytest.mark.parametrize("operation", OPERATIONS, ids=name_of)
def test_unknown_numerics_raise_an_error(operation):
    with pytest.raises(ValueError, match=r"numerics must be .*, not 'exact'"):
        operation(random(2, SIZE), random(2, SIZE), numerics="exact")
