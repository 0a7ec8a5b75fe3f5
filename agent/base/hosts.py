"""Which host is meant: this one, or recordings given with --host."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from probes.api import Snapshot
    from probes.scanner import Probes


def snapshots(
    hosts: Sequence[Path], probes: Probes, *, root: str = "/", timeout_seconds: float = 30.0, quiet: bool = False,
    stop: threading.Event | None = None,
) -> tuple[Snapshot, ...]:  # fmt: skip
    """Ask this host for these probes' facts, `timeout_seconds` for each, or replay the recordings in order.

    On a terminal a line shows that it is under way; `quiet` is for callers that draw their own. Soon after `stop` is
    set this returns: probes that have not answered are failed, and recordings that have not been read are left out.
    """
    if quiet or not sys.stderr.isatty():  # what draws on terminals is not imported where there is none
        return _snapshots(hosts, probes, root, timeout_seconds, stop)
    from agent.base.output import waiting

    with waiting("scan: asking this host" if not hosts else "scan: replaying"):
        return _snapshots(hosts, probes, root, timeout_seconds, stop)


def _snapshots(
    hosts: Sequence[Path], probes: Probes, root: str, timeout_seconds: float, stop: threading.Event | None
) -> tuple[Snapshot, ...]:
    if not hosts:
        from probes.scanner import Scanner

        with Scanner(root, probes=probes, timeout_seconds=timeout_seconds, stop=stop) as scanner:
            return (scanner.scan(),)
    from agent.base.recordings import replay

    return replay(hosts, probes, stop)
