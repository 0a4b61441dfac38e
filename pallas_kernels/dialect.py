"""Where MLIR's Python bindings find Triton's dialect."""

import contextlib
import importlib.util
import sys

NAME = "jaxlib.mlir.dialects.tt"


def register() -> None:
    """Give the dialect's module the name by which the bindings import it.

    For every value of a type of the dialect they import this name again, and forget that there is
    nothing: with jaxlib 0.10 and 0.11 that is most of the time in which a kernel is lowered.
    """
    with contextlib.suppress(ImportError):  # of a jaxlib that has it elsewhere
        if importlib.util.find_spec(NAME) is None:
            from jaxlib.triton import dialect

            sys.modules[NAME] = dialect
