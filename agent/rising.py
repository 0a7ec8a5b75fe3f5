"""Errors that rise between two scans of one host: a counter's value alone counts since the driver was loaded.

RDMA ports are judged by `probes.rdma_counters`. On an NVLink a replay is a packet sent again and a recovery a link
trained again (nvml.h, nvmlNvLinkErrorCounter_t): either one during a scan's interval is worth a warning, while
corrected CRC errors happen on healthy links.
"""

from __future__ import annotations

from collections.abc import Iterator

from probes import rdma_counters
from probes.api import Finding, Severity, Snapshot
from probes.gpu import GpuFacts
from probes.gpu_types import Gpu
from probes.rdma import RdmaFacts

NVLINK_COUNTERS = ("replay", "recovery")


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
    if old_gpus is not None and new_gpus is not None and old_gpus.driver_version == new_gpus.driver_version:
        found += _nvlinks(old_gpus, new_gpus, seconds)
    return tuple(found)


def _nvlinks(before: GpuFacts, after: GpuFacts, seconds: float) -> Iterator[Finding]:
    earlier = {gpu.uuid: gpu for gpu in before.gpus if gpu.uuid}
    for gpu in after.gpus:
        past = earlier.get(gpu.uuid or "")
        risen = list(_risen(past, gpu)) if past is not None else []
        if risen:
            yield Finding(
                code="gpu.nvlink.errors",
                severity=Severity.WARN,
                subject=f"GPU{gpu.index}",
                message=f"NVLink errors rose within {seconds:.0f} s: packets were sent again or a link trained again.",
                evidence=tuple(risen),
                remedy="If they go on rising, drain the node and have the link checked (nvidia-smi nvlink -e).",
            )


def _risen(before: Gpu, after: Gpu) -> Iterator[str]:
    """Each counter that rose; one that fell was reset in between, so its rise is unknown."""
    earlier = {link.link: link.errors or {} for link in before.nvlinks}
    for link in after.nvlinks:
        for name in NVLINK_COUNTERS:
            start, end = earlier.get(link.link, {}).get(name), (link.errors or {}).get(name)
            if start is not None and end is not None and end > start:
                yield f"link {link.link} {name}: {start}, then {end}"
