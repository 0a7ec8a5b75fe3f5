"""Hosts on the terminal: one row per probe."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from agent.base import units
from agent.base.tables import pairs, table
from agent.checks.view import View
from agent.terminal import brief
from agent.terminal.findings import findings
from contracts.finding import Finding
from probes.api import Absent, Failed, Ok, Snapshot
from probes.gpu.facts import GpuFacts
from probes.hostinfo.probe import HostinfoFacts
from probes.interfaces.facts import InterfacesFacts
from probes.limits.probe import LimitsFacts
from probes.rdma.facts import RdmaFacts
from topology.graph import NodeTopology


def scan(out: Console, view: View, *, verbose: bool, everything: bool) -> None:
    """The verdict of what a scan shows, hosts and their findings."""
    one = view.snapshots[0].hostname if len(view.snapshots) == 1 else ""
    brief.opening(out, view.verdict, view.checks, at=one)
    if not verbose:
        hosts_in_brief(out, view.snapshots, view.topologies, view.checks)
        brief.findings(out, view.checks)
        return
    for snapshot in view.snapshots:
        host(out, snapshot)
        out.print("\n[bold]Findings[/bold]")
        findings(out, [check for check in view.checks if check.node == snapshot.hostname], everything=everything)
    if view.verdict.word in ("fail", "warn"):
        out.print("[dim]scan only tells; `topoflight preflight` turns this into an exit code[/dim]")


def hosts_in_brief(
    out: Console, snapshots: Sequence[Snapshot], topologies: Sequence[NodeTopology], checks: Sequence[Finding]
) -> None:
    """One machine in a few rows; of several those that are sound, by kind."""
    found = list(zip(snapshots, topologies, strict=True))
    if len(found) == 1:
        pairs(out, brief.machine(*found[0]))
    else:
        brief.nodes(out, [(each[0].hostname, brief.kind(*each)) for each in found], checks)


def host(out: Console, snapshot: Snapshot) -> None:
    """What one host has, one row per probe; absent and failed ones say so."""
    out.print(f"\n[bold]{escape(snapshot.hostname)}[/bold]")
    rows = table("probe", "found")
    for name, outcome in snapshot.outcomes.items():
        if isinstance(outcome, Absent):
            rows.add_row(name, f"absent: {escape(outcome.why)}")
        elif isinstance(outcome, Failed):
            rows.add_row(name, f"[red]failed: {escape(outcome.error)}[/red]")
        elif isinstance(outcome, Ok):
            for line in facts_lines(outcome.facts):
                rows.add_row(name, escape(line))
                name = ""
    out.print(rows)


def facts_lines(facts: object) -> list[str]:
    """One probe's facts in a few lines."""
    if isinstance(facts, HostinfoFacts):
        where = f", virtual machine ({facts.virtual_machine})" if facts.virtual_machine else ""
        return [
            f"{facts.cpu_name or 'unknown CPU'}: {_counted(facts.sockets, 'socket')}, "
            f"{_counted(facts.threads, 'thread')}, {units.size(facts.memory_bytes)}{where}",
            *(f"NUMA {n.node}: CPUs {_cpus(n.cpus)}" for n in facts.numa),
        ]
    if isinstance(facts, GpuFacts):
        names = sorted({gpu.name or "unknown model" for gpu in facts.gpus})
        lost = [gpu.index for gpu in facts.gpus if gpu.error]
        text = f"{len(facts.gpus)} x {', '.join(names)}, driver {facts.driver_version or 'unknown'}"
        return [text + (f"; not answering: {lost}" if lost else "")]
    if isinstance(facts, RdmaFacts):
        return _rdma_lines(facts)
    if isinstance(facts, InterfacesFacts):
        return _interface_lines(facts)
    if isinstance(facts, LimitsFacts):
        soft = (
            "unlimited"
            if facts.memlock_soft_bytes is None and facts.memlock_known
            else units.size(facts.memlock_soft_bytes)
        )
        return [f"memlock {soft}, /dev/shm {units.size(facts.shm_size_bytes)}, of {facts.whose}"]
    devices = getattr(facts, "devices", None)
    return [units.count(len(devices), "PCI device") if devices is not None else type(facts).__name__]


def _rdma_lines(facts: RdmaFacts) -> list[str]:
    lines = []
    for device in facts.devices:
        for port in device.ports:
            lines.append(
                f"{device.name}:{port.port} {device.kind} {port.state or 'state unknown'} "
                f"{port.rate_text or units.bits(port.rate_bytes_per_second)} {port.link_layer or ''}"
                f"{f' netdev {port.netdev}' if port.netdev else ''}"
            )
        if not device.ports:
            lines.append(f"{device.name} {device.kind}, no port")
    return lines or ["no device"]


def _interface_lines(facts: InterfacesFacts) -> list[str]:
    return [
        f"{i.name} {i.role}{f' ({i.kind})' if i.kind else ''} mtu {i.mtu_bytes or '?'} "
        f"{units.bits(i.speed_bytes_per_second) if i.speed_bytes_per_second else 'speed unknown'} "
        f"{' '.join(i.addresses[:2])}"
        f"{' ← NCCL takes this one' if i.name == facts.nccl_choice else ''}"
        for i in facts.interfaces
    ]


def _counted(number: int | None, one: str) -> str:
    return f"{one}s unknown" if number is None else units.count(number, one)


def _cpus(text: str) -> str:
    """A kernel's CPU list; one that alternates between sockets is long, and its number says more."""
    parts = text.split(",")
    if len(parts) < 5:
        return text
    ends = [part.partition("-") for part in parts]
    total = sum(int(last or first) - int(first) + 1 for first, _, last in ends if first.isdecimal())
    return f"{','.join(parts[:3])} … {parts[-1]} ({total} CPUs)"
