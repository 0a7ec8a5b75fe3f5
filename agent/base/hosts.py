"""Read the hosts of a command: this host, or the recordings given with --host."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agent.base.output import waiting
from agent.base.recordings import replayed

if TYPE_CHECKING:
    from probes.api import Snapshot
    from probes.child import Probes


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
