"""Runs probes on a host: in this process for recordings, in a child that may hang or crash for a live machine.

Exceptions are caught here and nowhere else in this package: UnavailableError becomes `Absent`, any other `Failed`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

from contracts.finding import Finding, Status
from probes.api import Absent, Failed, Ok, Probe, Snapshot, UnavailableError
from probes.gpu.facts import GpuFacts
from probes.host.protocol import Host, Json
from probes.rdma.facts import RdmaFacts
from probes.registry import ALL, BY_NAME
from probes.wire import Outcome, SnapshotError, outcome_from_json, outcome_to_json

SCAN_CODES = tuple(f"{name}.probe.failed" for name in BY_NAME)
"""Codes of the finding that a failed probe becomes."""


def version() -> str:
    """The installed release of Topoflight."""
    try:
        return metadata.version("topoflight")
    except metadata.PackageNotFoundError:
        return "unknown"


def run(probe: Probe[Any], host: Host) -> Outcome:
    """One probe on one host; never raises for what the probe does."""
    start = time.perf_counter()
    try:
        facts = probe.read(host)
    except UnavailableError as error:
        return Absent(why=str(error), seconds=time.perf_counter() - start)
    except Exception as error:  # noqa: BLE001 - the one place: a probe's error is an outcome
        return Failed(error=f"{type(error).__name__}: {error}", seconds=time.perf_counter() - start)
    return Ok(facts=facts, seconds=time.perf_counter() - start)


def scan(host: Host, probes: Sequence[Probe[Any]] = ALL) -> Snapshot:
    """Run the probes in this process: for recordings, which cannot hang."""
    return snapshot_of(host.identity(), {probe.name: _fitting(probe.name, run(probe, host)) for probe in probes})


def snapshot_of(identity: dict[str, Json], outcomes: dict[str, Outcome]) -> Snapshot:
    """The snapshot of a host of this identity (`Host.identity`)."""
    return Snapshot(
        hostname=identity["hostname"],
        taken_at_seconds=identity["time"],
        topoflight_version=version(),
        outcomes=outcomes,
    )


def _fitting(name: str, outcome: Outcome) -> Outcome:
    """The outcome, where its facts are of the kinds they are declared to be: a recording may hold anything."""
    try:
        outcome_from_json(name, outcome_to_json(outcome))
    except SnapshotError as error:
        return Failed(error=str(error), seconds=outcome.seconds)
    return outcome


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
