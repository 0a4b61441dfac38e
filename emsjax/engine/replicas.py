"""Decodes on several devices of one process, each with a model replica, from one prompt queue."""

import contextlib
import queue
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

import jax

from emsjax.checks import check_instance
from emsjax.configured import own_settings
from emsjax.decode.run import Run
from emsjax.engine.requests import Requests
from emsjax.engine.slots import Entry, Row, Slots
from pallas_kernels.common.numerics import current_numerics

PUT_SECONDS = 0.2  # between two checks whether rows are still being consumed
STOP_SECONDS = 60  # the longest wait for a closed call to stop; it stops between device calls
ROWS_KEPT = 64  # rows per device that are buffered until they are consumed


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
    """Makes slots on each device, with a replica of model and drafter, and allocates caches.

    Args:
        count: slots per device.
        devices: the devices; None: the model's device.

    Raises:
        ValueError: as `Slots`, or `devices` is empty, repeats one, or holds something else.
    """
    if devices is None:
        return {None: Slots(run, requests, count)}
    if not isinstance(devices, Iterable) or getattr(devices, "shape", None) == ():
        raise ValueError(f"devices must be a sequence of devices, not {type(devices).__name__}")
    devices = tuple(devices)
    if not devices:
        raise ValueError("devices must not be empty")
    for i, device in enumerate(devices):
        check_instance(f"devices[{i}]", device, jax.Device, "one of jax.local_devices()")
    if len(set(devices)) < len(devices):
        raise ValueError(f"devices must be different, not {', '.join(map(str, devices))}")
    slots = {}
    for device in devices:
        with jax.default_device(device):
            slots[device] = Slots(jax.device_put(run, device), requests, count)
    return slots


def reopen(slots: Mapping[jax.Device | None, Slots], requests: Requests) -> None:
    """Prepares the slots of all devices for other sequences: see `Slots.open`.

    Threads of a call that was closed may still be decoding; they are waited for.
    """
    latest = time.monotonic() + STOP_SECONDS
    in_threads = [own for device, own in slots.items() if device is not None]
    while any(own.serving for own in in_threads) and time.monotonic() < latest:
        time.sleep(0.01)
    for device, own in slots.items():
        with jax.default_device(device) if device else contextlib.nullcontext():
            own.open(requests)


def rows_of_all(
    slots: Mapping[jax.Device | None, Slots], entries: Iterator[Entry], *, partial: bool = False
) -> Generator[Row, None, None]:
    """Yields the rows of all sequences, each from the device that had a slot for it.

    The first error on any device stops all devices.

    Args:
        partial: see `Slots.serve`.
    """
    if set(slots) == {None}:
        yield from slots[None].serve(entries, partial=partial)
        return
    shared, rows = Shared(entries), queue.Queue(ROWS_KEPT * len(slots))
    chosen = current_numerics()  # other threads begin without this one's

    def put(item) -> bool:
        """Returns whether rows are still being consumed."""
        while not shared.closed.is_set():
            try:
                rows.put(item, timeout=PUT_SECONDS)
                return True
            except queue.Full:
                continue
        return False

    def work(device: jax.Device) -> None:
        try:
            with own_settings(chosen), jax.default_device(device):
                all(map(put, slots[device].serve(shared, partial=partial)))
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
