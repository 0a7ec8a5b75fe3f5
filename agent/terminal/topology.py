"""Print the topology of a node: a summary, or the matrix with islands, nearest NICs and warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape

from agent.base import units
from agent.base.lines import print_bullet, print_headline, print_properties
from contracts.finding import Finding
from topology.check import describe_departures
from topology.graph import UNKNOWN, NodeTopology, Pairs
from topology.render import render_matrix


def print_node(out: Console, topology: NodeTopology) -> None:
    """Print matrix, islands, nearest NICs, expectations and warnings of one node."""
    out.print(f"\n[bold]{escape(topology.hostname)}[/bold] ({escape(topology.source)})")
    if topology.sku or topology.gpus:
        out.print(f"recognised as: {escape(topology.sku or 'no known machine type')}")
    for departure in describe_departures(topology):
        out.print(f"[yellow]! differs from the reference:[/yellow] {escape(departure)}")
    if topology.gpus or topology.nics:  # lines are never wrapped, as those of `nvidia-smi topo -m`
        out.print(render_matrix(topology), markup=False, overflow="ignore", no_wrap=True, crop=False)
    else:
        out.print("no GPU and no RDMA device was read: there is no link to show")
    labels = Pairs(topology.pairs)
    for island in topology.islands:
        all_known = all(labels.label(a, b) != UNKNOWN for i, a in enumerate(island.gpus) for b in island.gpus[i + 1 :])
        kind = "every pair" if island.all_to_all else "not every pair" if all_known else "not every pair is known"
        out.print(f"NVLink island: {' '.join(island.gpus)} ({kind}, {' '.join(island.nvlinks_per_pair)})")
    for expected in topology.expectations:
        if expected.op == "all_gather" and expected.scope == "island":
            out.print(f"expected all_gather within island: {units.expected_rate(expected)} bus bandwidth")
    print_properties(out, list_link_properties(topology, limit=64))
    for warning in topology.warnings:
        out.print(f"[yellow]![/yellow] {escape(warning)}")


def print_brief(out: Console, topology: NodeTopology, findings: Sequence[Finding]) -> None:
    """Print the verdict on a node's links and a summary in a few rows; `-v` prints the matrix."""
    bad = [*describe_departures(topology), *(f.code for f in findings if f.status in ("fail", "warn"))]
    is_open = topology.lacking or any(f.status == "unknown" for f in findings)
    word = "fail" if any(f.status == "fail" for f in findings) else "warn" if bad else "unknown" if is_open else "pass"
    todo = "Nothing to do." if word == "pass" else "See the list below."
    judged = topology.gpus or topology.nics
    if not judged:
        word, todo = "unknown", "Run this on a node with GPUs."
    machine = topology.sku or ("unknown machine type, not compared" if judged else "no GPU and no RDMA device was read")
    counted = f"{units.count(len(topology.gpus), 'GPU')}, {units.count(len(topology.nics), 'NIC')}"
    print_headline(out, word, f"{topology.hostname}: {machine}; {counted}", todo)
    print_properties(out, list_link_properties(topology))
    for departure in describe_departures(topology):
        print_bullet(out, "[yellow]![/yellow]", escape(f"differs from the reference: {departure}"))
    for warning in topology.warnings:
        print_bullet(out, "[yellow]![/yellow]", escape(warning))
    if judged:
        out.print("[dim]full matrix: -v, or -o svg, json, yaml[/dim]")


def list_link_properties(topology: NodeTopology, limit: int = 2) -> Iterator[tuple[str, str]]:
    """Return the links between GPUs, `limit` of each GPU's nearest NICs, and the rate that the links should reach."""
    gpus = {gpu.name for gpu in topology.gpus}
    labels = Counter(pair.label for pair in topology.pairs if {pair.a, pair.b} <= gpus)
    if labels:
        yield "GPU links", ", ".join(f"{label} ({units.count(n, 'pair')})" for label, n in labels.most_common())
    near: dict[str, dict[str, list[str]]] = {}
    for one in topology.nearest_nic:
        if one.nics or not one.decidable:
            label = one.label if one.decidable else "unknown"
            nics = units.some(one.nics, " to ", limit) * one.decidable + f" ({one.why})" * bool(one.why)
            near.setdefault(label, {}).setdefault(nics, []).append(one.gpu)
    for label, shared in near.items():
        yield "nearest NIC", f"{label}: " + "; ".join(f"{', '.join(gpus)}{nics}" for nics, gpus in shared.items())
    for expected in topology.expectations:
        if expected.op == "all_gather" and expected.scope == "node":
            is_open = expected.busbw_bytes_per_second is None
            is_explained = is_open or any(island.nvlinks_per_pair[1:] for island in topology.islands)
            fewest = f" ({expected.derivation[0].partition(' into')[0]})" * is_explained  # " (GPU3 has 16 NVLinks)"
            yield "expected", f"all_gather {units.expected_rate(expected)} bus bandwidth{fewest}"
