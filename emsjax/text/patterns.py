"""Regular expressions: of lists of choices, and without what only matches at the ends of a text."""

import re
from collections.abc import Sequence
from typing import Any

from emsjax.checks import check_list, refuse, shown

ESCAPED_OR_CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


def outlines_module() -> Any:
    """outlines-core.

    Raises:
        ImportError: it is missing.
    """
    try:
        import outlines_core
    except ImportError as error:
        raise ImportError(
            "constraints need outlines-core: pip install 'emsjax[constraints]'"
        ) from error
    return outlines_core


def choices(strings: Sequence[str]) -> str:
    """A regular expression that matches these strings.

    Raises:
        ValueError: there are none, or one is not a string.
    """
    strings = list(check_list("choices", strings, "list of strings"))
    if not strings:
        raise ValueError("choices is empty: at least one string is needed")
    for i, one in enumerate(strings):
        if not isinstance(one, str):
            refuse(f"choices[{i}]", "a string", one)
    return "|".join(map(re.escape, strings))


def without_anchors(pattern: str) -> str:
    """The pattern without a `^` at its beginning and a `$` at its end.

    Raises:
        ValueError: there are others, which only match at the ends of a text.
    """
    inner = pattern.removeprefix("^")
    backslashes = re.search(r"(\\*)\$\Z", inner)
    if backslashes and len(backslashes[1]) % 2 == 0:
        inner = inner[:-1]
    if re.search(r"[\^$]", ESCAPED_OR_CLASS.sub("", inner)):
        raise ValueError(
            f"pattern {shown(pattern)} must have no ^ or $ but as its first and last character"
        )
    return inner


def opens_what_it_closes(pattern: str) -> bool:
    """Whether each closing parenthesis has an opening one, so that it cannot close a group around.

    A group may stay open.
    """
    depth = 0
    for character in re.sub("[^()]", "", ESCAPED_OR_CLASS.sub("", pattern)):
        depth += 1 if character == "(" else -1
        if depth < 0:
            return False
    return True
