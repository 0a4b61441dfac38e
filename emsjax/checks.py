"""Checks of user input; each raises a ValueError that names the argument and the limit."""

from typing import Any

import numpy as np


def check_at_least(name: str, value: Any, minimum: int) -> int:
    """`value` as an int.

    Raises:
        ValueError: it is not an integer, or below `minimum`.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name} must be an integer of at least {minimum}, not {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, not {value}")
    return int(value)


def as_token_ids(name: str, tokens: Any, vocab_size: int | None = None) -> np.ndarray:
    """`tokens` as an int32 array [n].

    Raises:
        ValueError: they are text, empty, not 1-D, not integers, negative, or not below
            `vocab_size`.
    """
    if isinstance(tokens, str | bytes):
        kind = type(tokens).__name__
        raise ValueError(f"{name} is a {kind}: pass token ids, such as tokenizer(texts).input_ids")
    try:
        ids = np.asarray(tokens)
    except Exception as error:  # an object's __array__ may raise anything
        raise ValueError(f"{name} cannot be read as token ids: {error}") from error
    if ids.ndim != 1:
        raise ValueError(f"{name} must be a 1-D sequence of token ids, not of shape {ids.shape}")
    if ids.size == 0:
        raise ValueError(f"{name} is empty: at least one token id is needed")
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{name} must hold integer token ids, not {ids.dtype}")
    limit = np.iinfo(np.int32).max if vocab_size is None else vocab_size - 1
    outside = ids[(ids < 0) | (ids > limit)]
    if outside.size:
        raise ValueError(f"{name} holds the token id {outside[0]}, outside 0..{limit}")
    return ids.astype(np.int32)


def per_prompt(name: str, value: Any, num_prompts: int) -> list[Any]:
    """One value per prompt, from a scalar or a sequence.

    Raises:
        ValueError: it is a sequence of another length, or of sequences.
    """
    try:
        values = np.asarray(value)
    except ValueError:  # sequences of different lengths
        values = np.zeros((0, 0))
    if values.ndim > 1:
        raise ValueError(f"{name} must be one value or one per prompt, not sequences of them")
    if values.ndim == 0:
        return [values.item()] * num_prompts
    # Items of a list are kept as they are, because an array would convert booleans to numbers.
    values = list(value) if isinstance(value, list | tuple) else values.tolist()
    if len(values) != num_prompts:
        raise ValueError(
            f"{name} must be one value or one per prompt: got {len(values)} for "
            f"{num_prompts} prompts"
        )
    return values
