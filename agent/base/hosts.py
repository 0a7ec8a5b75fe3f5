"""Read the hosts of a command: this host, or the recordings given with --host."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agent.base.options import InputError
from agent.base.output import waiting

if TYPE_CHECKING:
    from probes.api import Snapshot
    from probes.child import Probes


RECORDINGS = (".json", ".json.gz", ".zip")


def snapshots(
    hosts: Sequence[Path], probes: Probes, *, root: str = "/", timeout_seconds: float = 30.0, quiet: bool = False,
    stop: threading.Event | None = None,
) -> tuple[Snapshot, ...]:  # fmt: skip
    """Run the probes on this host with `timeout_seconds` for each, or replay the recordings in order.

    A terminal shows a progress line; `quiet` is for callers that show their own progress. After `stop` is set the
    function returns soon: probes that have not answered are reported as failed, and unread recordings are omitted.
    """
    with contextlib.nullcontext() if quiet else waiting("scan: replaying" if hosts else "scan: asking this host"):
        if hosts:
            return replayed(hosts, probes, stop)
        from probes.scanner import Scanner

        with Scanner(root, probes=probes, timeout_seconds=timeout_seconds, stop=stop) as scanner:
            return (scanner.scan(),)


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
        inside = sorted(p for p in path.iterdir() if p.name.endswith(RECORDINGS)) if path.is_dir() else [path]
        if not inside:
            raise click.UsageError(f"{path}: no recording (*.json, *.json.gz, *.zip) in this folder")
        files += inside
    return files
