"""Print a node's links."""

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
    print_nearest_nics(out, topology)
    for expected in topology.expectations:
        if expected.op == "all_gather" and expected.scope in ("island", "node"):
            out.print(f"expected all_gather within {expected.scope}: {units.expected_rate(expected)} bus bandwidth")
    for warning in topology.warnings:
        out.print(f"[yellow]![/yellow] {escape(warning)}")


def print_brief(out: Console, topology: NodeTopology, findings: Sequence[Finding]) -> None:
    """Print the verdict on a node's links and a summary in a few rows; `-v` prints the matrix."""
    bad = [*describe_departures(topology), *(f.code for f in findings if f.status in ("fail", "warn"))]
    is_open = topology.lacking or any(f.status == "unknown" for f in findings)
    word = "fail" if any(f.status == "fail" for f in findings) else "warn" if bad else "unknown" if is_open else "pass"
    todo = "Nothing to do." if word == "pass" else "See below."
    judged = topology.gpus or topology.nics
    if not judged:
        word, todo = "unknown", "Run this on a node with GPUs."
    machine = topology.sku or ("unknown machine type, no reference" if judged else "no GPU and no RDMA device was read")
    counted = f"{units.count(len(topology.gpus), 'GPU')}, {units.count(len(topology.nics), 'NIC')}"
    print_headline(out, word, f"{topology.hostname}: {machine}; {counted}", todo)
    print_properties(out, list_link_properties(topology))
    for departure in describe_departures(topology):
        print_bullet(out, "[yellow]![/yellow]", escape(f"differs from the reference: {departure}"))
    for warning in topology.warnings:
        print_bullet(out, "[yellow]![/yellow]", escape(warning))
    if judged:
        out.print("[dim]full matrix: -v, or -o svg, json, yaml[/dim]")


def print_nearest_nics(out: Console, topology: NodeTopology) -> None:
    """Print each GPU's nearest NIC; GPUs with the same NIC share a line."""
    shared: dict[tuple[str, ...], list[str]] = {}
    for nearest in topology.nearest_nic:
        doubt = nearest.why and f"; {'' if nearest.decidable else 'cannot be determined: '}{nearest.why}"
        nics = units.some(nearest.nics, "nearest NIC ") or "nearest NIC unknown"
        shared.setdefault((nics, nearest.label, doubt), []).append(nearest.gpu)
    for (nics, label, doubt), gpus in shared.items():
        out.print(escape(f"{' '.join(gpus)}: {nics} ({label}){doubt}"))


def list_link_properties(topology: NodeTopology) -> Iterator[tuple[str, str]]:
    """Return the links between GPUs and to their nearest NICs, and the rate that they should reach."""
    gpus = {gpu.name for gpu in topology.gpus}
    labels = Counter(pair.label for pair in topology.pairs if {pair.a, pair.b} <= gpus)
    if labels:
        yield "GPU links", ", ".join(f"{label} ({units.count(n, 'pair')})" for label, n in labels.most_common())
    pairs = [near for near in topology.nearest_nic if near.nics or not near.decidable]
    near = Counter(near.label if near.decidable else "unknown" for near in pairs)
    if near:
        yield "nearest NIC", ", ".join(f"{label} for {units.count(n, 'GPU')}" for label, n in near.most_common())
    for expected in topology.expectations:
        if expected.op == "all_gather" and expected.scope == "node":
            uneven = any(island.nvlinks_per_pair[1:] for island in topology.islands)
            fewest = f" ({expected.derivation[0].partition(' into')[0]})" * uneven  # " (GPU3 has 16 NVLinks)"
            yield "expected", f"all_gather {units.expected_rate(expected)} bus bandwidth{fewest}"
