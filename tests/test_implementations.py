"""The choice of an implementation, and properties that those of all operations have."""

import functools
import inspect
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from kernel_cases import lower_for_cuda

import pallas_kernels
from pallas_kernels.common.implementations import choose, runs_triton, stages_that_fit

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("package", "function"),
    [
        ("attention", "ragged_attention"),
        ("cache_update", "update_kv_caches"),
        ("cutoff", "sampling_cutoff"),
        ("logsumexp", "log_sum_exp"),
        ("add_norm", "add_norm"),
        ("rotary", "rotate"),
    ],
)
def test_implementations_of_an_operation_take_the_same_arguments(package, function):
    modules = vars(getattr(pallas_kernels, package))
    functions = [
        getattr(modules[m], function) for m in ("reference", "xla", "triton") if m in modules
    ]
    first, *others = map(inspect.signature, functions)
    assert others
    assert all(other.parameters == first.parameters for other in others)


HEADS = np.zeros((4, 3, 8), np.float32)
X, WEIGHT = np.zeros((4, 128), np.float32), np.zeros((128, 128), np.float32)
CALLS = [
    functools.partial(pallas_kernels.ragged_attention, *[None] * 8),
    functools.partial(pallas_kernels.update_kv_cache, *[None] * 6),
    functools.partial(pallas_kernels.update_kv_caches, *[None] * 6),
    functools.partial(pallas_kernels.linear, X, WEIGHT),
    functools.partial(pallas_kernels.linear_sums, X, WEIGHT),
    functools.partial(pallas_kernels.add_layer_norm, X, X, *[None] * 3, epsilon=1e-5),
    functools.partial(pallas_kernels.add_rms_norm, X, X, *[None] * 2, epsilon=1e-5),
    functools.partial(pallas_kernels.rotate_heads, HEADS, None, X[:, :2], X[:, :2], kv_heads=1),
    functools.partial(pallas_kernels.sampling_cutoff, X, None, None),
    functools.partial(pallas_kernels.log_sum_exp, X),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.func.__name__)
def test_an_error_names_an_unknown_implementation(call):
    with pytest.raises(ValueError, match=r"implementation must be None or one of .* not 'fast'"):
        call(implementation="fast")


def test_an_implementation_that_the_device_cannot_run_raises_an_error(monkeypatch):
    monkeypatch.setattr("pallas_kernels.common.implementations.runs_triton", lambda: False)
    assert choose(None, ["triton", "xla"]) == "xla"
    assert choose("triton", ["triton", "xla"], interpret=True) == "triton"
    with pytest.raises(ValueError, match=r"compute capability 8\.0 or newer"):
        choose("triton", ["triton", "xla"])
    monkeypatch.setattr("pallas_kernels.common.implementations.runs_triton", lambda: True)
    assert choose(None, ["triton", "xla"]) == "triton"
    assert choose(None, ["xla"]) == "xla"


def test_lowering_a_kernel_does_not_search_for_a_missing_module(monkeypatch):
    """The search, for every value of the kernel, took longer than the rest of the lowering."""
    searched = []
    finder = SimpleNamespace(find_spec=lambda name, *_: searched.append(name))
    monkeypatch.setattr("pallas_kernels.common.implementations.runs_triton", lambda: True)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    cut = functools.partial(pallas_kernels.sampling_cutoff, top_k=None, top_p=None)
    lower_for_cuda(cut, (2, 16, "float32"))
    assert not [name for name in searched if name.endswith(".tt")]


def test_pipelines_fit_in_shared_memory(monkeypatch):
    assert stages_that_fit(3, 64 << 10) == 3  # without a GPU, or on an H200
    for capability, stages in (("9.0", 3), ("8.0", 2), ("8.9", 1), ("12.0", 1)):
        device = SimpleNamespace(platform="gpu", compute_capability=capability)
        monkeypatch.setattr(jax, "local_devices", lambda backend, device=device: [device])
        assert stages_that_fit(3, 64 << 10) == stages
    assert stages_that_fit(3, 1 << 20) == 1


@pytest.mark.parametrize(
    ("backend", "capability", "runs"),
    [
        ("gpu", "7.5", False),
        ("gpu", "8.0", True),
        ("gpu", "9.0", True),
        ("gpu", "12.0", True),
        ("gpu", "gfx942", False),
        ("gpu", None, False),
        ("cpu", "9.0", False),
    ],
)
def test_triton_runs_from_compute_capability_8(backend, capability, runs, monkeypatch):
    device = SimpleNamespace(platform=backend, compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [device])
    assert runs_triton() == runs
    with jax.default_device(jax.devices("cpu")[0]):
        assert not runs_triton()
