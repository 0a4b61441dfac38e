"""Rotary positions and the normalisation of queries and keys, in one pass."""

import functools

from jax import Array

from pallas_kernels.common.blocks import in_blocks
from pallas_kernels.common.implementations import choose, with_gradient_of
from pallas_kernels.common.numerics import is_invariant
from pallas_kernels.common.shapes import check_packed_heads, check_shapes
from pallas_kernels.rotary import triton, xla

IMPLEMENTATIONS = {"triton": triton.rotate, "xla": xla.rotate}


def rotate_heads(
    qkv: Array,  # [rows, heads + 2 * kv_heads, head_dim], or [shares, rows, ...]
    bias: Array | None,  # [heads + 2 * kv_heads, head_dim]
    cos: Array,  # float32 [rows, pairs]
    sin: Array,  # float32 [rows, pairs]
    query_scale: Array | None = None,  # [head_dim]
    key_scale: Array | None = None,  # [head_dim]
    *,
    kv_heads: int,
    epsilon: float = 1e-6,
    offset: float = 0.0,
    dtype=None,
    implementation: str | None = None,
    interpret: bool = False,
    numerics: str | None = None,
) -> Array:  # [rows, heads + 2 * kv_heads, head_dim]
    """Rotates the queries and keys of packed rows by their positions; values are not rotated.

    Number i of a head and number pairs + i are rotated together, for i in 0..pairs - 1:

        out[i]         = x[i] * cos[i] - x[pairs + i] * sin[i]
        out[pairs + i] = x[pairs + i] * cos[i] + x[i] * sin[i]

    Numbers from 2 * pairs on are not rotated. With scales, every head of queries and of keys is
    normalised before it is rotated: x / sqrt(mean(x ** 2) + epsilon) * (scale + offset). Everything
    is computed in float32, from the product to the result.

    Args:
        qkv: heads of queries, of keys and of values, side by side, as one product computes them;
            or the shares in which `pallas_kernels.linear_sums` returns it.
        bias: the product's bias; None: no bias.
        cos, sin: of each row's angles, float32 [rows, pairs]; at most head_dim / 2 pairs.
        query_scale, key_scale: the scales of the normalisation, [head_dim] each; both None: heads
            are not normalised.
        kv_heads: the number of heads of keys, and of values.
        epsilon: added to the mean square.
        offset: added to the scales: 1 for weights that are stored as differences from 1.
        dtype: the result's; None: qkv's.
        implementation: "triton" (one launch), "xla", or None: Triton on NVIDIA GPUs of
            compute capability 8.0 and newer, XLA elsewhere.
        interpret: run the Triton kernel in interpret mode, on any device.
        numerics: "fast" or "invariant": see `pallas_kernels.numerics`; None: the context's.

    Raises:
        ValueError: `implementation` or `numerics` is unknown, or the device cannot run it; an array
            has another shape than documented; only one of the scales is None.

    Reference: rotary positions, arXiv 2104.09864; normalised queries and keys, arXiv 2010.04245.
    """
    if (query_scale is None) != (key_scale is None):
        raise ValueError("query_scale and key_scale must be two arrays, or both None")
    vectors = {"bias": bias, "query_scale": query_scale, "key_scale": key_scale}
    vectors = {name: vector for name, vector in vectors.items() if vector is not None}
    check_shapes(
        ("qkv", qkv, "shares rows heads head_dim" if qkv.ndim == 4 else "rows heads head_dim"),
        ("cos", cos, "rows pairs"),
        ("sin", sin, "rows pairs"),
        *(
            (name, vector, "heads head_dim" if name == "bias" else "head_dim")
            for name, vector in vectors.items()
        ),
    )
    check_packed_heads("qkv", qkv[0] if qkv.ndim == 4 else qkv, kv_heads)
    if 2 * cos.shape[1] > qkv.shape[-1]:
        raise ValueError(
            f"cos has {cos.shape[1]} pairs, more than half of the {qkv.shape[-1]} numbers of a head"
        )
    options = {"kv_heads": kv_heads, "epsilon": epsilon, "offset": offset}
    options["dtype"] = dtype or qkv.dtype
    reference = functools.partial(xla.rotate, **options)
    invariant = is_invariant(numerics)
    # Kernels do not take arrays without numbers.
    if choose(implementation, IMPLEMENTATIONS, interpret) == "triton" and cos.size:
        kernel = functools.partial(triton.rotate, interpret=interpret, **options)
    elif invariant:
        kernel = functools.partial(_in_blocks, reference)
    else:
        return reference(qkv, vectors, cos, sin)
    return with_gradient_of(reference, kernel)(qkv, vectors, cos, sin)


def _in_blocks(function, qkv, vectors: dict[str, Array], cos, sin) -> Array:
    """function(qkv, vectors, cos, sin), computed for a fixed number of rows at a time."""
    rotate = lambda qkv, cos, sin: function(qkv, vectors, cos, sin)
    return in_blocks(rotate, qkv, cos, sin, axes=(-3, 0, 0))
