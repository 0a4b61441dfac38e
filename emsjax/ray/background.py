"""Slots in a thread of their own, which decode for several batches of prompts at a time."""

import dataclasses
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from emsjax.checks import INT32_MAX
from emsjax.decode.run import Run
from emsjax.engine.completions import Completion
from emsjax.engine.slots import NOT_YET
from emsjax.streaming import ONE_VARIANT, Numbered, Variants, stream_numbered

WAIT_SECONDS = 0.2  # for the next prompt, while nothing is decoded


@dataclasses.dataclass(frozen=True)
class Ask:
    """A prompt to complete.

    Attributes:
        prompt: its token ids.
        max_new_tokens: as for `Numbered`.
        key_number: decides its random keys.
        variant: its settings, where there are several variants.
        on_piece: is called with each piece that its sequences have gained, in the thread that
            decodes, if the slots yield pieces (`piece_steps`); None: pieces are dropped.
    """

    prompt: Sequence[int]
    max_new_tokens: Any = None
    key_number: int = 0
    variant: int = 0
    on_piece: Callable[[Completion], None] | None = None


class Batch:
    """A batch of prompts, until all of its sequences are complete."""

    def __init__(self, count: int, num_sequences: int):
        self.future: Future[list[list[Completion]]] = Future()
        self.future.set_running_or_notify_cancel()  # it can no longer be cancelled
        self.found: list[list[Any]] = [[None] * num_sequences for _ in range(count)]
        self.left = count

    def finish_prompt(self) -> None:
        """Counts a prompt whose sequences are complete; the last one ends the batch."""
        self.left -= 1
        if not self.left:
            self.future.set_result(self.found)


class Background:
    """Holds slots, and completes batches of prompts in them until it is closed.

    The slots see one endless stream of prompts, in which batches follow each other: when a sequence
    ends, its slot takes the next prompt, whichever batch that is from. They run empty only if there
    is no other batch.

    Args:
        run: the model and everything that decides how it decodes.
        num_sequences: sequences per prompt.
        variants: how many variants of the settings there are.
        options: the other arguments of `stream_numbered`.
    """

    def __init__(self, run: Run, num_sequences: int = 1, variants: int = 1, **options: Any):
        self.num_sequences, self.arrived = num_sequences, queue.SimpleQueue()
        self.waiting: dict[int, tuple[Batch, int, Ask]] = {}  # by number
        self.numbers = itertools.cycle(range(INT32_MAX // num_sequences))
        self.lock, self.closed = threading.Lock(), threading.Event()
        self.failure: BaseException | None = None
        own = ONE_VARIANT
        if variants > 1:
            own = Variants(variants, lambda number: self.waiting[number][2].variant)
        options |= {"num_sequences": num_sequences, "variants": own}
        # Impossible options are errors of the caller: they are found before the thread starts.
        self.completions = stream_numbered(run, self._prompts(), **options)
        self.thread = threading.Thread(target=self._decode, daemon=True)
        self.thread.start()

    def submit(self, asks: Sequence[Ask]) -> "Future[list[list[Completion]]]":
        """Queues a batch of prompts.

        Returns:
            A future of the sequences of each prompt, in order. It cannot be cancelled: the slots
            complete what they have been given.

        Raises:
            RuntimeError: decoding has failed, or was closed.
        """
        batch = Batch(len(asks), self.num_sequences)
        if not asks:
            batch.future.set_result([])
        with self.lock:
            if self.failure is not None or self.closed.is_set():
                raise RuntimeError("these slots no longer decode") from self.failure
            for place, ask in enumerate(asks):
                number = next(n for n in self.numbers if n not in self.waiting)
                self.waiting[number] = batch, place, ask
                own = ask.max_new_tokens, ask.key_number
                self.arrived.put(Numbered(number, ask.prompt, *own))
        return batch.future

    def close(self) -> None:
        """Lets the thread end; prompts that are still queued are not completed."""
        self.closed.set()
        self.thread.join()

    def _prompts(self) -> Iterator[Any]:
        """Yields prompts as they arrive, and `NOT_YET` while there are none."""
        while not self.closed.is_set():
            try:
                # What decodes must go on, so only an idle stream waits.
                idle = not self.waiting
                item = self.arrived.get(idle, WAIT_SECONDS)
            except queue.Empty:
                item = NOT_YET
            yield item

    def _decode(self) -> None:
        try:
            for completion in self.completions:
                batch, place, ask = self.waiting[completion.prompt]
                if completion.finish_reason is None:
                    if ask.on_piece is not None:
                        ask.on_piece(completion)
                    continue
                if completion.error is not None:  # without the number, which is the stream's
                    error = completion.error.replace(f"prompts[{completion.prompt}]", "the prompt")
                    completion = dataclasses.replace(completion, error=error)
                batch.found[place][completion.sequence] = completion
                if all(one is not None for one in batch.found[place]):
                    del self.waiting[completion.prompt]
                    batch.finish_prompt()
            failure: BaseException = RuntimeError("the slots were closed")
        except BaseException as error:
            failure = error
        with self.lock:
            self.failure = failure
            left = {id(batch): batch for batch, _, _ in self.waiting.values()}
        for batch in left.values():
            batch.future.set_exception(failure)
