"""The activations that a product may be followed by, as functions of float32 arrays."""

import functools

import jax
import jax.numpy as jnp

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
# Kernels need no gradients, for which Pallas Mosaic GPU has no rules.
IN_KERNELS = ACTIVATIONS | {"relu": lambda x: jnp.maximum(x, 0)}
# Pallas has no error function on GPUs, so "gelu" takes a pass of its own there.
FUSED = ("relu", "silu", "gelu_tanh")
