"""The options of `emsjax generate`. This module imports nothing heavy."""

import argparse
import dataclasses
import re
from pathlib import Path
from typing import Any

from emsjax.cli.sampling_arguments import add_sampling_arguments, check_sampling
from emsjax.terminal.options import (
    add_min_confidence,
    add_model_arguments,
    add_number_formats,
    add_numerics,
    flag,
    positive_int,
    seed,
    token_ids,
)

POLICIES = ("auto", "bass", "goodput")  # values of --draft-length other than numbers
OWN_POLICY = {"draft_length": "auto", "profile": None}  # options of every drafter except none
DRAFTER_OPTIONS = {  # the options of each drafter, with their defaults
    "none": {},
    "auto": {  # suffix and, with a draft model, both
        "draft_model": None,
        "draft_revision": None,
        "min_confidence": 0.0,
        "max_draft_tokens": None,
        "memory": None,
        **OWN_POLICY,
    },
    "prompt-lookup": {
        "match_length": 2,
        "max_draft_tokens": 7,
        "search_generated": False,
        "branches": 1,
        **OWN_POLICY,
    },
    "suffix": {"max_draft_tokens": 16, "memory": None, "branches": 1, **OWN_POLICY},
    "self": {"max_draft_tokens": None, "branches": 1, "draft_length": "bass"},
    "model": {
        "draft_model": None,
        "draft_revision": None,
        "min_confidence": 0.0,
        "max_draft_tokens": None,  # the policy's limit
        "branches": 1,
        **OWN_POLICY,
    },
}


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Every option of `emsjax generate` that changes results; stored beside the output."""

    model: str
    revision: str | None
    dtype: str
    quantize: str | None
    kv_dtype: str | None
    tensor_parallel: int | None
    numerics: str
    drafter: str
    draft_length: str | None
    max_draft_tokens: int | None
    match_length: int | None
    search_generated: bool
    branches: int | None
    draft_model: str | None
    draft_revision: str | None
    min_confidence: float | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    min_new_tokens: int
    logit_bias: dict[int, float] | None
    suppress_tokens: tuple[int, ...]
    stop: tuple[str, ...]
    include_stop: bool
    regex: str | None
    choices: tuple[str, ...] | None
    json_schema: str | None
    top_logprobs: int
    num_sequences: int
    batch_size: int
    max_new_tokens: int
    prompt_template: str | None
    max_prompt_tokens: int | None
    keep: str
    seed: int
    eos_token_ids: tuple[int, ...] | None
    skip_invalid: bool


def draft_length(text: str) -> str:
    """A policy's name, or a fixed length in canonical form."""
    if text in POLICIES:
        return text
    if not re.fullmatch(r"\d+", text, re.ASCII):
        choices = ", ".join(POLICIES)
        raise argparse.ArgumentTypeError(
            f"must be {choices} or an integer of at least 0, not {text!r}"
        )
    return str(int(text))


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_number_formats(parser)
    add_numerics(parser)
    add = parser.add_argument
    add(
        "--input",
        required=True,
        type=Path,
        help='JSON Lines: objects with a unique "id" (string or integer) and "prompt"; with --ray '
        "also Parquet, and folders of such files",
    )
    add(
        "--output",
        required=True,
        type=Path,
        help="JSON Lines: id, text, tokens, mean_logprob (higher is likelier), finish_reason; "
        "truncated where the prompt was cut. Only a run that writes a regular file can be resumed",
    )
    add(
        "--prompt-template",
        metavar="TEMPLATE",
        help="builds the prompt from fields of the input, as in '{article} TL;DR: '",
    )
    add(
        "--max-prompt-tokens",
        type=positive_int,
        metavar="N",
        help="cut longer prompts to N tokens, including special tokens such as a start token",
    )
    add(
        "--keep",
        choices=("first", "last"),
        default="first",
        help="which end of a cut prompt is kept (default: %(default)s)",
    )
    add(
        "--skip-invalid",
        action="store_true",
        help='write records that cannot be completed with an "error", and complete the others '
        "(default: refuse the input)",
    )
    add("--max-new-tokens", type=positive_int, default=128, metavar="N", help="default: 128")
    ends = parser.add_mutually_exclusive_group()
    ends.add_argument(
        "--eos-token-ids",
        type=token_ids,
        metavar="ID,ID,...",
        help="tokens that end a sequence (default: the model's)",
    )
    ends.add_argument("--ignore-eos", action="store_true", help="no token ends a sequence")
    add(
        "--num-sequences",
        type=positive_int,
        default=1,
        metavar="N",
        help='sequences per record, one output line each, with "sequence" (default: 1)',
    )
    add(
        "--batch-size",
        type=positive_int,
        default=8,
        metavar="N",
        help="sequences decoded together (default: 8)",
    )
    add(
        "--drafter",
        choices=DRAFTER_OPTIONS,
        default="auto",
        help="prompt-lookup: copy from the prompt; suffix: from prompt, completion and --memory; "
        "self: the model with weights in 4 bits; auto: suffix and, where it brings less, the "
        "--draft-model if there is one (default: auto)",
    )
    add(
        "--draft-length",
        type=draft_length,
        metavar="LENGTH",
        help="tokens drafted per step: auto, bass, goodput or a number; auto is goodput if "
        "`emsjax profile` has measured these models on this device, otherwise bass "
        "(default: auto; for self: bass)",
    )
    add("--profile", type=Path, metavar="FILE", help="profile to use instead of the stored one")
    add(
        "--max-draft-tokens",
        type=positive_int,
        metavar="N",
        help="default: a fixed --draft-length, otherwise 7 for prompt lookup, 16 for suffix, the "
        "policy's limit for a model and for self",
    )
    add("--match-length", type=positive_int, metavar="N", help="prompt lookup (default: 2)")
    add(
        "--search-generated", action="store_true", help="prompt lookup also searches the completion"
    )
    add(
        "--branches",
        type=positive_int,
        metavar="N",
        help="candidates for each token, or occurrences to copy from: drafts become trees "
        "(default: 1)",
    )
    add_min_confidence(parser)
    add(
        "--memory",
        type=Path,
        metavar="FILE",
        help="auto and suffix also draft from the completions in FILE, if it exists; those of this "
        "run are added at its end",
    )
    add_sampling_arguments(parser)
    add(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="let Ray Data deal out the input, a file or a folder of JSON Lines or Parquet, to the "
        "hosts of the cluster at this address, which write parts into the folder --output "
        "(default: a cluster of this machine alone)",
    )
    add(
        "--workers",
        type=positive_int,
        metavar="N",
        help="with --ray: actors with a model (default: one for each GPU, or each "
        "--tensor-parallel GPUs of a host; without GPUs, one for each host)",
    )
    add(
        "--seed",
        type=seed,
        default=0,
        help="seed of the random keys, one per sequence (default: 0)",
    )


