"""Requests to a model hub: the commit of a name, and its files.

Surface: `huggingface_hub`, which reads HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and HF_HOME. All ranks
use the commits that rank 0 has received. Files of these commits that are in the cache need no hub.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, constants, errors, get_session, get_token, hf_hub_download, snapshot_download
from huggingface_hub.utils import HFValidationError, validate_repo_id

from contracts.job_config import ConfigError, JobConfig

WEIGHTS = "model*.safetensors"  # one file, or shards
MOST_BYTES = 64 << 30  # of a data set's files, of all its splits and parts
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


def pin(config: JobConfig) -> JobConfig:
    """The settings with a commit for each revision, the same on every rank: rank 0 asks."""
    import torch.distributed as dist

    payload: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            payload = [commits_of(config)]
        except ConfigError as error:
            payload = [str(error)]
    dist.broadcast_object_list(payload, src=0)
    if isinstance(payload[0], str):
        raise ConfigError(payload[0])
    return dataclasses.replace(config, **payload[0])


def commits_of(config: JobConfig) -> dict[str, Any]:
    """The commit of each name that is a hub's, by the setting of its revision. Raises ConfigError."""
    found: dict[str, Any] = {}
    for kind, name, revision in (
        ("model", "model_name_or_path", "model_revision"),
        ("model", "tokenizer_name", "tokenizer_revision"),
        ("dataset", "dataset_name", "dataset_revision"),
    ):
        at, wanted = getattr(config, name), getattr(config, revision)
        if at is not None and is_id(name, at):
            with asking(name, at, wanted):
                found[revision] = str(HfApi().resolve_revision(at, repo_type=kind, revision=wanted).resolved)
    return found


def is_id(setting: str, name: str) -> bool:
    """Whether a setting names something on a hub; refuses what is neither that nor here."""
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


def download_data(name: str, revision: str, suffixes: tuple[str, ...]) -> Path:
    """Download a data set's files with these suffixes; without the hub, return the folder of those in the cache."""
    with asking("dataset_name", name, revision):
        with contextlib.suppress(errors.OfflineModeIsEnabled, errors.HfHubHTTPError, httpx2.TransportError):
            listed = HfApi().dataset_info(name, revision=revision, files_metadata=True).siblings or ()
            if sum(one.size or 0 for one in listed if one.rfilename.endswith(suffixes)) > MOST_BYTES:
                raise ConfigError(f"dataset_name={name!r}: more than {MOST_BYTES >> 30} GiB of files; download the "
                                  "part that you need (`hf download --include`), and name its folder")  # fmt: skip
        wanted = ["README.md", *(f"*{suffix}" for suffix in suffixes)]
        return Path(snapshot_download(name, repo_type="dataset", revision=revision, allow_patterns=wanted))


def download_weights(name: str, revision: str) -> Path:
    """Return the folder with a model's weights: its own, or that of the hub's files in the cache."""
    if os.path.isdir(name):
        return Path(name)
    with asking("model_name_or_path", name, revision):
        return Path(snapshot_download(name, revision=revision, allow_patterns=[WEIGHTS, "generation_config.json"]))


@contextlib.contextmanager
def asking(setting: str, name: str, revision: str | None) -> Iterator[None]:
    """What goes wrong inside becomes a ConfigError that says which name, and why in the library's own words."""
    hooks = (session := get_session()).event_hooks
    if _bound not in hooks["request"]:
        session.event_hooks = {**hooks, "request": [*hooks["request"], _bound]}
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, httpx2.HTTPError, errors.RevisionResolutionError) as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise
        token = "the token in HF_TOKEN" if get_token() else "no token (HF_TOKEN)"
        asked = f"revision {revision or 'main'}, asked of {constants.ENDPOINT} with {token}"
        raise ConfigError(f"{setting}={name!r}: {' '.join(str(error).split())[:500]} ({asked})") from error


def _bound(request: Any) -> None:
    """Limit the time of a request: of itself the library waits without end for an answer that is no file."""
    timeouts = request.extensions.get("timeout") or {}
    names = ("connect", "read", "write", "pool")
    request.extensions["timeout"] = {one: timeouts.get(one) or constants.HF_HUB_ETAG_TIMEOUT for one in names}


def main(name: str, revision: str) -> None:
    """Print the path of a model's config.json for `topoflight launch`; exits with why it cannot be had."""
    try:
        with asking("model_name_or_path", name, revision):
            print(hf_hub_download(name, "config.json", revision=revision))  # noqa: T201 - what the caller reads
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
