"""Checks of numbers and flags by kind: each returns the plain value, or names the argument.

A wrong type is a ValueError too. `emsjax.checks` has the other kinds.
"""

import math
import numbers
import reprlib
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np


def refuse(name: str, rule: str, value: Any) -> NoReturn:
    """Raises the ValueError that `name` must be `rule` and not `value`."""
    raise ValueError(f"{name} must be {rule}, not {shown(value)}")


def shown(value: Any) -> str:
    """A value as short text."""
    try:
        return reprlib.repr(plain(value))
    except Exception:  # an integer of too many digits, or an object's own __repr__
        return f"this {type(value).__name__}"


def plain(value: Any) -> Any:
    """numpy's numbers and booleans and 0-d arrays as Python's; everything else as it is."""
    if getattr(value, "shape", None) != ():
        return value
    try:
        array = np.asarray(value)
    except Exception:  # a traced value or a random key
        return value
    for kind, convert in ((np.bool_, bool), (np.integer, int), (np.floating, float)):
        if is_kind(array.dtype, kind):
            return convert(array[()])
    return value


def is_kind(dtype: Any, kind: type) -> bool:
    """Whether numbers have this kind; ml_dtypes' do too, and numpy's durations are no integers."""
    return getattr(dtype, "kind", "m") not in "mM" and jax.dtypes.issubdtype(dtype, kind)


def _is_number(number: Any, kind: type) -> bool:
    """Whether a plain value is such a number; numpy counts its durations as integers."""
    return isinstance(number, kind) and not isinstance(number, bool | np.generic)


def check_at_least(name: str, value: Any, minimum: int, most: int | None = None) -> int:
    """`value` as an int.

    Raises:
        ValueError: it is not an integer, below `minimum`, or above `most`.
    """
    number = plain(value)
    if not _is_number(number, numbers.Integral):
        refuse(name, f"an integer of at least {minimum}", value)
    if number < minimum:
        refuse(name, f"at least {minimum}", number)
    if most is not None and number > most:
        refuse(name, f"at most {most}", number)
    return int(number)


def check_number(name: str, value: Any, rule: str, fits: Callable[[float], bool]) -> float:
    """`value` as a float.

    Args:
        rule: what it must be, as in "above 0".
        fits: whether a number follows the rule; it is not asked about NaN.

    Raises:
        ValueError: it is not a real number, or breaks the rule.
    """
    number = plain(value)
    if not _is_number(number, numbers.Real):
        refuse(name, rule, value)
    try:
        number = float(number)
    except OverflowError:
        number = math.copysign(math.inf, number)
    if math.isnan(number) or not fits(number):
        refuse(name, rule, value)
    return number


def check_flag(name: str, value: Any) -> bool:
    """`value` as a bool; 0 and 1 are refused, as is text.

    Raises:
        ValueError: it is not a boolean.
    """
    flag = plain(value)
    if not isinstance(flag, bool):
        refuse(name, "True or False", value)
    return flag
