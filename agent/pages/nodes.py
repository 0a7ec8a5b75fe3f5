"""Nodes as the page shows them, in a few words each: the strip over its page, and its row among others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote

from agent.base import units
from agent.base.units import expected_rate
from agent.checks.codes import CLUSTER_CODES
from agent.checks.coverage import no_gpu_read, no_hca_read
from agent.checks.explain import point
from agent.checks.groups import Group, grouped
from agent.checks.view import View, only
from agent.cluster.gate import checks_of
from agent.cluster.nodes import Fleet, NodeRecord
from collectives.bench.results import BenchResult
from contracts.finding import Finding, Status
from probes.api import Snapshot
from probes.interfaces.facts import InterfacesFacts
from probes.limits.probe import LimitsFacts
from topology.graph import NodeTopology
from topology.reference import departures

ORDER = ("fail", "unknown", "warn", "pass")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One node of the table."""

    name: str
    word: str  # of its verdict
    worst: Group | None  # the first thing to read, where something failed or warned
    more: int  # further findings
    gpus: str
    nvlink: str
    rdma: str
    memlock: str
    age: str  # since its scan; empty where all were scanned at once
    link: str | None  # of its own page


def rows(view: View) -> tuple[Row, ...]:
    """Every scanned node once, sick ones first."""
    made = []
    for name in dict.fromkeys(snapshot.hostname for snapshot in view.snapshots):
        mine = only(view, name)
        node, scanned = mine.topologies[0], mine.snapshots[0]
        worst, more = first_of(mine.checks)
        made.append(
            Row(
                name=name, word=mine.verdict.word, worst=worst, more=more, gpus=gpus(node, scanned),
                nvlink=nvlink(node), rdma=rdma(node, scanned), memlock=_memlock(scanned), age="",
                link=f"./?node={quote(name, safe='')}",
            )
        )  # fmt: skip
    return _sorted(made)


def rows_of_records(records: Sequence[NodeRecord], checks: Sequence[Finding], now: float) -> tuple[Row, ...]:
    """Every published node, sick ones first; one that fell silent is unknown, whatever it said last."""
    mine: dict[str, list[Finding]] = {}
    for check in checks:
        mine.setdefault(check.node, []).append(check)
    made = []
    for record in records:
        worst, more = first_of(mine.get(record.name, ()))
        heard = record.scanned_at_seconds > 0
        made.append(
            Row(
                name=record.name, word="unknown" if record.silent(now) else record.verdict, worst=worst, more=more,
                gpus=gpu_text(record),
                nvlink=record.links or "unknown", rdma=record.rdma or "unknown", memlock=record.memlock or "unknown",
                age=units.ago(record.age_seconds(now)) if heard else "never", link=None,
            )
        )  # fmt: skip
    return _sorted(made)


def gpu_text(record: NodeRecord) -> str:
    """As a record has them."""
    if not record.gpus:
        return "unknown" if record.gpus is None else "none"
    return f"{record.gpus} × {record.product or 'unknown model'}"


def checks_of_records(fleet: Fleet, now: float, names: Sequence[str] | None = None) -> tuple[Finding, ...]:
    """What the agents of these nodes found, or of all; where an older agent's record has no remedy, docs give one.

    A node that fell silent is unknown on the pages; the gate fails, for it was asked whether a job may run there.
    """
    found = checks_of([record.name for record in fleet.records()] if names is None else names, fleet, now=now)
    silent, _ = CLUSTER_CODES
    return tuple(
        check if check.status == "pass" else replace(
            check, remedy=check.remedy or point(check.code, "Remedy"), required=check.required or check.code == silent,
            status=Status.UNKNOWN if check.code == silent else check.status,
        )
        for check in found
    )  # fmt: skip


def first_of(checks: Sequence[Finding]) -> tuple[Group | None, int]:
    """The first thing to read, and how many more there are."""
    found = [
        group
        for group in grouped(checks)
        if group.status in ("fail", "warn") or (group.required and group.status == "unknown")
    ]
    return (found[0] if found else None), max(0, len(found) - 1)


