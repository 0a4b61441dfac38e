"""`stream`: takes prompts as they arrive and yields completions as they finish."""

import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from emsjax.checks import check_at_least, check_flag, refuse
from emsjax.configured import configured, configured_generator
from emsjax.decode.base import Drafter, DraftLength, Model, ModelConfig
from emsjax.decode.run import Run
from emsjax.engine.adapt import make_run
from emsjax.engine.completions import Completion, completions_of, refusal
from emsjax.engine.preparation import check, holds_prompts, with_checked_drafter
from emsjax.engine.replicas import make_slots, rows_of_all
from emsjax.engine.requests import (
    PLACEHOLDER,
    Requests,
    check_positions,
    check_requests,
    read_prompt,
)
from emsjax.engine.slots import NOT_YET, PIECE_STEPS, Entry, Row, sequences_of
from emsjax.sampling import LogitsProcessor, Sampling
from pallas_kernels.common.blocks import round_up

WIDTH = 64  # cache lengths are multiples of it


class Variants(NamedTuple):
    """Settings that only some of a stream's prompts have.

    Attributes:
        count: number of variants.
        of: the variant of a numbered prompt.
    """

    count: int
    of: Callable[[int], int]


ONE_VARIANT = Variants(1, lambda prompt: 0)


class Numbered(NamedTuple):
    """A prompt of `stream_numbered`; a pair of number and prompt is one without the rest.

    Attributes:
        number: by which its completions are known, different from those of all other prompts that
            are decoded at the same time.
        prompt: its token ids.
        max_new_tokens: of this prompt; None: of all.
        key_number: decides its random keys, 0 or more; None: the number does.
    """

    number: int
    prompt: Sequence[int]
    max_new_tokens: Any = None
    key_number: int | None = None


@configured
def stream(
    model: Model,
    prompts: Iterable[Sequence[int]],
    drafter: Drafter | None = None,
    draft_length: DraftLength | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    sampling: Sampling | None = None,
    num_sequences: int = 1,
    *,
    batch_size: int,
    max_len: int | None = None,
    eos_token_ids: Iterable[int] | None = None,
    key: jax.Array | None = None,
    attention_implementation: str | Callable | None = None,
    devices: Sequence[jax.Device | Mesh] | None = None,
    attention_mask: Sequence[Sequence[int]] | None = None,
    processors: Sequence[LogitsProcessor] = (),
    stop: Any = None,
    tokenizer: Any = None,
    include_stop: bool = False,
    top_logprobs: int = 0,
    partial: bool = False,
    numerics: str | None = None,
    kv_dtype: str | None = None,
) -> Iterator[Completion]:
    """Completes any number of prompts, `batch_size` sequences at a time, each as it finishes.

    Tokens are identical to those of `emsjax.generate`, which also describes the arguments that
    are not listed here. Prompts enter in order; completions arrive in small groups, in any order.

    Args:
        prompts: a sequence, or an iterator that is read as slots become free: up to
            `batch_size` + 1 prompts ahead for each device, and decoding waits for these. With an
            iterator, `max_new_tokens` and the fields of `sampling` are one value for all prompts.
        batch_size: slots per device.
        max_len: for an iterator, tokens of the longest prompt and its continuation together,
            which set the size of the caches; None: as many as the model has positions for.
        devices: devices that each decode with a replica of the model and take prompts from the
            same queue; or meshes with the one axis "tp", over each of which a replica is split: see
            `emsjax.Decoder.split`. None: where the model is.
        attention_mask: as for `emsjax.generate`; only with a sequence of prompts.
        partial: whether pieces are yielded too: see below.

    Yields:
        A `Completion` for each sequence. A malformed or too long prompt from an iterator is
        `refused` and the others continue; in a sequence it raises an error before any work. With
        `partial`, a sequence's completion comes after its pieces: completions whose `finish_reason`
        is None, each with the tokens, log-probabilities and text that the sequence has gained in a
        few steps. Joined, the pieces are the whole.

    Raises:
        ValueError: as `emsjax.generate`, before any work; also if the drafter holds data for each
            prompt and `prompts` is an iterator.
        Exception: the iterator's own exception, after all earlier prompts are done; a note gives
            their number.
    """
    piece_steps = PIECE_STEPS if check_flag("partial", partial) else 0
    options = {
        "attention_mask": attention_mask,
        "max_new_tokens": max_new_tokens,
        "sampling": sampling,
        "num_sequences": num_sequences,
        "eos_token_ids": eos_token_ids,
        "key": key,
        "stop": stop,
        "tokenizer": tokenizer,
        "include_stop": include_stop,
        "top_logprobs": top_logprobs,
    }
    run = make_run(
        model,
        drafter,
        draft_length,
        processors=processors,
        attention_implementation=attention_implementation,
        kv_dtype=kv_dtype,
    )
    if not is_list(prompts):
        sizes = {"batch_size": batch_size, "max_len": max_len}
        sizes |= {"piece_steps": piece_steps, "devices": devices}
        return stream_numbered(run, enumerate(prompts), **sizes, **options)
    longest_sequence(run, max_len)  # checks it, although the prompts decide
    run, requests = check(run, prompts, **options)
    count = min(check_at_least("batch_size", batch_size, 1), requests.total_sequences)
    slots = make_slots(run, requests, count, devices)
    rows = rows_of_all(slots, sequences_of(requests), piece_steps=piece_steps)
    return configured_generator(completions_of(rows, requests, partial=piece_steps > 0))


