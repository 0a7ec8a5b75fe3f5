"""Which host is meant: this one, or recordings given with --host."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from probes.api import Snapshot
    from probes.scanner import Probes, Scanner

_POLL_SECONDS = 0.05  # a signal's event is looked at this often


def snapshots(
    hosts: Sequence[Path], probes: Probes, *, root: str = "/", timeout_seconds: float = 30.0, quiet: bool = False,
    stop: threading.Event | None = None,
) -> tuple[Snapshot, ...]:  # fmt: skip
    """Ask this host for these probes' facts, `timeout_seconds` for each, or replay the recordings in order.

    A person at a terminal sees that it is under way; `quiet` is for callers that say so themselves. Soon after `stop`
    is set this returns: what a scan was asked from then on is failed in it, and recordings not yet read are left out.
    """
    stop = stop or threading.Event()
    if quiet or not sys.stderr.isatty():  # what draws on terminals is not imported where there is none
        return _snapshots(hosts, probes, root, timeout_seconds, stop)
    from agent.base.output import waiting

    with waiting("scan: asking this host" if not hosts else "scan: replaying"):
        return _snapshots(hosts, probes, root, timeout_seconds, stop)


def _snapshots(
    hosts: Sequence[Path], probes: Probes, root: str, timeout_seconds: float, stop: threading.Event
) -> tuple[Snapshot, ...]:
    if not hosts:
        from probes.scanner import Scanner

        with Scanner(root, probes=probes, timeout_seconds=timeout_seconds) as scanner, _closed_by(stop, scanner):
            return (scanner.scan(),)
    from agent.base.recordings import replay

    return replay(hosts, probes, stop)


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
