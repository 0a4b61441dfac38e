"""The host's side of a batch of slots: it feeds in prompts and collects finished sequences.

Slots outlive the sequences of one call: the next call reuses compiled programs and caches.
"""

import dataclasses
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from time import monotonic, perf_counter, sleep
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
from emsjax.engine.requests import Requests
from emsjax.sampling import Settings

STEPS = 64  # per call of the loop; finished sequences wait no longer than this
BUDGET_CHECK_STEPS = 16  # per call of the loop if there is a deadline
PIECE_STEPS = 8  # between two pieces of a sequence, unless others are asked for
WAITING_STEPS = 16  # per call of the loop if the next sequence has not arrived yet
IDLE_SECONDS = 0.01  # between two looks for the next sequence while no slot is busy
NO_LIMIT = np.iinfo(np.int32).max // 2  # steps
TOTALS = ("model_calls", "real_rows", "padding_rows")  # fields of `Counters`
NOT_YET = object()  # an item of an iterator that has nothing at present, but may have more later
Row = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A sequence that waits for a slot.

    Attributes:
        sequence: the sequence's number; sequence i continues prompt i // num_sequences.
        tokens: the prompt.
        max_new_tokens: maximum number of tokens to emit.
        key: data of the sequence's random key.
        settings: the sequence's row.
    """

    sequence: int
    tokens: np.ndarray
    max_new_tokens: int
    key: np.ndarray
    settings: Settings


_places = jax.jit(Finished.places, static_argnames="count", keep_unused=True)


class Slots:
    """A batch whose slots take new sequences as others finish.

    Args:
        run: the model and everything that decides how it decodes.
        requests: the first requests; `open` accepts others up to the same `max_len`.
        count: number of slots.

    Raises:
        ValueError: the slots do not fit into memory, or the drafter is a constant that would be
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
        """Makes slots that hold one prefilled group of sequences, which `finish` decodes.

        Args:
            run: the run with the drafter for this group.
            cache_length: the length that `check_memory` returned.
        """
        self = object.__new__(cls)
        self.given, self.run, self.count = run, run.flat(), count
        self.totals, self.busy_slots, self.seconds = dict.fromkeys(TOTALS, 0), 0, 0.0
        self.state = begin_group(run, requests, group, count, cache_length)
        self.group_size = len(group)
        return self

    def open(self, requests: Requests) -> None:
        """Prepares the slots for other sequences; their present content is discarded.

        Args:
            requests: number of sequences per prompt, end tokens, stops and which settings are in
                use; also the prompts if the drafter holds data for each.

        Raises:
            ValueError: the requests are too long for these slots, the drafter would be compiled
                again for each prompt, or another call is being served.
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
                f"{type(unwrapped(drafter)).__name__} holds data for each prompt: to serve "
                "slots that are refilled it must be a pytree"
            )
        self.prompts = np.zeros(self.count, np.int64)  # prompt that each slot serves
        self.serve_prompts()
        self.idle_key = requests.keys.data(0)  # of slots without a sequence
        keys = requests.keys.wrap(np.stack([self.idle_key] * self.count))
        settings = self.no_settings()
        if self.state is None:
            cache = self.given.model.init_cache(self.count, self.max_len)
        else:  # the content of idle slots is undefined
            cache = self.state.cache
        run = dataclasses.replace(self.run.whole(), model=None)
        self.state = begin_idle(run, cache, keys, settings, requests.common, max_len=self.max_len)
        self.finished = _places(2 * self.count, self.state)  # where the state is
        # The counters on the device start again at 0.
        self.totals, self.busy_slots, self.seconds = dict.fromkeys(TOTALS, 0), 0, 0.0

    def serve(
        self,
        entries: Iterator[Any],
        *,
        enough: int | None = None,
        deadline: float | None = None,
        piece_steps: int = 0,
    ) -> Generator[Any, None, None]:
        """Yields each sequence's row as it finishes; sequences enter in the given order.

        Items that are not an `Entry` are passed through. After `NOT_YET` the slots go on with the
        sequences that they have, and ask for the next one after a few steps.

        Args:
            enough: number of idle slots at which the next sequences enter, if the drafter holds
                data for each prompt; None: an eighth of the slots.
            deadline: time of `time.monotonic` after which the rows of all unfinished sequences
                are yielded, marked `active`.
            piece_steps: steps after which the rows of all sequences that still decode are yielded,
                marked `active`, each time; 0: they are not.
        """
        self.serving = True
        try:
            yield from self._serve(entries, enough, deadline, piece_steps)
        finally:
            self.serving = False

    def _serve(self, entries: Iterator[Any], enough: int | None, deadline, piece_steps):
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
            while not (entry is None or entry is NOT_YET) and len(self.staged) < self.room:
                if isinstance(entry, Entry):
                    self.staged.append(entry)
                else:
                    yield entry
                entry = next(entries, None)
            steps = STEPS if deadline is None else BUDGET_CHECK_STEPS
            steps = piece_steps or steps
            waits = entry is NOT_YET
            if self.staged or self.busy:
                idle = self.count if waits or entry is None else enough
                self.decode(idle, min(steps, WAITING_STEPS) if waits else steps)
                yield from self.rows_of_call(piece_steps > 0)
            else:
                sleep(IDLE_SECONDS)
            entry = next(entries, None) if waits else entry

    def finish(self, deadline: float | None) -> list[Row]:
        """Decodes a filled group to its end or to the deadline, and returns its rows."""
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
        """Whether any slot serves a sequence."""
        return len(self.idle) < self.count

    @property
    def room(self) -> int:
        """Number of sequences that may be staged for the device to admit."""
        # A drafter that holds data for each prompt must know in advance which slot a prompt gets.
        return len(self.idle) if self.per_prompt else self.count

    def decode(self, enough: int, steps: int) -> None:
        """Takes steps until all staged sequences have entered and `enough` slots are idle.

        Args:
            enough: number of idle slots at which the loop ends.
            steps: maximum number of steps.
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
        """Sets the drafter to the one for the prompts that the slots serve."""
        run = for_prompts(self.given, self.prompts, self.requests.num_prompts)
        self.run = dataclasses.replace(self.run, drafter=run.flat_drafter)

    def read_back(self, queue: Queue) -> None:
        """Reads back slot occupancy and counters; blocks until the call finishes."""
        counters = {name: getattr(self.state.counters, name) for name in TOTALS}
        found = (counters, queue.finished.busy, queue.taken, self.state.active)
        counters, busy, taken, active = jax.device_get(found)
        for _ in range(int(taken)):
            self.staged.popleft()
        self.idle = np.flatnonzero(~active).tolist()
        self.busy_slots += int(busy)
        for name, count in counters.items():  # device counters wrap at 2**32
            self.totals[name] += (int(count) - self.totals[name]) % 2**32

    def waiting(self) -> Sequences:
        """Returns the staged sequences as arrays whose sizes are the same in each call."""
        places = self.count
        tokens = np.zeros((places, self.max_len), np.int32)
        numbers = np.ones((3, places), np.int32)
        settings = self.no_settings()
        keys = [self.idle_key] * places
        for place, entry in enumerate(self.staged):
            tokens[place, : len(entry.tokens)] = entry.tokens
            numbers[:, place] = len(entry.tokens), entry.max_new_tokens, entry.sequence
            keys[place] = entry.key
            for column, value in zip(
                jax.tree.leaves(settings), jax.tree.leaves(entry.settings), strict=True
            ):
                column[place] = value
        return Sequences(tokens, *numbers, self.requests.keys.wrap(np.stack(keys)), settings)

    def no_settings(self) -> Settings:
        """Returns a row of zeros for each slot, of the settings that are in use."""
        zeros = lambda values: np.zeros((self.count, *values.shape[1:]), values.dtype)
        return jax.tree.map(zeros, self.requests.settings)

    def take_finished(self) -> list[Row]:
        """Returns the rows of the sequences that finished in the last call."""
        count = int(self.finished.count)
        if not count:
            return []
        kept = {name: getattr(self.finished, name) for name in (*PER_SLOT, *COUNTED)}
        kept = jax.device_get(kept) | {"active": np.zeros(len(kept["lengths"]), bool)}
        return [self.row(kept, place) for place in range(count)]

    def rows_of_call(self, partial: bool) -> list[Row]:
        """Returns the rows that `serve` yields after a call of the loop."""
        return self.take_finished() + (self.unfinished() if partial else [])

    def unfinished(self) -> list[Row]:
        """Returns the rows of the sequences that still decode."""
        here = jax.device_get(sequence_results(self.state) | {"active": self.state.active})
        return [self.row(here, slot) for slot in np.flatnonzero(here["active"])]

    def row(self, arrays: Row, place: int) -> Row:
        """Copies one sequence's results out of batched arrays."""
        per_step = self.seconds / max(self.totals["model_calls"], 1)
        row = {name: x[place].copy() for name, x in arrays.items()}
        return row | {"finish_seconds": np.float32(per_step * row["num_steps"])}

    def not_begun(self, entry: Entry) -> Row:
        """Returns the row of a sequence that did not start before the deadline."""
        length = np.int32(len(entry.tokens))
        results = sequence_results(self.state)
        row = {name: np.zeros(x.shape[1:], x.dtype) for name, x in results.items()}
        row |= {"lengths": length, "prompt_lengths": length, "active": np.bool_(True)}
        row["tokens"][:length] = entry.tokens
        row["sequence_ids"] = np.int32(entry.sequence)
        return row | {"finish_seconds": np.float32(0)}

    @property
    def idle_share(self) -> float:
        """Share of idle slots, over all steps."""
        slots = max(1, self.totals["model_calls"] * self.count)
        return 1 - self.busy_slots / slots

    def counts(self) -> dict[str, int]:
        """Returns the totals over all steps."""
        return {**self.totals, "num_masked": int(self.state.cache.num_masked)}


def sequences_of(requests: Requests) -> Iterator[Entry]:
    """Yields all requested sequences in order."""
    for sequence in range(requests.total_sequences):
        prompt = sequence // requests.num_sequences
        yield Entry(
            sequence,
            requests.prompts[prompt],
            int(requests.max_new_tokens[prompt]),
            requests.keys.data(sequence),
            jax.tree.map(lambda values, at=prompt: values[at], requests.settings),
        )


def stacked(rows: Sequence[Row]) -> Row:
    """Stacks rows into arrays with one entry per row."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
