"""Which host is meant: this one, or recordings given with --host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from probes.api import Snapshot

host_option = click.option(
    "--host",
    "hosts",
    multiple=True,
    type=click.Path(exists=True, dir_okay=True, path_type=Path),
    metavar="FILE...",
    help="Recordings (topoflight capture) to use in place of this host; a folder means all in it.",
)
root_option = click.option(
    "--root", default="/", show_default=True, help="Where this host's /sys, /proc and /dev are mounted."
)


def snapshots(hosts: Sequence[Path], *, root: str = "/", timeout_seconds: float = 30.0) -> tuple[Snapshot, ...]:
    """Scan this host in a bounded child process, or replay the recordings in order."""
    if not hosts:
        from probes.scanner import scan_live

        return (scan_live(root, timeout_seconds),)
    from probes.recording import RecordingError, load
    from probes.scan import scan

    found = []
    for path in recordings(hosts):
        try:
            found.append(scan(load(path)))
        except RecordingError as error:
            raise click.ClickException(str(error)) from None
    return tuple(found)


def recordings(hosts: Sequence[Path]) -> list[Path]:
    """The files meant by --host: a folder stands for the recordings in it."""
    files: list[Path] = []
    for path in hosts:
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.name.endswith((".json", ".json.gz")))
            if not inside:
                raise click.UsageError(f"--host {path}: no recording (*.json, *.json.gz) in this folder")
            files += inside
        else:
            files.append(path)
    return files
