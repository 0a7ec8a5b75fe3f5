"""All checks of one host that need only a scan: checks of the probes, the topology and the NCCL environment.

Coverage: if a device on the host's PCI bus was not measured, the verdict is "unknown"; no option changes this. A GPU on
the bus makes every gpu.* check required, an HCA every rdma.* check. Devices that are not on the bus may be absent. The
probes that apply to every host must succeed, a driver of GPUs must answer, and without the PCI bus nothing is known.
docs/reference/exit-codes.md states the rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from agent.base import units
from contracts.finding import Finding, Status
from contracts.tables import read_table
from planner.lint.findings import CODES as ENVIRONMENT_CODES
from probes.api import Absent, Failed, Ok, Snapshot, finding
from probes.gpu.facts import GpuFacts
from probes.hostinfo.probe import HostinfoFacts
from probes.increases import CODES as RISING_CODES, find_risen
from probes.interfaces.facts import InterfacesFacts
from probes.limits.probe import LimitsFacts
from probes.pci import probe as pci_probe
from probes.pci.facts import AMD, HABANA, PciFacts, list_other_gpus
from probes.rdma.facts import RdmaFacts
from probes.registry import ALL, SCAN_CODES, check_facts, report_failures
from topology.check import CODES as TOPOLOGY_CODES, check as check_topology, find_role
from topology.graph import NodeTopology

_TEXTS = read_table(__file__, "findings.toml")
ALWAYS_THERE = ("hostinfo", "limits", "pci", "interfaces")  # probes that apply to every host
NOT_REQUIRED: dict[str, str] = read_table(__file__, "rules.toml")["not_required"]
"""Codes that may be unknown although their probe answered, with the reason, which is not a fault of the device."""
_SOFT_RDMA = ("rxe", "siw")  # software RDMA over an Ethernet interface, on no bus


# All finding codes of the product, and findings with the texts of findings.toml next to this module.


def make_finding(
    key: str, node: str, status: Status | None = None, *, subject: str = "", evidence: tuple[str, ...] = (),
    **values: object,
) -> Finding:  # fmt: skip
    """Create the finding with this key of findings.toml for a node, and fill in its texts."""
    return replace(finding(_TEXTS, key, status, subject, evidence, **values), node=node)


def _list_codes(*families: str) -> tuple[str, ...]:
    """Return the codes of findings.toml that begin with one of these words."""
    return tuple(dict.fromkeys(code for key in _TEXTS if (code := key.split()[0]).startswith(families)))


EXPECT_CODES = _list_codes("expect.")
RDMA_BENCH_CODES = _list_codes("bench.rdma.")
BENCH_CODES = tuple(code for code in _list_codes("bench.", "evidence.") if code not in RDMA_BENCH_CODES)
RUN_CODES = _list_codes("run.", "forecast.")
SEARCH_CODES = _list_codes("search.")
CLUSTER_CODES = _list_codes("cluster.")
PROBE_CODES: tuple[str, ...] = tuple(code for probe in ALL for code in probe.codes)
HOST_CODES: tuple[str, ...] = (  # checks that a preflight of a host can perform
    *PROBE_CODES, *SCAN_CODES, *TOPOLOGY_CODES, *ENVIRONMENT_CODES, *EXPECT_CODES, *BENCH_CODES, *RUN_CODES,
)  # fmt: skip
ALL_CODES: tuple[str, ...] = (*HOST_CODES, *RDMA_BENCH_CODES, *SEARCH_CODES, *CLUSTER_CODES)
"""Every finding code of the product: the frozen surface that docs/reference/findings.md and the gate share."""


def mark_required(snapshot: Snapshot, checks: Iterable[Finding]) -> Iterator[Finding]:
    """Mark checks that devices on the PCI bus make required; change a pass without a measurement to unknown."""
    pci = snapshot.facts(PciFacts)
    unread = {"gpu": explain_unread_gpus(snapshot), "rdma": explain_unread_hcas(snapshot)}
    failed = {name for name, outcome in snapshot.outcomes.items() if isinstance(outcome, Failed)}
    required = {*(failed & {*ALWAYS_THERE, "gpu"}), *_find_families(snapshot, pci)}  # without NVML the probe is absent
    optional = NOT_REQUIRED.keys() - ({"rdma.uverbs.missing"} if _needs_device_files(snapshot, pci) else set())
    for check in checks:
        family = check.code.split(".")[0]
        reason = unread.get(family, "")
        proven = check.evidence or check.code.endswith(".probe.failed")  # such a check is not changed
        if reason and check.status in ("pass", "unknown") and not proven:
            check = replace(check, status=Status.UNKNOWN, message=reason)
        excused = check.code in optional and not reason and family not in failed
        is_required = check.status == "unknown" and family in required and not excused
        yield replace(check, required=True) if is_required else check


def _needs_device_files(snapshot: Snapshot, pci: PciFacts | None) -> bool:
    """Return whether a missing device file of RDMA is a fault: on a host, and in a job's container without any.

    In another container a device plugin may have given the file to another pod.
    """
    rdma, limits = snapshot.facts(RdmaFacts), snapshot.facts(LimitsFacts)
    has_files = any(device.uverbs for device in (rdma.devices if rdma else ()))
    is_job_without_files = not has_files and limits is not None and not limits.of_agent
    return is_job_without_files or (pci is not None and pci.container is None)


def _find_families(snapshot: Snapshot, pci: PciFacts | None) -> set[str]:
    """Return the families of checks that devices on this host's bus make required."""
    gpus = snapshot.facts(GpuFacts)
    if pci is None:  # use the GPUs that NVML and sysfs show; one with an address is on a bus that is hidden here
        families = {"gpu"} if gpus is not None and (gpus.gpus or gpus.driver_error) else set()
        return families | {"pci" for gpu in (gpus.gpus if gpus is not None else ()) if gpu.bus_id}
    families = {"gpu"} if pci_probe.list_gpus(pci) or pci_probe.list_foreign_accelerators(pci) else set()
    return families | ({"rdma"} if pci_probe.list_hcas(pci) else set())


