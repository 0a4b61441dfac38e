"""The target's own continuations, as documents to train on."""

from collections.abc import Sequence

import jax
import numpy as np

from emsjax.checks import INT32_MAX, check_at_least, check_seed
from emsjax.configured import configured
from emsjax.decode.row_counts import round_up_length
from emsjax.distillation.finite import check_ends
from emsjax.drafters import PromptLookup
from emsjax.engine.memory import check_results_fit
from emsjax.generation import generate
from emsjax.models.decoder import Decoder
from emsjax.sampling import Sampling


@configured
def continuations(
    target: Decoder,
    documents: Sequence[np.ndarray],
    count: int,
    *,
    prompt_tokens: int = 64,
    new_tokens: int = 128,
    batch_size: int = 32,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[np.ndarray]:
    """Excerpts of documents, each with the target's continuation.

    While decoding, a draft model continues text that the target has written, so it must agree
    with the target there.

    Args:
        target: the model.
        documents: token ids; each is used once before any is used again. The first excerpt of a
            document is its beginning, later ones begin anywhere.
        count: number of continuations.
        prompt_tokens: length of an excerpt, which is at most half of the document.
        new_tokens: largest number of new tokens.
        batch_size: sequences decoded at once.
        temperature: temperature of sampling; 0 is greedy.
        seed: seed of the excerpts and of the samples, in 0..2**32 - 1.

    Returns:
        `count` arrays of token ids, int32 [t] each: an excerpt and the target's continuation.

    Raises:
        ValueError: a number is out of range, there are no documents, or the target has too few
            positions for `new_tokens`.
        NonFiniteError: the target's logits are not finite.
    """
    count = check_at_least("count", count, 0, INT32_MAX)
    prompt_tokens = check_at_least("prompt_tokens", prompt_tokens, 1)
    new_tokens = check_at_least("new_tokens", new_tokens, 1)
    batch_size = check_at_least("batch_size", batch_size, 1)
    seed = check_seed("seed", seed)
    sampling = Sampling(temperature=temperature)
    sampling.expand(1)
    if not count:
        return []
    if not len(documents):
        raise ValueError("documents must not be empty")
    room = target.config.max_position_embeddings - new_tokens
    if room < 1:
        raise ValueError(
            f"new_tokens must be below {target.config.max_position_embeddings}, the positions of "
            f"the target, not {new_tokens}"
        )
    check_results_fit("count", count, count, round_up_length(min(prompt_tokens, room) + new_tokens))
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
        sampling=sampling,
        batch_size=min(batch_size, count),
        key=jax.random.key(seed),
    )
    check_ends("excerpts", out.finish_reasons)
    new = [tokens[:length] for tokens, length in zip(out.tokens, out.lengths, strict=True)]
    return [np.concatenate(parts) for parts in zip(excerpts, new, strict=True)]
