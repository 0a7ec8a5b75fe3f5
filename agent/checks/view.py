"""What the agent knows at one moment: computed once per scan, read by every request."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from agent.checks.coverage import covered, no_gpu_read
from agent.checks.expect_checks import EXPECT_CODES, checks_of, settled
from agent.checks.verdict import Verdict, judge
from contracts.finding import Finding, Status
from contracts.redaction import redact
from planner.lint.environment import lint
from planner.lint.machine import machine_of, recorded_environments
from planner.lint.values import CODES as ENVIRONMENT_CODES
from probes.api import Absent, Failed, Ok, Snapshot
from probes.gpu.facts import GpuFacts
from probes.gpu.health import FREE_MEMORY, is_full, subject_of
from probes.hostinfo.probe import HostinfoFacts
from probes.increases import CODES as RISING_CODES
from probes.increases import risen_since
from probes.interfaces.facts import InterfacesFacts
from probes.pci.facts import PciFacts, bare_metal_gpus
from probes.rdma.facts import RdmaFacts
from probes.registry import ALL
from probes.scan import SCAN_CODES, failures, findings_of
from topology import check as topology_check
from topology.build import build, with_topology
from topology.cluster import join
from topology.graph import ClusterTopology, NodeTopology

if TYPE_CHECKING:
    from agent.base.result_store import Line
    from agent.checks.expect import Expectation
    from agent.checks.history import Event
    from collectives.bench.results import BenchResult
    from contracts.run_record import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Snapshots, what follows from them, and the last results of benchmark and runs."""

    snapshots: tuple[Snapshot, ...]
    topologies: tuple[NodeTopology, ...]
    cluster: ClusterTopology
    checks: tuple[Finding, ...]
    verdict: Verdict
    made_at_seconds: float
    made_at_monotonic: float = field(default_factory=time.monotonic)  # seconds; a clock that jumps does not age a view
    bench: BenchResult | None = None
    bench_at_seconds: float | None = None
    benches: tuple[Line, ...] = ()  # a line of each benchmark that is remembered, newest first
    runs: tuple[RunRecord, ...] = ()  # newest first
    events: tuple[Event, ...] = ()  # the newest, oldest first; of the resident agent's own host
    since: Mapping[tuple[str, str], float] = field(default_factory=dict)  # Unix time of each finding: code, subject


def look(
    snapshots: Sequence[Snapshot],
    *,
    benches: tuple[Line, ...] = (),
    runs: tuple[RunRecord, ...] = (),
    earlier: Sequence[Snapshot] = (),
    expected: Expectation | str | None = None,
) -> View:
    """Derive topology, checks and verdict from snapshots; `earlier` ones of the same hosts show what rises.

    `expected` is what each of them must have, or why that could not be read.
    """
    topologies = tuple(build(snapshot) for snapshot in snapshots)
    checks: list[Finding] = []
    for snapshot, node in zip(snapshots, topologies, strict=True):
        past = tuple(old for old in earlier if old.hostname == snapshot.hostname)
        found = with_rising(node_checks(snapshot, node), past, snapshot)
        checks.extend(found if expected is None else settled((*found, *_expected(expected, snapshot, node))))
    return View(
        snapshots=tuple(snapshots),
        topologies=topologies,
        cluster=join(topologies),
        checks=without_secrets(checks),
        verdict=judge(checks),
        made_at_seconds=time.time(),
        benches=benches,
        runs=runs,
    )


def without_secrets(checks: Iterable[Finding]) -> tuple[Finding, ...]:
    """The checks as they may be shown: messages and evidence quote environments, files and the kernel's log."""
    return tuple(check if check.status == "pass" else _redacted(check) for check in checks)


def _redacted(check: Finding) -> Finding:
    evidence = tuple(map(redact, check.evidence))
    return replace(check, message=redact(check.message), evidence=evidence, remedy=redact(check.remedy))


def _expected(expected: Expectation | str, snapshot: Snapshot, node: NodeTopology) -> tuple[Finding, ...]:
    if not isinstance(expected, str):
        return checks_of(expected, snapshot, node, snapshot.hostname)
    return (
        Finding(code=EXPECT_CODES[0], status=Status.UNKNOWN, node=snapshot.hostname, message=expected, required=True),
    )


def only(view: View, hostname: str) -> View:
    """The same view of one node; measurements and runs are of the whole run and stay."""
    others = {snapshot.hostname for snapshot in view.snapshots} - {hostname}
    checks = tuple(check for check in view.checks if hostname in _nodes(check) or not others & _nodes(check))
    return _part(view, {hostname}, checks)


