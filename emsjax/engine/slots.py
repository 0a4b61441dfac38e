"""The host's side of slots that refill: stages prompts, takes what has finished."""

import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from time import monotonic, perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from emsjax.decode.layout import UNPADDED
from emsjax.decode.refill import (
    COUNTED,
    PER_SLOT,
    Finished,
    Waiting,
    refill_loop,
    rows_of,
)
from emsjax.decode.step import Counters, DecodeState, Flat
from emsjax.drafters import Drafter
from emsjax.engine.initial_state import max_draft_tokens_of
from emsjax.engine.preparation import check_memory, drafter_for, holds_prompts
from emsjax.engine.requests import Requests, keys_at
from emsjax.models.opt import OPT
from emsjax.policies.lengths import DraftLength
from emsjax.sampling import Sampling

STEPS = 64  # of a call: what has finished is not kept back for longer
BUDGET_CHECK_STEPS = 16  # with a deadline
TOTALS = ("model_calls", "real_rows", "padding_rows")  # of `Counters`
Row = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A sequence that waits for a slot.

    Attributes:
        sequence: its number; sequence i continues prompt i // num_sequences.
        tokens: the prompt.
        max_new_tokens: tokens that it may emit.
        key: its random key's data.
        sampling: its values, or None where all decode greedily.
    """

    sequence: int
    tokens: np.ndarray
    max_new_tokens: int
    key: np.ndarray
    sampling: Sampling | None


class Slots:
    """A batch whose slots take new sequences as others finish.

    Args:
        drafter_for: the drafter whose slot i serves prompt prompts[i].
        per_prompt: whether that depends on the prompts: then sequences enter between calls, when
            `enough` slots are idle, and not inside of them.
        count: slots.
        max_len: static width that holds every prompt and its continuation.
        key: like those of entries, but typed.
        sampling: of any entry: which values are in use, or None where all decode greedily.
    """

    def __init__(
        self,
        model: OPT,
        drafter_for: Callable[[np.ndarray], Any],
        draft_length: DraftLength | None,
        *,
        per_prompt: bool,
        count: int,
        max_len: int,
        max_draft_tokens: int,
        num_sequences: int,
        end_token_ids: np.ndarray,
        key: jax.Array,
        sampling: Sampling | None,
        attention_implementation: str | Callable | None,
    ):
        self.weights = Flat.of(model)
        self.drafter_for, self.draft_length = drafter_for, draft_length
        self.per_prompt, self.num_sequences = per_prompt, num_sequences
        self.attention, self.max_len = attention_implementation, max_len
        self.staged: deque[Entry] = deque()
        self.prompts = np.zeros(count, np.int64)  # that the slots serve
        self.totals, self.busy_slots, self.seconds = dict.fromkeys(TOTALS, 0), 0, 0.0
        self.drafter = drafter_for(self.prompts)
        # From the host: the key may lie on another device than the model.
        self.key_impl, self.key_data = (
            jax.random.key_impl(key),
            np.asarray(jax.random.key_data(key))[None],
        )
        self.state, self.finished = _idle(
            self.drafter,
            draft_length,
            model.init_cache(count, max_len),
            end_token_ids,
            jax.random.wrap_key_data(self.key_data.repeat(count, axis=0), impl=self.key_impl),
            jax.tree.map(lambda value: np.zeros(count, np.asarray(value).dtype), sampling),
            max_len=max_len,
            max_draft_tokens=max_draft_tokens,
        )
        self.idle = list(range(count))  # as of the last call

    @classmethod
    def of(
        cls,
        model: OPT,
        drafter: Drafter | None,
        requests: Requests,
        draft_length: DraftLength | None,
        count: int,
        attention_implementation: str | Callable | None,
    ) -> "Slots":
        """Slots that fit all of these requests.

        Raises:
            ValueError: they do not fit into memory, or a drafter that would be compiled again
                for each prompt.
        """
        served = lambda prompts: drafter_for(drafter, prompts, requests.num_prompts)
        per_prompt = holds_prompts(drafter, requests.num_prompts)
        if per_prompt and jax.tree_util.all_leaves([drafter]):
            raise ValueError(
                f"{type(drafter).__name__} holds something for each prompt: to serve slots that "
                "are refilled it must be a pytree"
            )
        check_memory(model, drafter, slots=count, layout=UNPADDED, refilled=True, **requests.sizes)
        return cls(
            model,
            served,
            draft_length,
            per_prompt=per_prompt,
            count=count,
            max_len=requests.max_len,
            max_draft_tokens=max_draft_tokens_of(drafter),
            num_sequences=requests.num_sequences,
            end_token_ids=requests.end_token_ids,
            key=keys_at(requests.keys, 0),
            sampling=jax.tree.map(lambda values: values[0], requests.sampling),
            attention_implementation=attention_implementation,
        )

    @property
    def count(self) -> int:
        return len(self.prompts)

    def serve(
        self, entries: Iterator[Any], *, enough: int | None = None, deadline: float | None = None
    ) -> Generator[Any, None, None]:
        """Each sequence's row as it finishes; sequences enter in their order.

        What is no `Entry` is handed through.

        Args:
            enough: idle slots with which the next sequences of a per-prompt drafter enter; None: an
                eighth of the slots.
            deadline: of `time.monotonic`; after it come the rows of all that have not finished,
                `active`.
        """
        if not self.per_prompt:
            enough = 1
        elif enough is None:
            enough = -(-self.count // 8)
        entry = next(entries, None)
        while entry is not None or self.staged or self.busy:
            if deadline is not None and monotonic() >= deadline:
                yield from self.unfinished()
                rest = () if entry is None else (entry, *entries)
                yield from (self.not_begun(entry) for entry in (*self.staged, *rest))
                return
            while entry is not None and len(self.staged) < self.room:
                if isinstance(entry, Entry):
                    self.staged.append(entry)
                else:
                    yield entry
                entry = next(entries, None)
            steps = STEPS if deadline is None else BUDGET_CHECK_STEPS
            self.decode(self.count if entry is None else enough, steps)
            yield from self.take()

    @property
    def room(self) -> int:
        """How many may wait to enter by themselves."""
        # A drafter that holds something for each prompt must know which slot it gets.
        return len(self.idle) if self.per_prompt else self.count

    def decode(self, enough: int, steps: int) -> None:
        """Steps until all that are staged have entered and `enough` slots are idle, or so many."""
        if self.per_prompt:
            for slot, entry in zip(self.idle, self.staged, strict=False):
                self.prompts[slot] = entry.sequence // self.num_sequences
            self.drafter = self.drafter_for(self.prompts)
        waiting = self.waiting()
        jax.block_until_ready(self.state)
        start = perf_counter()
        self.state, waiting, self.finished = refill_loop(
            self.weights,
            Flat.of(self.drafter),
            self.state,
            waiting,
            self.finished,
            self.draft_length,
            steps,
            enough,
            attention_implementation=self.attention,
        )
        self.look(waiting)
        self.seconds += perf_counter() - start

    def look(self, waiting: Waiting) -> None:
        """Who is where, as the device says; waits for it."""
        counters = {name: getattr(self.state.counters, name) for name in TOTALS}
        found = (counters, self.finished.busy, waiting.taken, self.state.active)
        counters, busy, taken, active = jax.device_get(found)
        for _ in range(int(taken)):
            self.staged.popleft()
        self.idle = np.flatnonzero(~active).tolist()
        self.busy_slots += int(busy)
        for name, count in counters.items():  # the device's begin again at 2**32
            self.totals[name] += (int(count) - self.totals[name]) % 2**32

    @property
    def busy(self) -> bool:
        return len(self.idle) < self.count

    def waiting(self) -> Waiting:
        """The staged sequences as arrays, of as many places in each call."""
        places, count = self.count, len(self.staged)
        tokens = np.zeros((places, self.max_len), np.int32)
        numbers = np.ones((3, places), np.int32)
        sampling = self.state.sampling
        if sampling is not None:
            sampling = jax.tree.map(lambda x: np.zeros(places, x.dtype), sampling)
        keys = np.zeros((places, *self.key_data.shape[1:]), self.key_data.dtype)
        for place, entry in enumerate(self.staged):
            tokens[place, : len(entry.tokens)] = entry.tokens
            numbers[:, place] = len(entry.tokens), entry.max_new_tokens, entry.sequence
            keys[place] = entry.key
            if sampling is not None:
                for column, value in zip(
                    jax.tree.leaves(sampling), jax.tree.leaves(entry.sampling), strict=True
                ):
                    column[place] = value
        return Waiting(
            tokens,
            *numbers,
            num_sequences=np.int32(self.num_sequences),
            keys=jax.random.wrap_key_data(keys, impl=self.key_impl),
            sampling=sampling,
            count=np.int32(count),
            taken=np.int32(0),
        )

    def take(self) -> list[Row]:
        """The rows of what has finished in the last call."""
        count = int(self.finished.count)
        if not count:
            return []
        kept = {name: getattr(self.finished, name) for name in (*PER_SLOT, *COUNTED)}
        kept = jax.device_get(kept) | {"active": np.zeros(len(kept["lengths"]), bool)}
        return [self.row(kept, place) for place in range(count)]

    def unfinished(self) -> list[Row]:
        """The rows of what decodes still."""
        here = jax.device_get(rows_of(self.state) | {"active": self.state.active})
        return [self.row(here, slot) for slot in np.flatnonzero(here["active"])]

    def row(self, arrays: Row, place: int) -> Row:
        per_step = self.seconds / max(self.totals["model_calls"], 1)
        row = {name: x[place].copy() for name, x in arrays.items()}
        return row | {"finish_seconds": np.float32(per_step * row["num_steps"])}

    def not_begun(self, entry: Entry) -> Row:
        """The row of a sequence for which there was no time."""
        length = np.int32(len(entry.tokens))
        row = {name: np.zeros(x.shape[1:], x.dtype) for name, x in rows_of(self.state).items()}
        row |= {"lengths": length, "prompt_lengths": length, "active": np.bool_(True)}
        row["tokens"][:length] = entry.tokens
        row["sequence_ids"] = np.int32(entry.sequence)
        return row | {"finish_seconds": np.float32(0)}

    @property
    def idle_share(self) -> float:
        """Of slots in which no sequence was decoded or its prompt fed, over all steps."""
        slots = max(1, self.totals["model_calls"] * self.count)
        return 1 - self.busy_slots / slots

    def counts(self) -> dict[str, int]:
        """What the steps did together."""
        return {**self.totals, "num_masked": self.state.cache.num_masked}


def sequences_of(requests: Requests) -> Iterator[Entry]:
    """All sequences that are asked for, in their order."""
    keys = np.asarray(jax.random.key_data(requests.keys))
    for sequence in range(requests.total_sequences):
        prompt = sequence // requests.num_sequences
        yield Entry(
            sequence,
            requests.prompts[prompt],
            int(requests.max_new_tokens[prompt]),
            keys[sequence],
            jax.tree.map(lambda values, at=prompt: values[at], requests.sampling),
        )


def stacked(rows: Sequence[Row]) -> Row:
    """Rows as arrays with one entry each."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


@functools.partial(
    jax.jit, static_argnames=("max_len", "max_draft_tokens"), donate_argnames="cache"
)
def _idle(
    drafter, draft_length, cache, end_token_ids, keys, sampling, *, max_len, max_draft_tokens
) -> tuple[DecodeState, Finished]:
    """A state whose slots are all idle, and places for what will finish."""
    count = cache.lengths.shape[0]
    tokens, lengths = jnp.zeros((count, max_len), jnp.int32), jnp.ones(count, jnp.int32)
    state = DecodeState(
        tokens=tokens,
        logprobs=jnp.zeros(tokens.shape, jnp.float32),
        lengths=lengths,
        prompt_lengths=lengths,
        length_limits=lengths,
        active=jnp.zeros(count, bool),
        ended=jnp.zeros(count, bool),
        sequence_ids=jnp.full(count, -1, jnp.int32),
        end_token_ids=end_token_ids,
        keys=keys,
        sampling=sampling,
        cache=cache,
        drafter_state=() if drafter is None else drafter.init(tokens, lengths, max_len),
        policy_state=() if draft_length is None else draft_length.init(count, max_draft_tokens),
        counters=Counters.init(count, max_draft_tokens),
    )
    return state, Finished.places(2 * count, state)
