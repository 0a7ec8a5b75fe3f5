"""Errors of GPUs and RDMA ports that increase between two scans. The value of a counter alone proves nothing, because
it counts since the driver was loaded.

Sources: nvml.h, nvmlNvLinkErrorCounter_t (a replay is a retransmitted packet, a recovery is a retrained link; either
one between two scans is worth a warning); NVIDIA DCGM, dcgmlib/src/DcgmGpuHardwareLimits.h (more than 8 PCIe replays
per minute, 100 or more CRC errors per second); NVIDIA's Xid catalogue. Linux
Documentation/ABI/stable/sysfs-class-infiniband and NVIDIA's "Understanding mlx5 Linux Counters" for the port counters;
thresholds as documented by NVSentinel (docs/configuration/nic-health-monitor.md)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from contracts.finding import Finding, Status
from contracts.tables import read_table
from probes.api import Snapshot, finding
from probes.gpu.facts import Gpu, GpuFacts
from probes.gpu.health import WORDS, XID_CAUSES, finding as gpu_finding, list_xids, name_xids
from probes.rdma import probe as rdma
from probes.rdma.facts import RdmaFacts, RdmaPort

REPLAYS_PER_MINUTE = 8.0


def find_gpu_increases(before: GpuFacts, after: GpuFacts, seconds: float) -> Iterator[Finding]:
    """Report increases between two scans of one host that are `seconds` apart, if the driver version is the same."""
    if before.driver_version != after.driver_version:
        return
    earlier = {_identify(gpu): gpu for gpu in before.gpus if _identify(gpu)}
    for gpu in after.gpus:
        past = earlier.get(_identify(gpu))
        if past is not None:
            yield from _check_xids(past, gpu, seconds)
            yield from _check_counters(past, gpu, seconds)
            if risen := tuple(_find_risen_links(past, gpu, seconds)):
                yield gpu_finding("gpu.nvlink.errors rising", gpu, evidence=risen, seconds=seconds)


def _identify(gpu: Gpu) -> str | None:
    """Return an identifier of a GPU. A GPU that was lost between the scans has no UUID, but may have an address."""
    return gpu.bus_id or gpu.uuid


def _compute_rise(start: int | None, end: int | None) -> int:
    """Return the increase of a counter. A counter that fell was reset between the scans: its increase is unknown."""
    return end - start if start is not None and end is not None and end > start else 0


def _check_xids(before: Gpu, after: Gpu, seconds: float) -> Iterator[Finding]:
    earlier, now = list_xids(before), list_xids(after)
    if earlier is None or now is None:
        return
    new = tuple((Counter(now) - Counter(earlier)).elements())
    for cause in XID_CAUSES:
        if listed := name_xids(new, cause):
            yield gpu_finding(f"gpu.xid.new {cause}", after, what=listed, seconds=seconds)


def _check_counters(before: Gpu, after: Gpu, seconds: float) -> Iterator[Finding]:
    replays = _compute_rise(before.pcie_replays, after.pcie_replays)
    # For an interval under one minute, the limit of a whole minute applies, because one burst is not a rate.
    if replays > REPLAYS_PER_MINUTE * max(seconds / 60.0, 1.0):
        yield gpu_finding(
            "gpu.counters.rising replays", after, rise=replays, before=before, after=after, seconds=seconds
        )
    if errors := _compute_rise(before.ecc_uncorrected, after.ecc_uncorrected):
        yield gpu_finding("gpu.counters.rising", after, rise=errors, before=before, after=after, seconds=seconds)


def _find_risen_links(before: Gpu, after: Gpu, seconds: float) -> Iterator[str]:
    earlier = {link.link: link.errors or {} for link in before.nvlinks}
    for link in after.nvlinks:
        for name, per_second in WORDS["link_errors"].items():
            start, end = earlier.get(link.link, {}).get(name), (link.errors or {}).get(name)
            rise = _compute_rise(start, end)
            if rise and rise >= per_second * seconds:
                yield f"link {link.link} {name}: {start}, then {end}"


def find_rdma_increases(before: RdmaFacts, after: RdmaFacts, seconds: float) -> Iterator[Finding]:
    """Report counters that increased too fast between two scans of one host that are `seconds` apart."""
    earlier = {(d.name, p.port): p for d in before.devices for p in d.ports}
    for device in after.devices:
        for port in device.ports:
            past = earlier.get((device.name, port.port))
            if past is not None:
                yield from _check_port(f"{device.name}:{port.port}", past, port, seconds)


def _check_port(subject: str, before: RdmaPort, after: RdmaPort, seconds: float) -> Iterator[Finding]:
    for counter, row in read_table(rdma.__file__, "counters.toml").items():
        start, end = ((port.counters or {}).get(counter) for port in (before, after))
        rise = _compute_rise(start, end)
        # for a short interval the limit of the full period applies, because one event is not a rate
        if rise > row["count"] * max(seconds / row["seconds"], 1.0):
            yield finding(
                rdma.TEXTS, "rdma.counters.rising", Status(row["status"]), subject, counter=counter, rise=rise,
                seconds=seconds, meaning=row["meaning"], start=start, end=end,
            )  # fmt: skip


PAST_SECONDS = 60.0  # REPLAYS_PER_MINUTE requires scans at least one minute apart
KEPT = 4

CODES = ("rdma.counters.rising", "gpu.counters.rising", "gpu.xid.new")
"""Finding codes that require two scans. After a single scan their status is unknown."""


def compare_scans(before: Snapshot, after: Snapshot) -> tuple[Finding, ...]:
    """Report counters that increased between two scans; nothing if the scans cannot be compared."""
    seconds = after.taken_at_seconds - before.taken_at_seconds
    if before.hostname != after.hostname or not seconds > 0:
        return ()
    findings: list[Finding] = []
    if (old := before.facts(RdmaFacts)) and (new := after.facts(RdmaFacts)):
        findings += find_rdma_increases(old, new, seconds)
    if (old_gpus := before.facts(GpuFacts)) and (new_gpus := after.facts(GpuFacts)):
        findings += find_gpu_increases(old_gpus, new_gpus, seconds)
    return tuple(findings)


def find_risen(past: Sequence[Snapshot], now: Snapshot) -> tuple[Finding, ...]:
    """Report increases since any earlier scan. Each problem of a device is reported once, for the earliest such scan.

    A slow increase only shows over a long interval; a counter that was reset only shows an increase over a short one.
    """
    findings: dict[tuple[str, str, str], Finding] = {}
    for before in sorted(past, key=lambda snapshot: snapshot.taken_at_seconds):
        for risen in compare_scans(before, now):
            # the message without its numbers, which depend on the length of the interval
            trouble = re.sub(r"\d+(\.\d+)?", "", risen.message)
            findings.setdefault((risen.code, risen.subject, trouble), risen)
    return tuple(findings.values())


class EarlierScans:
    """Earlier scans for comparison: the last one, and one that is about a minute old."""

    def __init__(self) -> None:
        self._kept: list[tuple[Snapshot, ...]] = []

    def add(self, snapshots: tuple[Snapshot, ...]) -> None:
        """Add a scan, and drop scans that are older than needed or close to each other in time."""
        if not snapshots:
            return
        now = snapshots[0].taken_at_seconds
        while len(self._kept) > 1 and now - self._kept[1][0].taken_at_seconds >= PAST_SECONDS:
            self._kept.pop(0)
        # If scans are less than PAST_SECONDS / KEPT apart, the newer one replaces the older one, so few are stored.
        if len(self._kept) > 1 and now - self._kept[-2][0].taken_at_seconds < PAST_SECONDS / KEPT:
            self._kept.pop()
        self._kept.append(snapshots)

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """The oldest stored scan and the last scan."""
        if not self._kept:
            return ()
        return self._kept[0] if len(self._kept) == 1 else (*self._kept[0], *self._kept[-1])
