"""The drafter and the draft-length policy of `emsjax generate`."""

import functools
import shlex
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from emsjax.cli.generate_arguments import RunOptions
from emsjax.terminal.models import load_config
from emsjax.terminal.options import flag, number_formats
from emsjax.terminal.reporting import line

SUFFIX_TOKENS = 16  # the most that a suffix drafter drafts, unless the user sets a limit


def open_memory(path: Path | None):
    """The `SuffixMemory` in a file, or an empty one if there is no file; None without a path.

    Raises:
        ValueError: the file is damaged, or its folder does not exist.
    """
    from emsjax.drafters import SuffixMemory

    if path is None:
        return None
    if not path.parent.is_dir():
        raise ValueError(f"--memory: {path.parent} is not a folder")
    return SuffixMemory.load(path) if path.exists() else SuffixMemory()


def load_models(
    options: RunOptions | Namespace,
    target,
    tokenizer_size: int,
    positions: int,
    *,
    chosen: Mapping[str, Any] | None = None,
    memory=None,
):
    """The model and the drafter, for up to `positions` positions of a sequence.

    Args:
        target: the model's configuration.
        chosen: the record of the draft lengths that `resolve` returns; None: there is none.
        memory: the `SuffixMemory` that a suffix drafter reads; None: none.

    Raises:
        ValueError: one of them cannot be loaded, or the drafter does not suit the model.
    """
    from emsjax.models.pretrained import from_pretrained
    from emsjax.tensor_parallel import first_mesh

    # A draft model is loaded first: it is small, and may turn out not to suit the target.
    kind = feature_drafter_of(options)
    if kind is None:
        _check_confidence(options, has_head=False)
        drafter = _load_drafter(options, target, tokenizer_size, positions, memory)
    else:
        _check_feature_drafter(options, kind, target)
    given = {"dtype": options.dtype, "revision": options.revision}
    given["mesh"] = first_mesh(options.tensor_parallel)
    load = functools.partial(from_pretrained, options.model, **given)
    model = load(quantize=options.quantize)
    if kind is not None:  # it may use arrays of the target
        given = {"revision": options.draft_revision, "max_draft_tokens": options.max_draft_tokens}
        if (options.branches or 1) > 1:
            given["branches"] = options.branches
        if options.min_confidence:
            given["min_confidence"] = options.min_confidence
        drafter = kind.from_pretrained(options.draft_model, model, **given)
    if is_mixed(options):
        drafter = _mixed(options, drafter, chosen, memory)
    if options.drafter != "self":
        return model, drafter
    from emsjax.drafters.self_draft import SelfDraft, narrow_copy

    copy = narrow_copy(model, lambda format: load(quantize=format))
    return model, SelfDraft(copy, options.max_draft_tokens, branches=options.branches)


def _load_drafter(
    options: RunOptions | Namespace, target, tokenizer_size: int, positions: int, memory
):
    """The drafter, unless it is made of the target."""
    from emsjax.drafters import DraftModel, PromptLookup, SuffixDrafter
    from emsjax.models.pretrained import from_pretrained

    if options.drafter in ("none", "self"):
        return None
    if options.drafter == "prompt-lookup":
        return PromptLookup(
            match_length=options.match_length,
            max_draft_tokens=options.max_draft_tokens,
            search_generated=options.search_generated,
            branches=options.branches,
        )
    if options.drafter == "suffix" or (options.drafter == "auto" and not is_mixed(options)):
        limit, branches = options.max_draft_tokens or SUFFIX_TOKENS, options.branches or 1
        return SuffixDrafter(limit, memory, branches=branches)
    model = from_pretrained(
        options.draft_model, dtype=options.dtype, revision=options.draft_revision
    )
    sizes = {model.config.vocab_size, target.vocab_size}
    # Of vocabularies of different sizes, only ids that both models and the tokenizer have.
    shared = None if len(sizes) == 1 else min(*sizes, tokenizer_size)
    drafter = DraftModel(
        model, options.max_draft_tokens, vocab_size=shared, branches=options.branches or 1
    )
    drafter.check_target(target, positions)
    return drafter


def feature_drafter_of(options: RunOptions | Namespace):
    """The class of the --draft-model that reads the target's hidden states; None: it is none.

    Raises:
        ValueError: there is no such folder or repository.
    """
    if options.draft_model is None:
        return None
    from emsjax.drafters.folders import feature_drafter

    return feature_drafter(options.draft_model, options.draft_revision)


