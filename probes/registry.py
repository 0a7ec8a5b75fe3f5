"""The probes a scan runs, in order, and what they find. One line in `ALL` is all that a new probe needs here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from contracts.finding import Finding, Status
from probes.api import Failed, Probe, Snapshot
from probes.gpu import probe as gpu
from probes.gpu.facts import GpuFacts
from probes.hostinfo import probe as hostinfo
from probes.imex import probe as imex
from probes.interfaces import probe as interfaces
from probes.limits import probe as limits
from probes.pci import probe as pci
from probes.rdma import probe as rdma
from probes.rdma.facts import RdmaFacts

ALL: tuple[Probe[Any], ...] = (
    hostinfo.PROBE,
    limits.PROBE,
    pci.PROBE,
    gpu.PROBE,
    rdma.PROBE,
    interfaces.PROBE,
    imex.PROBE,
)
BY_NAME = {probe.name: probe for probe in ALL}

SCAN_CODES = tuple(f"{name}.probe.failed" for name in BY_NAME)
"""Codes of the finding that a failed probe becomes."""


def findings_of(snapshot: Snapshot, probe: Probe[Any], facts: Any) -> tuple[Finding, ...]:
    """What a probe finds wrong with its facts, without what the facts of another probe of this snapshot disprove.

    A part of sysfs may be hidden (a container, another root): what talks to the device knows better.
    """
    seen = (_beside_the_driver(snapshot, _beside_rdma(snapshot, finding)) for finding in probe.check(facts))
    return tuple(finding for finding in seen if finding is not None)


def _beside_the_driver(snapshot: Snapshot, finding: Finding | None) -> Finding | None:
    """A GPU that NVML lists has its driver."""
    if finding is None or finding.code != "pci.device.no_driver":
        return finding
    gpus = snapshot.facts(GpuFacts)
    listed = gpus is not None and any(gpu.bus_id == finding.subject and gpu.error is None for gpu in gpus.gpus)
    return None if listed else finding


def _beside_rdma(snapshot: Snapshot, finding: Finding) -> Finding | None:
    """A NIC whose RDMA device is listed has one; where a device's own NIC is not known, it may be this one's."""
    rdma = snapshot.facts(RdmaFacts)
    if finding.code != "pci.nic.no_rdma" or rdma is None:
        return finding
    if any(device.bus_id == finding.subject for device in rdma.devices):
        return None
    unplaced = [device.name for device in rdma.devices if device.bus_id is None and device.kind not in ("rxe", "siw")]
    if not unplaced:
        return finding
    return replace(
        finding,
        status=Status.UNKNOWN,
        message=f"Whether this NIC has an RDMA device is unknown: sysfs does not place {', '.join(unplaced[:4])}.",
        remedy="Scan on the host, with all of /sys.",
    )


def failures(snapshot: Snapshot) -> tuple[Finding, ...]:
    """One finding for each probe that could not finish."""
    outcomes = snapshot.outcomes.items()
    return tuple(_failed(name, outcome) for name, outcome in outcomes if isinstance(outcome, Failed))


def _failed(name: str, outcome: Failed) -> Finding:
    return Finding(
        code=f"{name}.probe.failed",
        status=Status.UNKNOWN,
        subject=name,
        message=f"the {name} probe could not finish: {outcome.error}",
        evidence=(f"{outcome.seconds:.1f} s: {outcome.error}",),
        remedy="Run `topoflight scan` on the host itself and look at dmesg; a hung driver needs a reboot.",
    )