def named(view: View, name: str) -> View:
    """The same view of what is called so: a node, or the checks of a device or of a code. UnknownNameError."""
    hosts = {snapshot.hostname for snapshot in view.snapshots}
    if name in hosts:
        return only(view, name)
    checks = tuple(c for c in view.checks if name == c.code or name in c.subject.split(", "))
    if not checks:
        some = ", ".join(sorted(hosts)[:8])
        raise UnknownNameError(f"{name}: no node, no device with a finding and no finding code here; nodes: {some}")
    return _part(view, {check.node for check in checks}, checks)


def _part(view: View, hosts: Set[str], checks: tuple[Finding, ...]) -> View:
    """The view of these hosts, with these checks of them."""
    pairs = [pair for pair in zip(view.snapshots, view.topologies, strict=True) if pair[0].hostname in hosts]
    topologies = tuple(node for _, node in pairs)
    return replace(
        view, snapshots=tuple(snapshot for snapshot, _ in pairs), topologies=topologies, cluster=join(topologies),
        checks=checks, verdict=judge(checks),
    )  # fmt: skip


class UnknownNameError(ValueError):
    """A name that nothing in a view has."""


def _nodes(check: Finding) -> set[str]:
    """The nodes of a check: several where it is of a run over several, whose names need not be those of a scan."""
    return set(check.node.split(", "))


def checks_of_snapshot(snapshot: Snapshot) -> tuple[Finding, ...]:
    """Every code of every probe, judged on one host.

    A check passes only where its probe answered, could judge that code and raised nothing under it; a probe that is
    absent or failed leaves its checks "unknown", which is never a pass.
    """
    checks: list[Finding] = []
    for probe in ALL:
        outcome = snapshot.outcomes.get(probe.name)
        if isinstance(outcome, Ok):
            found = findings_of(snapshot, probe, outcome.facts)
            unjudged = {code: why for code, why in probe.unjudged(outcome.facts).items() if code in probe.codes}
            judged = [code for code in probe.codes if code not in unjudged]
            checks.extend(with_passes(snapshot.hostname, found, judged))
            checks.extend(_unknown(snapshot.hostname, unjudged))
            continue
        if isinstance(outcome, Absent):
            why = f"absent: {outcome.why}"
        elif isinstance(outcome, Failed):
            why = f"the {probe.name} probe failed: {outcome.error}"
        else:
            why = f"the {probe.name} probe did not run"
        checks.extend(_unknown(snapshot.hostname, dict.fromkeys(probe.codes, why)))
    checks.extend(with_passes(snapshot.hostname, failures(snapshot), SCAN_CODES))
    return tuple(checks)


def _unknown(node: str, codes: Mapping[str, str]) -> Iterator[Finding]:
    return (Finding(code=code, status=Status.UNKNOWN, node=node, message=why) for code, why in codes.items())


def with_passes(node: str, findings: Iterable[Finding], codes: Sequence[str]) -> tuple[Finding, ...]:
    """The findings on their node, and a pass for each of `codes` that was judged and raised nothing."""
    found = tuple(replace(finding, node=node) for finding in findings)
    raised = {finding.code for finding in found}
    passed = (Finding(code=code, status=Status.PASS, node=node) for code in codes if code not in raised)
    return (*found, *passed)


def node_checks(snapshot: Snapshot, node: NodeTopology) -> tuple[Finding, ...]:
    """All checks that need nothing but a scan: the probes' own, the topology's, and the NCCL environment's."""
    names = {gpu.bus_id: gpu.name for gpu in node.gpus if gpu.bus_id}
    snapshot = with_topology(snapshot, node)
    of_probes = (
        _sockets_only_start(snapshot, _called(check, names))
        for check in covered(snapshot, checks_of_snapshot(snapshot))
    )
    found = (*of_probes, *environment_checks(snapshot, node))
    if not node.gpus:
        unread = no_gpu_read(snapshot)
        why = f"no link is judged: {unread}" if unread else "absent: no GPU on this host, so there is no link to judge"
        silent = (
            Finding(code=c, status=Status.UNKNOWN, node=snapshot.hostname, message=why) for c in topology_check.CODES
        )
        return (*found, *silent)
    host, pci = snapshot.facts(HostinfoFacts), snapshot.facts(PciFacts)
    told = topology_check.check(
        node,
        gdr_level=host.nccl_variables.get("NCCL_NET_GDR_LEVEL") if host else None,
        gpus_on_bus=bare_metal_gpus(pci) if pci else None,
        in_container=pci is None or pci.container is not None,
    )
    judged = with_passes(snapshot.hostname, told, topology_check.CODES)
    if node.nvlink_known:
        return (*found, *judged)
    why = "the NVLinks of these GPUs could not be read"
    return (*found, *(replace(c, status=Status.UNKNOWN, message=why) if _of_nvlink(c) else c for c in judged))


