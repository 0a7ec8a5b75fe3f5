"""Coverage: what a host's PCI bus shows must have been measured, without any option, or the verdict is "unknown".

A GPU on the bus makes every check of gpu.* required, an HCA every check of rdma.*; what the bus does not show may be
absent. A probe of what every host has must have ended, and where the bus itself could not be read nothing is known.
docs/reference/exit-codes.md states the rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from contracts.finding import Finding, Status
from contracts.tables import read_table
from probes.api import Failed, Ok, Snapshot
from probes.gpu.facts import GpuFacts
from probes.pci import facts as pci_facts
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaFacts

ALWAYS_THERE = ("hostinfo", "limits", "pci", "interfaces")  # probes of what every host has
NOT_REQUIRED: dict[str, str] = read_table(__file__, "rules.toml")["not_required"]
"""Unknown although their probe answered, for reasons that do not lie with the device: they are not required."""
_SOFT_RDMA = ("rxe", "siw")  # software over any Ethernet interface: on no bus


def covered(snapshot: Snapshot, checks: Iterable[Finding]) -> tuple[Finding, ...]:
    """The checks of one host with those marked as required that its bus makes so; a pass over nothing is unknown."""
    pci = snapshot.facts(PciFacts)
    unread = {}
    if why := no_gpu_read(snapshot):
        unread["gpu"] = why
    if why := no_hca_read(snapshot):
        unread["rdma"] = why
    failed = {name for name, outcome in snapshot.outcomes.items() if isinstance(outcome, Failed)}
    owed = {*(failed & set(ALWAYS_THERE)), *_shown(snapshot, pci)}
    # On the host itself nobody hands nodes out: one that is not there is no job's either.
    on_host = {"rdma.uverbs.missing"} if pci is not None and pci.container is None else set()
    excused = NOT_REQUIRED.keys() - on_host
    return tuple(_judged(check, owed, unread, failed, excused) for check in checks)


def _judged(
    check: Finding, owed: set[str], unread: dict[str, str], failed: set[str], not_required: set[str]
) -> Finding:
    family = check.code.split(".")[0]
    proven = check.evidence or check.code.endswith(".probe.failed")  # what tells of it stands as it is
    if family in unread and check.status in ("pass", "unknown") and not proven:
        check = replace(check, status=Status.UNKNOWN, message=unread[family])
    excused = check.code in not_required and family not in unread and family not in failed
    if check.status != "unknown" or family not in owed or excused:
        return check
    return replace(check, required=True)


def _shown(snapshot: Snapshot, pci: PciFacts | None) -> set[str]:
    """Families that this host's bus makes required."""
    gpus = snapshot.facts(GpuFacts)
    if pci is None:  # what NVML and sysfs told all the same
        return {"gpu"} if gpus is not None and (gpus.gpus or gpus.driver_error) else set()
    shown = {"gpu"} if pci_facts.gpus(pci) or pci_facts.foreign_accelerators(pci) else set()
    return shown | ({"rdma"} if pci_facts.hcas(pci) else set())


def no_gpu_read(snapshot: Snapshot) -> str:
    """Why nothing is known of GPUs that the bus shows; empty where one was read, or where there is none."""
    pci = snapshot.facts(PciFacts)
    on_bus = pci_facts.gpus(pci) if pci else ()
    foreign = pci_facts.foreign_accelerators(pci) if pci else ()
    facts = snapshot.facts(GpuFacts)
    if facts is None:
        if on_bus:
            return f"{_number(on_bus, 'GPU')} on the PCI bus, and nothing could be read: {_outcome(snapshot, 'gpu')}"
        if foreign:
            return (
                f"{_number(foreign, 'accelerator')} of another vendor on the PCI bus: this release reads NVIDIA's only"
            )
        return ""
    if any(gpu.error is None for gpu in facts.gpus) or not (on_bus or facts.gpus or facts.driver_error):
        return ""
    if facts.driver_error:
        return f"no GPU was read: NVML answers {facts.driver_error}"
    return "no GPU was read: " + (f"none of the {len(facts.gpus)} that NVML lists answers" if facts.gpus else
                                  f"NVML lists none of the {len(on_bus)} on the PCI bus")  # fmt: skip


def no_hca_read(snapshot: Snapshot) -> str:
    """Why nothing is known of HCAs that the bus shows; empty where one was read, or where there is none."""
    pci = snapshot.facts(PciFacts)
    on_bus = pci_facts.hcas(pci) if pci else ()
    if not on_bus:
        return ""
    facts = snapshot.facts(RdmaFacts)
    if facts is None:
        return f"{_number(on_bus, 'HCA')} on the PCI bus, and no RDMA device was read: {_outcome(snapshot, 'rdma')}"
    if all(device.kind in _SOFT_RDMA for device in facts.devices):
        return f"{_number(on_bus, 'HCA')} on the PCI bus, and the only RDMA devices are software"
    return ""


def _number(devices: Sequence[object], one: str) -> str:
    named = ", ".join(str(getattr(device, "bus_id", "")) for device in devices[:4])
    more = f" and {len(devices) - 4} more" if len(devices) > 4 else ""
    return f"{len(devices)} {one}{'' if len(devices) == 1 else 's'} ({named}{more})"


def _outcome(snapshot: Snapshot, name: str) -> str:
    outcome = snapshot.outcomes.get(name)
    if isinstance(outcome, Failed):
        return outcome.error
    if outcome is None:
        return f"the {name} probe did not run"
    return getattr(outcome, "why", "") if not isinstance(outcome, Ok) else ""


def gdrdma_possible(snapshots: Sequence[Snapshot]) -> bool:
    """Whether the hardware and modules could do GPUDirect RDMA on every host."""
    for snapshot in snapshots:
        rdma, pci = snapshot.facts(RdmaFacts), snapshot.facts(PciFacts)
        active = rdma is not None and any(p.state == "ACTIVE" for d in rdma.devices for p in d.ports)
        if not active or pci is None or not (pci.peermem_loaded or pci.dmabuf_possible):
            return False
    return bool(snapshots)
