"""Models and prompts that options name: shapes, or a trained model and a file of prompts."""

import argparse
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from emsjax.benchmarks.shapes import MODELS
from emsjax.device import dtype_name
from emsjax.drafters import DraftModel
from emsjax.drafters.folders import check_is_no_drafter, check_target, feature_drafter
from emsjax.models.config import DecoderConfig
from emsjax.models.decoder import Decoder
from emsjax.models.numbers import NumberFormats
from emsjax.models.pretrained import from_pretrained
from emsjax.records.input import Records, survey
from emsjax.records.prompts import Limits, Prompts, check_prompts
from emsjax.terminal.models import load_config, load_tokenizer
from emsjax.terminal.options import flag, number_formats

DRAFT_SHAPE = "opt-125m"
DRAFT_SHAPES = {"qwen3-8b": "qwen3-0.6b", "llama-3.1-8b": "llama-3.2-1b"}  # others: DRAFT_SHAPE
OF_TRAINED = ("data", "revision", "draft_model", "draft_revision", "dtype")  # need --model


class Models(NamedTuple):
    """A target and what drafts for it: their description for the settings, and how to load them.

    Attributes:
        config: the target's.
        load_draft: None: no draft model.
        feature_drafter: makes the drafter of hidden states for the loaded target; None: none.
    """

    config: DecoderConfig
    describe: dict[str, Any]
    load: Callable[[], Decoder]
    load_draft: Callable[[], Decoder] | None
    feature_drafter: Callable[[Decoder], Any] | None = None

    def own_drafter(self, target: Decoder, draft_tokens: int) -> Any | None:
        """The drafter for the loaded target; None: there is none but the free ones."""
        if self.feature_drafter is not None:
            return self.feature_drafter(target)
        return None if self.load_draft is None else DraftModel(self.load_draft(), draft_tokens)


class Trained(NamedTuple):
    """Tokenized prompts, their description with that of the models, and the models."""

    prompts: list[list[int]]
    describe: dict[str, Any]
    models: Models


def check_absent(options: argparse.Namespace, names: Iterable[str], needed: str) -> None:
    """Raise a ValueError if one of these options, which need another one, was given."""
    for name in names:
        if getattr(options, name) is not None:
            raise ValueError(f"{flag(name)} needs {needed}")


def check_shapes(shape: str, draft_shape: str | None, *others: str) -> str:
    """The draft model's shape; raises a ValueError for an unknown name."""
    draft_shape = draft_shape or DRAFT_SHAPES.get(shape, DRAFT_SHAPE)
    for option, name, known in (
        ("--shape", shape, [*others, *MODELS]),
        ("--draft-shape", draft_shape, list(MODELS)),
    ):
        if name not in known:
            raise ValueError(f"{option} must be one of {', '.join(known)}, not {name!r}")
    return draft_shape


def read_trained(
    options: argparse.Namespace, max_prompts: int, largest_batch: int, *, features: bool = False
) -> Trained:
    """`--model`, `--draft-model` if given, and the first prompts of `--data`.

    Args:
        features: whether the draft model may be a drafter that reads the target's hidden states.

    Raises:
        ValueError: missing data, bad records, a revision without its model, prompts that do not
            fit, or fewer prompts than the largest batch needs.
    """
    if options.data is None:
        raise ValueError("--model needs --data")
    models = trained_models(options, features=features)
    records = Records(options.data, options.prompt_template)
    data = survey(records)
    tokenizer = load_tokenizer(options.model, options.revision, keep="last")
    limits = limits_of(models.config, options.max_new_tokens)
    tokenized = Prompts(records, tokenizer, options.max_prompt_tokens, limits)
    prompts = list(itertools.islice(tokenized, max_prompts))
    if len(prompts) < largest_batch:
        raise ValueError(
            f"--batch-sizes: {largest_batch} is more than the {len(prompts)} prompts of --data"
        )
    check_prompts(prompts)
    describe = {
        **models.describe,
        "data_sha256": data.sha256,
        "prompt_template": options.prompt_template,
        "max_prompt_tokens": options.max_prompt_tokens,
        "max_prompts": max_prompts,
    }
    return Trained([ids for _, ids in prompts], describe, models)


def trained_models(options: argparse.Namespace, *, features: bool) -> Models:
    """`--model`, and `--draft-model` if given, unloaded.

    Args:
        features: whether the draft model may be a drafter that reads the target's hidden states.

    Raises:
        ValueError: a revision without its model, or folders that do not go together.
    """
    draft = (options.draft_model, options.draft_revision)
    kind = load_draft = make_drafter = None
    if options.draft_model is None:
        check_absent(options, ["draft_revision"], "--draft-model")
    elif features:
        kind = feature_drafter(*draft)
    else:
        check_is_no_drafter(*draft)
    config = load_config(options.model, options.revision)
    numbers = NumberFormats(dtype_name(options.dtype), **number_formats(options))
    if kind is not None:
        check_target(*draft, config)
        given = {"revision": draft[1], "max_draft_tokens": options.draft_tokens}
        make_drafter = functools.partial(kind.from_pretrained, draft[0], **given)
    elif options.draft_model is not None:
        load_draft = functools.partial(load, numbers.of_draft_model, *draft)
    describe = {
        "model": options.model,
        "revision": options.revision,
        "draft_model": options.draft_model,
        "draft_revision": options.draft_revision,
        **numbers.settings,
    }
    target = functools.partial(load, numbers, options.model, options.revision)
    return Models(config, describe, target, load_draft, make_drafter)


def limits_of(config: DecoderConfig, max_new_tokens: int) -> Limits:
    """What the prompts of such a model must keep to."""
    return Limits(max_new_tokens, config.max_position_embeddings, config.vocab_size)


def load(numbers: NumberFormats, model: str, revision: str | None) -> Decoder:
    """The model of a folder or id, with its numbers in these formats."""
    options = {"dtype": numbers.dtype, "quantize": numbers.quantize, "revision": revision}
    options["mesh"] = numbers.mesh if numbers.is_split else None
    return numbers.placed(from_pretrained(model, **options)).with_kv_dtype(numbers.kv_dtype)
