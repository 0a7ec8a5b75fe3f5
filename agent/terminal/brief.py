"""Ten lines: the verdict and what to do, the machine in a few rows, findings grouped over nodes. The rest is `-v`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.markup import escape

from agent.base import units
from agent.base.tables import COLOURS, GLYPHS, point
from agent.checks.groups import Group, grouped, unknown_ids
from agent.checks.order import ORDER
from agent.checks.verdict import Verdict
from agent.terminal.findings import finding
from agent.terminal.links import links
from contracts.finding import Finding
from probes.api import Absent, Failed, Snapshot
from probes.gpu.facts import GpuFacts
from probes.interfaces.facts import InterfacesFacts
from probes.rdma.facts import RdmaFacts
from topology.graph import NodeTopology

TODO = {"pass": "Nothing to do.", "unknown": "See below why, and measure again."}


def opening(
    out: Console, judged: Verdict, checks: Iterable[Finding], *, at: str = "", seconds: float | None = None
) -> None:
    """The verdict, what it rests on, and what to do first."""
    bad = [group for group in by_weight(checks) if group.status in ("fail", "warn")]
    first = next((group for group in bad if group.status == judged.word), None)
    line, todo = judged.why, TODO.get(judged.word, "")
    if first is not None:
        more = f" and {units.count(len(bad) - 1, 'more finding')}" if len(bad) > 1 else ""
        line, todo = f"{first.title} {_where(first, at)}".rstrip() + f"{more} ({line})", first.remedy
    elif judged.word == "unknown":
        required = (group for group in grouped(checks) if group.status == "unknown" and group.required)
        todo = next((group.remedy for group in required if group.remedy), todo)
    took = f" in {units.seconds(seconds)}" if seconds is not None else ""
    line = f"{at}: {line}{took}" if at else line + took
    mark = f"[{COLOURS[judged.word]}]{GLYPHS[judged.word]}[/{COLOURS[judged.word]}]"
    out.print(f"{mark} {escape(line)}" + (f". [bold]→ {escape(todo)}[/bold]" if todo else ""))


def by_weight(checks: Iterable[Finding]) -> list[Group]:
    """Faults worst first, of the same severity those of most nodes."""
    return sorted(grouped(checks), key=lambda group: (ORDER.index(group.status), -len(group.nodes)))


def _where(group: Group, at: str) -> str:
    if len(group.nodes) > 1:
        return f"on {units.count(len(group.nodes), 'node')}"
    node = "" if at else f" of {group.nodes[0]}" if group.nodes else ""
    if len(group.subjects) == 1:
        return f"on {group.subjects[0]}{node}"
    return (group.places + node) if group.places else f"on{node[3:]}" if node else ""


def nodes(out: Console, found: Sequence[tuple[str, str]], checks: Sequence[Finding]) -> None:
    """Nodes without a failure or a warning, named, by what they have: pairs of name and kind."""
    bad = {name for check in checks if check.status in ("fail", "warn") for name in check.node.split(", ")}
    kinds: dict[str, list[str]] = {}
    for name, words in found:
        if name not in bad:
            kinds.setdefault(words, []).append(name)
    for words, names in sorted(kinds.items(), key=lambda item: -len(item[1])):
        word = "pass" if "absent: " not in words.partition(";")[0] else "unknown"
        text = f"{units.count(len(names), 'node')}, {words}: {units.hostlist(names)}"
        point(out, f"[{COLOURS[word]}]{GLYPHS[word]}[/{COLOURS[word]}]", escape(text))


def findings(out: Console, checks: Iterable[Finding]) -> None:
    """Failures, warnings and what was required and not measured, each fault once with its nodes; the rest counted."""
    groups = by_weight(checks)
    checks = [check for group in groups for check in group.checks]
    named = len({check.node for check in checks if check.node}) > 1
    for group in groups:
        if group.status in ("fail", "warn") or (group.required and group.status == "unknown"):
            finding(out, group, named=named, brief=True)
    infos = len({group.id for group in groups if group.status == "info"})
    quiet = [units.count(infos, "note")] if infos else []
    if unknown := unknown_ids(groups):
        families = Counter(code.split(".")[0] for code in unknown)
        each = ", ".join(f"{name} {number}" for name, number in families.items())
        quiet.append(f"{units.count(len(unknown), 'check')} unknown ({each})")
    out.print(f"[dim]{'; '.join([*quiet, 'details: -v'])}[/dim]")


def machine(snapshot: Snapshot, topology: NodeTopology) -> Iterator[tuple[str, str]]:
    """What a host has: GPUs, links, RDMA, sockets; a probe that gave nothing says why."""
    yield "GPUs", _gpus(snapshot, topology)
    yield from links(topology)
    yield "RDMA", _rdma(snapshot)
    sockets = snapshot.facts(InterfacesFacts)
    chosen = next((i for i in sockets.interfaces if i.name == sockets.nccl_choice), None) if sockets else None
    if chosen is not None:
        speed = units.bits(chosen.speed_bytes_per_second) if chosen.speed_bytes_per_second else "speed unknown"
        yield "sockets", f"NCCL takes {chosen.name}, {speed}"
    else:
        yield "sockets", _silent(snapshot, "interfaces") or "NCCL's choice unknown"


def kind(snapshot: Snapshot, topology: NodeTopology) -> str:
    """What makes a node one of its kind, in a few words: GPUs and ports."""
    return f"{_gpus(snapshot, topology)}; RDMA {_rdma(snapshot)}"


def _gpus(snapshot: Snapshot, topology: NodeTopology) -> str:
    facts = snapshot.facts(GpuFacts)
    if facts is None:
        return _silent(snapshot, "gpu")
    if facts.driver_error:
        return f"{facts.pci_gpus or 'number unknown'} on the PCI bus, none readable: NVML answers {facts.driver_error}"
    models = Counter(gpu.name or "unknown model" for gpu in facts.gpus)
    each = ", ".join(f"{number} x {name}" for name, number in models.items()) or "none"
    sku = f" ({topology.sku})" if topology.sku else ""
    return f"{each}, driver {facts.driver_version or 'unknown'}{sku}"


def _rdma(snapshot: Snapshot) -> str:
    facts = snapshot.facts(RdmaFacts)
    if facts is None:
        return _silent(snapshot, "rdma")
    ports = Counter(
        f"{port.state or 'state unknown'} {port.rate_text or units.bits(port.rate_bytes_per_second)}"
        for device in facts.devices
        for port in device.ports
    )
    return ", ".join(f"{number} x {words}" for words, number in ports.most_common()) or "no port"


def _silent(snapshot: Snapshot, probe: str) -> str:
    outcome = snapshot.outcomes.get(probe)
    if isinstance(outcome, Absent):
        return f"absent: {outcome.why}"
    return f"failed: {outcome.error}" if isinstance(outcome, Failed) else ""
