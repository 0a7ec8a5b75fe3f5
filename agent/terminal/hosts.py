"""Print scans: the verdict, the hardware of each host, what each probe read, and the findings in brief."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.markup import escape

from agent.base import units
from agent.base.lines import mark, print_bullet, print_headline, print_properties, table
from agent.checks.expect import judge_gdr
from agent.checks.findings import ORDER, FindingGroup, group_findings, is_problem, list_codes
from agent.checks.verdict import Verdict
from agent.checks.view import View
from agent.terminal.findings import print_findings, print_group
from agent.terminal.topology import list_link_properties
from contracts.finding import Finding
from contracts.host_list import list_names
from probes.api import Absent, Failed, Ok, Snapshot
from probes.gpu.facts import GpuFacts
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import Interface, InterfacesFacts
from probes.limits.probe import LimitsFacts, format_size as format_limit
from probes.pci.facts import PciFacts
from probes.rdma.facts import RdmaFacts, RdmaPort
from topology.graph import NodeTopology

TODO = {"pass": "Nothing to do.", "unknown": "Read the reasons below, then measure again."}


def print_scan(out: Console, view: View, *, verbose: bool, everything: bool) -> None:
    """Print the verdict of a scan, the hosts and their findings."""
    host = view.snapshots[0].hostname if len(view.snapshots) == 1 else ""
    print_verdict(out, view.verdict, view.checks, host=host)
    if not verbose:
        print_hosts_brief(out, view.snapshots, view.topologies, view.checks)
        print_findings_brief(out, view.checks)
        return
    for snapshot in view.snapshots:
        print_host(out, snapshot)
        out.print("\n[bold]Findings[/bold]")
        print_findings(out, [check for check in view.checks if check.node == snapshot.hostname], everything=everything)
    if view.verdict.word in ("fail", "warn"):
        out.print("[dim]scan always exits with 0; `topoflight preflight` turns this verdict into an exit code[/dim]")


def print_hosts_brief(
    out: Console, snapshots: Sequence[Snapshot], topologies: Sequence[NodeTopology], checks: Sequence[Finding]
) -> None:
    """Print one machine in a few rows; for several hosts, the healthy ones by hardware."""
    hosts = list(zip(snapshots, topologies, strict=True))
    if len(hosts) == 1:
        print_properties(out, list_hardware_properties(*hosts[0]))
    else:
        domains = [frozenset(gpu.nvlink_domain for gpu in node.gpus if gpu.nvlink_domain) for _, node in hosts]
        is_shared = len({*domains}) < len(hosts)  # otherwise each may be that of a host's own board
        kinds = []
        for (snapshot, node), own_domains in zip(hosts, domains, strict=True):
            domain_text = "".join(f"; NVLink domain {domain}" for domain in sorted(own_domains) if is_shared)
            kinds.append((snapshot.hostname, f"{_describe_gpus(snapshot, node)}; RDMA {_rdma(snapshot)}{domain_text}"))
        print_healthy_nodes(out, kinds, checks)


def print_host(out: Console, snapshot: Snapshot) -> None:
    """Print the hardware of one host, one row per probe, including absent and failed probes."""
    out.print(f"\n[bold]{escape(snapshot.hostname)}[/bold]")
    rows = table("probe", "found")
    for name, outcome in snapshot.outcomes.items():
        for number, line in enumerate(describe_outcome(outcome)):
            text = f"[red]{escape(line)}[/red]" if isinstance(outcome, Failed) else escape(line)
            rows.add_row("" if number else name, text)
    out.print(rows)


def describe_outcome(outcome: Ok[Any] | Absent | Failed) -> list[str]:
    """Return what a probe found in a few lines, or why it found nothing."""
    if isinstance(outcome, Absent):
        return [f"absent: {outcome.why}"]
    return [f"failed: {outcome.error}"] if isinstance(outcome, Failed) else describe_facts(outcome.facts)


def describe_facts(facts: Any) -> list[str]:
    """Return one probe's facts in a few lines."""
    if isinstance(facts, HostinfoFacts):
        sockets = units.count(facts.sockets, "socket") if facts.sockets else "sockets unknown"
        threads = units.count(facts.threads, "thread") if facts.threads else "threads unknown"
        machine = f", virtual machine ({facts.virtual_machine})" if facts.virtual_machine else ""
        return [f"{facts.cpu_name or 'unknown CPU'}: {sockets}, {threads}, {units.size(facts.memory_bytes)}{machine}"]
    if isinstance(facts, GpuFacts):
        names = sorted({gpu.name or "unknown model" for gpu in facts.gpus})
        lost = [gpu.index for gpu in facts.gpus if gpu.error]
        suffix = f"; not answering: {lost}" if lost else ""
        return [f"{len(facts.gpus)} x {', '.join(names)}, driver {facts.driver_version or 'unknown'}{suffix}"]
    if isinstance(facts, RdmaFacts):
        ports = [f"{device.name}:{port.port} {device.kind} {_describe_port(port)} {port.link_layer or ''}"
                 f"{f' netdev {port.netdev}' if port.netdev else ''}"
                 for device in facts.devices for port in device.ports]  # fmt: skip
        return [*ports, *(f"{one.name} {one.kind}, no port" for one in facts.devices if not one.ports)] or ["no device"]
    if isinstance(facts, InterfacesFacts):
        return [
            f"{i.name} {i.role}{f' ({i.kind})' if i.kind else ''} mtu {i.mtu_bytes or '?'} {_describe_speed(i)} "
            f"{' '.join(i.addresses[:2])}{' ← NCCL uses this one' if i.name == facts.nccl_choice else ''}"
            for i in facts.interfaces
        ]
    if isinstance(facts, LimitsFacts):
        memlock = format_limit(facts.memlock_soft_bytes) if facts.memlock_known else "unknown"
        return [f"memlock {memlock}, /dev/shm {units.size(facts.shm_size_bytes)}, of {facts.whose}"]
    if isinstance(facts, PciFacts):
        return [units.count(len(facts.devices), "PCI device")]
    # a probe without lines of its own: its values, and the number of entries of each list
    named = ((field.name.replace("_", " "), getattr(facts, field.name)) for field in fields(facts))
    counted = ((name, len(value) if isinstance(value, tuple) else value) for name, value in named if value is not None)
    texts = (f"{name}: {('no', 'yes')[value] if isinstance(value, bool) else value}" for name, value in counted)
    return [", ".join(texts) or "nothing"]


