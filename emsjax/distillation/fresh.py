"""New networks over a target's hidden states, before training."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from emsjax.checks import check_at_least
from emsjax.drafters.feature_network import FeatureConfig, FeatureNetwork
from emsjax.models.architecture import Architecture
from emsjax.models.decoder import Decoder, check_taps
from emsjax.models.llama import LlamaConfig


def frequent_tokens(documents: Sequence[np.ndarray], count: int, vocab_size: int) -> np.ndarray:
    """The ids of the `count` most frequent tokens, ascending; of equally frequent ones the lowest.

    Raises:
        ValueError: `count` is out of range.
    """
    check_at_least("draft_vocab_size", count, 1)
    if count > vocab_size:
        raise ValueError(
            f"draft_vocab_size must be at most {vocab_size}, the target's vocabulary, not {count}"
        )
    order = np.argsort(-frequencies(documents, vocab_size), kind="stable")
    return np.sort(order[:count]).astype(np.int32)


def frequencies(documents: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    """How often each token occurs."""
    counts = (np.bincount(one, minlength=vocab_size) for one in documents)
    return sum(counts, np.zeros(vocab_size, np.int64))


def evenly_spaced_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """Up to `count` layers: from the second to the last but two, or from few layers all."""
    first, last = (2, num_layers - 2) if num_layers > 5 else (1, num_layers)
    spaced = np.linspace(first, last, count)
    return tuple(sorted({round(float(x)) for x in spaced}))


def common_fields(
    target: Decoder,
    documents: Sequence[np.ndarray],
    taps: Sequence[int],
    *,
    layers: int,
    draft_vocab_size: int | None,
) -> tuple[dict[str, Any], np.ndarray | None]:
    """Fields of a `FeatureConfig` for a target, and the ids of the tokens that can be drafted.

    Args:
        documents: texts, in which the tokens that can be drafted are the most frequent.
        taps: layers of the target.
        layers: number of draft layers, which have the sizes of the target's.
        draft_vocab_size: tokens that can be drafted; None: all.

    Raises:
        ValueError: a number is out of range.
    """
    a, layers = target.architecture, check_at_least("layers", layers, 1)
    check_taps(tuple(taps), len(a.layers))
    ids = None
    if draft_vocab_size not in (None, a.vocab_size):
        ids = frequent_tokens(documents, draft_vocab_size, a.vocab_size)
    fields = {
        "layers": layer_config(a, layers),
        "taps": tuple(taps),
        "draft_vocab_size": a.vocab_size if ids is None else len(ids),
        "owns_embeddings": not shares_tables(target),
    }
    return fields, ids


def layer_config(a: Architecture, layers: int) -> LlamaConfig:
    """Draft layers with the sizes of a target's.

    Raises:
        ValueError: the target's heads have an odd size.
    """
    return LlamaConfig(
        vocab_size=a.vocab_size,
        hidden_size=a.width,
        intermediate_size=a.ffn_size,
        num_hidden_layers=layers,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads,
        head_dim=a.head_dim,
        max_position_embeddings=a.max_positions,
        bos_token_id=None,
        eos_token_id=None,
    )


def shares_tables(target: Decoder) -> bool:
    """Whether a network of the target's width can use the target's embeddings and head."""
    return has_plain_tables(target.architecture) and target.parallel is None


def has_plain_tables(a: Architecture) -> bool:
    """Whether a model neither scales its embeddings, nor caps, shifts or projects its logits."""
    plain = a.embedding_scale == 1 and not a.logit_cap and not a.head_bias
    return plain and not a.is_projected


def fill_tables(network: FeatureNetwork, target: Decoder, draft_ids: Any) -> None:
    """Starts a network's own embeddings and head with the target's, if they are as wide."""
    if target.architecture.is_projected:
        return
    table = target.embed_tokens.embedding[...].astype(network.dtype)
    if network.embed_tokens is not None:
        network.embed_tokens.embedding[...] = table * target.architecture.embedding_scale
    if network.lm_head is not None:
        head = (target.lm_head or target.embed_tokens).embedding[...].astype(network.dtype)
        network.lm_head.embedding[...] = head if draft_ids is None else head[draft_ids]


def fresh_network(
    make: type[FeatureNetwork], config: FeatureConfig, target: Decoder, draft_ids: Any, seed: int
) -> FeatureNetwork:
    """A float32 network with random weights, and the target's tables where it has its own."""
    network = make(config, rngs=nnx.Rngs(seed), dtype=jnp.float32)
    fill_tables(network, target, draft_ids)
    return network
