"""The name under which MLIR's Python bindings look for Triton's dialect."""

import contextlib
import importlib.util
import sys

NAME = "jaxlib.mlir.dialects.tt"


def register() -> None:
    """Register the dialect's module under the name by which the bindings import it.

    The bindings import this name again for every value of one of the dialect's types, and do not
    remember that the import failed: in jaxlib 0.10 and 0.11 that takes most of the time in which
    a kernel is lowered.
    """
    with contextlib.suppress(ImportError):  # a jaxlib that keeps the dialect elsewhere
        if importlib.util.find_spec(NAME) is None:
            from jaxlib.triton import dialect

            sys.modules[NAME] = dialect