def _check_feature_drafter(options: RunOptions | Namespace, kind: type, target) -> None:
    """Raises ValueError unless such a drafter suits the target and the options."""
    from emsjax.drafters import BlockDrafter
    from emsjax.drafters.folders import check_target

    try:
        config = check_target(options.draft_model, options.draft_revision, target)
    except ValueError as error:
        raise ValueError(f"--draft-model {options.draft_model}: {error}") from error
    if kind is BlockDrafter and (options.branches or 1) > 1:
        raise ValueError(
            f"--branches must be 1 for --draft-model {options.draft_model}: a BlockDrafter drafts "
            "chains"
        )
    _check_confidence(options, has_head=getattr(config, "enable_confidence_head", False))


def _check_confidence(options: RunOptions | Namespace, has_head: bool) -> None:
    """Raises ValueError if --min-confidence needs a head that the --draft-model has not."""
    if options.min_confidence and not has_head:
        raise ValueError(
            f"--min-confidence needs a DSpark drafter with a confidence head, and --draft-model "
            f"{options.draft_model} has none"
        )


def is_mixed(options: RunOptions | Namespace) -> bool:
    """Whether the --draft-model and a suffix drafter are used together."""
    return options.drafter == "auto" and options.draft_model is not None


def _mixed(options: RunOptions | Namespace, draft_model, chosen: Mapping | None, memory):
    """Suffix drafts, and those of the --draft-model where they bring more."""
    from emsjax.drafters import Mixed, SuffixDrafter
    from emsjax.policies import profiles as profile_store

    suffix = SuffixDrafter(options.max_draft_tokens or SUFFIX_TOKENS, memory)
    policy = None if chosen is None else profile_store.policy(chosen)
    return Mixed(suffix, draft_model, costs=getattr(policy, "costs", None))


def run_policy(options: RunOptions | Namespace, chosen: Mapping[str, Any] | None):
    """The draft-length policy of a run; None: every draft has its full length.

    Mixed drafters use measured costs themselves. To `Goodput` every token of theirs would cost a
    step of the draft model.

    Args:
        chosen: see `load_models`.
    """
    from emsjax.policies import profiles as profile_store

    policy = None if chosen is None else profile_store.policy(chosen)
    return None if is_mixed(options) and hasattr(policy, "costs") else policy


def resolve(options: RunOptions, target, profile_path: Path | None) -> dict[str, Any]:
    """The choices that depend on the options and on this machine's stored profiles, as JSON.

    Args:
        target: the model's configuration.
        profile_path: a profile to use instead of the stored one.

    Raises:
        ValueError: a profile is needed and missing, or belongs to other models.
    """
    if options.draft_length is None:
        return {}
    from emsjax.models.numbers import NumberFormats
    from emsjax.policies import profiles as profile_store

    draft_config, request = None, options.draft_length
    if feature_drafter_of(options) is not None:
        if request == "goodput" or profile_path is not None:
            raise ValueError(
                f"no profile measures --draft-model {options.draft_model}, which reads the "
                "target's hidden states: use --draft-length bass or a number"
            )
        request = "bass" if request == "auto" else request
    elif options.draft_model is not None:
        draft_config = load_config(options.draft_model, options.draft_revision)
    numbers = NumberFormats(options.dtype, **number_formats(options))
    wanted = profile_store.subject(target, draft_config, numbers)
    advice = profile_command(options)
    return {"draft_length": profile_store.choose(request, wanted, profile_path, advice)}


def profile_command(options: RunOptions) -> str:
    """The command that measures the steps of these models."""
    names = ("model", "revision", "draft_model", "draft_revision", "dtype", "quantize", "kv_dtype")
    given = [(name, getattr(options, name)) for name in (*names, "tensor_parallel")]
    words = [word for name, value in given if value is not None for word in (flag(name), value)]
    return shlex.join(["emsjax", "profile", *map(str, words)])


def draft_policy(options: RunOptions, resolved: Mapping, resumed: bool, console: Console):
    """The draft-length policy; prints one line that names it and the reason."""
    chosen = resolved.get("draft_length")
    if chosen is None:
        return None
    text = f"Draft lengths: {chosen['why']}"
    policy = run_policy(options, chosen)
    if policy is None:
        text = f"Draft lengths: as the drafter chooses, {chosen['why'].removeprefix('Goodput, ')}"
    if resumed:
        text += ", as when the run began"
    elif (
        options.draft_length == "auto"
        and chosen["policy"] == "bass"
        and feature_drafter_of(options) is None
    ):
        text += f"; `{profile_command(options)}` measures this device for better ones"
    line(console, text)
    return policy
