"""Attention, KV-cache, normalisation and sampling kernels over packed rows; depends on jax alone.

`reference` holds attention and the cache update in dense jnp: the specification that the other
implementations are tested against. Tests compare the other operations with numpy in float64.
"""

from pallas_kernels import dialect, reference
from pallas_kernels.add_layer_norm import add_layer_norm
from pallas_kernels.keys_and_values import keys_and_values
from pallas_kernels.linear import linear, linear_sums
from pallas_kernels.ragged_attention import ragged_attention
from pallas_kernels.sampling_cutoff import sampling_cutoff
from pallas_kernels.update_kv_cache import update_kv_cache, update_kv_caches

dialect.register()

__all__ = [
    "add_layer_norm",
    "keys_and_values",
    "linear",
    "linear_sums",
    "ragged_attention",
    "reference",
    "sampling_cutoff",
    "update_kv_cache",
    "update_kv_caches",
]
