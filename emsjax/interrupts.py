"""Signals that end a command: soon, with one line on stderr and a known exit code.

Python turns SIGINT into a KeyboardInterrupt between two bytecodes of the main thread: that is late
during a long compilation, in vain where a library swallows the exception, and a traceback while
modules are imported. This module imports nothing heavy, so that it can be there first.
"""

import contextlib
import functools
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, NoReturn

GRACE_SECONDS = 1.0  # from a signal until the process is ended whatever it does
SIGNALS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


@functools.cache
def is_command() -> bool:
    """Whether this process is a command of emsjax, not a program that imports it."""
    started, arguments = [*getattr(sys, "argv", ()), ""][0], sys.orig_argv
    if started == "-m":  # Python looks for the module, and has imported its package alone
        return arguments[arguments.index("-m") + 1].partition(".")[0] == "emsjax"
    return os.path.basename(started) == "emsjax"


def end(number: int, hint: str = "") -> NoReturn:
    """End the process at once, with one line on stderr."""
    # The stream's own lock may be held by the code that was interrupted. A progress bar hides the
    # cursor, and ends its line when it is closed, which it no longer will be.
    restored = b"\x1b[?25h\r\x1b[K" if os.isatty(2) else b""
    with contextlib.suppress(OSError):
        os.write(2, restored + f"emsjax: {SIGNALS[number]}{hint}\n".encode())
    os._exit(128 + number)


def end_while_importing() -> None:
    """Let signals end a command of emsjax at once, as long as it has not begun its work."""
    if is_command() and threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                signal.signal(number, lambda number, frame: end(number))


end_while_importing()  # here, because the package imports this module before all others


class Interruptible:
    """A context in which a signal raises a KeyboardInterrupt, or else ends a command soon.

    The first signal raises the exception in the main thread, so that files are closed; a second
    one, and `GRACE_SECONDS`, end the process if it is a command. Signals that are ignored stay
    ignored.

    Args:
        hint: follows the line that says what has happened.

    Attributes:
        received: the first signal; None: there has been none.
    """

    def __init__(self, hint: str = ""):
        self.hint, self.received = hint, None
        self.previous: dict[int, Any] = {}
        self.left = threading.Event()

    def __enter__(self) -> "Interruptible":
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread may handle signals
        self.unraisable, sys.unraisablehook = sys.unraisablehook, self.on_unraisable
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self.previous[number] = signal.signal(number, self.handle)
        # Python writes the number there at once, even if the main thread runs no bytecode.
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self.wakeup = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        threading.Thread(target=self.watch, daemon=True, name="emsjax-signals").start()
        return self

    def __exit__(self, *_: Any) -> None:
        if not self.previous:
            return
        self.left.set()
        signal.set_wakeup_fd(self.wakeup)
        os.close(self.writer)
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        sys.unraisablehook = self.unraisable

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            self.end()
        self.received = number
        raise KeyboardInterrupt

    def watch(self) -> None:
        """End the process some time after a signal, unless the context has been left."""
        while found := os.read(self.reader, 1):
            if found[0] in self.previous:
                if is_command() and not self.left.wait(GRACE_SECONDS):
                    end(found[0], self.hint)
                break
        os.close(self.reader)

    def on_unraisable(self, unraisable: Any) -> None:
        """A KeyboardInterrupt in a destructor or a callback would be printed and forgotten."""
        if self.received is not None and isinstance(unraisable.exc_value, KeyboardInterrupt):
            self.end()
        self.unraisable(unraisable)

    def end(self) -> None:
        """End a command because of the signal that was received."""
        if is_command():
            # The reader may be gone, or the signal may have come during another flush.
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                sys.stdout.flush()
            end(self.received, self.hint)