def _describe_port(port: RdmaPort) -> str:
    return f"{port.state or 'state unknown'} {port.rate_text or units.bits(port.rate_bytes_per_second)}"


def _describe_speed(interface: Interface) -> str:
    return units.bits(interface.speed_bytes_per_second) if interface.speed_bytes_per_second else "speed unknown"


def print_verdict(out: Console, judged: Verdict, checks: Iterable[Finding], *, host: str = "") -> None:
    """Print the verdict, its reason, and the first action."""
    bad = [group for group in sort_by_weight(checks) if group.status in ("fail", "warn")]
    first = next((group for group in bad if group.status == judged.word), None)
    line, todo = judged.why, TODO.get(judged.word, "")
    if first is not None:
        others = f" and {units.count(len(bad) - 1, 'more finding')}" if len(bad) > 1 else ""
        where = _describe_place(first, is_host_known=bool(host))
        line, todo = f"{first.title} {where}".rstrip() + f"{others} ({line})", first.remedy
    elif judged.word == "unknown":
        required = (group for group in group_findings(checks) if group.status == "unknown" and group.required)
        todo = next((group.remedy for group in required if group.remedy), todo)
    print_headline(out, judged.word, f"{host}: {line}" if host else line, todo)


def _describe_place(group: FindingGroup, *, is_host_known: bool) -> str:
    """Return where a finding is: "on GPU3 of gpu-01", "on gpu-01"; without the host if the reader knows it."""
    place = group.place if len(group.nodes) < 2 and len(group.subjects) == 1 else group.places
    if is_host_known or len(group.nodes) != 1:
        return place
    return f"{place} of {group.nodes[0]}" if place else f"on {group.nodes[0]}"