def run_options(arguments: argparse.Namespace) -> RunOptions:
    """The options that change results, from the parsed arguments.

    Raises:
        ValueError: options that contradict each other, sampling values out of range, or a model
            path that is not a folder.
    """
    given = dict(vars(arguments))
    complete_drafter_options(given)
    check_sampling(given)
    if given["keep"] != "first" and given["max_prompt_tokens"] is None:
        raise ValueError("--keep needs --max-prompt-tokens: otherwise no prompt is cut")
    if given["workers"] is not None and given["ray"] is None:
        raise ValueError("--workers needs --ray")
    if given["memory"] is not None and given["ray"] is not None:
        raise ValueError("--memory is not for --ray, whose workers have no memory in common")
    from emsjax.device import dtype_name
    from emsjax.terminal.models import resolve_models

    resolve_models(given)
    if given["ignore_eos"]:
        given["eos_token_ids"] = ()
    given["dtype"] = dtype_name(given["dtype"])
    return RunOptions(**{name: given[name] for name in RunOptions.__dataclass_fields__})


def complete_drafter_options(given: dict[str, Any]) -> None:
    """Set the drafter's options that were not given to their defaults.

    Raises:
        ValueError: an option of another drafter, a missing draft model, or a profile for a policy
            that does not read one.
    """
    own = DRAFTER_OPTIONS[given["drafter"]]
    for name in (name for options in DRAFTER_OPTIONS.values() for name in options):
        if given[name] and name not in own:
            *others, last = (of for of, options in DRAFTER_OPTIONS.items() if name in options)
            owners = f"{', '.join(others)} or {last}" if others else last
            raise ValueError(f"{flag(name)} is an option of --drafter {owners}")
    if (given["draft_length"] or "").isdecimal():  # more would never be used
        given["max_draft_tokens"] = given["max_draft_tokens"] or max(1, int(given["draft_length"]))
    for name, default in own.items():
        given[name] = given[name] or default
    if given["drafter"] == "model" and given["draft_model"] is None:
        raise ValueError("--drafter model needs --draft-model")
    for name in ("draft_revision", "min_confidence"):
        if given[name] and given["draft_model"] is None:
            raise ValueError(f"{flag(name)} needs --draft-model")
    if given["drafter"] == "self" and given["draft_length"] in ("auto", "goodput"):
        raise ValueError(
            f"--draft-length {given['draft_length']} needs a profile, and none measures --drafter "
            "self: use bass or a number"
        )
    if given["profile"] is not None and given["draft_length"] not in ("auto", "goodput"):
        raise ValueError("--profile is an option of --draft-length auto or goodput")
