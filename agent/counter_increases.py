"""Errors that rise between two scans of one host: a counter's value alone counts since the driver was loaded.

GPUs, their links and RDMA ports are judged by `probes.increases`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from probes.api import Finding, Snapshot
from probes.gpu.facts import GpuFacts
from probes.increases import gpu_increases, rdma_increases
from probes.rdma.facts import RdmaFacts

PAST_SECONDS = 60.0  # the limit of PCIe replays is one of a minute (probes.increases)
KEPT = 4

CODES = ("rdma.counters.rising", "gpu.counters.rising", "gpu.xid.new")
"""Codes that only two scans can raise; one scan leaves them unknown."""


def rising(before: Snapshot, after: Snapshot) -> tuple[Finding, ...]:
    """Findings about counters that rose from one scan to the next; none where the two cannot be compared."""
    seconds = after.taken_at_seconds - before.taken_at_seconds
    if before.hostname != after.hostname or not seconds > 0:
        return ()
    found: list[Finding] = []
    old_rdma, new_rdma = before.facts(RdmaFacts), after.facts(RdmaFacts)
    if old_rdma is not None and new_rdma is not None:
        found += rdma_increases(old_rdma, new_rdma, seconds)
    old_gpus, new_gpus = before.facts(GpuFacts), after.facts(GpuFacts)
    if old_gpus is not None and new_gpus is not None:
        found += gpu_increases(old_gpus, new_gpus, seconds)
    return tuple(found)


def risen_since(past: Sequence[Snapshot], now: Snapshot) -> tuple[Finding, ...]:
    """What rose since any of these earlier scans, each trouble of a device once: as the earliest of them shows it.

    A counter that rises slowly shows over a longer time only, one that was reset in between over a shorter time only.
    """
    found: dict[tuple[str, str, str], Finding] = {}
    for before in sorted(past, key=lambda snapshot: snapshot.taken_at_seconds):
        for finding in rising(before, now):
            found.setdefault((finding.code, finding.subject, _trouble(finding)), finding)
    return tuple(found.values())


def _trouble(finding: Finding) -> str:
    """What a finding is about, without its figures: they differ with the time that is looked at."""
    return re.sub(r"\d+(\.\d+)?", "", finding.message)


class Past:
    """Earlier scans to compare with: the last one, and one that is about a minute old."""

    def __init__(self, seconds: float = PAST_SECONDS) -> None:
        """`seconds` is how old a scan is to be that a slow rise is seen against."""
        self._seconds = seconds
        self._kept: list[tuple[Snapshot, ...]] = []

    def add(self, snapshots: tuple[Snapshot, ...]) -> None:
        """Keep a scan; those that are older than needed are forgotten, of those in between few are kept."""
        if not snapshots:
            return
        now = snapshots[0].taken_at_seconds
        while len(self._kept) > 1 and now - self._kept[1][0].taken_at_seconds >= self._seconds:
            self._kept.pop(0)
        # Scans that follow each other closely take each other's place: a handful stands for the whole time.
        if len(self._kept) > 1 and now - self._kept[-2][0].taken_at_seconds < self._seconds / KEPT:
            self._kept.pop()
        self._kept.append(snapshots)

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """The oldest that is kept, and the last."""
        if not self._kept:
            return ()
        return self._kept[0] if len(self._kept) == 1 else (*self._kept[0], *self._kept[-1])
