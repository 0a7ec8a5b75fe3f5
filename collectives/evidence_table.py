"""The verdict for people: a rich group for terminals. Numbers in brackets are line numbers of the log."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from collectives.transport import ChannelCount, Evidence, LogProblem

_COLOUR = {"fail": "red", "warn": "yellow", "info": "cyan"}
_STATE = {"on": "[green]on[/]", "off": "[red]off[/]", "partial": "[yellow]partial[/]", "none": "[yellow]no evidence[/]"}


def table(evidence: Evidence) -> RenderableType:
    """Verdict, problems with their first lines, and proof."""
    parts: list[RenderableType] = [_summary(evidence)]
    if evidence.problems:
        parts.append(_problems(evidence.problems, "Problems"))
    if evidence.notes:
        parts.append(_problems(evidence.notes, "Notes"))
    if evidence.proof or evidence.problems:
        parts.append(_proof(evidence))
    return Group(*parts)


def _ends(name: str, count: ChannelCount) -> str:
    return f"{name} {count.gdrdma} of {count.total}" if count.total else ""


def _gdrdma(evidence: Evidence) -> str:
    counts = (("send", evidence.send), ("receive", evidence.receive), ("undirected", evidence.undirected))
    ends = ", ".join(filter(None, (_ends(name, count) for name, count in counts)))
    share = "" if evidence.gdrdma_fraction is None else f" ({evidence.gdrdma_fraction:.0%} of channels: {ends})"
    torn = f", {evidence.torn_lines} torn lines left out" if evidence.torn_lines else ""
    return _STATE[evidence.gdrdma] + share + torn


def _summary(evidence: Evidence) -> Table:
    grid = Table(show_header=False, box=None, pad_edge=False)
    rows = {
        "NCCL version": evidence.nccl_version or "not in the log",
        "Ranks, nodes": f"{evidence.ranks or '?'} ranks, {evidence.nodes or '?'} nodes",
        "Between nodes": evidence.inter_node_transport or "none expected",
        "Within a node": evidence.intra_node_transport or "none expected",
        "Devices": ", ".join(evidence.hcas) or "none listed",
        "Channels": ", ".join(f"{name} {count}" for name, count in evidence.transports.items()) or "none",
    }
    for name, value in rows.items():
        grid.add_row(name, escape(value))
    grid.add_row("GPUDirect RDMA", _gdrdma(evidence))
    return grid


def _problems(problems: tuple[LogProblem, ...], title: str) -> Table:
    grid = Table("code", "severity", "what", "first action", "lines", title=title, title_justify="left")
    for problem in problems:
        lines = ", ".join(str(row.line) for row in problem.lines)
        colour = _COLOUR[problem.severity]
        grid.add_row(
            f"[{colour}]{problem.code}[/]",
            problem.severity,
            escape(f"{problem.message} ({problem.count} times)" if problem.count > 1 else problem.message),
            escape(problem.action),
            lines,
        )
    return grid


def _proof(evidence: Evidence) -> Table:
    grid = Table("line", "proves", "text", title="Proof", title_justify="left")
    rows = {(row.line, row.proves): row for problem in evidence.problems for row in problem.lines}
    rows |= {(row.line, row.proves): row for row in evidence.proof[:24]}
    for _, row in sorted(rows.items()):
        grid.add_row(str(row.line), escape(row.proves), escape(row.text))
    return grid
