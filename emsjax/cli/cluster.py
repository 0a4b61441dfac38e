"""The cluster of `emsjax generate --ray`: the connection to it, its room, and its errors."""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Where the work is done.

    Attributes:
        address: of the cluster, as for `ray.init`.
        workers: number of actors; None: one for each GPU or group of them, or else for each host.
    """

    address: str
    workers: int | None


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """A context with a connection to the cluster, which is kept if there was one before.

    Raises:
        ValueError: there is no cluster at the address.
    """
    import ray

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False  # there is one for results
    context.raise_original_map_exception = True  # `reason_of` finds it
    # The datasets tell of failures; Ray would also show where they were, and errors of its own
    # statistics.
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if ray.is_initialized():
        yield
        return
    quiet = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, log_to_driver=False, logging_level="warning", **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(f"--ray {address}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def failures_in_one_line() -> Iterator[None]:
    """A context in which an error of a worker, or its death, is a ValueError of one line."""
    import ray

    try:
        yield
    except ray.exceptions.RayError as error:
        raise ValueError(reason_of(error)) from error


def reason_of(error: BaseException) -> str:
    """What was wrong on a host, in one line, from the error that Ray made of it."""
    from ray.exceptions import RayError

    while getattr(error, "cause", None) is not None:  # the error that was raised on the host
        error = error.cause
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, RayError):  # before the last line is where the error was
        return lines[-1].strip()
    message = " ".join(map(str.strip, lines))
    return message if isinstance(error, ValueError) else f"{type(error).__name__}: {message}"


def count_actors(
    nodes: Sequence[Mapping[str, Any]], workers: int | None, tensor_parallel: int
) -> tuple[int, bool]:
    """The number of actors for which these hosts have room, and whether they have GPUs.

    Args:
        nodes: the hosts, as `ray.nodes()` tells of them.
        workers: see `Cluster`; there are no more than the GPUs suffice for.
        tensor_parallel: GPUs of an actor, which must be of one host.

    Raises:
        ValueError: there are GPUs, and no host has enough of them.
    """
    gpus = [int(node["Resources"].get("GPU", 0)) for node in nodes if node["Alive"]]
    if not any(gpus):
        return workers or len(gpus), False
    room = sum(number // tensor_parallel for number in gpus)
    if not room:
        raise ValueError(f"--tensor-parallel {tensor_parallel}: no host has {tensor_parallel} GPUs")
    return min(workers or room, room), True