def explain_unread_gpus(snapshot: Snapshot) -> str:
    """Return why no GPU on the bus could be read; empty if one was read or there is none."""
    pci, facts = snapshot.facts(PciFacts), snapshot.facts(GpuFacts)
    on_bus = pci_probe.list_gpus(pci) if pci else ()
    foreign = pci_probe.list_foreign_accelerators(pci) if pci else ()
    if facts is None and on_bus:
        return f"{_number(on_bus, 'GPU')} on the PCI bus, and nothing could be read: {_outcome(snapshot, 'gpu')}"
    if facts is None and foreign:
        maker = {AMD: "AMD", HABANA: "Habana (Gaudi)"}.get(foreign[0].vendor_id, "other")
        return f"{_number(foreign, f'{maker} accelerator')} on the PCI bus: only NVIDIA's are read"
    if facts is None or any(g.error is None for g in facts.gpus) or not (on_bus or facts.gpus or facts.driver_error):
        return ""
    if facts.driver_error:
        return f"no GPU was read: NVML answers {facts.driver_error}"
    return "no GPU was read: " + (f"none of the {len(facts.gpus)} that NVML lists answers" if facts.gpus else
                                  f"NVML lists none of the {len(on_bus)} on the PCI bus")  # fmt: skip


def explain_unread_hcas(snapshot: Snapshot) -> str:
    """Return why no HCA on the bus could be read; empty if one was read or there is none."""
    pci = snapshot.facts(PciFacts)
    if not (on_bus := pci_probe.list_hcas(pci) if pci else ()):
        return ""
    facts = snapshot.facts(RdmaFacts)
    if facts is None:
        return f"{_number(on_bus, 'HCA')} on the PCI bus, and no RDMA device was read: {_outcome(snapshot, 'rdma')}"
    if all(device.kind in _SOFT_RDMA for device in facts.devices):
        return f"{_number(on_bus, 'HCA')} on the PCI bus, and the only RDMA devices are software"
    return ""


def _number(devices: Sequence[object], noun: str) -> str:
    places = [str(getattr(device, "bus_id", "")) for device in devices]
    return f"{units.count(len(devices), noun)} ({units.some(places, limit=4)})"


def _outcome(snapshot: Snapshot, name: str) -> str:
    """Return why a probe has no facts."""
    outcome = snapshot.outcomes.get(name)
    if isinstance(outcome, Absent):
        return f"absent: {outcome.why}"
    return f"the {name} probe {f'failed: {outcome.error}' if isinstance(outcome, Failed) else 'did not run'}"


