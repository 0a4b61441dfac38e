"""The folder of a model: a local one, or the cached files of a repository of the hub."""

import os
from collections.abc import Collection
from os import PathLike
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from emsjax.checks import check_instance
from emsjax.models.schema import shown
from emsjax.models.weight_files import choose_format, read_index

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
# One of the first holds a tokenizer's vocabulary; the others are settings.
VOCABULARIES = (
    *("tokenizer.json", "vocab.json", "vocab.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
)
TOKENIZER_FILES = (
    *VOCABULARIES,
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("merges.txt", "chat_template.jinja"),
)


def folder_of(
    path_or_repo_id: str | PathLike, revision: str | None, *, weights: bool = True
) -> Path:
    """A local folder, or the cached folder of a repository after its files are downloaded.

    Args:
        path_or_repo_id: a folder, or a hub id such as "facebook/opt-125m".
        revision: a branch, tag or commit of the repository.
        weights: whether the weights and the tokenizer's files are needed as well as the configs.

    Raises:
        ValueError: it is neither a folder nor a repository, the repository lacks files, or the
            revision is no text.
    """
    if revision is not None:
        check_instance("revision", revision, str, "text")
    if os.path.isdir(path_or_repo_id):  # Path("") would be the current folder
        return Path(path_or_repo_id)
    if (
        not isinstance(path_or_repo_id, str)
        or not path_or_repo_id
        or os.path.exists(path_or_repo_id)
        or looks_like_path(path_or_repo_id)
    ):
        raise ValueError(f"{shown(str(path_or_repo_id))} is not a folder")
    return download(path_or_repo_id, revision, weights=weights)


def looks_like_path(text: str) -> bool:
    """Whether it cannot be a repository id, which is a name, or an owner and a name."""
    return not text.isprintable() or text.startswith((".", "~", "/")) or text.count("/") > 1


def download(repo_id: str, revision: str | None, *, weights: bool) -> Path:
    """Download the configs, the files of one weight format and the tokenizer's; the cached folder.

    The arguments and errors are those of `folder_of`.
    """
    problem = f"{shown(repo_id)} is neither a folder nor a repository of the Hugging Face hub"
    try:
        names = huggingface_hub.list_repo_files(repo_id, revision=revision)
    except OfflineModeIsEnabled as error:
        return cached(repo_id, revision, error)
    except HFValidationError as error:
        raise ValueError(f"{problem}: {str(error)[:200]}") from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{repo_id!r} has no revision {revision!r}") from error
    except RepositoryNotFoundError as error:
        raise ValueError(problem) from error
    except Exception as error:  # depends on the library that sends the request
        return cached(repo_id, revision, error)
    if CONFIG not in names:
        raise ValueError(f"{repo_id!r} has no {CONFIG}")
    wanted = {CONFIG} | {GENERATION_CONFIG}.intersection(names)
    if weights:
        wanted |= weight_names(repo_id, revision, names) | set(TOKENIZER_FILES).intersection(names)
    return Path(
        huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=sorted(wanted))
    )


def weight_names(repo_id: str, revision: str | None, names: Collection[str]) -> set[str]:
    """The files of the preferred weight format: one, or an index and its shards."""
    form, first = choose_format(names, repr(repo_id))
    if first != form.index_name:
        return {first}
    index = huggingface_hub.hf_hub_download(repo_id, first, revision=revision)
    return {first, *read_index(Path(index)).values()}


def cached(repo_id: str, revision: str | None, error: Exception) -> Path:
    """The cached folder of a repository that cannot be reached."""
    options = {"revision": revision, "local_files_only": True}
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, **options))
    except LocalEntryNotFoundError:
        raise ValueError(
            f"{repo_id!r} is not in the cache, and the Hugging Face hub cannot be reached: {error}"
        ) from error


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a folder's tokenizer; none if it has no vocabulary.

    A link to another place is none of them, unless it is one of the hub's cache: whoever wrote the
    folder does not choose which of the user's files are copied.
    """
    home = folder.resolve()
    homes = (home, home.parent.parent / "blobs")  # in the cache, home is snapshots/REVISION
    paths = [folder / name for name in TOKENIZER_FILES if os.path.isfile(folder / name)]
    paths = [path for path in paths if path.resolve().parent in homes]
    return paths if any(path.name in VOCABULARIES for path in paths) else []
