"""The store of profiles that `emsjax profile` writes, and the policy chosen by a profile."""

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from emsjax.decode.base import DraftLength
from emsjax.models.config import OWN_HEADS, DecoderConfig
from emsjax.models.families import family_of
from emsjax.models.gpt2 import GPT2_SIZES
from emsjax.models.numbers import NumberFormats
from emsjax.policies.costs import FORMAT, StepCosts, read_profile
from emsjax.policies.goodput import Goodput
from emsjax.policies.lengths import BassHeuristic, FixedLength
from emsjax.records.writing import to_json

POLICIES = {"fixed": FixedLength, "bass": BassHeuristic, "goodput": Goodput}
# Fields of a configuration that do not affect the time of a step.
TIMELESS = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "init_std", "initializer_range"),
    *("max_position_embeddings", "n_positions", "rope_theta", "rope_scaling"),
)


def device() -> str:
    """Name of the device that this process measures."""
    first = jax.local_devices()[0]
    return f"{first.platform} {first.device_kind}"


def subject(
    config: DecoderConfig, draft_config: DecoderConfig | None, numbers: NumberFormats
) -> dict[str, Any]:
    """The subject of a profile: the device, the target's numbers and the shapes of the models."""

    def shape(config: DecoderConfig) -> dict[str, Any]:
        fields = {"model_type": family_of(config).model_type, **config.to_json()}
        return {name: value for name, value in fields.items() if name not in TIMELESS}

    return {
        "device": device(),
        "dtype": str(numbers),
        "model": shape(config),
        "draft_model": None if draft_config is None else shape(draft_config),
    }


def folder() -> Path:
    """`$EMSJAX_PROFILES`, or `emsjax/profiles` in the user's cache folder."""
    if chosen := os.environ.get("EMSJAX_PROFILES"):
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "emsjax" / "profiles"


def store(profile: Mapping[str, Any]) -> Path:
    """Write a profile to the store and return its path.

    Raises:
        OSError: the folder cannot be written.
    """
    path = path_of(profile["subject"])
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(to_json(profile, indent=1))
    os.replace(unfinished, path)
    return path


def find(wanted: Mapping[str, Any]) -> Path | None:
    """The file of the stored profile of this subject, or None.

    If no draft model is wanted, a profile with any draft model will do, because it has the costs
    of the target's steps.
    """
    paths = [path_of(wanted)]
    if wanted["draft_model"] is None:
        paths += sorted(paths[0].parent.glob(f"{paths[0].stem.split('-')[0]}-*.json"))
    return next((path for path in paths if path.exists()), None)


def path_of(subject: Mapping[str, Any]) -> Path:
    """Path of the profile of this subject in the store, whether it exists or not."""
    digest = lambda part: hashlib.sha256(to_json(part, sort_keys=True).encode()).hexdigest()[:16]
    target = {name: value for name, value in subject.items() if name != "draft_model"}
    draft = subject["draft_model"]
    # The format is part of the name, so profiles of other formats are not found.
    target["format"] = FORMAT
    return folder() / f"{digest(target)}-{'none' if draft is None else digest(draft)}.json"


def read_for(path: Path, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
    """The profile in a file that the user gave.

    Raises:
        ValueError: it is not a profile, or one of another device, dtype or model.
    """
    profile = read_profile(path)
    check_subject(profile, wanted, str(path))
    StepCosts.from_profile(path)  # checks its numbers
    return profile


def check_subject(profile: Mapping[str, Any], wanted: Mapping[str, Any], name: str) -> None:
    """Raises a ValueError unless the profile has the wanted device, dtype and models."""
    parts = ("device", "dtype", "model", "draft_model")
    subject = profile.get("subject")
    if not isinstance(subject, Mapping) or not all(part in subject for part in parts):
        raise ValueError(f"{name} does not say what it is a profile of")
    for what in parts:
        found, expected = subject[what], wanted[what]
        if found != expected and not (what == "draft_model" and expected is None):
            values = f"{_told(found, expected)}, not {_told(expected, found)}"
            raise ValueError(f"{name} is a profile of another {what}: {values}")


def _told(this: Any, other: Any) -> str:
    """A part of a subject as text; for a model, only the fields that differ from `other`."""
    if not isinstance(this, Mapping):
        return "none" if this is None else str(this)
    if not isinstance(other, Mapping):
        other = dict.fromkeys(("model_type", *OWN_HEADS.values(), *GPT2_SIZES.values()))
    names = [name for name in this if name in other and this[name] != other[name]]
    return " ".join(f"{name}={this[name]}" for name in names)


def choose(
    request: str, wanted: Mapping[str, Any], profile: Path | None, advice: str
) -> dict[str, Any]:
    """The policy that a requested draft length resolves to, as JSON for `policy`.

    Args:
        request: "auto", "bass", "goodput" or a number.
        wanted: the run's `subject`.
        profile: a file to use instead of the stored one.
        advice: the command that measures such a profile.

    Returns:
        The policy's name, all its settings, and the reason in words.

    Raises:
        ValueError: "goodput" is requested without a profile, or the profile has another subject.
    """
    if request not in ("auto", "goodput", "bass"):
        return _record(FixedLength, {"k": int(request)}, f"fixed at {request}")
    if request == "bass":
        return _record(BassHeuristic, {}, "BASS heuristic")
    path = profile or find(wanted)
    if path is None and request == "goodput":
        raise ValueError(
            "--draft-length goodput: no profile of these models on this device is stored; "
            f"`{advice}` measures one"
        )
    if path is None:
        return _record(BassHeuristic, {}, "BASS heuristic")
    costs = read_for(path, wanted)["costs"]
    which = "the stored profile" if profile is None else "the profile"
    return _record(Goodput, {"costs": costs}, f"Goodput, from {which} {path}")


def policy(record: Mapping[str, Any]) -> DraftLength:
    """The policy of a record that `choose` returned."""
    kind, settings = POLICIES[record["policy"]], dict(record["settings"])
    if kind is Goodput:
        costs = {"format": FORMAT, "costs": settings.pop("costs")}
        return Goodput.from_profile(costs, **settings)
    return kind(**settings)


def _record(kind: type, settings: Mapping[str, Any], why: str) -> dict[str, Any]:
    """A record with all defaults, because another version may have different ones."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    defaults = {field.name: field.default for field in fields if field.name != "costs"}
    (name,) = (name for name, policy in POLICIES.items() if policy is kind)
    return {"policy": name, "settings": defaults | settings, "why": why}
