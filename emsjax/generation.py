"""`generate` for completing prompts, and `init_state` and `step` for custom decoding loops."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from emsjax.checks import INT32_MAX, check_at_least, check_instance, check_number, is_traced
from emsjax.configured import configured
from emsjax.decode.base import Drafter, DraftLength, Model, ModelConfig
from emsjax.decode.layout import UNPADDED, Layout
from emsjax.decode.run import Run
from emsjax.decode.state import DecodeState, StepInfo
from emsjax.decode.step import advance
from emsjax.engine.adapt import make_run
from emsjax.engine.group import begin_group, sequences_served
from emsjax.engine.memory import check_results_fit
from emsjax.engine.output import GenerateOutput, assemble
from emsjax.engine.preparation import check, check_memory, check_one_process, for_prompts
from emsjax.engine.requests import Requests
from emsjax.engine.slots import Slots, sequences_of, stacked
from emsjax.sampling import LogitsProcessor, Sampling

LEAST_SHAPE = 16  # slots; fewer would give a small batch a shape of its own


@configured
def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter | None = None,
    draft_length: DraftLength | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    sampling: Sampling | None = None,
    num_sequences: int = 1,
    batch_size: int | None = None,
    eos_token_ids: Iterable[int] | None = None,
    key: jax.Array | None = None,
    time_budget_s: float | None = None,
    attention_implementation: str | Callable | None = None,
    attention_mask: Sequence[Sequence[int]] | None = None,
    *,
    processors: Sequence[LogitsProcessor] = (),
    stop: Any = None,
    tokenizer: Any = None,
    include_stop: bool = False,
    top_logprobs: int = 0,
    numerics: str | None = None,
    kv_dtype: str | None = None,
) -> GenerateOutput:
    """Completes ragged prompts by batched, unpadded, lossless speculative decoding.

    Greedy output is identical to plain decoding (`drafter=None`) for any drafter.
    Sampled output is identical under the same keys if the drafter is deterministic,
    and has the same distribution otherwise.

    Args:
        model: the target model.
        prompts: 1-D integer token-id sequences of any lengths, or what a tokenizer returns: a
            mapping with input_ids, whose attention_mask is used if it holds one.
        drafter: proposes draft tokens; None: plain decoding.
        draft_length: a policy that limits draft tokens per step; None: as many as the
            drafter proposes. It has no effect without a drafter.
        max_new_tokens: maximum number of tokens to emit, one value for all prompts or one
            per prompt.
        sampling: temperature, penalties and other settings: see `Sampling`; None: greedy.
        num_sequences: sequences per prompt; the prompt is prefilled once. More than one needs a
            prompt with a temperature above 0; those of a prompt with temperature 0 are equal.
        batch_size: number of sequences decoded at a time; None: all at once.
        eos_token_ids: tokens that end a sequence, one or any iterable of them; None: the model
            config's, which are those of generation_config.json where the model was loaded from a
            folder with one; (): none.
        key: one typed key (sequence i uses fold_in(key, i)) or one per sequence;
            required if a temperature is above 0.
        time_budget_s: seconds after which unfinished sequences are returned as they
            are; checked between chunks of device steps.
        attention_implementation: "triton", "xla", "reference", a callable with the
            signature of `pallas_kernels.ragged_attention`, or None for the device's
            default.
        attention_mask: for padded prompts, zeros and ones in the shape of the prompts. Tokens
            with a zero, before or after all others, are left out.
        processors: your own logits processors, applied after the settings that change logits, and
            before anything is drawn or compared.
        stop: what ends a sequence when its new tokens hold it, beside end tokens: a string, which
            is found wherever it begins and ends within tokens; a sequence of token ids; several of
            these; or one list of them per prompt. The token that completes a stop is the last one.
        tokenizer: a tokenizer of transformers, which strings in `stop` need. The output then has
            `texts`.
        include_stop: whether a text keeps the stop that ended it.
        top_logprobs: number of likeliest tokens that the output has for each emitted token.
        numerics: "fast", or "invariant": the bits of a sequence then depend on it alone, whatever
            is decoded beside it; None: those of `pallas_kernels.numerics` around the call.
        kv_dtype: "int8" or "fp8": keys and values are stored in 8 bits, with a scale for each token
            and head. Output is then that of plain decoding with such a cache. None: in the model's
            dtype.

    It runs with 64-bit types off and JAX's default random generator, whatever else is set, and so
    does code of yours that it calls.

    Returns:
        A `GenerateOutput` in prompt-major order.

    Raises:
        ValueError: an argument is of the wrong kind or out of range; the message names it. The
            list or a prompt is empty, ids are not integers or lie outside the vocabulary, a prompt
            without a mask begins or ends with a token that is for padding alone, a stop is empty
            or needs a tokenizer, no token may be chosen, a count is below 1, the number of
            per-prompt values or keys is wrong, a prompt's length + max_new_tokens - 1 exceeds the
            model's positions, a sampling setting or several sequences have no effect because
            decoding is greedy, the key is missing or a legacy key, the budget is not positive, the
            drafter does not suit the model or is on another device, or the run does not fit into
            memory. The error comes before anything is allocated.

    Reference: EMS-SD, arXiv 2405.07542.
    """
    deadline = None
    if time_budget_s is not None:
        seconds = check_number("time_budget_s", time_budget_s, "seconds above 0", lambda s: s > 0)
        deadline = monotonic() + seconds
    run = make_run(
        model,
        drafter,
        draft_length,
        processors=processors,
        attention_implementation=attention_implementation,
        kv_dtype=kv_dtype,
    )
    if deadline is not None:
        check_one_process(run)
    run, requests = check(
        run,
        prompts,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        num_sequences=num_sequences,
        eos_token_ids=eos_token_ids,
        key=key,
        stop=stop,
        tokenizer=tokenizer,
        include_stop=include_stop,
        top_logprobs=top_logprobs,
    )
    return complete(run, requests, batch_size=batch_size, deadline=deadline)


def complete(
    run: Run,
    requests: Requests,
    *,
    batch_size: int | None = None,
    deadline: float | None = None,
) -> GenerateOutput:
    """Completes checked requests, `batch_size` sequences at a time; None: all at once.

    Args:
        deadline: a time of `time.monotonic`; None: no deadline.

    Raises:
        ValueError: the batch size is below 1, the drafter does not suit the requests, or the run
            does not fit into memory.
    """
    count = total = requests.total_sequences
    if batch_size is not None:
        # A few idle slots give ragged batches a common shape; more would never be used.
        most = max(LEAST_SHAPE, 1 << (total - 1).bit_length())
        count = min(check_at_least("batch_size", batch_size, 1), most)
    check_results_fit("num_sequences", requests.num_sequences, total, requests.max_len)
    if count < total and run.layout == UNPADDED:
        slots = Slots(run, requests, count)
        rows = slots.serve(sequences_of(requests), deadline=deadline)
        rows = sorted(rows, key=lambda row: row["sequence_ids"])
        results = [stacked(rows) | slots.counts()]
    else:
        results = in_groups(run, requests, count, deadline)
    return assemble(results, requests, pad_token_id=padding_token(run.model.config, requests))


def padding_token(config: ModelConfig, requests: Requests) -> int:
    """The token after a sequence's end: as in transformers, an end token if there is no other."""
    if config.pad_token_id is not None:
        return config.pad_token_id
    return int(requests.end_token_ids[0]) if requests.end_token_ids.size else 0


