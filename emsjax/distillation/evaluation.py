"""The value of a drafter: its acceptance rate, and the speed of decoding with it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from flax import nnx

from emsjax.checks import check_at_least
from emsjax.configured import configured
from emsjax.decode.base import Drafter
from emsjax.decode.step import decode_loop
from emsjax.distillation.finite import check_ends, check_finite
from emsjax.drafters import DraftModel
from emsjax.engine.adapt import make_run
from emsjax.generation import generate, init_state
from emsjax.models.decoder import Decoder


@configured
def evaluate(
    target: Decoder,
    draft: Decoder | Drafter | None,
    prompts: Sequence[np.ndarray],
    *,
    draft_tokens: int = 4,
    new_tokens: int = 128,
    batch_size: int = 8,
) -> dict[str, Any]:
    """Decode the prompts greedily in groups of `batch_size`, and measure acceptance and speed.

    Args:
        target: the model that decodes.
        draft: a draft model or another drafter; None for plain decoding.
        prompts: token ids, int32 [t] each.
        draft_tokens: draft tokens of every step, below `new_tokens`, unless the drafter has a limit
            of its own.
        new_tokens: largest number of new tokens of each prompt.
        batch_size: prompts decoded at once.

    Returns:
        `acceptance_rate`; `by_position`, the fraction of draft tokens at each position that were
        accepted if all tokens before them were, in sequences that no end token ends;
        `mean_acceptance_length`; `tokens_per_s`, prefill excluded.

    Raises:
        ValueError: `emsjax.generate` rejects the arguments, there are no prompts, or
            `draft_tokens` is so large that no step drafts all of them.
        NonFiniteError: the draft's parameters or the target's logits are not finite.
    """
    if not len(prompts):
        raise ValueError("prompts must not be empty")
    draft_tokens = check_at_least("draft_tokens", draft_tokens, 1)
    positions = target.config.max_position_embeddings
    new_tokens = check_at_least("new_tokens", new_tokens, 1, positions)
    batch_size = check_at_least("batch_size", batch_size, 1)
    drafter = draft
    if isinstance(draft, Decoder):
        check_finite("the draft model's parameters", nnx.state(draft))
        drafter = DraftModel(draft)
    if drafter is not None:
        check_finite("the drafter's parameters", drafter)
        drafter = drafter.with_limit(draft_tokens)
        draft_tokens = drafter.max_draft_tokens
    if draft_tokens >= new_tokens:
        raise ValueError(f"draft_tokens must be below new_tokens {new_tokens}, not {draft_tokens}")
    groups = [prompts[at : at + batch_size] for at in range(0, len(prompts), batch_size)]
    for _ in range(2):  # the first time compiles
        outputs = [generate(target, group, drafter, max_new_tokens=new_tokens) for group in groups]
    check_ends("prompts", [reason for out in outputs for reason in out.finish_reasons])
    stats = [out.stats for out in outputs]
    total = lambda name: sum(int(getattr(of, name).sum()) for of in stats)
    return {
        "acceptance_rate": total("num_accepted") / max(total("num_drafted"), 1),
        "by_position": [] if drafter is None else by_position(target, drafter, groups, new_tokens),
        "mean_acceptance_length": total("num_emitted") / total("num_steps"),
        "tokens_per_s": total("num_emitted") / sum(float(of.finish_seconds.max()) for of in stats),
    }


def by_position(target: Decoder, drafter: Drafter, groups, new_tokens: int) -> list[float]:
    """Acceptance rates by position, in steps that draft as many tokens as they can.

    No step is cut short by the end of a sequence.
    """
    k = drafter.max_draft_tokens
    histogram = np.zeros(k + 1, np.int64)
    run = make_run(target, drafter).flat()
    for prompts in groups:
        state = init_state(target, drafter, prompts, max_new_tokens=new_tokens, eos_token_ids=())
        state, _ = decode_loop(run, state, new_tokens // (k + 1))
        histogram += np.asarray(state.counters.accepted_histogram).sum(axis=0)
    return acceptance_by_position(histogram)


def acceptance_by_position(histogram: np.ndarray) -> list[float]:
    """Fraction of the steps with at least i accepted tokens that accepted more, for i = 0..k-1.

    Args:
        histogram: number of steps by accepted tokens, 0..k, of k drafted ones.
    """
    at_least = np.cumsum(histogram[::-1])[::-1]
    return (at_least[1:] / np.maximum(at_least[:-1], 1)).tolist()
