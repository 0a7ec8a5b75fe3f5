"""Errors that rise between two scans of one host: a counter's value alone counts since the driver was loaded.

RDMA ports are judged by `probes.rdma_counters`, GPUs and their links by `probes.gpu_counters`.
"""

from __future__ import annotations

from probes import gpu_counters, rdma_counters
from probes.api import Finding, Snapshot
from probes.gpu import GpuFacts
from probes.rdma import RdmaFacts

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
        found += rdma_counters.rising(old_rdma, new_rdma, seconds)
    old_gpus, new_gpus = before.facts(GpuFacts), after.facts(GpuFacts)
    if old_gpus is not None and new_gpus is not None:
        found += gpu_counters.rising(old_gpus, new_gpus, seconds)
    return tuple(found)