def in_groups(
    run: Run, requests: Requests, count: int, deadline: float | None
) -> list[Mapping[str, np.ndarray]]:
    """Decodes groups of `count` sequences; each group runs until its last sequence ends."""
    total = requests.total_sequences
    cache_length = check_memory(run, requests, count)
    groups = [np.arange(first, min(first + count, total)) for first in range(0, total, count)]
    # Every group is checked before the first one runs.
    runs = [group_run(run, requests, group, count) for group in groups]
    results = []
    for group, own in zip(groups, runs, strict=True):
        slots = Slots.filled(own, requests, group, count, cache_length)
        rows = slots.finish(deadline)
        results.append(stacked(rows) | slots.counts())
        del slots  # the caches of two groups must not exist at the same time
    return results


def group_run(run: Run, requests: Requests, group: np.ndarray, slots: int) -> Run:
    """Returns the run with the drafter for the prompts of one group of sequences."""
    prompts = sequences_served(group, slots) // requests.num_sequences
    return for_prompts(run, prompts, requests.num_prompts)


@configured
def init_state(
    model: Model,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    draft_length: DraftLength | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    sampling: Sampling | None = None,
    num_sequences: int = 1,
    eos_token_ids: Iterable[int] | None = None,
    key: jax.Array | None = None,
    attention_implementation: str | Callable | None = None,
    attention_mask: Sequence[Sequence[int]] | None = None,
    layout: Layout = UNPADDED,
    processors: Sequence[LogitsProcessor] = (),
    stop: Any = None,
    tokenizer: Any = None,
    top_logprobs: int = 0,
    numerics: str | None = None,
    kv_dtype: str | None = None,
) -> DecodeState:
    """Returns the state before the first `step`: prompts are prefilled and nothing is emitted.

    Arguments and errors are the same as for `generate`; every sequence gets a slot, and `layout`
    sets what is padded. With several sequences per prompt, pass a drafter that holds data for
    each prompt to `step` as
    drafter.for_prompts(np.arange(slots) // num_sequences, len(prompts)).
    """
    run = make_run(
        model,
        drafter,
        draft_length,
        processors=processors,
        attention_implementation=attention_implementation,
        layout=layout,
        kv_dtype=kv_dtype,
    )
    run, requests = check(
        run,
        prompts,
        attention_mask=attention_mask,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        num_sequences=num_sequences,
        eos_token_ids=eos_token_ids,
        key=key,
        stop=stop,
        tokenizer=tokenizer,
        top_logprobs=top_logprobs,
    )
    slots = requests.total_sequences
    cache_length = check_memory(run, requests, slots)
    group = np.arange(slots)
    run = group_run(run, requests, group, slots)
    return begin_group(run, requests, group, slots, cache_length)


