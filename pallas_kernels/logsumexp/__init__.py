"""The logarithm of the sum of the exponentials of logits."""

import functools

from jax import Array

from pallas_kernels.common.blocks import in_blocks
from pallas_kernels.common.implementations import choose, with_gradient_of
from pallas_kernels.common.numerics import is_invariant
from pallas_kernels.common.shapes import check_shapes
from pallas_kernels.logsumexp import triton, xla

IMPLEMENTATIONS = {"triton": triton.log_sum_exp, "xla": xla.log_sum_exp}


def log_sum_exp(
    logits: Array,  # float32 [rows, vocab]
    *,
    implementation: str | None = None,
    interpret: bool = False,
    numerics: str | None = None,
) -> Array:  # float32 [rows]
    """log(sum(exp(logits))) of each row, as `jax.nn.logsumexp` computes it.

    A row whose logits are all -inf has -inf. A row with NaN has NaN, and one with infinity but
    without NaN has infinity.

    Args:
        logits: float32 [rows, vocab].
        implementation: "triton" (two launches), "xla", or None: with "invariant" numerics Triton
            on NVIDIA GPUs of compute capability 8.0 and newer, otherwise XLA.
        interpret: run the Triton kernels in interpret mode, on any device.
        numerics: "fast" or "invariant": see `pallas_kernels.numerics`; None: the context's.

    Returns:
        The logarithms, float32 [rows].

    Raises:
        ValueError: `implementation` or `numerics` is unknown, or the device cannot run it; logits
            are not an array of rows.
    """
    check_shapes(("logits", logits, "rows vocab"))
    invariant = is_invariant(numerics)
    if implementation is None and not invariant:
        implementation = "xla"
    if choose(implementation, IMPLEMENTATIONS, interpret) == "triton":
        kernel = functools.partial(triton.log_sum_exp, interpret=interpret)
    elif invariant:
        kernel = functools.partial(in_blocks, xla.log_sum_exp)
    else:
        return xla.log_sum_exp(logits)
    return with_gradient_of(xla.log_sum_exp, kernel)(logits)
