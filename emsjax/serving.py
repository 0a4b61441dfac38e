"""An engine that keeps its slots for callers with many requests."""

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from emsjax.checks import check_at_least, check_flag
from emsjax.configured import configured, configured_generator, own_settings
from emsjax.decode.base import Drafter, DraftLength, Model
from emsjax.engine.adapt import make_run
from emsjax.engine.completions import Completion, completions_of
from emsjax.engine.preparation import check, holds_prompts, with_checked_drafter
from emsjax.engine.replicas import make_slots, reopen, rows_of_all
from emsjax.engine.requests import PLACEHOLDER, check_requests
from emsjax.engine.slots import PIECE_STEPS, sequences_of
from emsjax.sampling import LogitsProcessor, Sampling
from emsjax.streaming import (
    WIDTH,
    Source,
    check_unseen,
    is_list,
    longest_sequence,
)
from pallas_kernels.common.blocks import round_up
from pallas_kernels.common.numerics import current_numerics


class Engine:
    """Keeps slots, compiled programs and caches across calls of `stream`.

    It is meant for rollout workers or actors that receive many requests. Each call's output is
    the same as from `emsjax.stream` with the same arguments. One call is served at a time.

    Args:
        model, drafter, draft_length, attention_implementation, devices: as for `emsjax.stream`.
        processors, numerics, kv_dtype: as for `emsjax.stream`.
        batch_size: slots per device.
        max_len: tokens of the longest prompt and its continuation together, which set the size
            of the caches; None: as many as the model has positions for.

    Raises:
        ValueError: as `emsjax.stream`; also if the drafter holds data for each prompt.
    """

    @configured
    def __init__(
        self,
        model: Model,
        drafter: Drafter | None = None,
        draft_length: DraftLength | None = None,
        *,
        batch_size: int,
        max_len: int | None = None,
        attention_implementation: str | Callable | None = None,
        devices: Sequence[jax.Device | Mesh] | None = None,
        processors: Sequence[LogitsProcessor] = (),
        numerics: str | None = None,
        kv_dtype: str | None = None,
    ):
        run = make_run(
            model,
            drafter,
            draft_length,
            processors=processors,
            attention_implementation=attention_implementation,
            kv_dtype=kv_dtype,
        )
        if holds_prompts(run.drafter, None):
            raise ValueError(
                "a drafter that holds data for each prompt cannot serve other prompts: use "
                "emsjax.stream"
            )
        self.numerics = current_numerics()
        self.longest = longest_sequence(run, max_len)
        self.run = with_checked_drafter(run, self.longest - 1)
        requests = check_requests(model.config, **PLACEHOLDER, max_new_tokens=1)
        requests = dataclasses.replace(requests, max_len=round_up(self.longest, WIDTH))
        count = check_at_least("batch_size", batch_size, 1)
        self.slots = make_slots(self.run, requests, count, devices)
        self.last_call = lambda: None  # a weak reference to its results

    def stream(
        self,
        prompts: Iterable[Sequence[int]],
        max_new_tokens: int | Sequence[int] = 128,
        sampling: Sampling | None = None,
        num_sequences: int = 1,
        **asked: Any,
    ) -> Iterator[Completion]:
        """Completes prompts in these slots: see `emsjax.stream`.

        Args:
            asked: other arguments of `emsjax.stream` that concern the prompts: `eos_token_ids`,
                `key`, `attention_mask`, `stop`, `tokenizer`, `include_stop`, `top_logprobs` and
                `partial`.

        Raises:
            ValueError: as `emsjax.stream`; also if a sequence has more than `max_len` tokens, or
                if another call's results have not all been read.
        """
        with own_settings(self.numerics):
            asked |= {"max_new_tokens": max_new_tokens, "sampling": sampling}
            return self._stream(prompts, asked | {"num_sequences": num_sequences})

    def _stream(self, prompts: Iterable[Sequence[int]], options: dict[str, Any]):
        partial = check_flag("partial", options.pop("partial", False))
        if is_list(prompts):
            _, requests = check(self.run, prompts, **options)
            if requests.positions >= self.longest:
                raise ValueError(
                    f"a prompt and its continuation need {requests.positions + 1} tokens: more "
                    f"than max_len {self.longest}"
                )
            entries, source = sequences_of(requests), None
            requests = dataclasses.replace(requests, max_len=round_up(self.longest, WIDTH))
        else:
            _, requests = check_unseen(self.run, self.longest, **options)
            source = Source(enumerate(prompts), self.run.model.config, requests, self.longest)
            entries = source.entries()
        # The slots themselves notice a call only once its first result is asked for.
        last = self.last_call()
        if last is not None and inspect.getgeneratorstate(last) != inspect.GEN_CLOSED:
            raise ValueError("the slots serve another call: read its results, or close it, first")
        reopen(self.slots, requests)
        rows = rows_of_all(self.slots, entries, piece_steps=PIECE_STEPS if partial else 0)
        if source is None:
            results = completions_of(rows, requests, partial=partial)
        else:
            results = source.completions(rows, partial=partial)
        results = configured_generator(results)
        self.last_call = weakref.ref(results)
        return results
