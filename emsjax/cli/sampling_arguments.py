"""Options of `emsjax generate` for how tokens are chosen and where sequences stop."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emsjax.terminal.options import count, flag, token_ids

# Fields of `Sampling`, and values of those that need a temperature and have no effect.
FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_new_tokens",
    "logit_bias",
    "suppress_tokens",
)
CONSTRAINTS = ("regex", "choices", "json_schema")  # at most one of them
NEED_TEMPERATURE = {"top_k": 0, "top_p": 1, "min_p": 0, "num_sequences": 1}


def biases(text: str) -> dict[int, float]:
    """The biases in "5=2.5,17=-1", for example, by token id."""
    found = {}
    for part in text.split(","):
        token, _, bias = part.partition("=")
        try:
            if not re.fullmatch(r"\d+", token, re.ASCII):
                raise ValueError(token)
            found[int(token)] = float(bias)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"must be like 5=2.5,17=-1, not {part!r}") from error
    return found


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--temperature", type=float, default=0.0, help="default: 0, greedy")
    add("--top-k", type=int, default=0, metavar="N", help="default: 0, all tokens")
    add("--top-p", type=float, default=1.0, metavar="P", help="default: 1, all tokens")
    add(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="least share of the likeliest token's probability (default: 0, all tokens)",
    )
    for name, default, what in (
        ("repetition", 1.0, "divides positive logits of tokens in the prompt and the text"),
        ("presence", 0.0, "is subtracted from logits of tokens in the text"),
        ("frequency", 0.0, "is subtracted for each time that the text has a token"),
    ):
        help_text = f"{what} (default: {default:g}, none)"
        add(f"--{name}-penalty", type=float, default=default, metavar="X", help=help_text)
    add(
        "--min-new-tokens",
        type=count,
        default=0,
        metavar="N",
        help="new tokens before which no end token and no stop can end a sequence (default: 0)",
    )
    add(
        "--logit-bias",
        type=biases,
        metavar="ID=X,ID=X,...",
        help="numbers that are added to the logits of these tokens",
    )
    add(
        "--suppress-tokens",
        type=token_ids,
        default=(),
        metavar="ID,ID,...",
        help="tokens that are never chosen",
    )
    add(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end a sequence where its text holds this; the text is cut there. May be repeated",
    )
    add("--include-stop", action="store_true", help="keep the stop at the end of the text")
    confined = parser.add_mutually_exclusive_group()
    confined.add_argument("--regex", metavar="PATTERN", help="confine texts to this pattern")
    confined.add_argument(
        "--choices", nargs="+", metavar="TEXT", help="confine texts to one of these"
    )
    confined.add_argument(
        "--json-schema", type=Path, metavar="FILE", help="confine texts to JSON of this schema"
    )
    add(
        "--top-logprobs",
        type=count,
        default=0,
        metavar="N",
        help='the output also has "logprobs", and the N likeliest tokens at each place',
    )


def check_sampling(given: dict[str, Any]) -> None:
    """Complete the options, and raise a ValueError unless they are in range and go together."""
    given["stop"] = tuple(given["stop"] or ())
    if "" in given["stop"]:
        raise ValueError("--stop is empty, which ends every text")
    if given["include_stop"] and not given["stop"]:
        raise ValueError("--include-stop needs --stop")
    given["choices"] = given["choices"] and tuple(given["choices"])
    given["json_schema"] = given["json_schema"] and given["json_schema"].read_text()
    given["suppress_tokens"] = tuple(given["suppress_tokens"])
    check_values(given, None)
    for name, off in NEED_TEMPERATURE.items():
        if given["temperature"] == 0 and given[name] != off:
            raise ValueError(f"{flag(name)} needs a --temperature above 0: greedy has no choice")
    if given["min_new_tokens"] > given["max_new_tokens"]:
        raise ValueError(
            f"--min-new-tokens {given['min_new_tokens']} is more than --max-new-tokens "
            f"{given['max_new_tokens']}"
        )


def check_values(given: Mapping[str, Any], vocab_size: int | None) -> None:
    """Raise a ValueError that names the option unless its value is in range.

    Args:
        vocab_size: token ids must be below it; None: it is not known yet.
    """
    from emsjax.sampling import Sampling

    for name in FIELDS:
        try:
            values = {"temperature": 1.0} | {name: given[name]}
            Sampling(**values).expand(1, vocab_size)
        except ValueError as error:
            raise ValueError(str(error).replace(f"sampling.{name}", flag(name))) from error
