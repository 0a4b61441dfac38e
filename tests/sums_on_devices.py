"""Sums over four devices; `test_tensor_parallel.py` runs these tests in a process that has them."""

import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from kernel_cases import COMPILED, abstract_gpu, cuda_without_a_gpu

import pallas_kernels
from pallas_kernels.add_norm import triton
from pallas_kernels.common import implementations, inboxes
from pallas_kernels.common.inboxes import MOST_ROWS, SLOTS, Inboxes
from pallas_kernels.matmul.narrow import FORMATS
from pallas_kernels.matmul.rounded import Rounding, round_rows

TP = "tp"
needs_devices = pytest.mark.skipif(jax.device_count() < 2, reason="several devices are needed")


def on_devices(function, number, for_gpus=False):
    """`function` of x, y and vectors, called on every device with its own part of y.

    The devices' order in the mesh is not that of their numbers.

    Args:
        for_gpus: the function is not called, but lowered for GPUs.
    """
    mesh = lowered_on = Mesh(np.array(jax.devices()[:number][::-1]), (TP,))
    specs = PartitionSpec(), PartitionSpec(TP), PartitionSpec()
    if for_gpus and jax.__version_info__ >= (0, 11):
        kinds = {"axis_types": (jax.sharding.AxisType.Auto,), "abstract_device": abstract_gpu()}
        lowered_on = jax.sharding.AbstractMesh((number,), (TP,), **kinds)

    def on_device(*parts):
        with pallas_kernels.on_mesh(mesh):
            return function(*parts)

    specs = {"in_specs": specs, "out_specs": specs[0]}
    return jax.shard_map(on_device, mesh=lowered_on, check_vma=False, **specs)


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
@pytest.mark.parametrize("implementation", ["xla", "triton"])
@pytest.mark.parametrize("case", CASES)
def test_sums_of_parts_equal_numpy_on_every_device(case, implementation):
    _, rows, size, shares, names, centred = CASES[case]
    number, x, y, vectors = inputs_of(case)
    options = {"implementation": implementation, "interpret": not COMPILED}
    function = functools.partial(add_norm, centred=centred, **options)
    lowered = jax.jit(on_devices(function, number)).lower(x, y, vectors)
    exchanges = COMPILED and implementation == "triton"
    assert ("sum_add" in lowered.as_text()) == exchanges
    totals, outs = lowered.compile()(x, y, vectors)

    wide = lambda array: np.asarray(array, np.float64)
    parts = wide(y).reshape(number, max(shares, 1), rows, size)
    if exchanges:  # each device's part is rounded to its dtype
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


@needs_devices
@pytest.mark.gpu
@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
@pytest.mark.parametrize(("rows", "size", "shares"), [(5, 640, 2), (24, 5120, 0)])
def test_sums_are_rounded_for_the_product_that_follows(format, rows, size, shares):
    options = {"implementation": "triton", "interpret": not COMPILED}
    number, rounding = 2, Rounding(FORMATS[format], 32)
    y = numbers(1, number * max(shares, 1), rows, size)
    y = y if shares else y.reshape(-1, size)

    def both(x, y, vectors):
        given = {**vectors, "axis_name": TP, "epsilon": 1e-5, "dtype": jnp.bfloat16, **options}
        _, rounded = pallas_kernels.add_rms_norm(x, y, **given, rounding=rounding)
        _, out = pallas_kernels.add_rms_norm(x, y, **given)
        expected = round_rows(out, rounding, interpret=not COMPILED)
        return jax.tree.map(lambda array: jax.lax.all_gather(array, TP), (rounded, expected))

    x = numbers(0, rows, size, dtype=jnp.float32)
    rounded, expected = jax.jit(on_devices(both, number))(x, y, {"y_bias": None, "scale": None})
    for one, other in zip(*map(jax.tree.leaves, (rounded, expected)), strict=True):
        np.testing.assert_array_equal(one.astype(float), other.astype(float))


