"""The target's own continuations, as documents to train on."""

from collections.abc import Sequence

import jax
import numpy as np

from emsjax.drafters import PromptLookup
from emsjax.generation import generate
from emsjax.models.opt import OPT
from emsjax.sampling import Sampling


def continuations(
    target: OPT,
    documents: Sequence[np.ndarray],
    count: int,
    *,
    prompt_tokens: int = 64,
    new_tokens: int = 128,
    batch_size: int = 32,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[np.ndarray]:
    """Excerpts of documents, each with what the target says next.

    A draft model is asked to go on where the target has been writing for a while: there its
    drafts are verified, and there it must be like the target.

    Args:
        target: the model.
        documents: token ids; all are taken once before any a second time. Their first excerpts
            are their beginnings, later ones begin anywhere.
        count: how many.
        prompt_tokens: of an excerpt, and at most half of the document.
        new_tokens: at most.
        batch_size: decoded at once.
        temperature: 0: greedy.
        seed: of the excerpts and of the samples.

    Returns:
        `count` arrays of token ids, int32 [t] each: an excerpt, and what the target said.

    Raises:
        ValueError: no documents, or the target has no room for `new_tokens` behind a prompt.
    """
    if not count:
        return []
    if not documents:
        raise ValueError("documents must not be empty")
    room = target.config.max_position_embeddings - new_tokens
    if room < 1:
        raise ValueError(
            f"new_tokens must be below {target.config.max_position_embeddings}, the positions of "
            f"the target, not {new_tokens}"
        )
    rng = np.random.default_rng(seed)
    rounds = -(-count // len(documents))
    order = np.concatenate([rng.permutation(len(documents)) for _ in range(rounds)])[:count]
    excerpts = []
    for taken, document in enumerate(documents[i] for i in order):
        length = min(prompt_tokens, max(1, len(document) // 2), room)
        begin = 0 if taken < len(documents) else rng.integers(max(1, len(document) - length))
        excerpts.append(np.asarray(document[begin : begin + length], np.int32))
    out = generate(
        target,
        excerpts,
        PromptLookup(),
        max_new_tokens=new_tokens,
        sampling=Sampling(temperature=temperature),
        batch_size=min(batch_size, count),
        key=jax.random.key(seed),
    )
    new = [tokens[:length] for tokens, length in zip(out.tokens, out.lengths, strict=True)]
    return [np.concatenate(parts) for parts in zip(excerpts, new, strict=True)]
