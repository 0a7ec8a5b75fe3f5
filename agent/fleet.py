"""A node in a few words: the strip over its page, and its row among others."""

from __future__ import annotations

from dataclasses import dataclass

from agent import units
from agent.gate import Verdict
from agent.view import Group, View, grouped, only
from collectives.results import BenchResult
from probes.api import Snapshot
from probes.interfaces import InterfacesFacts
from topology.graph import NodeTopology
from topology.reference import departures


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One node of the table."""

    name: str
    verdict: Verdict
    worst: Group | None  # the first thing to read, where something failed or warned
    more: int  # further findings
    gpus: str
    nvlink: str
    rdma: str


def rows(view: View) -> tuple[Row, ...]:
    """Every node once, sick ones first."""
    made = []
    for name in dict.fromkeys(snapshot.hostname for snapshot in view.snapshots):
        mine = only(view, name)
        found = [group for group in grouped(mine.checks) if group.status in ("fail", "warn")]
        node = mine.topologies[0]
        made.append(
            Row(
                name=name,
                verdict=mine.verdict,
                worst=found[0] if found else None,
                more=max(0, len(found) - 1),
                gpus=gpus(node),
                nvlink=nvlink(node),
                rdma=rdma(node),
            )
        )
    order = ("fail", "unknown", "warn", "pass")
    return tuple(sorted(made, key=lambda row: (order.index(row.verdict.word), row.name)))


def glance(node: NodeTopology, snapshot: Snapshot, bench: BenchResult | None) -> list[tuple[str, str]]:
    """What a person wants to see first of a machine."""
    interfaces = snapshot.facts(InterfacesFacts)
    choice = interfaces.nccl_choice if interfaces else None
    shown = [
        ("GPUs", gpus(node)),
        ("NVLink", nvlink(node)),
        ("RDMA", rdma(node)),
        ("Nearest NIC", _nearest(node)),
        ("NCCL's own interface choice", choice or "unknown"),
        ("Expected all-gather", _expected(node)),
        ("Measured all-gather", _measured(bench)),
        ("Recognised as", node.sku or "no machine of the reference table"),
    ]
    return [*shown, *(("Departs from it", text) for text in departures(node))]


def gpus(node: NodeTopology) -> str:
    """ "8 x NVIDIA H100 80GB HBM3"."""
    if not node.gpus:
        return "none"
    names = dict.fromkeys(gpu.model or "unknown model" for gpu in node.gpus if gpu.usable)
    lost = sum(not gpu.usable for gpu in node.gpus)
    return f"{len(node.gpus)} × {', '.join(names) or 'unknown model'}" + (f", {lost} lost" if lost else "")


def nvlink(node: NodeTopology) -> str:
    """The links of the islands, "none" only where the source would have told."""
    if not node.islands:
        return "none" if node.nvlink_known else "unknown"
    island = node.islands[0]
    words = f"{' and '.join(island.nvlinks_per_pair)}, {'every pair' if island.all_to_all else 'not every pair'}"
    return words if len(node.islands) == 1 else f"{len(node.islands)} islands: {words}"


def rdma(node: NodeTopology) -> str:
    """Devices that can do RDMA, and how many of them are up."""
    able = [nic for nic in node.nics if nic.kind not in ("ethernet", "unknown")]
    if not able:
        return "no device"
    up = [nic for nic in able if nic.active]
    total = sum(nic.rate_bytes_per_second or 0.0 for nic in up)
    return f"{len(up)} of {len(able)} devices up, {units.rate(total) if total else 'rate unknown'} together"


def _nearest(node: NodeTopology) -> str:
    if not node.nearest_nic:
        return "no NIC" if node.gpus else "no GPU"
    if not all(near.decidable for near in node.nearest_nic):
        return "undecidable here"
    counts: dict[str, int] = {}
    for near in node.nearest_nic:
        counts[near.label] = counts.get(near.label, 0) + 1
    return ", ".join(f"{label} for {number} of {len(node.nearest_nic)} GPUs" for label, number in counts.items())


def _expected(node: NodeTopology) -> str:
    for scope in ("node", "island"):
        for e in node.expectations:
            if e.scope == scope and e.op == "all_gather" and e.busbw_bytes_per_second:
                return f"{units.rate(e.busbw_bytes_per_second)} bus bandwidth within the {scope}"
    return "not derivable"


def _measured(bench: BenchResult | None) -> str:
    found = [m for m in bench.measurements if m.op == "all_gather" and m.verified] if bench else []
    if not found:
        return "nothing measured"
    best = max(found, key=lambda m: m.bytes)
    return f"{units.rate(best.busbw_bytes_per_second)} bus bandwidth at {units.size(best.bytes)}"