def is_gdrdma_possible(snapshots: Sequence[Snapshot]) -> bool:
    """Return whether hardware and kernel modules support GPUDirect RDMA on every host."""
    for snapshot in snapshots:
        rdma, pci = snapshot.facts(RdmaFacts), snapshot.facts(PciFacts)
        active = rdma is not None and any(p.state == "ACTIVE" for d in rdma.in_reach for p in d.ports)
        if not active or pci is None or not (pci.peermem_loaded or pci.dmabuf_possible):
            return False
    return bool(snapshots)


# All checks that need only one scan.


def check_snapshot(snapshot: Snapshot) -> tuple[Finding, ...]:
    """Return a result for every code of every probe on one host.

    A check passes only if its probe answered, could evaluate the code and raised no finding. If a probe is absent or
    failed, its checks are "unknown", which is never a pass.
    """
    checks: list[Finding] = []
    for probe in ALL:
        outcome = snapshot.outcomes.get(probe.name)
        if isinstance(outcome, Ok):
            findings = check_facts(snapshot, probe, outcome.facts)
            unjudged = {code: why for code, why in probe.unjudged(outcome.facts).items() if code in probe.codes}
            judged = [code for code in probe.codes if code not in unjudged]
            checks.extend(with_passes(snapshot.hostname, findings, judged))
            for code, reason in unjudged.items():
                checks.extend(make_unmeasured((code,), reason, snapshot.hostname))
        else:
            checks.extend(make_unmeasured(probe.codes, _outcome(snapshot, probe.name), snapshot.hostname))
    checks.extend(with_passes(snapshot.hostname, report_failures(snapshot), SCAN_CODES))
    return tuple(checks)


def make_unmeasured(codes: Iterable[str], reason: str, node: str = "") -> tuple[Finding, ...]:
    """Return these checks as not measured: unknown, never a pass."""
    return tuple(Finding(code=code, status=Status.UNKNOWN, node=node, message=reason) for code in codes)


def with_passes(node: str, findings: Iterable[Finding], codes: Sequence[str]) -> tuple[Finding, ...]:
    """Return the findings with their node, and a pass for each of `codes` that was evaluated without a finding."""
    marked = tuple(replace(finding, node=node) for finding in findings)
    raised = {finding.code for finding in marked}
    passed = (Finding(code=code, status=Status.PASS, node=node) for code in codes if code not in raised)
    return (*marked, *passed)


def check_node(snapshot: Snapshot, node: NodeTopology) -> tuple[Finding, ...]:
    """Run all checks of a node that need only a scan: of the probes, the topology and the NCCL environment."""
    names = {gpu.bus_id: gpu.name for gpu in node.gpus if gpu.bus_id}
    snapshot = with_topology(snapshot, node)
    of_probes = (
        _lower_socket_finding(snapshot, _add_gpu_name(check, names))
        for check in mark_required(snapshot, check_snapshot(snapshot))
    )
    findings = (*of_probes, *check_environment(snapshot, node))
    if not node.gpus:
        unread = explain_unread_gpus(snapshot)
        why = f"no link is known: {unread}" if unread else "absent: no GPU on this host, so there is no link to judge"
        return (*findings, *make_unmeasured(TOPOLOGY_CODES, why, snapshot.hostname))
    host, pci, limits = snapshot.facts(HostinfoFacts), snapshot.facts(PciFacts), snapshot.facts(LimitsFacts)
    of_topology = check_topology(
        node,
        gdr_level=host.nccl_variables.get("NCCL_NET_GDR_LEVEL") if host else None,
        gpus_on_bus=pci_probe.count_bare_metal_gpus(pci) if pci else None,
        in_container=pci is None or pci.container is not None,
        of_job=limits is not None and limits.container is not None and not limits.of_agent,
    )
    judged = with_passes(snapshot.hostname, of_topology, TOPOLOGY_CODES)
    if node.nvlink_known:
        return (*findings, *judged)
    why = "the NVLinks of these GPUs could not be read"
    links = [c for c in judged if c.status == "pass" and c.code.startswith("topology.nvlink.")]
    return (*findings, *(replace(c, status=Status.UNKNOWN, message=why) if c in links else c for c in judged))