def _sorted(made: Sequence[Row]) -> tuple[Row, ...]:
    return tuple(sorted(made, key=lambda row: (ORDER.index(row.word) if row.word in ORDER else 1, row.name)))


def _memlock(snapshot: Snapshot) -> str:
    limits = snapshot.facts(LimitsFacts)
    if limits is None or not limits.memlock_known:
        return "unknown"
    return "unlimited" if limits.memlock_soft_bytes is None else units.size(limits.memlock_soft_bytes)


def glance(node: NodeTopology, snapshot: Snapshot, bench: BenchResult | None) -> list[tuple[str, str]]:
    """What a person wants to see first of a machine."""
    interfaces = snapshot.facts(InterfacesFacts)
    choice = interfaces.nccl_choice if interfaces else None
    shown = [
        ("GPUs", gpus(node, snapshot)),
        ("NVLink", nvlink(node)),
        ("RDMA", rdma(node, snapshot)),
        ("Nearest NIC", _nearest(node)),
        ("NCCL's own interface choice", choice or "unknown"),
        ("Expected all-gather", _expected(node)),
        ("Measured all-gather", _measured(bench)),
        ("Recognised as", node.sku or "no machine of the reference table"),
    ]
    return [*shown, *(("Departs from it", text) for text in departures(node))]


def gpus(node: NodeTopology, snapshot: Snapshot) -> str:
    """ "8 x NVIDIA H100 80GB HBM3"; "none" only where the bus shows none."""
    if not node.gpus:
        return "unknown" if no_gpu_read(snapshot) else "none"
    names = dict.fromkeys(gpu.model or "unknown model" for gpu in node.gpus if gpu.usable)
    lost = sum(not gpu.usable for gpu in node.gpus)
    return f"{len(node.gpus)} × {', '.join(names) or 'unknown model'}" + (f", {lost} not usable" if lost else "")


def nvlink(node: NodeTopology) -> str:
    """The links of the islands, "none" only where the source would have told."""
    if not node.islands:
        return "none" if node.nvlink_known else "unknown"
    island = node.islands[0]
    words = f"{' and '.join(island.nvlinks_per_pair)}, {'every pair' if island.all_to_all else 'not every pair'}"
    of = f" of {len(island.gpus)} of {len(node.gpus)} GPUs" if len(island.gpus) < len(node.gpus) else ""
    return f"{words}{of}" if len(node.islands) == 1 else f"{len(node.islands)} islands: {words}"


def rdma(node: NodeTopology, snapshot: Snapshot) -> str:
    """Devices that can do RDMA, and how many of them are up; "no device" only where the bus shows no HCA."""
    able = [nic for nic in node.nics if nic.kind not in ("ethernet", "unknown")]
    if not able:
        return "unknown" if no_hca_read(snapshot) else "no device"
    up = [nic for nic in able if nic.active]
    total = sum(nic.rate_bytes_per_second or 0.0 for nic in up)
    return f"{len(up)} of {len(able)} up, {units.bits(total) if total else 'rate unknown'} together"


def _nearest(node: NodeTopology) -> str:
    if not node.nearest_nic:
        return "no NIC" if node.gpus else "no GPU"
    if not any(near.decidable for near in node.nearest_nic):
        return "undecidable here"
    counts: dict[str, int] = {}
    for near in node.nearest_nic:
        label = near.label if near.decidable else "undecidable"
        counts[label] = counts.get(label, 0) + 1
    return ", ".join(f"{label} for {number} of {len(node.nearest_nic)} GPUs" for label, number in counts.items())


def _expected(node: NodeTopology) -> str:
    for scope in ("node", "island"):
        for e in node.expectations:
            if e.scope == scope and e.op == "all_gather" and (e.busbw_bytes_per_second or e.least_bytes_per_second):
                return f"{expected_rate(e)} bus bandwidth within the {scope}"
    return "not derivable"


def _measured(bench: BenchResult | None) -> str:
    found = [m for m in bench.measurements if m.op == "all_gather" and m.verified] if bench else []
    if not found:
        return "nothing measured"
    best = max(found, key=lambda m: m.bytes)
    return f"{units.rate(best.busbw_bytes_per_second)} bus bandwidth at {units.size(best.bytes)}"