def is_list(prompts: Any) -> bool:
    """Whether prompts are all there, rather than read from an iterator.

    Raises:
        ValueError: they are neither.
    """
    known = hasattr(prompts, "__len__")
    if not known and not isinstance(prompts, Iterable):
        refuse("prompts", "a sequence or an iterator of token-id sequences", prompts)
    return known


@configured
def stream_numbered(
    run: Run,
    prompts: Iterator[Any],
    *,
    batch_size: int,
    max_len: int | None = None,
    devices: Sequence[jax.Device | Mesh] | None = None,
    piece_steps: int = 0,
    variants: Variants = ONE_VARIANT,
    **options: Any,
) -> Iterator[Completion]:
    """`stream` for an iterator of numbered prompts; the numbers decide each sequence's key.

    A run that skips finished prompts therefore has the same output for the remaining ones.

    Args:
        prompts: pairs of number and prompt, or `Numbered`. An iterator that has to wait for its
            next prompt yields `NOT_YET` meanwhile, so that other sequences are decoded.
        piece_steps: steps after which the pieces that sequences have gained are yielded, each time,
            as with `partial` of `stream`; 0: there are no pieces.
        variants: settings, stops and values of processors that only some prompts have; there is
            then one of each per variant, in `options` and in the processors.
    """
    batch_size = check_at_least("batch_size", batch_size, 1)
    longest = longest_sequence(run, max_len)
    run, requests = check_unseen(run, longest, variants, **options)
    source = Source(prompts, run.model.config, requests, longest, variants)
    slots = make_slots(run, requests, batch_size, devices)
    rows = rows_of_all(slots, source.entries(), piece_steps=piece_steps)
    return configured_generator(source.completions(rows, partial=piece_steps > 0))


def longest_sequence(run: Run, max_len: int | None) -> int:
    """Returns the most tokens of a prompt and its continuation that a slot has room for."""
    longest = run.model.config.max_position_embeddings + 1  # the last token is never fed
    return longest if max_len is None else min(longest, check_at_least("max_len", max_len, 2))