def with_topology(snapshot: Snapshot, node: NodeTopology) -> Snapshot:
    """Add facts that need the topology: roles of RDMA devices, the number of GPUs, the backend of collectives.

    A role is set if the node's topology determines it. Without a GPU, the backend is gloo. Specification: NCCL
    src/graph/search.cc, ncclTopoSelectNets: the nets of each GPU are tried by path type, nearest first. If every GPU
    has a NIC near it, a NIC that is nearest to no GPU therefore carries no collective.
    """
    pci = snapshot.facts(PciFacts)
    on_bus = not isinstance(snapshot.outcomes.get("pci"), Absent)
    if pci is not None:
        on_bus = bool(pci_probe.list_gpus(pci) or list_other_gpus(pci))
    if not node.gpus and not on_bus:
        snapshot = snapshot.with_facts(InterfacesFacts, lambda facts: replace(facts, backend="gloo"))
    snapshot = snapshot.with_facts(LimitsFacts, lambda facts: replace(facts, gpus=len(node.gpus)))
    return snapshot.with_facts(RdmaFacts, lambda facts: replace(
        facts, devices=tuple(replace(d, role=find_role(node, d, facts.devices)) for d in facts.devices)))  # fmt: skip


def _lower_socket_finding(snapshot: Snapshot, check: Finding) -> Finding:
    """Lower a finding about a slow host interface if RDMA or Google's plugin carries the data.

    On a pod's default network the finding is not changed, because a scan does not prove that RDMA works in the pod.
    """
    rdma, host = snapshot.facts(RdmaFacts), snapshot.facts(HostinfoFacts)
    interfaces = snapshot.facts(InterfacesFacts)
    if check.code != "interfaces.choice.wrong" or check.status not in ("warn", "fail") or interfaces is None:
        return check
    ports = [port for device in rdma.devices if device.kind in ("hca", "efa") for port in device.ports] if rdma else []
    plugin = host is not None and any("tcpx" in path for path in host.vendor_files)
    carrier = "RDMA" if any(port.state == "ACTIVE" for port in ports) else "The TCPX plugin" * plugin
    of_host = any(i.name == check.subject and i.role in ("host", "unknown") for i in interfaces.interfaces)
    if not (carrier and of_host):
        return check
    message = f"{check.message} {carrier} carries the data here: sockets only start the job."
    return replace(check, status=Status.INFO, message=message)


def _add_gpu_name(check: Finding, names: Mapping[str, str]) -> Finding:
    """Add the GPU's name to a check of the PCI probe, which knows only the address."""
    name, sentence = names.get(check.subject), check.message.removeprefix("The GPU ")
    return check if name is None or sentence == check.message else replace(check, message=f"{name} {sentence}")


def add_rising_counters(checks: Sequence[Finding], earlier: Sequence[Snapshot], now: Snapshot) -> tuple[Finding, ...]:
    """Add checks of counters that rose since earlier scans; without an earlier scan these checks are unknown."""
    same_host = (old for old in earlier if old.hostname == now.hostname)
    past = [old for old in same_host if old.taken_at_seconds < now.taken_at_seconds]  # a replayed recording is one scan
    if not past:
        reason = "needs two scans: a single one shows totals since the driver was loaded, not what rises"
        return tuple(
            replace(c, status=Status.UNKNOWN, message=reason) if c.code in RISING_CODES and c.status == "pass" else c
            for c in checks
        )
    risen = with_passes(now.hostname, find_risen(past, now), ())
    raised = {check.code for check in risen}
    return (*(check for check in checks if check.status != "pass" or check.code not in raised), *risen)


def check_environment(snapshot: Snapshot, node: NodeTopology) -> tuple[Finding, ...]:
    """Check the NCCL variables that a job would get on this host against the hardware."""
    host = snapshot.facts(HostinfoFacts)
    if host is None or host.nccl_environment is None:
        reason = "the environment of this host was not read"
        return make_unmeasured(ENVIRONMENT_CODES, reason, snapshot.hostname)
    findings: list[Finding] = []
    for source, environment in {"process": host.nccl_environment, "nccl.conf": host.nccl_conf}.items():
        if environment:
            from planner.lint.environment import lint  # not needed on most hosts
            from planner.lint.machine import machine_of
            from planner.lint.script import NamedEnvironment

            process_environment = NamedEnvironment(source=f"{snapshot.hostname} {source}", environment=environment)
            findings += lint(process_environment, machine=machine_of(snapshot, node))
    return with_passes(snapshot.hostname, findings, ENVIRONMENT_CODES)
