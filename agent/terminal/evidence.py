"""What an NCCL log proves, on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from agent.terminal.tables import COLOURS, GLYPHS, indented, table
from collectives.nccl_log.transport import Evidence, ProofLine

_NVLINK_WORDS = {
    "used": "used",
    "enabled": "enabled for a communicator, no channel seen",
    "available": "the hardware has it, no use of it seen",
    "not available": "not available",
    "unknown": "unknown",
}
_OUTCOMES = {"failed": "failed", "finished": "finished", "unknown": "unknown: no line tells"}


def _place(line: ProofLine) -> str:
    return f"line {line.line}" + (f" of {line.file}" if line.file else "")


def evidence(out: Console, found: Evidence) -> None:
    """The verdict on a log, the problems with their lines, and the lines that prove it."""
    rows = table("what", "verdict")
    rows.add_row("library", f"{found.library} {found.nccl_version or 'version unknown'}")
    rows.add_row("between nodes", escape(found.inter_node_transport or "none seen"))
    rows.add_row("within a node", escape(found.intra_node_transport or "none seen"))
    counts = (
        f"send {found.send.gdrdma}/{found.send.total}, receive {found.receive.gdrdma}/{found.receive.total} channels"
    )
    word = {"none": "no evidence"}.get(found.gdrdma, found.gdrdma)
    rows.add_row("GPUDirect RDMA", f"{word}: {counts}")
    if found.undirected.total:
        rows.add_row("", f"{found.undirected.gdrdma}/{found.undirected.total} channels of unnamed direction")
    for name, number in sorted(found.transports.items()):
        rows.add_row("channels", f"{number} via {escape(name)}")
    rows.add_row("NVLS", _NVLINK_WORDS[found.nvls_use])
    if found.mnnvl_use not in ("unknown", "off"):
        clique = f", a clique of {found.mnnvl_clique} GPUs" if found.mnnvl_clique else ""
        rows.add_row("NVLink between nodes", _NVLINK_WORDS[found.mnnvl_use] + clique)
    rows.add_row("end of the job", _OUTCOMES[found.outcome])
    for number, run in enumerate(found.runs, 1):
        joined = f"between nodes {run.inter_node_transport or 'none seen'}, GPUDirect RDMA {run.gdrdma}"
        rows.add_row(f"run {number}", escape(f"from {_place(run.first)}: {joined}, {_OUTCOMES[run.outcome]}"))
    if found.torn_lines:
        rows.add_row("torn lines", f"{found.torn_lines}, counted as neither on nor off")
    for path in found.gdr_paths[:4]:
        rows.add_row("GPU to NIC", escape(path))
    for seen in found.notes[:6]:
        rows.add_row("note", escape(f"{seen.code}: {seen.message}"))
    out.print(rows)
    for problem in found.problems:
        colour, times = COLOURS.get(problem.severity, "yellow"), f" (x {problem.count})" if problem.count > 1 else ""
        mark = GLYPHS.get(problem.severity, problem.severity)
        out.print(f"[{colour}]{escape(mark)}[/{colour}] [bold]{escape(problem.code)}[/bold]{times}")
        indented(out, escape(problem.message))
        for line in problem.lines[:2]:
            indented(out, f"[dim]{escape(f'{_place(line)}: {line.text}')}[/dim]")
        indented(out, f"[bold]→ {escape(problem.action)}[/bold]")
    if found.proof:
        out.print("[bold]Proof[/bold]")
    for line in found.proof[:8]:
        indented(out, f"[dim]{escape(f'{_place(line)}: {line.text}')}[/dim] · {escape(line.proves)}", 2)
