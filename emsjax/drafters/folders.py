"""Folders of drafters that read the target's hidden states, told from those of draft models."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

from emsjax.decode.base import ModelConfig
from emsjax.drafters import block_drafter, eagle3
from emsjax.drafters.feature_drafter import FeatureDrafter, check_fits
from emsjax.drafters.feature_files import DrafterFormat
from emsjax.drafters.feature_formats import BLOCK, EAGLE3, kind_of
from emsjax.drafters.feature_network import FeatureConfig
from emsjax.models.hub import CONFIG, folder_of
from emsjax.models.stored import read_json

KINDS: Mapping[str, tuple[type[FeatureDrafter], DrafterFormat]] = {
    EAGLE3: (eagle3.Eagle3, eagle3.FORMAT),
    BLOCK: (block_drafter.BlockDrafter, block_drafter.FORMAT),
}


def feature_drafter(
    path_or_repo_id: str | PathLike, revision: str | None = None
) -> type[FeatureDrafter] | None:
    """The class of the drafter in a folder; None: it is none that reads hidden states.

    Raises:
        ValueError: there is no such folder or repository, or no config.json.
    """
    kind = kind_of(_contents(path_or_repo_id, revision))
    return None if kind is None else KINDS[kind][0]


def check_target(
    path_or_repo_id: str | PathLike, revision: str | None, config: ModelConfig
) -> FeatureConfig:
    """Checks the drafter in a folder against a target before either is loaded.

    Args:
        config: the target's configuration.

    Returns:
        The drafter's.

    Raises:
        ValueError: it is for another target, or its config.json is not supported.
    """
    contents = _contents(path_or_repo_id, revision)
    _, form = KINDS[kind_of(contents)]
    theirs = getattr(config, "architecture", None)
    mine = form.parse(contents, None if theirs is None else len(theirs.layers))
    check_fits(mine, config)
    return mine


def check_is_no_drafter(path_or_repo_id: str | PathLike, revision: str | None) -> None:
    """Raises ValueError if a folder that should hold a model has a drafter of hidden states."""
    if (kind := feature_drafter(path_or_repo_id, revision)) is not None:
        raise ValueError(
            f"--draft-model {path_or_repo_id} must be a draft model here, not a drafter that reads "
            f"the target's hidden states ({kind.__name__})"
        )


def _contents(path_or_repo_id: str | PathLike, revision: str | None) -> Mapping[str, Any]:
    return read_json(folder_of(path_or_repo_id, revision, weights=False) / CONFIG)
