"""Who drafts in `emsjax generate`, and how much; models' configurations, without their weights."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from emsjax.cli.arguments import RunOptions, flag


def read_config(model: str, revision: str | None):
    """A model's `OPTConfig`, without its weights."""
    from transformers import AutoConfig

    from emsjax.models.config import OPTConfig

    config = AutoConfig.from_pretrained(model, **revision_of(revision))
    return OPTConfig.from_dict(config.to_dict())


def revision_of(revision: str | None) -> dict[str, str]:
    return {} if revision is None else {"revision": revision}


def load_drafter(options: RunOptions, target, tokenizer_size: int, positions: int):
    """The drafter, for a target of this configuration that uses up to `positions` positions.

    Raises:
        ValueError: a draft model that does not suit it.
    """
    import emsjax

    if options.drafter == "none":
        return None
    if options.drafter == "prompt-lookup":
        return emsjax.PromptLookup(
            match_length=options.match_length,
            max_draft_tokens=options.max_draft_tokens,
            search_generated=options.search_generated,
        )
    model = emsjax.OPT.from_pretrained(
        options.draft_model, dtype=options.dtype, revision=options.draft_revision
    )
    same_size = model.config.vocab_size == target.vocab_size
    drafter = emsjax.DraftModel(
        model, options.max_draft_tokens, vocab_size=None if same_size else tokenizer_size
    )
    drafter.check_target(target, positions)
    return drafter


def resolve(options: RunOptions, target, profile_path: Path | None) -> dict[str, Any]:
    """What follows from the options and from what is stored on this machine, as JSON.

    Args:
        target: the model's configuration.
        profile_path: of a profile to use, not the stored one.

    Raises:
        ValueError: no profile where one is needed, or one of something else.
    """
    if options.draft_length is None:
        return {}
    from emsjax.policies import profiles as profile_store

    draft_config = None
    if options.draft_model is not None:
        draft_config = read_config(options.draft_model, options.draft_revision)
    wanted = profile_store.subject(target, draft_config, options.dtype)
    advice = profile_command(options)
    return {
        "draft_length": profile_store.choose(options.draft_length, wanted, profile_path, advice)
    }


def profile_command(options: RunOptions) -> str:
    """What measures the steps of these models."""
    names = ("model", "revision", "draft_model", "draft_revision", "dtype")
    given = [(name, getattr(options, name)) for name in names]
    words = [word for name, value in given if value is not None for word in (flag(name), value)]
    return shlex.join(["emsjax", "profile", *words])


def draft_policy(options: RunOptions, resolved: Mapping, resumed: bool, console: Console):
    """The draft-length policy; one line on the console says which and why."""
    from emsjax.policies import profiles as profile_store

    chosen = resolved.get("draft_length")
    if chosen is None:
        return None
    line = f"Draft lengths: {chosen['why']}"
    if resumed:
        line += ", as when the run began"
    elif options.draft_length == "auto" and chosen["policy"] == "bass":
        line += f"; `{profile_command(options)}` measures this device for better ones"
    console.print(line, highlight=False, markup=False, soft_wrap=True)
    return profile_store.policy(chosen)