@needs_devices
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_that_follow_one_another_do_not_mix(dtype):
    """Many in a function, of different numbers of rows, before each of which some devices wait."""
    number, size, row_counts = min(4, jax.device_count()), 1280, 4 * (200, 1, 24, 1, 144)
    parts = np.random.default_rng(0).integers(1, 4, (number, 200, size))

    def sums(x, part, zeros):
        totals = []
        for n, rows in enumerate(row_counts):
            work = 16 * ((jax.lax.axis_index(TP) + n) % number)
            zero = jax.lax.fori_loop(0, work, lambda _, found: found @ zeros, zeros)[0, 0]
            term = (part[:rows] * (n + 1) + zero).astype(dtype)
            totals.append(add_norm(x[:rows], term, {"y_bias": None, "scale": None}, centred=False))
        return [total for total, _ in totals]

    y = jnp.asarray(parts.reshape(number * 200, size), jnp.float32)
    zeros = jnp.zeros((512, 512), jnp.float32)
    call = jax.jit(on_devices(sums, number))
    for _ in range(5):
        totals = call(jnp.zeros((200, size), jnp.float32), y, zeros)
        for n, (total, rows) in enumerate(zip(totals, row_counts, strict=True)):
            expected = (n + 1) * parts.sum(axis=0)[:rows]  # exact, as the numbers are small
            np.testing.assert_array_equal(total, np.stack([expected] * number))


@needs_devices
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("numbers", [(-0.0,), (0.0, -0.0), (-0.0, 1.0)])
def test_zeros_of_any_sign_are_sent(dtype, numbers):
    """Words of some of them are those where nothing has come."""
    row = np.resize(np.array(numbers), 640)
    x, y = jnp.zeros((3, 640), jnp.float32), jnp.asarray(np.tile(row, (6, 1)), dtype)
    function = on_devices(functools.partial(add_norm, centred=False), 2)
    totals, _ = jax.jit(function)(x, y, {"y_bias": None, "scale": None})
    np.testing.assert_array_equal(totals, np.tile(2 * row, (2, 3, 1)))


@pytest.fixture
def reached(monkeypatch):
    """Devices whose kernels would write to one another's memory, if they were GPUs."""
    monkeypatch.setattr(inboxes, "reach_each_other", lambda devices: True)
    monkeypatch.setattr(implementations, "_compute_capability", lambda: 9.0)


@pytest.mark.parametrize(("size", "shares"), [(256, ()), (5120, (4,)), (9216, (8,))])
def test_sums_lower_for_cuda(size, shares, reached):
    x = numbers(0, 3, size, dtype=jnp.float32)
    y = numbers(1, 2 * shares[0], 3, size) if shares else numbers(1, 6, size)
    function = on_devices(functools.partial(add_norm, centred=True), 2, for_gpus=True)
    traced = jax.jit(function).trace(x, y, {"y_bias": None, "scale": None, "bias": None})
    with cuda_without_a_gpu():
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "sum_add_layer_norm" in text
    assert "all_reduce" not in text


@pytest.mark.parametrize(
    ("rows", "size", "numerics", "exchanges"),
    [
        (MOST_ROWS, 256, "fast", True),
        (MOST_ROWS + 1, 256, "fast", False),
        (3, 64, "fast", False),
        (3, 258, "fast", False),
        (3, 256, "invariant", False),
    ],
)
def test_rows_are_exchanged_where_they_fit(rows, size, numerics, exchanges, reached):
    traced = traced_sum(rows, size, numerics=numerics)
    assert ("elementwise_inline_asm" in traced) == exchanges
    # The others' totals are gathered by the test itself.
    assert (traced.count("psum") + traced.count(" = all_gather[") > 2) != exchanges


def test_no_rows_are_exchanged_between_processors(monkeypatch):
    monkeypatch.setattr(implementations, "_compute_capability", lambda: 9.0)
    assert "elementwise_inline_asm" not in traced_sum(3, 256)


def test_no_rows_are_exchanged_in_interpret_mode(reached):
    options = {"implementation": "triton", "interpret": True}
    assert "elementwise_inline_asm" not in traced_sum(3, 256, **options)


