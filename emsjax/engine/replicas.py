"""Decodes on several devices of one process, each with a model replica, from one prompt queue."""

import contextlib
import dataclasses
import queue
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

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


Place = jax.Device | Mesh  # of a replica


def make_slots(
    run: Run, requests: Requests, count: int, devices: Sequence[Place] | None
) -> dict[Place | None, Slots]:
    """Makes slots in each place, with a replica of model and drafter, and allocates caches.

    Args:
        count: slots per replica.
        devices: devices, or meshes over which replicas are split; None: where the model is.

    Raises:
        ValueError: as `Slots`, or `devices` is empty, repeats a device, or holds something else; or
            the model cannot be split over a mesh.
    """
    if devices is None:
        return {None: Slots(run, requests, count)}
    if not isinstance(devices, Iterable) or getattr(devices, "shape", None) == ():
        raise ValueError(f"devices must be a sequence of devices, not {type(devices).__name__}")
    places = tuple(devices)
    if not places:
        raise ValueError("devices must not be empty")
    for i, place in enumerate(places):
        check_instance(
            f"devices[{i}]", place, Place, "one of jax.local_devices(), or a mesh of some of them"
        )
    every = [device for place in places for device in devices_of(place)]
    if any(device.process_index != jax.process_index() for device in every):
        raise ValueError("devices must be those of this process")
    if len(set(every)) < len(every):
        raise ValueError(f"devices must be different, not {', '.join(map(str, every))}")
    slots = {}
    for place in places:
        with _default(place):
            slots[place] = Slots(replica(run, place), requests, count)
    return slots


def devices_of(place: Place) -> list[jax.Device]:
    """The devices of a replica."""
    return list(place.devices.flat) if isinstance(place, Mesh) else [place]


def replica(run: Run, place: Place) -> Run:
    """The run with model and drafter on a device, or the model split over a mesh.

    A drafter's model is split if it is split already or shares the target's cache; otherwise each
    device of the mesh has it, as it has all other arrays.

    Raises:
        ValueError: the model cannot be moved to such a place.
    """
    if not isinstance(place, Mesh):
        if getattr(run.model, "parallel", None) is not None:
            raise ValueError("devices must be meshes, as the model is on one")
        return jax.device_put(run, place)
    if not hasattr(run.model, "split"):
        raise ValueError(f"devices must not be meshes, as {type(run.model).__name__} has no split")
    shares = run.drafter is not None and run.drafter.shares_cache
    is_model = lambda node: hasattr(node, "replicate")
    everywhere = NamedSharding(place, PartitionSpec())

    def move(node):
        if not is_model(node):
            return jax.device_put(node, everywhere)
        return node.split(place) if node.is_split or shares else node.replicate(place)

    others = jax.tree.map(move, dataclasses.replace(run, model=None), is_leaf=is_model)
    return dataclasses.replace(others, model=run.model.split(place))


def _default(place: Place):
    """A context in which new arrays are in this place, or uncommitted on its first device."""
    return jax.default_device(devices_of(place)[0])


def reopen(slots: Mapping[jax.Device | None, Slots], requests: Requests) -> None:
    """Prepares the slots of all devices for other sequences: see `Slots.open`.

    Threads of a call that was closed may still be decoding; they are waited for.
    """
    latest = time.monotonic() + STOP_SECONDS
    in_threads = [own for device, own in slots.items() if device is not None]
    while any(own.serving for own in in_threads) and time.monotonic() < latest:
        time.sleep(0.01)
    for device, own in slots.items():
        with contextlib.nullcontext() if device is None else _default(device):
            own.open(requests)


def rows_of_all(
    slots: Mapping[Place | None, Slots], entries: Iterator[Entry], *, piece_steps: int = 0
) -> Generator[Row, None, None]:
    """Yields the rows of all sequences, each from the device that had a slot for it.

    The first error on any device stops all devices.

    Args:
        piece_steps: see `Slots.serve`.
    """
    if set(slots) == {None}:
        yield from slots[None].serve(entries, piece_steps=piece_steps)
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

    def work(device: Place) -> None:
        try:
            with own_settings(chosen), _default(device):
                all(map(put, slots[device].serve(shared, piece_steps=piece_steps)))
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