def check_unseen(
    run: Run, longest: int, variants: Variants = ONE_VARIANT, **options: Any
) -> tuple[Run, Requests]:
    """Checks what holds for all prompts of an iterator, before any of them is read.

    Returns:
        The run with its drafter checked, and requests that hold the common arguments.

    Raises:
        ValueError: see `stream`.
    """
    if getattr(options.get("key"), "ndim", 0):
        raise ValueError("one key per sequence needs a sequence of prompts, not an iterator")
    if holds_prompts(run.drafter, None):
        raise ValueError(
            "a drafter that holds data for each prompt needs a sequence of prompts, not an iterator"
        )
    if variants is ONE_VARIANT and any(one.num_prompts is not None for one in run.processors):
        raise ValueError(
            "a processor with values for each prompt needs a sequence of prompts, not an iterator"
        )
    if options.get("attention_mask") is not None:
        raise ValueError("attention_mask needs a sequence of prompts, not an iterator")
    # Placeholders are used to check the other arguments: a prompt for each variant.
    placeholders = {name: value * variants.count for name, value in PLACEHOLDER.items()}
    requests = check_requests(
        run.model.config, processors=run.processors, **(options | placeholders)
    )
    new = int(requests.max_new_tokens[0])
    if new >= longest:
        raise ValueError(
            f"max_new_tokens must be below {longest}, the tokens of a prompt and its continuation "
            f"together (max_len), not {new}"
        )
    # The whole run has one width, so it need not be rounded to one of a few common widths.
    requests = dataclasses.replace(
        requests,
        max_len=round_up(longest, WIDTH),
        texts=requests.texts and dataclasses.replace(requests.texts, row_of=variants.of),
    )
    return with_checked_drafter(run, longest - 1), requests


class Source:
    """The sequences of prompts that are read one by one.

    Args:
        prompts: as for `stream_numbered`.
        requests: the arguments of each variant.
        longest: maximum number of tokens of a prompt and its continuation together.
        variants: settings that only some prompts have.
    """

    def __init__(
        self,
        prompts: Iterator[Any],
        config: ModelConfig,
        requests: Requests,
        longest: int,
        variants: Variants = ONE_VARIANT,
    ):
        self.prompts, self.config, self.requests = prompts, config, requests
        self.longest, self.variants = longest, variants
        self.error: BaseException | None = None

    def entries(self) -> Iterator[Any]:
        """Yields `NOT_YET` and, per sequence, an `Entry` or its refusal."""
        each = self.requests.num_sequences
        for item in self.read():
            if item is NOT_YET:
                yield item
                continue
            one = Numbered(*item)
            place = one.number
            try:
                new = self.new_tokens(place, one.max_new_tokens)
                ids = self.checked(place, one.prompt, new)
            except ValueError as error:
                yield from (refusal(place, n, str(error)) for n in range(each))
                continue
            row = self.variants.of(place)  # a prompt that is refused may have none
            settings = jax.tree.map(lambda values, row=row: values[row], self.requests.settings)
            first = (place if one.key_number is None else one.key_number) * each
            for n in range(each):
                key = self.requests.keys.data(first + n)
                yield Entry(place * each + n, ids, new, key, settings)

    def read(self) -> Iterator[Any]:
        """Yields the prompts; an error ends them and is stored in `self.error`."""
        count = 0
        while True:
            try:
                item = next(self.prompts)
            except StopIteration:
                return
            except Exception as error:
                error.add_note(f"raised by the iterator of prompts after {count} of them")
                self.error = error
                return
            count += item is not NOT_YET
            yield item

    def new_tokens(self, place: int, own: Any) -> int:
        """The most new tokens of a prompt, which may have a number of its own.

        Raises:
            ValueError: the prompt's own number is none, or less than `min_new_tokens`.
        """
        if own is None:
            return int(self.requests.max_new_tokens[0])
        new = check_at_least("max_new_tokens", own, 1)
        controls = self.requests.settings.controls
        if controls is not None and controls.min_new_tokens is not None:
            least = controls.min_new_tokens[self.variants.of(place)]
            check_at_least("max_new_tokens", new, int(least))
        return new

    def checked(self, place: int, prompt: Sequence[int], new: int) -> np.ndarray:
        ids = read_prompt(self.config, place, prompt)
        check_positions(self.config, place, ids, new)
        if len(ids) + new > self.longest:
            raise ValueError(
                f"prompts[{place}] has {len(ids)} tokens and max_new_tokens is {new}: together "
                f"more than max_len {self.longest}"
            )
        return ids

    def completions(
        self, rows: Generator[Row, None, None], *, partial: bool = False
    ) -> Iterator[Completion]:
        """Yields completions and refusals, then raises the iterator's error if there was one."""
        yield from completions_of(rows, self.requests, partial=partial)
        if self.error is not None:
            raise self.error
