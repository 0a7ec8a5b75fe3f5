"""The recordings of hosts that are given with --host, and the bundle: a file of recordings and more."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import threading
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agent.base.options import InputError
from contracts import bounded

if TYPE_CHECKING:
    from probes.api import Snapshot
    from probes.child import Probes

RECORDINGS = (".json", ".json.gz", ".tgz", ".tar.gz")


def replayed(hosts: Sequence[Path], probes: Probes, stop: threading.Event | None = None) -> tuple[Snapshot, ...]:
    """Scan recordings in order, those not yet read at `stop` left out. Raises InputError."""
    from probes.child import replay
    from probes.wire import RecordingError

    found: list[Snapshot] = []
    paths: list[Path] = []
    for path in _files(hosts):
        try:
            if not (stop and stop.is_set()):
                found += replay(path, probes, stop)
                paths += [path] * (len(found) - len(paths))
        except (OSError, RecordingError) as error:
            raise InputError(str(error)) from None
    return distinct_names(found, paths)


def distinct_names(found: Sequence[Snapshot], paths: Sequence[Path]) -> tuple[Snapshot, ...]:
    """Two recordings of hosts with one name (pods often have one) get their files' names added."""
    times = Counter(snapshot.hostname for snapshot in found)
    taken: Counter[str] = Counter()
    made = []
    for snapshot, path in zip(found, paths, strict=True):
        if times[snapshot.hostname] > 1:
            name = f"{snapshot.hostname} ({path.name.removesuffix('.gz').removesuffix('.json')})"
            taken[name] += 1
            snapshot = replace(snapshot, hostname=name if taken[name] == 1 else f"{name} {taken[name]}")
        made.append(snapshot)
    return tuple(made)


def _files(hosts: Sequence[Path]) -> list[Path]:
    """The files of --host, where a folder means the recordings in it."""
    files: list[Path] = []
    for path in hosts:
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.name.endswith(RECORDINGS))
            if not inside:
                raise click.UsageError(f"--host {path}: no recording (*.json, *.json.gz, *.tgz) in this folder")
            files += inside
        else:
            files.append(path)
    return files


# The file that `topoflight bundle` writes: a gzipped tar with a folder of files for each host.

Files = dict[str, bytes]
MOST_FILE_BYTES = 8 << 20  # a recording takes about 1 MiB
MOST_BUNDLE_BYTES = 512 << 20  # of a bundle, unpacked


class BundleError(RuntimeError):
    """Why no bundle came; the message says what to do."""


def folder_name(host: str) -> str:
    """The folder of a host in a bundle."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", host).lstrip(".") or "host"


def unpack_bundle(content: bytes) -> dict[str, Files]:
    """Read the files of a bundle, by host. Raises BundleError."""

    def is_wanted(path: str) -> bool:
        name = path.partition("/")[2]
        return bool(name) and ".." not in name

    found: dict[str, Files] = {}
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
            for path, data in bounded.tar_files(stream, MOST_BUNDLE_BYTES, MOST_BUNDLE_BYTES, is_wanted):
                host, _, name = path.partition("/")
                found.setdefault(folder_name(host), {})[name] = data
    except (tarfile.TarError, bounded.TooLargeError, EOFError, OSError, zlib.error) as error:
        raise BundleError(f"not a bundle: {error}") from None
    return found
