"""The probes of a scan, in order, and their findings. A new probe needs an import and a line in `ALL` here."""

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
"""Codes of the findings that report a failed probe."""


def check_facts(snapshot: Snapshot, probe: Probe[Any], facts: Any) -> tuple[Finding, ...]:
    """Check the facts of a probe, and drop findings that the facts of another probe of this snapshot disprove.

    Part of sysfs may be hidden (in a container, or under another root). Probes that query a device are more reliable.
    """
    findings = (_reconcile(snapshot, finding) for finding in probe.check(facts))
    return tuple(finding for finding in findings if finding is not None)


def _reconcile(snapshot: Snapshot, finding: Finding) -> Finding | None:
    """Drop a finding about a GPU without driver if NVML lists it, or a NIC without RDMA device if the rdma probe does.

    If the NIC of an RDMA device is unknown, it may be the NIC of the finding, whose status then becomes unknown.
    """
    gpus, rdma = snapshot.facts(GpuFacts), snapshot.facts(RdmaFacts)
    if finding.code == "pci.device.no_driver" and gpus is not None:
        return None if any(gpu.bus_id == finding.subject and gpu.error is None for gpu in gpus.gpus) else finding
    if finding.code != "pci.nic.no_rdma" or rdma is None:
        return finding
    # RoCE LAG has one RDMA device for all functions of a card
    cards = {device.bus_id.rpartition(".")[0] for device in rdma.devices if device.bus_id and device.bond}
    if finding.subject.rpartition(".")[0] in cards or any(d.bus_id == finding.subject for d in rdma.devices):
        return None
    unplaced = [device.name for device in rdma.devices if device.bus_id is None and device.kind not in ("rxe", "siw")]
    if not unplaced:
        return finding
    message = f"Whether this NIC has an RDMA device is unknown: sysfs does not place {', '.join(unplaced[:4])}."
    return replace(finding, status=Status.UNKNOWN, message=message, remedy="Scan on the host, with all of /sys.")


def report_failures(snapshot: Snapshot) -> tuple[Finding, ...]:
    """Return one finding for each probe that could not finish."""
    return tuple(
        Finding(
            code=f"{name}.probe.failed",
            status=Status.UNKNOWN,
            subject=name,
            message=f"the {name} probe could not finish: {outcome.error}",
            evidence=(f"{outcome.seconds:.1f} s: {outcome.error}",),
            remedy="If a file is missing, scan on the host itself. If a driver hangs (look at dmesg), reboot the host.",
        )
        for name, outcome in snapshot.outcomes.items()
        if isinstance(outcome, Failed)
    )
