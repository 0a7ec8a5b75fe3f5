"""Which host is meant: this one, or recordings given with --host."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agent.base.inputs import InputError
from agent.base.output import say
from contracts import bounded

if TYPE_CHECKING:
    from probes.api import Snapshot
    from probes.scanner import Scanner

RECORDINGS = (".json", ".json.gz", ".tgz", ".tar.gz")
_POLL_SECONDS = 0.05  # a signal's event is looked at this often


def snapshots(
    hosts: Sequence[Path], *, root: str = "/", timeout_seconds: float = 30.0, quiet: bool = False,
    stop: threading.Event | None = None,
) -> tuple[Snapshot, ...]:  # fmt: skip
    """Scan this host in a child process, `timeout_seconds` for each probe, or replay the recordings in order.

    A person at a terminal sees that it is under way; `quiet` is for callers that say so themselves. Soon after `stop`
    is set this returns: what a scan was asked from then on is failed in it, and recordings not yet read are left out.
    """
    stop = stop or threading.Event()
    if quiet or not sys.stderr.isatty():  # what draws on terminals is not imported where there is none
        return _snapshots(hosts, root, timeout_seconds, stop)
    from agent.base.output import waiting

    with waiting("scan: asking this host" if not hosts else "scan: replaying"):
        return _snapshots(hosts, root, timeout_seconds, stop)


def _snapshots(hosts: Sequence[Path], root: str, timeout_seconds: float, stop: threading.Event) -> tuple[Snapshot, ...]:
    if not hosts:
        from probes.scanner import Scanner

        with Scanner(root, timeout_seconds=timeout_seconds) as scanner, _closed_by(stop, scanner):
            return (scanner.scan(),)
    from probes.host.recording import RecordingError, load_all
    from probes.scan import scan

    found, paths = [], []
    for path in recordings(hosts):
        try:
            for host in load_all(path):
                if not stop.is_set():
                    found.append(scan(host))
                    paths.append(path)
            if path.name.endswith((".tgz", ".tar.gz")):
                from agent.base import bundle_file

                with contextlib.suppress(bundle_file.BundleError):
                    packed = bounded.read(path, bundle_file.MOST_BYTES)
                    for line in bundle_file.brief(bundle_file.unpacked(packed, "differences.txt")):
                        say(line, err=True)
        except (OSError, RecordingError) as error:
            raise InputError(str(error)) from None
    return distinct_names(found, paths)


@contextlib.contextmanager
def _closed_by(stop: threading.Event, scanner: Scanner) -> Iterator[None]:
    """Close the scanner as soon as `stop` is set; by a thread, since who scans waits for the answer."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_POLL_SECONDS):
            if stop.is_set():
                scanner.close()
                return

    thread = threading.Thread(target=watch, name="end of the scan", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def distinct_names(found: Sequence[Snapshot], paths: Sequence[Path]) -> tuple[Snapshot, ...]:
    """Two recordings of hosts with one name (pods often have one) get their files' names beside it."""
    times = Counter(snapshot.hostname for snapshot in found)
    taken: set[str] = set()
    made = []
    for snapshot, path in zip(found, paths, strict=True):
        name = snapshot.hostname
        if times[name] > 1:
            stem = path.name.removesuffix(".gz").removesuffix(".json")
            name = first = f"{name} ({stem})"
            number = 1
            while name in taken:
                number += 1
                name = f"{first} {number}"
        taken.add(name)
        made.append(snapshot if name == snapshot.hostname else replace(snapshot, hostname=name))
    return tuple(made)


def recordings(hosts: Sequence[Path]) -> list[Path]:
    """The files meant by --host: a folder stands for the recordings in it."""
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
