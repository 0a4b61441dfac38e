"""The least logits that top-k and top-p sampling keep."""

from jax import Array

from pallas_kernels.common.blocks import in_blocks
from pallas_kernels.common.implementations import choose
from pallas_kernels.common.numerics import is_invariant
from pallas_kernels.cutoff import triton, xla

IMPLEMENTATIONS = {"triton": triton.sampling_cutoff, "xla": xla.sampling_cutoff}


def sampling_cutoff(
    logits: Array,  # float32 [rows, vocab]
    top_k: Array | None,  # int32 [rows]
    top_p: Array | None,  # float32 [rows]
    *,
    implementation: str | None = None,
    interpret: bool = False,
    numerics: str | None = None,
) -> Array:  # float32 [rows]
    """The least logit of each row that may be sampled; logits equal to it are kept as well.

    Top-k keeps the k largest. Of these, top-p keeps the smallest set of largest logits whose share
    of the softmax reaches p.

    Args:
        logits: float32 [rows, vocab].
        top_k: int32 [rows], 0 keeps all; None: keep all in every row.
        top_p: float32 [rows], 1 and more keeps all; None: keep all in every row.
        implementation: "triton" (one launch), "xla", or None: Triton on NVIDIA GPUs of
            compute capability 8.0 and newer, XLA elsewhere.
        interpret: run the Triton kernel in interpret mode, on any device.
        numerics: "fast" or "invariant": see `pallas_kernels.numerics`; None: the context's.

    Returns:
        The cutoffs, float32 [rows]; -inf where all logits are kept.

    Raises:
        ValueError: `implementation` or `numerics` is unknown, or the device cannot run it.

    Reference: nucleus sampling, arXiv 1904.09751.
    """
    invariant = is_invariant(numerics)
    chosen = choose(implementation, IMPLEMENTATIONS, interpret)
    if chosen == "xla" and invariant:
        return _in_blocks(logits, {"top_k": top_k, "top_p": top_p})
    return IMPLEMENTATIONS[chosen](logits, top_k, top_p, interpret=interpret)


def _in_blocks(logits: Array, limits: dict[str, Array | None]) -> Array:
    """The cutoffs in XLA operations, of a fixed number of rows at a time."""
    given = {name: limit for name, limit in limits.items() if limit is not None}
    left_out = dict.fromkeys(limits.keys() - given.keys())

    def cutoff(logits, *values):
        return xla.sampling_cutoff(logits, **left_out, **dict(zip(given, values, strict=True)))

    return in_blocks(cutoff, logits, *given.values())
