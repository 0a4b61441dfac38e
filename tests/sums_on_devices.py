"""Sums over four devices; `test_tensor_parallel.py` runs these tests in a process that has them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from kernel_cases import COMPILED
from test_linear_mosaic import needs_new_jax

import pallas_kernels
from emsjax.tensor_parallel import TensorParallel
from pallas_kernels.add_norm import mosaic
from pallas_kernels.common import implementations

TP = "tp"
needs_devices = pytest.mark.skipif(jax.device_count() < 2, reason="several devices are needed")


def on_devices(function, number):
    """`function` of x, y and vectors, called on every device with its own part of y."""
    mesh = Mesh(np.array(jax.devices()[:number]), (TP,))
    specs = PartitionSpec(), PartitionSpec(TP), PartitionSpec()
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)


def add_norm(x, y, vectors, *, centred, **options):
    """Returns every device's results, [devices, rows, size] each."""
    add = pallas_kernels.add_layer_norm if centred else pallas_kernels.add_rms_norm
    options |= {"axis_name": TP, "epsilon": 1e-5, "dtype": jnp.bfloat16}
    return [jax.lax.all_gather(found, TP) for found in add(x, y, **vectors, **options)]


def numbers(seed, *shape, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


# Devices, rows, size, shares, vectors, layer normalisation.
CASES = {
    "layer": (2, 3, 256, 0, ("y_bias", "scale", "bias"), True),
    "shares": (4, 5, 640, 2, ("y_bias", "scale"), False),
    "addend": (2, 2, 1024, 0, ("y_bias", "scale", "y_scale"), False),
    "rows": (2, 35, 128, 3, ("y_bias", "scale", "bias"), True),
    "many shares": (4, 2, 9216, 3, ("y_bias", "scale"), False),
}


def inputs_of(case):
    """The number of devices, x, y and the vectors of a case."""
    number, rows, size, shares, names, _ = CASES[case]
    number = min(number, jax.device_count())
    y = numbers(1, number * shares, rows, size) if shares else numbers(1, number * rows, size)
    vectors = {"y_bias": None, "scale": None}
    vectors |= {name: numbers(2 + i, size) for i, name in enumerate(names)}
    return number, numbers(0, rows, size, dtype=jnp.float32), y, vectors


@needs_devices
@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["xla", pytest.param("mosaic", marks=needs_new_jax)])
@pytest.mark.parametrize("case", CASES)
def test_sums_of_parts_equal_numpy_on_every_device(case, implementation):
    _, rows, size, shares, names, centred = CASES[case]
    number, x, y, vectors = inputs_of(case)
    options = {"implementation": implementation, "interpret": not COMPILED}
    function = functools.partial(add_norm, centred=centred, **options)
    totals, outs = jax.jit(on_devices(function, number))(x, y, vectors)

    wide = lambda array: np.asarray(array, np.float64)
    parts = wide(y).reshape(number, max(shares, 1), rows, size)
    own = jax.ShapeDtypeStruct((shares, rows, size), y.dtype)
    if implementation == "mosaic" and shares and mosaic.adds_first(own, number):
        parts = wide(jnp.asarray(parts.sum(axis=1, keepdims=True), y.dtype))
    added = parts.sum(axis=(0, 1)) + wide(vectors["y_bias"])
    rms_norm = lambda array: array / np.sqrt((array**2).mean(axis=1, keepdims=True) + 1e-5)
    if "y_scale" in names:
        added = rms_norm(added) * wide(vectors["y_scale"])
    total = wide(x) + added
    out = total - total.mean(axis=1, keepdims=True) if centred else total
    out = rms_norm(out) * wide(vectors["scale"]) + (wide(vectors["bias"]) if "bias" in names else 0)
    for found, expected, error in ((totals, total, 1e-6), (outs, out, 2**-8)):
        assert (np.asarray(found) == np.asarray(found[0])).all()
        np.testing.assert_allclose(wide(found[0]), expected, rtol=error, atol=1e-5)


@needs_new_jax
@pytest.mark.parametrize(("size", "shares"), [(256, ()), (5120, (4,)), (9216, (8,))])
def test_sums_lower_for_cuda(size, shares):
    static = {"norm": mosaic.Norm(1e-5, jnp.bfloat16, centred=True), "axis_name": TP}
    function = on_devices(functools.partial(mosaic.add_norm, **static), 2)
    parts = jnp.zeros((2 * shares[0], 3, size) if shares else (6, size), jnp.bfloat16)
    arrays = numbers(0, 3, size, dtype=jnp.float32), parts, {}
    lowered = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_shares_are_added_first_where_that_saves_time_or_they_would_not_fit():
    first = lambda devices, *shape: mosaic.adds_first(
        jax.ShapeDtypeStruct(shape, "bfloat16"), devices
    )
    assert not first(2, 2, 1, 5120)
    assert not first(4, 1, 256, 16384)
    assert first(4, 2, 1, 5120)
    assert first(2, 4, 24, 5120)
    assert first(2, 16, 1, 8192)  # 512 KiB


@needs_new_jax
@pytest.mark.parametrize(
    ("places", "reached"), [((0, 1), True), ((2, 3), False), ((1, 0), False), ((0, 2), False)]
)
def test_devices_read_each_other_only_if_they_are_numbered_as_in_the_mesh(
    places, reached, monkeypatch
):
    """Of several groups of devices only the first one's are."""
    parallel = TensorParallel(Mesh(np.array(jax.devices())[list(places)], (TP,)))
    add = functools.partial(add_norm, vectors={"y_bias": None, "scale": None}, centred=False)
    specs = PartitionSpec(), PartitionSpec(TP)
    monkeypatch.setattr(implementations, "_compute_capability", lambda: 9.0)
    arrays = numbers(0, 3, 256, dtype=jnp.float32), numbers(1, 6, 256)
    traced = jax.make_jaxpr(parallel.map(add, specs, specs[0]))(*arrays)
    assert ("semaphore_wait" in str(traced)) == reached
    assert ("psum" in str(traced)) != reached


@needs_devices
@pytest.mark.parametrize(
    ("rows", "options", "error"),
    [
        (mosaic.MOST_ROWS + 1, {}, "at most 256 rows"),
        (3, {"numerics": "invariant"}, "in fast numerics"),
    ],
)
@needs_new_jax
def test_sums_that_the_kernel_does_not_take_raise_an_error(rows, options, error):
    options |= {"implementation": "mosaic", "interpret": True, "centred": False}
    function = on_devices(functools.partial(add_norm, **options), 2)
    arrays = numbers(0, rows, 256, dtype=jnp.float32), numbers(1, 2 * rows, 256)
    with pytest.raises(ValueError, match=error):
        jax.jit(function)(*arrays, {"y_bias": None, "scale": None})
