"""Models as options name them: local folders or Hugging Face ids, without their weights."""

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from emsjax.models.config import DecoderConfig
from emsjax.records.reading import in_one_line
from emsjax.terminal.options import flag


def load_config(model: str, revision: str | None) -> DecoderConfig:
    """The architecture of a local folder's or a Hugging Face id's model.

    Raises:
        ValueError: it cannot be read, or is not supported.
    """
    from emsjax.models import checkpoint

    with in_one_line(f"the configuration of {model} cannot be used"):
        return checkpoint.load_config(model, revision)


def load_tokenizer(model: str, revision: str | None, keep: str | None = None):
    """The model's tokenizer, which truncates prompts to their first or last tokens.

    It truncates text only, so a start token is kept whichever end of the prompt is kept.

    Args:
        keep: "first" or "last"; None: as the tokenizer's own configuration says.

    Raises:
        ValueError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    sides = {"first": "right", "last": "left"}
    side = {} if keep is None else {"truncation_side": sides[keep]}
    with in_one_line(f"the tokenizer of {model} cannot be used"):
        tokenizer = AutoTokenizer.from_pretrained(model, **side, **revision_of(revision))
    if tokenizer.vocab_size == 0:  # transformers makes an empty one if it finds no files
        raise ValueError(
            f"{model} has no tokenizer, such as tokenizer.json: copy the tokenizer's files from "
            "the model that it was made from"
        )
    return tokenizer


def revision_of(revision: str | None) -> dict[str, str]:
    """Keyword arguments of `from_pretrained` in transformers; without a revision, none."""
    return {} if revision is None else {"revision": revision}


def resolve_models(given: MutableMapping[str, Any]) -> None:
    """Make the paths of model folders absolute, so that they hold from any working folder.

    Raises:
        ValueError: a path that is not a folder.
    """
    for name in ("model", "draft_model", "target", "compare_with"):
        if given.get(name) is None:
            continue
        folder = Path(given[name])
        if folder.is_dir():
            given[name] = str(folder.resolve())
        elif folder.is_absolute() or given[name].startswith("."):
            raise ValueError(f"{flag(name)}: {folder} is not a folder")