def test_no_rows_are_exchanged_over_one_axis_of_several(reached):
    """The devices on one axis alone are not all that write to the inboxes."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", TP))
    specs = {"in_specs": (PartitionSpec(), PartitionSpec(TP)), "out_specs": PartitionSpec()}

    def sums(x, y):
        with pallas_kernels.on_mesh(mesh):
            return add_norm(x, y, {"y_bias": None, "scale": None}, centred=False)

    x, y = jnp.zeros((3, 256)), jnp.zeros((6, 256))
    traced = jax.make_jaxpr(jax.shard_map(sums, mesh=mesh, check_vma=False, **specs))(x, y)
    assert "elementwise_inline_asm" not in str(traced)


@pytest.mark.parametrize(
    ("platforms", "processes", "access", "reach"),
    [
        (("gpu", "gpu"), (0, 0), True, True),
        (("gpu", "gpu"), (0, 1), True, False),
        (("gpu", "cpu"), (0, 0), True, False),
        (("gpu", "gpu"), (0, 0), False, False),
    ],
)
def test_devices_reach_others_of_their_process_with_access(
    platforms, processes, access, reach, monkeypatch
):
    def can_access(found, one, other):
        found._obj.value = access or one == other
        return 0

    cuda = types.SimpleNamespace(cuDeviceCanAccessPeer=can_access)
    monkeypatch.setattr(inboxes.ctypes, "CDLL", lambda name: cuda)
    fields = zip(platforms, processes, range(2), strict=True)
    names = ("platform", "process_index", "local_hardware_id")
    devices = [types.SimpleNamespace(**dict(zip(names, of, strict=True))) for of in fields]
    assert inboxes.reach_each_other.__wrapped__(tuple(devices)) == reach


@pytest.mark.parametrize(
    ("devices", "row_bytes", "rows"), [(2, 10240, 256), (8, 20480, 58), (8, 20481, 57)]
)
def test_devices_send_a_bounded_number_of_bytes(devices, row_bytes, rows, reached):
    with inboxes._devices(tuple(range(devices))):
        assert Inboxes.of(devices, row_bytes).rows == rows
        assert Inboxes.of(devices - 1, row_bytes) is None


def test_gradients_are_those_of_a_collective_operation(reached, monkeypatch):
    """The kernel, which CPUs do not run, has no part in them."""
    x, y = numbers(0, 3, 256, dtype=jnp.float32), numbers(1, 6, 256, dtype=jnp.float32)
    ran = []

    def forward(x, y, vectors, *, norm, **options):
        ran.append(options["inboxes"])
        return jnp.zeros_like(x), jnp.zeros(x.shape, norm.dtype)

    monkeypatch.setattr(triton, "add_norm", forward)

    weights = [numbers(seed, 2, 3, 256, dtype=jnp.float32) for seed in (2, 3)]

    def gradients(implementation):
        options = {"centred": False, "implementation": implementation}
        function = on_devices(functools.partial(add_norm, **options), 2)

        def loss(x, y):
            found = function(x, y, {"y_bias": None, "scale": None})
            pairs = zip(weights, found, strict=True)
            return sum((weight * of.astype(jnp.float32)).sum() for weight, of in pairs)

        return jax.grad(loss, argnums=(0, 1))(x, y)

    for one, other in zip(gradients("triton"), gradients("xla"), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    assert len(ran) == 1


def test_each_of_mapped_sums_is_exchanged_by_itself(reached):
    vectors = {"y_bias": None, "scale": None}

    def mapped(x, y, vectors):
        return jax.vmap(lambda x: add_norm(x, y, vectors, centred=False))(x)

    x, y = jnp.zeros((5, 3, 256)), jnp.zeros((6, 256))
    traced = str(jax.make_jaxpr(on_devices(mapped, 2))(x, y, vectors))
    assert "elementwise_inline_asm" in traced
    assert "grid=(5" not in traced


def traced_sum(rows, size, **options):
    function = on_devices(functools.partial(add_norm, centred=False, **options), 2)
    x, y = (jnp.zeros((n * rows, size), jnp.float32) for n in (1, 2))
    return str(jax.make_jaxpr(function)(x, y, {"y_bias": None, "scale": None}))


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("row_bytes", [512, 10240, 36864])
def test_places_in_an_inbox_do_not_overlap(devices, row_bytes):
    one = Inboxes(tuple(range(devices)), 7, row_bytes)
    pieces = [(one.place_of_count(row), 4) for row in range(one.rows)]
    every = itertools.product(range(SLOTS), range(devices), range(one.rows))
    pieces += [(one.place_of_row(*at), row_bytes) for at in every]
    ends = [0]
    for first, length in sorted(pieces):
        assert first >= ends[-1]
        assert first % min(length, 16) == 0
        ends.append(first + length)
    assert ends[-1] == one.bytes
