"""Values of command-line options."""

import argparse
import math
import re

DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_DTYPE = "default: float32 on a CPU, bfloat16 on GPUs that have it, else float16"


def positive_int(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def count(text: str) -> int:
    """0 or more."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, not {number}")
    return number


def positive_float(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"must be finite and above 0, not {text}")
    return number


positive_int.__name__ = count.__name__ = "integer"  # argparse: "invalid integer value"
positive_float.__name__ = "number"


def positive_ints(text: str) -> tuple[int, ...]:
    """Ascending, each once, of for instance "1,8,64"."""
    if not re.fullmatch(r"0*[1-9]\d*(,0*[1-9]\d*)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be like 1,8,64, all at least 1, not {text!r}")
    return tuple(sorted(set(map(int, text.split(",")))))


def loss_weights(text: str) -> dict[str, float]:
    """Of for instance "forward-kl=0.9,cross-entropy=0.1"; a name by itself weighs 1."""
    weights = {}
    for part in text.split(","):
        name, _, weight = part.partition("=")
        try:
            weights[name] = float(weight or 1)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"must be like name=0.5, not {part!r}") from error
    return weights


def names(text: str) -> tuple[str, ...]:
    """Each once, of for instance "llma,poor"."""
    return tuple(dict.fromkeys(text.split(",")))
