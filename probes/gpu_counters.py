"""Errors of GPUs that rise between two scans: a counter's value alone counts since the driver was loaded.

Sources: nvml.h, nvmlNvLinkErrorCounter_t (a replay is a packet sent again, a recovery a link trained again: either one
within a scan's interval is worth a warning); NVIDIA DCGM, dcgmlib/src/DcgmGpuHardwareLimits.h (more than 8 PCIe replays
a minute, 100 or more CRC errors a second); NVIDIA's Xid catalogue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from probes.api import Finding, Severity
from probes.gpu_health import HARDWARE_XIDS, subject_of
from probes.gpu_types import Gpu, GpuFacts

NVLINK_COUNTERS = ("replay", "recovery")
CRC_COUNTERS = ("crc_flit", "crc_data")
CRC_PER_SECOND = 100.0
REPLAYS_PER_MINUTE = 8.0


def rising(before: GpuFacts, after: GpuFacts, seconds: float) -> Iterator[Finding]:
    """Findings about what rose between two scans of one host, `seconds` apart, under one driver."""
    if not seconds > 0:
        raise ValueError(f"seconds={seconds}: the second scan must be later than the first")
    if before.driver_version != after.driver_version:
        return
    earlier = {_name(gpu): gpu for gpu in before.gpus if _name(gpu)}
    for gpu in after.gpus:
        past = earlier.get(_name(gpu))
        if past is not None:
            yield from _xids(past, gpu, seconds)
            yield from _counters(past, gpu, seconds)
            yield from _nvlinks(past, gpu, seconds)


def _name(gpu: Gpu) -> str | None:
    """A GPU that was lost between the scans no longer tells its UUID, but may be known by its place."""
    return gpu.bus_id or gpu.uuid


def _rise(start: int | None, end: int | None) -> int:
    """How far a counter rose; one that fell was reset in between, so its rise is unknown and counts as none."""
    return end - start if start is not None and end is not None and end > start else 0


def _xids(before: Gpu, after: Gpu, seconds: float) -> Iterator[Finding]:
    if before.xids is None or after.xids is None:
        return
    new = Counter(after.xids) - Counter(before.xids)
    for hardware in (True, False):
        found = {xid: count for xid, count in new.items() if (xid in HARDWARE_XIDS) is hardware}
        if found:
            what = ", ".join(f"Xid {xid} ({count} times)" for xid, count in found.items())
            yield Finding(
                code="gpu.xid.new",
                severity=Severity.FAIL if hardware else Severity.INFO,
                subject=subject_of(after),
                message=f"The driver logged {what} within {seconds:.0f} s"
                + (": the GPU, its memory or its links." if hardware else ", usually an error of the program."),
                evidence=(f"kernel log, NVRM: {what} more than in the scan before",),
                remedy="Drain the node and look the number up in NVIDIA's Xid catalogue." if hardware else "",
            )


def _counters(before: Gpu, after: Gpu, seconds: float) -> Iterator[Finding]:
    replays = _rise(before.pcie_replays, after.pcie_replays)
    # A short interval is held to the whole minute's count: one burst is no rate.
    if replays > REPLAYS_PER_MINUTE * max(seconds / 60.0, 1.0):
        yield Finding(
            code="gpu.counters.rising",
            severity=Severity.WARN,
            subject=subject_of(after),
            message=f"{replays} PCIe packets were sent again in {seconds:.0f} s: the link to the GPU is marginal.",
            evidence=(f"nvmlDeviceGetPcieReplayCounter: {before.pcie_replays}, then {after.pcie_replays}",),
            remedy="Look for AER lines in dmesg, and reseat the card or riser.",
        )
    errors = _rise(before.ecc_uncorrected, after.ecc_uncorrected)
    if errors:
        yield Finding(
            code="gpu.counters.rising",
            severity=Severity.FAIL,
            subject=subject_of(after),
            message=f"{errors} uncorrectable memory error(s) in {seconds:.0f} s: its results are not to be trusted.",
            evidence=(
                f"nvmlDeviceGetTotalEccErrors(uncorrected, volatile): {before.ecc_uncorrected}, then "
                f"{after.ecc_uncorrected}",
            ),
            remedy="Drain the node and reset the GPU; have it checked if it happens again.",
        )


def _nvlinks(before: Gpu, after: Gpu, seconds: float) -> Iterator[Finding]:
    risen = tuple(_risen_links(before, after, seconds))
    if risen:
        yield Finding(
            code="gpu.nvlink.errors",
            severity=Severity.WARN,
            subject=subject_of(after),
            message=f"NVLink errors rose within {seconds:.0f} s: packets were sent again or a link trained again.",
            evidence=risen,
            remedy="If they go on rising, drain the node and have the link checked (nvidia-smi nvlink -e).",
        )


def _risen_links(before: Gpu, after: Gpu, seconds: float) -> Iterator[str]:
    earlier = {link.link: link.errors or {} for link in before.nvlinks}
    for link in after.nvlinks:
        for name in (*NVLINK_COUNTERS, *CRC_COUNTERS):
            start, end = earlier.get(link.link, {}).get(name), (link.errors or {}).get(name)
            rise = _rise(start, end)
            if rise and (name in NVLINK_COUNTERS or rise >= CRC_PER_SECOND * seconds):
                yield f"link {link.link} {name}: {start}, then {end}"
