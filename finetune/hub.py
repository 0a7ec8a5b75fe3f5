"""What is asked of a model hub: the commit that a name means, files of it, and in words why they cannot be had.

Surface: `huggingface_hub`, which reads HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and HF_HOME. Nothing is asked twice: a
run goes on with the commits that its first rank was told, from its cache where the hub is gone since.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from finetune.config import ConfigError, JobConfig

CONVERTED = "refs/convert/parquet"  # the branch of a data set that the hub's own converter writes
MAX_FILES = 10_000  # of a data set's listing
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


def pin(config: JobConfig) -> JobConfig:
    """The settings with a commit for each revision, the same on every rank: rank 0 asks."""
    import torch.distributed as dist

    said: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            said = [_commits(config)]
        except ConfigError as error:
            said = [str(error)]
    dist.broadcast_object_list(said, src=0)
    if isinstance(said[0], str):
        raise ConfigError(said[0])
    return dataclasses.replace(config, **said[0])


def _commits(config: JobConfig) -> dict[str, str]:
    found = {}
    for kind, name, revision in (
        ("model", "model_name_or_path", "model_revision"),
        ("model", "tokenizer_name", "tokenizer_revision"),
        ("dataset", "dataset_name", "dataset_revision"),
    ):
        at = getattr(config, name)
        if at is not None and is_id(name, at):
            found[revision] = resolve(kind, name, at, revision, getattr(config, revision))
    return found


def is_id(setting: str, name: str) -> bool:
    """Whether a setting names something on a hub; refuses what is neither that nor here."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    path = Path(name).expanduser()
    if name.startswith(("random:", "synthetic:", "builtin:")) or path.exists():
        return False
    if name.startswith(("/", ".", "~")):
        raise ConfigError(f"{setting}={name!r}: no such file or folder")
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ConfigError(f"{setting}={name!r}: no such file or folder, and not a hub id (org/name)") from None
    return not name.endswith((".json", ".jsonl", ".parquet"))


def resolve(kind: str, setting: str, name: str, revision_setting: str, revision: str) -> str:
    """The commit of a branch, tag or commit."""
    from huggingface_hub import HfApi

    with asking(setting, name, f"{revision_setting}={revision!r}"):
        return str(HfApi().resolve_revision(name, repo_type=kind, revision=revision).resolved)


def list_files(name: str, revision: str, absent: str | None = None) -> dict[str, int]:
    """Path -> bytes of a data set at a commit; offline, of what the cache holds. `absent`: what to say without it."""
    import httpx2
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled, RevisionNotFoundError
    from huggingface_hub.hf_api import RepoFile

    with asking("dataset_name", name, f"dataset_revision={revision!r}"):
        try:
            tree = HfApi().list_repo_tree(name, repo_type="dataset", revision=revision, recursive=True)
            listed = list(islice(tree, MAX_FILES + 1))
        except RevisionNotFoundError:
            if absent is None:
                raise
            raise ConfigError(absent) from None
        except (OfflineModeIsEnabled, httpx2.TransportError):
            folder = Path(
                snapshot_download(
                    name, repo_type="dataset", revision=revision, local_files_only=True, allow_patterns=["README.md"]
                )
            )
            return {f.relative_to(folder).as_posix(): f.stat().st_size for f in folder.rglob("*") if f.is_file()}
    if len(listed) > MAX_FILES:
        raise ConfigError(f"dataset_name={name!r}: more than {MAX_FILES} files")
    return {entry.path: entry.size for entry in listed if isinstance(entry, RepoFile)}


def fetch(name: str, path: str, revision: str) -> Path:
    """One file of a data set, from the cache where it is there."""
    from huggingface_hub import hf_hub_download

    with asking("dataset_name", name, f"dataset_revision={revision!r}"):
        return Path(hf_hub_download(name, path, repo_type="dataset", revision=revision))


@contextlib.contextmanager
def asking(setting: str, name: str, revision: str) -> Iterator[None]:
    """What goes wrong inside becomes a ConfigError that says which name, and why."""
    from httpx2 import HTTPError
    from huggingface_hub.errors import RevisionResolutionError

    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, HTTPError, RevisionResolutionError) as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise
        raise ConfigError(f"{setting}={name!r}: {_why(error, revision)}") from error


def _why(error: BaseException, revision: str) -> str:
    """The deepest cause that says something of the hub, in a sentence that names what may be done."""
    import httpx2
    from huggingface_hub import constants, errors, get_token

    token = "the token in HF_TOKEN" if get_token() else "no token (HF_TOKEN)"
    cached = f"and the cache {constants.HF_HUB_CACHE} does not hold it"
    chain = _chain(error)
    for one in chain:
        if isinstance(one, errors.GatedRepoError):
            return f"gated, and {token} opens it: its owner must let you in, and HF_TOKEN must be yours"
        if isinstance(one, errors.DisabledRepoError):
            return "disabled by the hub"
        if isinstance(one, errors.RevisionNotFoundError):
            return f"{revision}: no such branch, tag or commit"
        if isinstance(one, errors.RepositoryNotFoundError):
            return f"not on {constants.ENDPOINT}, or private and {token} opens it; no such file or folder here either"
        if isinstance(one, errors.OfflineModeIsEnabled):
            return f"HF_HUB_OFFLINE is set, {cached}"
    for one in chain:
        if isinstance(one, httpx2.TransportError):
            return f"{constants.ENDPOINT} cannot be reached ({type(one).__name__}: {one}), {cached}"
        if isinstance(one, errors.HfHubHTTPError) and one.response is not None:
            return f"{constants.ENDPOINT} answered {one.response.status_code}, {cached}"
    return str(error).strip().splitlines()[0]


def _chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and len(found) < 20:
        found.append(one)
        one = one.__cause__ or one.__context__
    return found
