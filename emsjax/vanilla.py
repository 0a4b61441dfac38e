"""The baselines of the paper's experiment: batched speculative decoding with padding.

Not for use: `emsjax.generate` gives the same tokens sooner. They share its step, its loop, its
drafters and its kernels, so that what they take longer is what padding costs.
"""

from collections.abc import Callable, Sequence

from emsjax.decode.base import Drafter, DraftLength, Model
from emsjax.decode.layout import Layout
from emsjax.engine.adapt import make_run
from emsjax.engine.output import GenerateOutput
from emsjax.engine.preparation import check
from emsjax.generation import complete


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter | None = None,
    draft_length: DraftLength | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    *,
    unpad_kv_cache: bool = False,
    unpad_inputs: bool = False,
    batch_size: int | None = None,
    eos_token_ids: Sequence[int] | None = None,
    attention_implementation: str | Callable | None = None,
) -> GenerateOutput:
    """Complete prompts greedily by the vanilla method, or one of its two ablations.

    A step feeds every sample, those that have finished too, as many rows as the sample with
    the longest draft has (of drafts above 10 tokens: the next of at most twelve row counts). All
    write at one position of the cache, which moves on by the most that any of them emits; the
    others' gaps are masked for good, and take room: up to min(batch, draft + 1) places for
    each new token.

    Args:
        unpad_kv_cache: each sample writes at its own offset.
        unpad_inputs: real rows alone are fed, but for what fills a row bucket.
        attention_implementation: as for `emsjax.generate`; an own callable must take a
            `cache_mask`.

    Other arguments are those of `emsjax.generate`; with both ablations this is that.

    Returns:
        As `emsjax.generate`; `stats.padding_ratio` tells the padding of both kinds.

    Raises:
        ValueError: as `emsjax.generate`.

    Reference: EMS-SD, arXiv 2405.07542.
    """
    run = make_run(
        model,
        drafter,
        draft_length,
        attention_implementation=attention_implementation,
        layout=Layout(pad_inputs=not unpad_inputs, pad_kv_cache=not unpad_kv_cache),
    )
    run, requests = check(run, prompts, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids)
    return complete(run, requests, batch_size=batch_size)
