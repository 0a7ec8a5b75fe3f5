"""Why a run is as it is, on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from agent.base.tables import indented
from planner.why import Verdict

_COLOURS = {"stuck": "red", "failed": "red", "slow": "yellow", "fine": "green"}


def verdict(out: Console, found: Verdict) -> None:
    """The verdict, its causes with their evidence, and what is not known."""
    colour = _COLOURS.get(found.state, "yellow")
    state, _, rest = found.line.partition(": ")
    todo = "" if found.causes or found.state != "fine" else " → nothing to change"
    out.print(f"[{colour} bold]{escape(state if rest else found.state)}[/]: {escape(rest or found.line)}{todo}")
    for name, row in (("nodes", found.nodes), ("GPUs", found.gpus), ("NICs", found.nics)):
        if row:
            out.print(f"{name}: {escape(', '.join(row))}")
    for number, cause in enumerate(found.causes, 1):
        share = f", {cause.share:.0%} of the wait" if cause.share is not None else ""
        out.print(f"{number}. [bold]{escape(cause.code)}[/bold]{share}: {escape(cause.message)}")
        for line in cause.evidence:
            indented(out, f"[dim]{escape(line)}[/dim]")
        if cause.price:
            indented(out, escape(cause.price))
        if cause.action:
            indented(out, f"[bold]→ {escape(cause.action)}[/bold]")
    for line in found.innocent:
        out.print(f"no fault: {escape(line)}")
    for line in found.disagree:
        out.print(f"sources differ: {escape(line)}")
    for line in found.change:
        out.print(f"change: {escape(line)}")
    if found.forecast:
        out.print(escape(found.forecast))
    for one in found.unknown:
        out.print(f"unknown: {escape(one.what)}; {escape(one.command)}")
    if found.sources:
        out.print(f"[dim]read: {escape('; '.join(found.sources))}[/dim]")