def sort_by_weight(checks: Iterable[Finding]) -> list[FindingGroup]:
    """Return faults worst first; of equal severity, those on most nodes first."""
    return sorted(group_findings(checks), key=lambda group: (ORDER.index(group.status), -len(group.nodes)))


def print_healthy_nodes(out: Console, hosts: Sequence[tuple[str, str]], checks: Sequence[Finding]) -> None:
    """Print the nodes without problems by hardware; `hosts` are pairs of name and hardware.

    A node with a failure, a warning or a required check that could not run is not among them.
    """
    bad = {name for check in filter(is_problem, checks) for name in check.node.split(", ")}
    kinds: dict[str, list[str]] = {}
    for name, kind in hosts:
        if name not in bad:
            kinds.setdefault(kind, []).append(name)
    for kind, names in sorted(kinds.items(), key=lambda item: -len(item[1])):
        word = "pass" if "absent: " not in kind.partition(";")[0] else "unknown"
        text = f"{units.count(len(names), 'node')}, {kind}: {list_names(names)}"
        print_bullet(out, mark(word), escape(text))


def print_findings_brief(out: Console, checks: Iterable[Finding]) -> None:
    """Print failures, warnings and required checks that were not measured, each once with its nodes; count the rest."""
    groups = sort_by_weight(checks)
    checks = [check for group in groups for check in group.checks]
    several_nodes = len({check.node for check in checks if check.node}) > 1
    for group in groups:
        if is_problem(group):
            print_group(out, group, nodes_named=several_nodes, brief=True)
    infos = len({group.id for group in groups if group.status == "info"})
    quiet = [units.count(infos, "note")] if infos else []
    if unknown := list_codes(groups, "unknown"):
        families = Counter(code.split(".")[0] for code in unknown)
        each = ", ".join(f"{name} {number}" for name, number in families.items())
        quiet.append(f"{units.count(len(unknown), 'check')} could not run ({each})")
    out.print(f"[dim]{'; '.join([*quiet, '-v shows details'])}[/dim]")


def list_hardware_properties(snapshot: Snapshot, topology: NodeTopology) -> Iterator[tuple[str, str]]:
    """Return the hardware of a host: GPUs, links, RDMA, sockets; a probe without a result shows the reason."""
    yield "GPUs", _describe_gpus(snapshot, topology)
    yield from list_link_properties(topology)
    yield "RDMA", _rdma(snapshot)
    if topology.gpus and snapshot.facts(RdmaFacts) is not None:
        yield "GPUDirect", judge_gdr(snapshot, topology)[1].removeprefix("GPUDirect RDMA is ")
    sockets = snapshot.facts(InterfacesFacts)
    interface = next((i for i in sockets.interfaces if i.name == sockets.nccl_choice), None) if sockets else None
    if interface is not None:
        yield "sockets", f"NCCL uses {interface.name}, {_describe_speed(interface)}"
    else:
        yield "sockets", _explain_no_facts(snapshot, "interfaces") or "NCCL's choice unknown"


def _describe_gpus(snapshot: Snapshot, topology: NodeTopology) -> str:
    facts = snapshot.facts(GpuFacts)
    if facts is None:
        return _explain_no_facts(snapshot, "gpu")
    if facts.driver_error:
        return f"{facts.pci_gpus or 'number unknown'} on the PCI bus, none readable: NVML answers {facts.driver_error}"
    models = Counter(gpu.name or "unknown model" for gpu in facts.gpus)
    each = ", ".join(f"{number} x {name}" for name, number in models.items()) or "none"
    return f"{each}, driver {facts.driver_version or 'unknown'}{f' ({topology.sku})' if topology.sku else ''}"


def _rdma(snapshot: Snapshot) -> str:
    facts = snapshot.facts(RdmaFacts)
    if facts is None:
        return _explain_no_facts(snapshot, "rdma")
    ports = Counter(_describe_port(port) for device in facts.in_reach for port in device.ports)
    return ", ".join(f"{number} x {kind}" for kind, number in ports.most_common()) or "no port"


def _explain_no_facts(snapshot: Snapshot, probe: str) -> str:
    outcome = snapshot.outcomes.get(probe)
    return describe_outcome(outcome)[0] if isinstance(outcome, Absent | Failed) else ""
