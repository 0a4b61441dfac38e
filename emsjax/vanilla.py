"""The baselines of the paper's experiment: batched speculative decoding with padding.

They are not meant for use, as `emsjax.generate` returns the same tokens sooner. They share its
step, loop, drafters and kernels, so the difference in time is the cost of padding.
"""

from collections.abc import Callable, Iterable, Sequence

from emsjax.checks import check_flag
from emsjax.configured import configured
from emsjax.decode.base import Drafter, DraftLength, Model
from emsjax.decode.layout import Layout
from emsjax.engine.adapt import make_run
from emsjax.engine.output import GenerateOutput
from emsjax.engine.preparation import check
from emsjax.generation import complete


@configured
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
    eos_token_ids: Iterable[int] | None = None,
    attention_implementation: str | Callable | None = None,
    attention_mask: Sequence[Sequence[int]] | None = None,
    numerics: str | None = None,
    kv_dtype: str | None = None,
) -> GenerateOutput:
    """Completes prompts greedily by the vanilla method or one of its two ablations.

    A step feeds every sample, including finished ones, as many rows as the sample with the
    longest draft has (for drafts above 10 tokens, the next of at most twelve row counts). All
    samples write at one position of the cache, which advances by the most tokens that any sample
    emits. The gaps in the other samples stay masked and take up space: up to
    min(batch, draft + 1) places for each new token.

    Args:
        unpad_kv_cache: each sample writes at its own offset.
        unpad_inputs: only real rows are fed, and padding only fills up the row bucket.
        attention_implementation: as for `emsjax.generate`; a user's callable must accept a
            `cache_mask`.
        numerics: as for `emsjax.generate`; "invariant" needs `unpad_kv_cache`, as gaps move keys to
            places that depend on other samples.

    Other arguments are the same as for `emsjax.generate`. With both ablations this function is
    equivalent to `emsjax.generate`.

    Returns:
        As `emsjax.generate`; `stats.padding_ratio` reports both kinds of padding.

    Raises:
        ValueError: as `emsjax.generate`.

    Reference: EMS-SD, arXiv 2405.07542.
    """
    unpad_inputs = check_flag("unpad_inputs", unpad_inputs)
    unpad_kv_cache = check_flag("unpad_kv_cache", unpad_kv_cache)
    run = make_run(
        model,
        drafter,
        draft_length,
        attention_implementation=attention_implementation,
        layout=Layout(pad_inputs=not unpad_inputs, pad_kv_cache=not unpad_kv_cache),
        kv_dtype=kv_dtype,
    )
    run, requests = check(
        run,
        prompts,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        eos_token_ids=eos_token_ids,
    )
    return complete(run, requests, batch_size=batch_size)
