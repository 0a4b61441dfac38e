"""The least logits that top-k and top-p sampling keep."""

from jax import Array

from pallas_kernels.common.implementations import choose
from pallas_kernels.cutoff import triton, xla

IMPLEMENTATIONS = {"triton": triton.sampling_cutoff, "xla": xla.sampling_cutoff}


def sampling_cutoff(
    logits: Array,  # float32 [rows, vocab]
    top_k: Array | None,  # int32 [rows]
    top_p: Array | None,  # float32 [rows]
    *,
    implementation: str | None = None,
    interpret: bool = False,
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

    Returns:
        The cutoffs, float32 [rows]; -inf where all logits are kept.

    Raises:
        ValueError: `implementation` is unknown or the device cannot run it.

    Reference: nucleus sampling, arXiv 1904.09751.
    """
    cutoff = IMPLEMENTATIONS[choose(implementation, IMPLEMENTATIONS, interpret)]
    return cutoff(logits, top_k, top_p, interpret=interpret)
