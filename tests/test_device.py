"""The default dtype of a model depends on the device."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import emsjax


@pytest.mark.parametrize(
    ("backend", "capability", "expected"),
    [
        ("cpu", None, jnp.float32),
        ("gpu", "7.5", jnp.float16),
        ("gpu", "8.0", jnp.bfloat16),
        ("gpu", "9.0", jnp.bfloat16),
        ("gpu", "gfx942", jnp.float16),
        ("tpu", None, jnp.bfloat16),
    ],
)
def test_each_device_gets_a_dtype_that_it_supports(monkeypatch, backend, capability, expected):
    device = SimpleNamespace(platform=backend, compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda backend: [device])
    assert emsjax.best_dtype() == expected
