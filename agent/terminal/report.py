"""A whole preflight on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from agent.gate.verdict import unjudged

if TYPE_CHECKING:
    from agent.gate.report import Report
from agent.terminal.advice import recommendation
from agent.terminal.findings import findings, verdict
from agent.terminal.hosts import host
from agent.terminal.measured import bench, by_network, comparison, run
from agent.terminal.tables import COLOURS
from agent.terminal.topology import node


def report(out: Console, whole: Report, *, everything: bool = False) -> None:
    """The whole report, in the order of the flight, verdict last; first what it does not speak of."""
    if (aside := unjudged(whole.checks)) and whole.verdict.word in ("pass", "warn"):
        out.print(f"[{COLOURS['unknown']}]{escape(aside)}[/{COLOURS['unknown']}]: this says nothing of GPUs")
    for snapshot, topology in zip(whole.snapshots, whole.topologies, strict=True):
        host(out, snapshot)
        node(out, topology, brief=True)
    if whole.bench is not None:
        bench(out, whole.bench)
    if whole.recommendation is not None:
        recommendation(out, whole.recommendation)
    if whole.flight is not None:
        run(out, whole.flight)
        comparison(out, whole.comparisons)
    by_network(out, whole)
    out.print("\n[bold]Findings[/bold]")
    findings(out, whole.checks, everything=everything)
    for note in whole.notes:
        out.print(f"· {escape(note)}")
    verdict(out, whole.verdict, whole.seconds)
