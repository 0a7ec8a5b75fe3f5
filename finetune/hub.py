"""What is asked of a model hub: the commit that a name means, files of it, and in words why they cannot be had.

Surface: `huggingface_hub`, which reads HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and HF_HOME. Nothing is asked twice: a
run goes on with the commits that its first rank was told, from its cache where the hub is gone since.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from contracts.job_config import ConfigError, JobConfig

MAX_FILES = 10_000  # of a data set's listing
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
_gone: list[str] = []  # why no more questions are asked


def pin(config: JobConfig, note: Callable[[str], None] = lambda _text: None) -> JobConfig:
    """The settings with a commit for each revision, the same on every rank: rank 0 asks."""
    import torch.distributed as dist

    payload: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            payload = [(commits_of(config), _gone[-1:])]
        except ConfigError as error:
            payload = [str(error)]
    dist.broadcast_object_list(payload, src=0)
    if isinstance(payload[0], str):
        raise ConfigError(payload[0])
    commits, gone = payload[0]
    if gone and not _gone:
        _require_cached_copy(gone[0])
    if gone:
        note(f"{gone[0]}: models and data come from the cache")
    return dataclasses.replace(config, **commits)


def commits_of(config: JobConfig) -> dict[str, Any]:
    """The commit of each name that is a hub's, by the setting of its revision. Raises ConfigError.

    Where the hub is not there it is asked this once, and the cache from then on.
    """
    from huggingface_hub import HfApi

    found: dict[str, Any] = {}
    for kind, name, revision in (
        ("model", "model_name_or_path", "model_revision"),
        ("model", "tokenizer_name", "tokenizer_revision"),
        ("dataset", "dataset_name", "dataset_revision"),
    ):
        at, wanted = getattr(config, name), getattr(config, revision)
        if at is None or not is_id(name, at):
            continue
        with asking(name, at, f"{revision}={wanted!r}"):
            if not found:
                _require_hub(HfApi(), kind, at)
            found[revision] = str(HfApi().resolve_revision(at, repo_type=kind, revision=wanted).resolved)
    return found


def _require_hub(api: Any, kind: str, name: str) -> None:
    """Whether the hub is there. Where it is not, every later question would try again for minutes: ask none."""
    import httpx2
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        api.repo_info(name, repo_type=kind)
    except OfflineModeIsEnabled:
        return
    except httpx2.TransportError as error:
        _require_cached_copy(f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}: {error})")
    except HfHubHTTPError as error:
        if error.response.status_code >= 500:
            _require_cached_copy(f"{constants.ENDPOINT} answered {error.response.status_code}")


def _require_cached_copy(why: str) -> None:
    from huggingface_hub import constants

    _gone.append(why)
    constants.HF_HUB_OFFLINE = True  # what transformers looks at too


def is_id(setting: str, name: str) -> bool:
    """Whether a setting names something on a hub; refuses what is neither that nor here."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    path = Path(name).expanduser()
    if name.startswith(("random:", "synthetic:", "builtin:")) or os.path.exists(path):
        return False
    if name.startswith(("/", ".", "~")):
        raise ConfigError(f"{setting}={name!r}: no such file or folder")
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ConfigError(f"{setting}={name!r}: no such file or folder, and not a hub id (org/name)") from None
    return not name.endswith((".json", ".jsonl", ".parquet", ".csv"))


def list_files(name: str, revision: str) -> dict[str, int]:
    """Path -> bytes of a data set at a commit; offline, of what the cache holds."""
    import httpx2
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.hf_api import RepoFile

    where = {"repo_type": "dataset", "revision": revision}
    with asking("dataset_name", name, f"dataset_revision={revision!r}"):
        try:
            listed = list(islice(HfApi().list_repo_tree(name, recursive=True, **where), MAX_FILES + 1))
        except (OfflineModeIsEnabled, httpx2.TransportError):
            folder = Path(snapshot_download(name, local_files_only=True, allow_patterns=["README.md"], **where))
            return {f.relative_to(folder).as_posix(): f.stat().st_size for f in folder.rglob("*") if f.is_file()}
    if len(listed) > MAX_FILES:
        raise ConfigError(f"dataset_name={name!r}: more than {MAX_FILES} files")
    found = {entry.path: entry.size for entry in listed if isinstance(entry, RepoFile)}
    for path in map(PurePosixPath, found):
        if path.is_absolute() or ".." in path.parts:
            raise ConfigError(
                f"dataset_name={name!r}: the hub lists {str(path)!r:.99}, which leads out of the data set"
            )
    return found


def fetch(name: str, path: str, revision: str) -> Path:
    """One file of a data set, from the cache where it is there."""
    from huggingface_hub import hf_hub_download

    with asking("dataset_name", name, f"dataset_revision={revision!r}"):
        return Path(hf_hub_download(name, path, repo_type="dataset", revision=revision))


@contextlib.contextmanager
def asking(setting: str, name: str, revision: str) -> Iterator[None]:
    """What goes wrong inside becomes a ConfigError that says which name, and why."""
    from httpx2 import HTTPError
    from huggingface_hub import get_session
    from huggingface_hub.errors import RevisionResolutionError

    # Of itself the library waits without end for an answer that is no file.
    hooks = (session := get_session()).event_hooks
    if _bound not in hooks["request"]:
        session.event_hooks = {**hooks, "request": [*hooks["request"], _bound]}
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, HTTPError, RevisionResolutionError) as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise
        raise ConfigError(f"{setting}={name!r}: {_why(error, revision)}") from error


def _bound(request: Any) -> None:
    from huggingface_hub import constants

    timeouts = request.extensions.get("timeout") or {}
    limits = {
        name: timeouts.get(name) or constants.HF_HUB_ETAG_TIMEOUT for name in ("connect", "read", "write", "pool")
    }
    request.extensions["timeout"] = limits


def _why(error: BaseException, revision: str) -> str:
    """The deepest cause that says something of the hub, in a sentence that names what may be done."""
    import httpx2
    from huggingface_hub import constants, errors, get_token

    token = "the token in HF_TOKEN" if get_token() else "no token (HF_TOKEN)"
    cached = f"and the cache {constants.HF_HUB_CACHE} does not hold it"
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and len(chain) < 20:
        chain.append(one)
        one = one.__cause__ or one.__context__
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
            return f"{_gone[-1] if _gone else 'HF_HUB_OFFLINE is set'}, {cached}"
    for one in chain:
        if isinstance(one, httpx2.TransportError):
            return f"{constants.ENDPOINT} cannot be reached ({type(one).__name__}: {one}), {cached}"
        if isinstance(one, errors.HfHubHTTPError) and one.response is not None:
            return f"{constants.ENDPOINT} answered {one.response.status_code}, {cached}"
    return " ".join(str(error).split())[:500]


def main(name: str, revision: str) -> None:
    """Print the path of a model's config.json for `topoflight launch`; exits with why it cannot be had."""
    from huggingface_hub import hf_hub_download

    try:
        with asking("model_name_or_path", name, f"model_revision={revision!r}"):
            print(hf_hub_download(name, "config.json", revision=revision))  # noqa: T201 - what the caller reads
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
