"""The host's side of a batch of slots: puts prompts into them, takes finished sequences out.

Slots outlive the sequences of one call: compiled programs and caches serve the next call too.
"""

import dataclasses
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from time import monotonic, perf_counter
from typing import Any

import jax
import numpy as np

from emsjax.decode.refill import COUNTED, PER_SLOT, Finished, Queue, sequence_results
from emsjax.decode.run import Run
from emsjax.decode.state import DecodeState, Sequences
from emsjax.decode.step import decode_loop
from emsjax.engine.adapt import unwrapped
from emsjax.engine.group import begin_group, begin_idle
from emsjax.engine.preparation import check_memory, for_prompts, holds_prompts
from emsjax.engine.requests import Requests, keys_at
from emsjax.sampling import Sampling

STEPS = 64  # per call; what has finished is not kept back for longer
BUDGET_CHECK_STEPS = 16  # per call, with a deadline
NO_LIMIT = np.iinfo(np.int32).max // 2  # steps
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
        sampling: its values, or None when all decode greedily.
    """

    sequence: int
    tokens: np.ndarray
    max_new_tokens: int
    key: np.ndarray
    sampling: Sampling | None


class Slots:
    """A batch whose slots take new sequences as others finish.

    Args:
        run: what decodes.
        requests: what is asked for; `open` takes others of at most their `max_len`.
        count: number of slots.

    Raises:
        ValueError: they do not fit into memory, or the drafter is a constant that would be
            compiled again for each prompt.
    """

    def __init__(self, run: Run, requests: Requests, count: int):
        check_memory(run, requests, count, refilled=True)
        self.given, self.run, self.count = run, run.flat(), count
        self.max_len, self.staged = requests.max_len, deque()
        self.totals, self.busy_slots, self.seconds = dict.fromkeys(TOTALS, 0), 0, 0.0
        self.state: DecodeState | None = None
        self.finished: Finished | None = None
        self.serving = False
        self.open(requests)

    @classmethod
    def filled(
        cls, run: Run, requests: Requests, group: np.ndarray, count: int, cache_length: int
    ) -> "Slots":
        """Slots that hold one group of sequences, prefilled, to be decoded by `finish`.

        Args:
            run: with the drafter for this group.
            cache_length: as `check_memory` returned it.
        """
        self = object.__new__(cls)
        self.given, self.run, self.count = run, run.flat(), count
        self.totals, self.busy_slots, self.seconds = dict.fromkeys(TOTALS, 0), 0, 0.0
        self.state = begin_group(run, requests, group, count, cache_length)
        self.group_size = len(group)
        return self

    def open(self, requests: Requests) -> None:
        """Get ready for other sequences; what the slots hold is given up.

        Args:
            requests: number of sequences per prompt, end tokens, which sampling values are in
                use; prompts if the drafter holds something for each.

        Raises:
            ValueError: requests that are too long for these slots, a drafter that would be
                compiled again for each prompt, or another call that is being served.
        """
        if self.serving:
            raise ValueError("these slots serve another call: read its results, or close it, first")
        if requests.max_len > self.max_len:
            raise ValueError(
                f"a prompt and its continuation may have {self.max_len} tokens in these slots, "
                f"not {requests.max_len}"
            )
        self.requests, self.staged = requests, deque()
        self.idle = list(range(self.count))  # as of the last call
        drafter, num_prompts = self.given.drafter, requests.num_prompts
        self.per_prompt = holds_prompts(drafter, num_prompts)
        if self.per_prompt and not jax.tree.leaves(drafter):
            raise ValueError(
                f"{type(unwrapped(drafter)).__name__} holds something for each prompt: to serve "
                "slots that are refilled it must be a pytree"
            )
        self.prompts = np.zeros(self.count, np.int64)  # that the slots serve
        self.serve_prompts()
        # From the host: the key may lie on another device than the model.
        key = keys_at(requests.keys, 0)
        self.key_impl = jax.random.key_impl(key)
        self.key_data = np.asarray(jax.random.key_data(key))[None]
        keys = jax.random.wrap_key_data(
            self.key_data.repeat(self.count, axis=0), impl=self.key_impl
        )
        zeros = lambda values: np.zeros(self.count, np.asarray(values[0]).dtype)
        sampling = jax.tree.map(zeros, requests.sampling)
        if self.state is None:
            cache = self.given.model.init_cache(self.count, self.max_len)
        else:  # its content is undefined where no sequence is
            cache = self.state.cache
        run = dataclasses.replace(self.run.whole(), model=None)
        self.state = begin_idle(
            run, cache, keys, sampling, requests.end_token_ids, max_len=self.max_len
        )
        self.finished = Finished.places(2 * self.count, self.state)
        # The device's counters begin anew.
        self.totals, self.busy_slots, self.seconds = dict.fromkeys(TOTALS, 0), 0, 0.0

    def serve(
        self, entries: Iterator[Any], *, enough: int | None = None, deadline: float | None = None
    ) -> Generator[Any, None, None]:
        """Each sequence's row as it finishes; sequences enter in their order.

        What is not an `Entry` is passed through.

        Args:
            enough: idle slots at which the next sequences enter, if the drafter holds something
                for each prompt; None: an eighth of the slots.
            deadline: in `time.monotonic`; after it come the rows of all that have not finished,
                still `active`.
        """
        self.serving = True
        try:
            yield from self._serve(entries, enough, deadline)
        finally:
            self.serving = False

    def _serve(self, entries: Iterator[Any], enough: int | None, deadline: float | None):
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
            yield from self.take_finished()

    def finish(self, deadline: float | None) -> list[Row]:
        """The rows of a filled group, decoded to its end or to the deadline."""
        jax.block_until_ready(self.state)
        started = perf_counter()
        if deadline is None:
            self.state, _ = decode_loop(self.run, self.state, NO_LIMIT)
        while deadline is not None and monotonic() < deadline:
            self.state, _ = decode_loop(self.run, self.state, BUDGET_CHECK_STEPS)
            if not np.asarray(self.state.active).any():
                break
        jax.block_until_ready(self.state)
        self.seconds = perf_counter() - started
        totals = {name: getattr(self.state.counters, name) for name in TOTALS}
        self.totals = {name: int(count) for name, count in jax.device_get(totals).items()}
        held = jax.device_get(sequence_results(self.state) | {"active": self.state.active})
        return [self.row(held, slot) for slot in range(self.group_size)]

    @property
    def busy(self) -> bool:
        """Whether a slot serves a sequence."""
        return len(self.idle) < self.count

    @property
    def room(self) -> int:
        """How many sequences may wait to enter by themselves."""
        # A drafter that holds something for each prompt must know which slot it gets.
        return len(self.idle) if self.per_prompt else self.count

    def decode(self, enough: int, steps: int) -> None:
        """Take steps until all staged sequences have entered and `enough` slots are idle.

        Args:
            steps: limit of the steps.
        """
        if self.per_prompt:
            for slot, entry in zip(self.idle, self.staged, strict=False):
                self.prompts[slot] = entry.sequence // self.requests.num_sequences
            self.serve_prompts()
        queue = Queue(
            self.waiting(),
            count=np.int32(len(self.staged)),
            taken=np.int32(0),
            num_sequences=np.int32(self.requests.num_sequences),
            enough=np.int32(enough),
            finished=self.finished,
        )
        jax.block_until_ready(self.state)
        start = perf_counter()
        self.state, queue = decode_loop(self.run, self.state, steps, queue)
        self.finished = queue.finished
        self.read_back(queue)
        self.seconds += perf_counter() - start

    def serve_prompts(self) -> None:
        """Make the drafter the one for the prompts that the slots serve."""
        run = for_prompts(self.given, self.prompts, self.requests.num_prompts)
        self.run = dataclasses.replace(self.run, drafter=run.flat_drafter)

    def read_back(self, queue: Queue) -> None:
        """Read back slot occupancy and counters; blocks until the call finishes."""
        counters = {name: getattr(self.state.counters, name) for name in TOTALS}
        found = (counters, queue.finished.busy, queue.taken, self.state.active)
        counters, busy, taken, active = jax.device_get(found)
        for _ in range(int(taken)):
            self.staged.popleft()
        self.idle = np.flatnonzero(~active).tolist()
        self.busy_slots += int(busy)
        for name, count in counters.items():  # the device's begin again at 2**32
            self.totals[name] += (int(count) - self.totals[name]) % 2**32

    def waiting(self) -> Sequences:
        """The staged sequences as arrays of the same sizes in each call."""
        places = self.count
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
        keys = jax.random.wrap_key_data(keys, impl=self.key_impl)
        return Sequences(tokens, *numbers, keys, sampling)

    def take_finished(self) -> list[Row]:
        """The rows of the sequences that finished in the last call."""
        count = int(self.finished.count)
        if not count:
            return []
        kept = {name: getattr(self.finished, name) for name in (*PER_SLOT, *COUNTED)}
        kept = jax.device_get(kept) | {"active": np.zeros(len(kept["lengths"]), bool)}
        return [self.row(kept, place) for place in range(count)]

    def unfinished(self) -> list[Row]:
        """The rows of the sequences that still decode."""
        here = jax.device_get(sequence_results(self.state) | {"active": self.state.active})
        return [self.row(here, slot) for slot in np.flatnonzero(here["active"])]

    def row(self, arrays: Row, place: int) -> Row:
        """One sequence's results, copied out of the arrays of many."""
        per_step = self.seconds / max(self.totals["model_calls"], 1)
        row = {name: x[place].copy() for name, x in arrays.items()}
        return row | {"finish_seconds": np.float32(per_step * row["num_steps"])}

    def not_begun(self, entry: Entry) -> Row:
        """The row of a sequence for which there was no time."""
        length = np.int32(len(entry.tokens))
        results = sequence_results(self.state)
        row = {name: np.zeros(x.shape[1:], x.dtype) for name, x in results.items()}
        row |= {"lengths": length, "prompt_lengths": length, "active": np.bool_(True)}
        row["tokens"][:length] = entry.tokens
        row["sequence_ids"] = np.int32(entry.sequence)
        return row | {"finish_seconds": np.float32(0)}

    @property
    def idle_share(self) -> float:
        """Share of slots without a sequence, over all steps."""
        slots = max(1, self.totals["model_calls"] * self.count)
        return 1 - self.busy_slots / slots

    def counts(self) -> dict[str, int]:
        """What the steps did together."""
        return {**self.totals, "num_masked": int(self.state.cache.num_masked)}


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
