"""Several devices of one process: a replica of the model each, and one queue of prompts."""

import queue
import threading
from collections.abc import Generator, Iterator, Mapping

import jax

from emsjax.engine.slots import Entry, Row, Slots

PUT_SECONDS = 0.2  # between two looks whether anybody still takes rows
ROWS_KEPT = 64  # of each device, until they are taken


class Shared:
    """An iterator that several threads take from, until it is closed."""

    def __init__(self, entries: Iterator[Entry]):
        self.entries, self.lock = entries, threading.Lock()
        self.closed = threading.Event()

    def __iter__(self):
        return self

    def __next__(self) -> Entry:
        with self.lock:
            if self.closed.is_set():
                raise StopIteration
            return next(self.entries)


def rows_of_all(
    slots: Mapping[jax.Device, Slots], entries: Iterator[Entry]
) -> Generator[Row, None, None]:
    """The rows of all sequences, each from the device that had a slot for it.

    The first error of a device ends all.
    """
    shared, rows = Shared(entries), queue.Queue(ROWS_KEPT * len(slots))

    def put(item) -> bool:
        """Whether anybody takes rows still."""
        while not shared.closed.is_set():
            try:
                rows.put(item, timeout=PUT_SECONDS)
                return True
            except queue.Full:
                continue
        return False

    def work(device: jax.Device) -> None:
        try:
            with jax.default_device(device):
                all(map(put, slots[device].serve(shared)))
            put(None)
        except BaseException as error:
            put(error)

    for device in slots:
        threading.Thread(target=work, args=(device,), daemon=True).start()
    try:
        at_work = len(slots)
        while at_work:
            row = rows.get()
            if isinstance(row, BaseException):
                raise row
            if row is None:
                at_work -= 1
            else:
                yield row
    finally:
        shared.closed.set()
