"""What `emsjax bench` decodes: checked shapes, or a trained model and the prompts of a file."""

import argparse
import functools
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import emsjax
from emsjax.arguments import flag
from emsjax.batch_input import Records, survey
from emsjax.batch_run import Prompts, check_prompts
from emsjax.benchmarks.runs import MODELS

DRAFT_SHAPE = "opt-125m"
OF_TRAINED = ("data", "revision", "draft_model", "draft_revision")  # options


class Trained(NamedTuple):
    """Models and tokenized prompts, and what settings tell of them."""

    model: emsjax.OPT
    draft_model: emsjax.OPT | None
    prompts: list[list[int]]
    describe: dict[str, Any]


def check_absent(options: argparse.Namespace, names: Iterable[str], needed: str) -> None:
    """Raises a ValueError if one of these options, which are some other's, was given."""
    for name in names:
        if getattr(options, name) is not None:
            raise ValueError(f"{flag(name)} needs {needed}")


def check_shapes(shape: str, draft_shape: str | None, *others: str) -> str:
    """The draft model's shape; raises a ValueError for a name that is none of these."""
    draft_shape = draft_shape or DRAFT_SHAPE
    for option, name, known in (
        ("--shape", shape, [*others, *MODELS]),
        ("--draft-shape", draft_shape, list(MODELS)),
    ):
        if name not in known:
            raise ValueError(f"{option} must be one of {', '.join(known)}, not {name!r}")
    return draft_shape


def load_trained(options: argparse.Namespace, max_prompts: int) -> Trained:
    """`--model`, `--draft-model` if given, and the first prompts of `--data`.

    Raises:
        ValueError: no data, bad records, a revision of no model, or prompts that do not fit.
    """
    if options.data is None:
        raise ValueError("--model needs --data")
    if options.draft_model is None:
        check_absent(options, ["draft_revision"], "--draft-model")
    records = Records(options.data, options.prompt_template)
    data = survey(records)
    cut = argparse.Namespace(
        model=options.model,
        revision=options.revision,
        keep="last",
        max_prompt_tokens=options.max_prompt_tokens,
    )
    prompts = list(itertools.islice(Prompts(records, cut), max_prompts))
    load = functools.partial(emsjax.OPT.from_pretrained, dtype=options.dtype)
    model = load(options.model, revision=options.revision)
    check_prompts(prompts, options.max_new_tokens, model.config)
    draft_model = None
    if options.draft_model is not None:
        draft_model = load(options.draft_model, revision=options.draft_revision)
    describe = {
        "model": options.model,
        "revision": options.revision,
        "draft_model": options.draft_model,
        "draft_revision": options.draft_revision,
        "dtype": options.dtype,
        "data_sha256": data.sha256,
        "prompt_template": options.prompt_template,
        "max_prompt_tokens": options.max_prompt_tokens,
        "max_prompts": max_prompts,
    }
    return Trained(model, draft_model, [ids for _, ids in prompts], describe)
