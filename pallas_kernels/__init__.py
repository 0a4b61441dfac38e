"""Attention, KV cache, matmul, normalisation, rotary and sampling kernels over packed rows.

The package depends on jax alone. Each operation has a folder with its public function and one
module per implementation: `reference`, `xla`, `triton`, `mosaic`. `pallas_kernels.reference` holds
attention and the cache update in dense jnp, the specification that the other implementations are
tested against. Tests compare the other operations with numpy in float64.
"""

from pallas_kernels import reference
from pallas_kernels.add_norm import add_layer_norm, add_rms_norm
from pallas_kernels.attention import ragged_attention
from pallas_kernels.attention.confine import confine
from pallas_kernels.cache_update import update_kv_cache, update_kv_caches
from pallas_kernels.common import dialect
from pallas_kernels.common.inboxes import on_mesh
from pallas_kernels.common.narrow_rows import NarrowRows, round_rows
from pallas_kernels.common.numerics import numerics
from pallas_kernels.cutoff import sampling_cutoff
from pallas_kernels.logsumexp import log_sum_exp
from pallas_kernels.matmul import linear, linear_sums, rounding_for
from pallas_kernels.matmul.narrow import NarrowWeight
from pallas_kernels.matmul.rounded import RoundedRows, Rounding
from pallas_kernels.rotary import rotate_heads

dialect.register()

__all__ = [
    "NarrowRows",
    "NarrowWeight",
    "RoundedRows",
    "Rounding",
    "add_layer_norm",
    "add_rms_norm",
    "confine",
    "linear",
    "linear_sums",
    "log_sum_exp",
    "numerics",
    "on_mesh",
    "ragged_attention",
    "reference",
    "rotate_heads",
    "round_rows",
    "rounding_for",
    "sampling_cutoff",
    "update_kv_cache",
    "update_kv_caches",
]
