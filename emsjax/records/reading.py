"""Errors of third-party readers in the form of this library's own."""

import contextlib
from collections.abc import Iterator

NO_ERRORS = (KeyboardInterrupt, SystemExit, GeneratorExit)


@contextlib.contextmanager
def in_one_line(failure: str) -> Iterator[None]:
    """Turn any exception into a ValueError of one line.

    Readers of other libraries raise exceptions of any kind on files that they do not expect, even
    ones that are no `Exception`, as the tokenizers in Rust do.

    Args:
        failure: what has failed, with the names of the files or the folder.
    """
    try:
        yield
    except NO_ERRORS:
        raise
    except BaseException as error:
        cause = " ".join(str(error).split())
        raise ValueError(f"{failure}: {type(error).__name__}: {cause}") from error
