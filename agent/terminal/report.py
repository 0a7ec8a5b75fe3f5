"""A whole preflight on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from agent.cluster.nodes import NodeRecord
    from agent.jobs.preflight import Report
from agent.terminal import brief
from agent.terminal.advice import recommendation
from agent.terminal.findings import findings, verdict
from agent.terminal.hosts import host, hosts_in_brief
from agent.terminal.measured import bench, by_network, comparison, run
from agent.terminal.topology import node


def report(out: Console, whole: Report, *, verbose: bool = False, everything: bool = False) -> None:
    """The verdict and what to do, then what it rests on; `verbose` with hosts, links and proofs."""
    one = whole.snapshots[0].hostname if len(whole.snapshots) == 1 else ""
    brief.opening(out, whole.verdict, whole.checks, at=one, seconds=whole.seconds)
    if not verbose:
        hosts_in_brief(out, whole.snapshots, whole.topologies, whole.checks)
        brief.nodes(out, [(r.name, _kind(r)) for r in whole.nodes],
                    whole.checks)  # fmt: skip
    if verbose:
        for snapshot, topology in zip(whole.snapshots, whole.topologies, strict=True):
            host(out, snapshot)
            node(out, topology, brief=True)
    if whole.bench is not None:
        bench(out, whole.bench, verbose=verbose)
    if whole.recommendation is not None and (verbose or whole.recommendation.model is not None):
        recommendation(out, whole.recommendation, brief=not verbose)
    if whole.flight is not None:
        run(out, whole.flight)
        comparison(out, whole.flight)
    by_network(out, whole)
    if verbose:
        out.print("\n[bold]Findings[/bold]")
        findings(out, whole.checks, everything=everything)
    else:
        brief.findings(out, whole.checks)
    for note in whole.notes:
        out.print(f"· {escape(note)}")
    if verbose:
        verdict(out, whole.verdict, whole.seconds)


def _kind(node: NodeRecord) -> str:
    """What a node has, by its record: "8 x NVIDIA H100; RDMA 8/8 active"."""
    gpus = (
        "no GPU"
        if node.gpus == 0
        else f"{'unknown number of' if node.gpus is None else node.gpus} x " + (node.product or "unknown GPU")
    )
    return f"{gpus}; RDMA {node.rdma or 'unknown'}"
