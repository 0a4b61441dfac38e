"""Checks of what users pass in, by kind: count, number, flag, choice, token ids, prompts, ....

Each check returns the plain value, an `int` for a count that was given as a 0-d array, say, and
raises a ValueError for anything else, a wrong type included. The message names the argument, what
it must be, and the value that was found. Checks run before any work, on the host.
"""

import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np

from pallas_kernels.common.numbers import (
    check_at_least,
    check_flag,
    check_number,
    is_kind,
    plain,
    refuse,
    shown,
)

__all__ = [
    "check_at_least",
    "check_flag",
    "check_number",
    "is_kind",
    "plain",
    "refuse",
    "shown",
]

INT32_MAX = np.iinfo(np.int32).max
MOST = 1 << 30  # the largest length, far from int32 overflow: the device loop may add to it
NOT_TEXT = "pass token ids, such as tokenizer(texts).input_ids"


def is_traced(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def check_seed(name: str, value: Any) -> int:
    """`value` as an int in 0..2**32 - 1, which is all of a seed that JAX uses.

    Raises:
        ValueError: it is not such an integer.
    """
    return check_at_least(name, value, 0, 2**32 - 1)


def check_choice(name: str, value: Any, choices: Iterable[str]) -> str:
    """`value`, which is one of these strings.

    Raises:
        ValueError: it is not.
    """
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        refuse(name, f"one of {', '.join(choices)}", value)
    return value


def check_instance(name: str, value: Any, kind: type, example: str) -> Any:
    """`value`, which is of this class.

    Args:
        example: the class as users write it, as in "emsjax.Sampling(...)".

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be {example}, not {type(value).__name__}")
    return value


def check_list(name: str, value: Any, content: str) -> Any:
    """`value`, which has a length and an order.

    Raises:
        ValueError: it is text, a mapping, a set, or has no length.
    """
    unsuited = isinstance(value, str | bytes | bytearray | Mapping | Set | type)
    unsuited = unsuited or not hasattr(value, "__len__")
    if unsuited or getattr(value, "shape", None) == ():
        raise ValueError(f"{name} must be a {content}, not {type(value).__name__}")
    return value


def check_table(
    name: str, table: Any, check: Callable[[str, Any], Any], most: int | None = None
) -> dict[int, Any]:
    """A mapping from counts of at least 1 as an ascending dict.

    Args:
        check: a check of one value, given its name.
        most: the largest count.

    Raises:
        ValueError: it is not a mapping, it is empty, or a count or a value is wrong.
    """
    if not isinstance(table, Mapping):
        raise ValueError(f"{name} must be a mapping, not {type(table).__name__}")
    if not table:
        raise ValueError(f"{name} is empty: at least one entry is needed")
    checked = {
        check_at_least(f"a key of {name}", at, 1, most): check(f"{name}[{shown(at)}]", value)
        for at, value in table.items()
    }
    return dict(sorted(checked.items()))


def as_token_ids(name: str, tokens: Any, vocab_size: int | None = None) -> np.ndarray:
    """`tokens` as an int32 array [n].

    Raises:
        ValueError: they are text, empty, not 1-D, not integers, negative, or not below
            `vocab_size`.
    """
    if isinstance(tokens, str | bytes | bytearray):
        raise ValueError(f"{name} is a {type(tokens).__name__}: {NOT_TEXT}")
    try:
        ids = np.asarray(tokens)
    except Exception as error:  # an object's __array__ may raise anything
        raise ValueError(f"{name} cannot be read as token ids: {error}") from error
    if ids.ndim != 1:
        found = f"of shape {ids.shape}" if ids.ndim else shown(tokens)
        raise ValueError(f"{name} must be a 1-D sequence of token ids, not {found}")
    if ids.size == 0:
        raise ValueError(f"{name} is empty: at least one token id is needed")
    # numpy converts booleans among integers to integers.
    kinds = set(map(type, tokens)) if isinstance(tokens, list | tuple) else set()
    if kinds & {bool, np.bool_} or not is_kind(ids.dtype, np.integer):
        found = "booleans" if kinds & {bool, np.bool_} else ids.dtype
        raise ValueError(f"{name} must hold integer token ids, not {found}")
    limit = INT32_MAX if vocab_size is None else vocab_size - 1
    outside = ids[(ids < 0) | (ids > limit)]
    if outside.size:
        raise ValueError(f"{name} holds the token id {outside[0]}, outside 0..{limit}")
    return ids.astype(np.int32)


def as_end_token_ids(name: str, ids: Any, vocab_size: int) -> np.ndarray:
    """A token id, or any iterable of them, as an ascending int32 array [m] without duplicates.

    Raises:
        ValueError: they are text, not integers, or outside the vocabulary.
    """
    number = plain(ids)
    if isinstance(number, numbers.Integral):
        ids = [number]
    elif isinstance(ids, str | bytes | bytearray | Mapping | type) or not isinstance(ids, Iterable):
        refuse(name, "token ids", ids)
    elif getattr(ids, "ndim", 1) != 1:
        refuse(name, "one token id or a 1-D sequence of them", ids)
    # One by one, so that an endless iterator of numbers ends at the first id outside.
    unique = {check_at_least(f"a token id of {name}", one, 0, vocab_size - 1) for one in ids}
    return np.array(sorted(unique), np.int32)


def per_prompt(
    name: str, value: Any, num_prompts: int, check: Callable[[str, Any], Any]
) -> list[Any]:
    """One checked value per prompt, from a single value or a sequence.

    Args:
        check: a check of one value, given its name.

    Raises:
        ValueError: it is a sequence of another length, or of sequences, or a value is wrong.
    """
    if not is_per_prompt(value):
        return [check(name, value)] * num_prompts
    if getattr(value, "ndim", 1) > 1 or any(is_per_prompt(one) for one in value):
        raise ValueError(f"{name} must be one value or one per prompt, not sequences of them")
    if len(value) != num_prompts:
        raise ValueError(
            f"{name} must be one value or one per prompt: got {len(value)} for "
            f"{num_prompts} prompts"
        )
    values = value if isinstance(value, Sequence) else np.asarray(value)
    return [check(f"{name}[{i}]", one) for i, one in enumerate(values)]


def is_per_prompt(value: Any) -> bool:
    """Whether a setting is given for each prompt by itself, as a list or an array."""
    if isinstance(value, str | bytes | bytearray):
        return False
    shape = getattr(value, "shape", ())  # of a class, it is a descriptor
    return isinstance(value, Sequence) or (isinstance(shape, tuple) and len(shape) > 0)
