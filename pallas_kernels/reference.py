"""Dense jnp versions of attention and the cache update: the specification of the kernels.

They are short and slow. Tests compare them with numpy in float64, and the other implementations
with both.
"""

from pallas_kernels.attention.reference import ragged_attention
from pallas_kernels.cache_update.reference import update_kv_cache

__all__ = ["ragged_attention", "update_kv_cache"]