def with_environment(snapshot: Snapshot, environment: Mapping[str, str]) -> Snapshot:
    """The same host as a job with these variables meets it: what the job sets is not to be held against the host."""
    outcomes = dict(snapshot.outcomes)
    for name, outcome in snapshot.outcomes.items():
        if isinstance(outcome, Ok) and isinstance(outcome.facts, HostinfoFacts):
            merged = {**(outcome.facts.nccl_environment or {}), **environment}
            outcomes[name] = replace(outcome, facts=replace(outcome.facts, nccl_environment=merged))
        elif isinstance(outcome, Ok) and isinstance(outcome.facts, InterfacesFacts):
            chosen = environment.get("NCCL_SOCKET_IFNAME") or outcome.facts.socket_ifname
            gloo = environment.get("GLOO_SOCKET_IFNAME") or outcome.facts.gloo_ifname
            outcomes[name] = replace(outcome, facts=replace(outcome.facts, socket_ifname=chosen, gloo_ifname=gloo))
    return replace(snapshot, outcomes=outcomes)


def for_next_job(checks: Iterable[Finding], snapshots: Iterable[Snapshot]) -> tuple[Finding, ...]:
    """The checks as they count for a job that is to start now: memory that a running job fills is not its own."""
    facts = [(snapshot.hostname, found) for snapshot in snapshots if (found := snapshot.facts(GpuFacts)) is not None]
    full = {(node, subject_of(gpu)) for node, found in facts for gpu in found.gpus if is_full(gpu)}
    return tuple(
        replace(check, status=Status.FAIL, remedy=FREE_MEMORY)
        if check.code == "gpu.memory.held" and (check.node, check.subject) in full
        else check
        for check in checks
    )


def _of_nvlink(check: Finding) -> bool:
    return check.status == "pass" and check.code.startswith("topology.nvlink.")


def _sockets_only_start(snapshot: Snapshot, check: Finding) -> Finding:
    """A host's interface that is slower than another costs nothing where RDMA, or Google's plugin, carries the data.

    On a pod's default network it stays what it is: whether the pod's RDMA works is not proven by a scan.
    """
    rdma, host = snapshot.facts(RdmaFacts), snapshot.facts(HostinfoFacts)
    interfaces = snapshot.facts(InterfacesFacts)
    if check.code != "interfaces.choice.wrong" or check.status not in ("warn", "fail") or interfaces is None:
        return check
    devices = [device for device in rdma.devices if device.kind in ("hca", "efa")] if rdma else []
    plugin = host is not None and any("tcpx" in path for path in host.vendor_files)
    carrier = "RDMA" if any(port.state == "ACTIVE" for device in devices for port in device.ports) else ""
    carrier = carrier or "The TCPX plugin" * plugin
    of_host = any(i.name == check.subject and i.role in ("host", "unknown") for i in interfaces.interfaces)
    if not (carrier and of_host):
        return check
    message = f"{check.message} {carrier} carries the data here: sockets only start the job."
    return replace(check, status=Status.INFO, message=message)


def _called(check: Finding, names: Mapping[str, str]) -> Finding:
    """What the PCI probe says of a GPU, which it knows by address only, under the GPU's name."""
    name, words = names.get(check.subject), check.message.removeprefix("The GPU ")
    return check if name is None or words == check.message else replace(check, message=f"{name} {words}")


def with_rising(checks: Sequence[Finding], past: Sequence[Snapshot], now: Snapshot) -> tuple[Finding, ...]:
    """The checks with what rose since earlier scans; without one, that nothing rises is not known."""
    past = [old for old in past if old.taken_at_seconds < now.taken_at_seconds]  # a recording replayed is one scan
    if not past:
        why = "needs two scans: a single one shows totals since the driver was loaded, not what rises"
        return tuple(
            replace(check, status=Status.UNKNOWN, message=why)
            if check.code in RISING_CODES and check.status == "pass"
            else check
            for check in checks
        )
    risen = with_passes(now.hostname, risen_since(past, now), ())
    raised = {check.code for check in risen}
    kept = (check for check in checks if not (check.status == "pass" and check.code in raised))
    return (*kept, *risen)


def environment_checks(snapshot: Snapshot, node: NodeTopology) -> tuple[Finding, ...]:
    """The NCCL variables that this process would hand to a job, linted against the machine."""
    host = snapshot.facts(HostinfoFacts)
    if host is None or host.nccl_environment is None:
        why = "the environment of this host was not read"
        return tuple(
            Finding(code=c, status=Status.UNKNOWN, node=snapshot.hostname, message=why) for c in ENVIRONMENT_CODES
        )
    machine = machine_of(snapshot, node)
    findings = [
        finding
        for named in recorded_environments(snapshot)
        for finding in lint(named.environment, machine=machine, source=named.source)
    ]
    return with_passes(snapshot.hostname, findings, ENVIRONMENT_CODES)
