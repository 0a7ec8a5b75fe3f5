"""Read the host recordings given with --host."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agent.base.options import InputError

if TYPE_CHECKING:
    from probes.api import Snapshot
    from probes.child import Probes

RECORDINGS = (".json", ".json.gz", ".zip")


def replayed(hosts: Sequence[Path], probes: Probes, stop: threading.Event | None = None) -> tuple[Snapshot, ...]:
    """Replay the recordings in order; omit those not read when `stop` is set. Raises InputError."""
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
    """Add the file names to hosts that have the same name, which is common for pods."""
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
    """Return the files of --host; a folder is replaced by the recordings in it."""
    files: list[Path] = []
    for path in hosts:
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.name.endswith(RECORDINGS))
            if not inside:
                raise click.UsageError(f"--host {path}: no recording (*.json, *.json.gz, *.zip) in this folder")
            files += inside
        else:
            files.append(path)
    return files
