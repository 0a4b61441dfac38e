"""Values of command-line options, and a parser that reports errors in one line."""

import argparse
import math
import re
from typing import Any, NoReturn

WEIGHT_FORMATS = ("int8", "fp8", "int4", "int8-weights")  # see `emsjax.from_pretrained`
KV_DTYPES = ("int8", "fp8")  # see `emsjax.generate`
NUMERICS = ("fast", "invariant")  # see `pallas_kernels.numerics`; the first is the default
DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_DTYPE = "default: float32 on a CPU, bfloat16 on GPUs that support it, otherwise float16"
DISTILLATION_LOSSES = {"forward-kl": 0.9, "cross-entropy": 0.1}  # the default of `emsjax distil`


class OneLineErrorParser(argparse.ArgumentParser):
    """Reports a bad argument as every other error is reported: in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"emsjax: error: {message}\n")


def flag(name: str) -> str:
    """The option whose value is stored under this name."""
    return "--" + name.replace("_", "-")


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


def seed(text: str) -> int:
    """0 to 2**32 - 1, which is all of a seed that JAX uses."""
    number = int(text)
    if not 0 <= number < 2**32:
        raise argparse.ArgumentTypeError(f"must be in 0..{2**32 - 1}, not {text}")
    return number


def positive_float(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"must be finite and above 0, not {text}")
    return number


def probability(text: str) -> float:
    """0 to 1."""
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"must be in 0..1, not {text}")
    return number


positive_int.__name__ = count.__name__ = "integer"  # argparse: "invalid integer value"
positive_float.__name__ = probability.__name__ = "number"


def positive_ints(text: str) -> tuple[int, ...]:
    """The numbers in "1,8,64", for example: sorted, without duplicates."""
    if not re.fullmatch(r"0*[1-9]\d*(,0*[1-9]\d*)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be like 1,8,64, all at least 1, not {text!r}")
    return tuple(sorted(set(map(int, text.split(",")))))


def token_ids(text: str) -> tuple[int, ...]:
    """The token ids in "0,2", for example: sorted, without duplicates."""
    if not re.fullmatch(r"\d+(,\d+)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be like 0,2, all at least 0, not {text!r}")
    return tuple(sorted(set(map(int, text.split(",")))))


def shapes(text: str) -> list[tuple[int, int]]:
    """Batch and rows per sample of each shape in "8x1,24x8", for example."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(,[1-9]\d*x[1-9]\d*)*", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"must be like 8x1,24x8 (batch x rows per sample, both at least 1), not {text!r}"
        )
    return [tuple(map(int, part.split("x"))) for part in text.split(",")]


def loss_weights(text: str) -> dict[str, float]:
    """Weights by name in "forward-kl=0.9,cross-entropy=0.1"; a name by itself has weight 1."""
    weights = {}
    for part in text.split(","):
        name, _, weight = part.partition("=")
        try:
            weights[name] = float(weight or 1)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"must be like name=0.5, not {part!r}") from error
    return weights


def names(text: str) -> tuple[str, ...]:
    """The names in "llma,poor", for example, without duplicates."""
    return tuple(dict.fromkeys(text.split(",")))


def add_numerics(parser: argparse.ArgumentParser) -> None:
    """Adds the option for the order of sums."""
    parser.add_argument(
        "--numerics",
        choices=NUMERICS,
        default=NUMERICS[0],
        help="invariant: a sequence's bits do not depend on what is decoded beside it "
        "(default: %(default)s)",
    )


def add_quantize(
    parser: argparse.ArgumentParser, option: str = "--quantize", default: str = "the model"
) -> None:
    """Adds an option for narrow weights.

    Args:
        default: whose weights stay as they are without it.
    """
    parser.add_argument(
        option,
        choices=WEIGHT_FORMATS,
        help=f"weights of the layers in 8 or 4 bits (default: as {default} has them)",
    )


def add_number_formats(parser: argparse.ArgumentParser) -> None:
    """Adds the options for narrow weights and caches, and for several devices."""
    add_quantize(parser)
    parser.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        help="keys and values are stored in 8 bits (default: in the model's dtype)",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=positive_int,
        metavar="N",
        help="devices over which each layer is split (default: 1)",
    )


def number_formats(options: argparse.Namespace) -> dict[str, Any]:
    """What was given of `add_number_formats`, by the names that `NumberFormats` has for it."""
    names = ("quantize", "kv_dtype", "tensor_parallel")
    given = {name: getattr(options, name, None) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def add_min_confidence(parser: argparse.ArgumentParser) -> None:
    """Adds the option for drafters that predict which of their tokens are accepted."""
    parser.add_argument(
        "--min-confidence",
        type=probability,
        metavar="P",
        help="a DSpark drafter ends its draft before a token that it expects to be accepted with "
        "a lower probability (default: 0, never)",
    )


def add_model_arguments(parser: argparse.ArgumentParser, *, hidden_states: bool = True) -> None:
    """Adds the options that name models.

    Args:
        hidden_states: whether drafters that read hidden states are draft models too.
    """
    add, drafters = parser.add_argument, "a draft model"
    if hidden_states:
        drafters += ", or an EAGLE-3, DFlash or DSpark drafter of --model"
    add("--model", required=True, metavar="DIR_OR_ID", help="local folder or Hugging Face id")
    add("--revision", help="branch, tag or commit of a Hugging Face id")
    add("--dtype", choices=DTYPES, help=DEFAULT_DTYPE)
    add("--draft-model", metavar="DIR_OR_ID", help=drafters)
    add("--draft-revision", metavar="REVISION", help="branch, tag or commit of --draft-model")
