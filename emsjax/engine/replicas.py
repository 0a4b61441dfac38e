"""Several devices of one process: a replica of the model each, and one queue of prompts."""

import contextlib
import queue
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

import jax

from emsjax.decode.run import Run
from emsjax.engine.requests import Requests
from emsjax.engine.slots import Entry, Row, Slots

PUT_SECONDS = 0.2  # between two looks whether rows are still being taken
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


def make_slots(
    run: Run, requests: Requests, count: int, devices: Sequence[jax.Device] | None
) -> dict[jax.Device | None, Slots]:
    """Slots on each device, with a replica of the model and the drafter; caches are allocated.

    Args:
        count: slots of each device.
        devices: None: where the model is.

    Raises:
        ValueError: as `Slots`, or `devices` that is empty or not a sequence.
    """
    if devices is None:
        return {None: Slots(run, requests, count)}
    if not isinstance(devices, Iterable):
        raise ValueError(f"devices must be a sequence of devices, not {type(devices).__name__}")
    devices = tuple(devices)
    if not devices:
        raise ValueError("devices must not be empty")
    slots = {}
    for device in devices:
        with jax.default_device(device):
            slots[device] = Slots(jax.device_put(run, device), requests, count)
    return slots


def reopen(slots: Mapping[jax.Device | None, Slots], requests: Requests) -> None:
    """Get slots of all devices ready for other sequences: see `Slots.open`."""
    for device, own in slots.items():
        with jax.default_device(device) if device else contextlib.nullcontext():
            own.open(requests)


def rows_of_all(
    slots: Mapping[jax.Device | None, Slots], entries: Iterator[Entry]
) -> Generator[Row, None, None]:
    """The rows of all sequences, each from the device that had a slot for it.

    The first error of a device ends all.
    """
    if set(slots) == {None}:
        yield from slots[None].serve(entries)
        return
    shared, rows = Shared(entries), queue.Queue(ROWS_KEPT * len(slots))

    def put(item) -> bool:
        """Returns whether rows are still being taken."""
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