@configured
def step(
    model: Model,
    drafter: Drafter | Any | None,
    state: DecodeState,
    *,
    draft_length: DraftLength | Any | None = None,
    attention_implementation: str | Callable | None = None,
    layout: Layout = UNPADDED,
    num_sequences: int | Int32[Array, ""] | None = None,
    processors: Sequence[LogitsProcessor] = (),
    numerics: str | None = None,
) -> tuple[DecodeState, StepInfo]:
    """Drafts, verifies and commits once for every sample that decodes.

    The function is pure and meant to be traced.

    Args:
        model: the target.
        drafter: the source of draft tokens; None: plain decoding.
        state: the state that `init_state` or an earlier step returned.
        draft_length: a policy that limits drafting; None: the drafter's own limit.
        attention_implementation: as for `generate`.
        layout: the same layout as for `init_state`.
        num_sequences: sequences per prompt, if some prompts may not be fully cached: the step
            then feeds their tokens too. None: all prompts are cached.
        processors: the same logits processors as for `init_state`.
        numerics: the same as for `init_state`.

    Returns:
        The next state, and the step's `StepInfo`.

    Raises:
        ValueError: `model` is not a model, prompts are to be fed in a padded layout, the
            attention is unknown, a `free` drafter draws its
            tokens, the processors are not those of the state, or the attention, drafter, policy or
            a processor does not return what it should.
    """
    check_instance("state", state, DecodeState, "what emsjax.init_state returned")
    if num_sequences is not None and not is_traced(num_sequences):
        num_sequences = jnp.int32(check_at_least("num_sequences", num_sequences, 1, INT32_MAX))
    if num_sequences is not None and layout != UNPADDED:
        raise ValueError("num_sequences must be None in a padded layout, which cannot feed prompts")
    run = make_run(
        model,
        drafter,
        draft_length,
        processors=processors,
        attention_implementation=attention_implementation,
        layout=layout,
    )
    return advance(run, state, num_sequences)
