"""The activations that a product may be followed by, as functions of float32 arrays."""

import functools

import jax

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
# Pallas has no error function on GPUs, so "gelu" takes a pass of its own there.
FUSED = ("relu", "silu", "gelu_tanh")
