"""Requests to a model hub: the commit of a name, and its files.

Surface: `huggingface_hub`, which reads HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and HF_HOME. All ranks
use the commits that rank 0 has received. Files of these commits that are in the cache need no hub.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2
from huggingface_hub import HfApi, constants, errors, get_session, get_token, hf_hub_download, snapshot_download
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import HFValidationError, validate_repo_id

from contracts.job_config import ConfigError, JobConfig

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"  # one file, or the names of shards
MAX_BYTES = 64 << 30  # of the files of one split
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


def resolve_commits(config: JobConfig) -> dict[str, Any]:
    """The commit of each name that is a hub's, by the setting of its revision. Raises ConfigError."""
    commits: dict[str, Any] = {}
    for kind, name, revision in (
        ("model", "model_name_or_path", "model_revision"),
        ("model", "tokenizer_name", "tokenizer_revision"),
        ("dataset", "dataset_name", "dataset_revision"),
    ):
        repository, branch = getattr(config, name), getattr(config, revision)
        if repository is not None and is_id(name, repository):
            with explain_errors(name, repository, branch):
                commits[revision] = str(HfApi().resolve_revision(repository, repo_type=kind, revision=branch).resolved)
    return commits


def is_id(setting: str, name: str) -> bool:
    """Whether a setting names something on a hub; refuses what is neither that nor here."""
    path = Path(name).expanduser()
    if name.startswith(("random:", "synthetic:", "builtin:")) or os.path.exists(path):
        return False
    if name.startswith(("/", ".", "~")) or name.endswith((".json", ".jsonl", ".parquet", ".csv")):
        raise ConfigError(f"{setting}={name!r}: no such file or folder")
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ConfigError(f"{setting}={name!r}: no such file or folder, and not a hub id (org/name)") from None
    return True


def download_data(name: str, revision: str, choose: Callable[[Path], list[str]]) -> list[Path]:
    """Download the files of a data set that `choose` names; without the hub, return those in the cache.

    `choose` gets a folder with README.md, and with an empty file for each other file of the data set.
    """
    where: dict[str, Any] = {"repo_id": name, "repo_type": "dataset", "revision": revision}
    with explain_errors("dataset_name", name, revision), TemporaryDirectory() as folder:
        listing = Path(folder).resolve()
        try:
            listed = [entry for entry in HfApi().list_repo_tree(**where, recursive=True) if isinstance(entry, RepoFile)]
        except (errors.OfflineModeIsEnabled, errors.HfHubHTTPError, httpx2.TransportError):
            cached = Path(snapshot_download(**where, allow_patterns=["README.md"]))
            return [cached / file for file in choose(cached)]
        sizes = {entry.path: entry.size for entry in listed if (listing / entry.path).resolve().is_relative_to(listing)}
        for place in map(listing.joinpath, sizes):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
        if "README.md" in sizes:
            shutil.copyfile(hf_hub_download(**where, filename="README.md"), listing / "README.md")
        files = choose(listing)
        if sum(sizes[file] for file in files) > MAX_BYTES:
            raise ConfigError(f"dataset_name={name!r}: more than {MAX_BYTES >> 30} GiB of files in one split; download"
                              " the part that you need (`hf download --include`), and name its folder")  # fmt: skip
        cached = Path(snapshot_download(**where, allow_patterns=list(map(glob.escape, files))))
        return [cached / file for file in files]


def download_weights(name: str, revision: str) -> list[Path]:
    """Return the files with a model's weights, in its folder or in the cache of the hub's files. Raises ConfigError."""
    folder = Path(name)
    if not os.path.isdir(name):
        with explain_errors("model_name_or_path", name, revision):
            download = partial(snapshot_download, name, revision=revision)
            folder = Path(download(allow_patterns=[WEIGHTS, INDEX, "generation_config.json"]))
            download(allow_patterns=list(map(glob.escape, _list_weights(folder))))
    return [folder / file for file in _list_weights(folder)]


def _list_weights(folder: Path) -> list[str]:
    """The files that transformers reads: others may be of another precision or of an earlier save."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    try:
        return sorted(set(map(str, json.loads((folder / INDEX).read_text())["weight_map"].values())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"model_name_or_path: {folder}: neither {WEIGHTS} nor a valid {INDEX}: {error}") from None


@contextlib.contextmanager
def explain_errors(setting: str, name: str, revision: str | None) -> Iterator[None]:
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
        request = f"revision {revision or 'main'}, asked of {constants.ENDPOINT} with {token}"
        raise ConfigError(f"{setting}={name!r}: {' '.join(str(error).split())[:500]} ({request})") from error


def _bound(request: Any) -> None:
    """Limit the time of a request: of itself the library waits without end for an answer that is no file."""
    timeouts = request.extensions.get("timeout") or {}
    names = ("connect", "read", "write", "pool")
    request.extensions["timeout"] = {phase: timeouts.get(phase) or constants.HF_HUB_ETAG_TIMEOUT for phase in names}


def main(name: str, revision: str) -> None:
    """Print the path of a model's config.json for `topoflight launch`; exits with why it cannot be had."""
    try:
        with explain_errors("model_name_or_path", name, revision):
            print(hf_hub_download(name, "config.json", revision=revision))  # noqa: T201 - what the caller reads
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
