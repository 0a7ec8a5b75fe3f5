"""Errors of GPUs and of RDMA ports that increase between two scans: a counter's value alone counts since the driver was
loaded, and proves nothing.

Sources: nvml.h, nvmlNvLinkErrorCounter_t (a replay is a packet sent again, a recovery a link trained again: either one
within a scan's interval is worth a warning); NVIDIA DCGM, dcgmlib/src/DcgmGpuHardwareLimits.h (more than 8 PCIe replays
a minute, 100 or more CRC errors a second); NVIDIA's Xid catalogue. Linux
Documentation/ABI/stable/sysfs-class-infiniband and NVIDIA's "Understanding mlx5 Linux Counters" for the meaning of each
counter of a port; thresholds as NVSentinel documents them (docs/configuration/nic-health-monitor.md).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from contracts.finding import Finding, Status
from contracts.tables import read_table
from probes.api import Snapshot, finding
from probes.gpu.facts import Gpu, GpuFacts
from probes.gpu.health import XID_CAUSES, named_xids, xids_of
from probes.gpu.health import finding as gpu_finding
from probes.rdma import probe as rdma
from probes.rdma.facts import RdmaFacts, RdmaPort

NVLINK_COUNTERS = ("replay", "recovery", "receive", "recovery_failed")
"""Of each link: any rise is one too many. From Blackwell on packets received with errors, and links that were lost."""

PER_SECOND = {
    "crc_flit": 100.0,
    "crc_data": 100.0,
    # From Blackwell on, errors that the link's code left. A link carries 4e11 bits a second each way (NVLink 5), and a
    # bit error rate over 1e-12 is no healthy link (ibdiagnet, default of --ber_thresh).
    "effective": 0.4,
    "symbol": 0.4,
}
"""Errors a second from which a counter of each link is worth a warning."""

REPLAYS_PER_MINUTE = 8.0


def gpu_increases(before: GpuFacts, after: GpuFacts, seconds: float) -> Iterator[Finding]:
    """Findings about what increased between two scans of one host, `seconds` apart, under one driver."""
    if before.driver_version != after.driver_version:
        return
    earlier = {_name(gpu): gpu for gpu in before.gpus if _name(gpu)}
    for gpu in after.gpus:
        past = earlier.get(_name(gpu))
        if past is not None:
            yield from _xids(past, gpu, seconds)
            yield from _counters(past, gpu, seconds)
            if risen := tuple(_risen_links(past, gpu, seconds)):
                yield gpu_finding("gpu.nvlink.errors rising", gpu, evidence=risen, seconds=seconds)


def _name(gpu: Gpu) -> str | None:
    """A GPU that was lost between the scans no longer tells its UUID, but may be known by its place."""
    return gpu.bus_id or gpu.uuid


def _rise(start: int | None, end: int | None) -> int:
    """How far a counter rose; one that fell was reset in between, so its rise is unknown and counts as none."""
    return end - start if start is not None and end is not None and end > start else 0


def _xids(before: Gpu, after: Gpu, seconds: float) -> Iterator[Finding]:
    earlier, now = xids_of(before), xids_of(after)
    if earlier is None or now is None:
        return
    new = tuple((Counter(now) - Counter(earlier)).elements())
    for cause in XID_CAUSES:
        if what := named_xids(new, cause):
            yield gpu_finding(f"gpu.xid.new {cause}", after, what=what, seconds=seconds)


def _counters(before: Gpu, after: Gpu, seconds: float) -> Iterator[Finding]:
    replays = _rise(before.pcie_replays, after.pcie_replays)
    # A short interval is held to the whole minute's count: one burst is no rate.
    if replays > REPLAYS_PER_MINUTE * max(seconds / 60.0, 1.0):
        yield gpu_finding(
            "gpu.counters.rising replays", after, rise=replays, before=before, after=after, seconds=seconds
        )
    if errors := _rise(before.ecc_uncorrected, after.ecc_uncorrected):
        yield gpu_finding("gpu.counters.rising", after, rise=errors, before=before, after=after, seconds=seconds)


def _risen_links(before: Gpu, after: Gpu, seconds: float) -> Iterator[str]:
    earlier = {link.link: link.errors or {} for link in before.nvlinks}
    for link in after.nvlinks:
        for name in (*NVLINK_COUNTERS, *PER_SECOND):
            start, end = earlier.get(link.link, {}).get(name), (link.errors or {}).get(name)
            rise = _rise(start, end)
            if rise and rise >= PER_SECOND.get(name, 0.0) * seconds:
                yield f"link {link.link} {name}: {start}, then {end}"


def rdma_increases(before: RdmaFacts, after: RdmaFacts, seconds: float) -> Iterator[Finding]:
    """Findings about counters that rose too fast between two scans of one host, `seconds` apart."""
    earlier = {(d.name, p.port): p for d in before.devices for p in d.ports}
    for device in after.devices:
        for port in device.ports:
            past = earlier.get((device.name, port.port))
            if past is not None:
                yield from _port(f"{device.name}:{port.port}", past, port, seconds)


def _port(subject: str, before: RdmaPort, after: RdmaPort, seconds: float) -> Iterator[Finding]:
    for counter, row in read_table(rdma.__file__, "counters.toml").items():
        start, end = ((port.counters or {}).get(counter) for port in (before, after))
        rise = _rise(start, end)
        # a short interval is held to the whole count: one event is no rate
        if rise > row["count"] * max(seconds / row["seconds"], 1.0):
            yield finding(
                rdma.TEXTS, "rdma.counters.rising", Status(row["status"]), subject, counter=counter, rise=rise,
                seconds=seconds, meaning=row["meaning"], start=start, end=end,
            )  # fmt: skip


PAST_SECONDS = 60.0  # REPLAYS_PER_MINUTE needs scans that are a minute apart
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
        for risen in rising(before, now):
            # the subject without its figures: they differ with the length of the interval
            trouble = re.sub(r"\d+(\.\d+)?", "", risen.message)
            found.setdefault((risen.code, risen.subject, trouble), risen)
    return tuple(found.values())


class Past:
    """Earlier scans to compare with: the last one, and one that is about a minute old."""

    def __init__(self) -> None:
        self._kept: list[tuple[Snapshot, ...]] = []

    def add(self, snapshots: tuple[Snapshot, ...]) -> None:
        """Keep a scan; those that are older than needed are forgotten, of those in between few are kept."""
        if not snapshots:
            return
        now = snapshots[0].taken_at_seconds
        while len(self._kept) > 1 and now - self._kept[1][0].taken_at_seconds >= PAST_SECONDS:
            self._kept.pop(0)
        # Scans that follow each other closely take each other's place: a handful stands for the whole time.
        if len(self._kept) > 1 and now - self._kept[-2][0].taken_at_seconds < PAST_SECONDS / KEPT:
            self._kept.pop()
        self._kept.append(snapshots)

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """The oldest that is kept, and the last."""
        if not self._kept:
            return ()
        return self._kept[0] if len(self._kept) == 1 else (*self._kept[0], *self._kept[-1])
