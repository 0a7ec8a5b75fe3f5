"""Findings on the terminal, failures first with the remedy, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from agent.base import units
from agent.base.lines import SHOWN, indented, mark

if TYPE_CHECKING:  # loaded with checks; a topology that is read from a file has findings only
    from agent.checks.groups import Group
    from contracts.finding import Finding


def findings(out: Console, checks: Iterable[Finding], *, everything: bool = False) -> None:
    """Findings worst first, the same one on several subjects once; unknowns by name, passes as a count."""
    from agent.checks.groups import grouped, passed_ids

    quiet: dict[str, list[Group]] = {"unknown": [], "pass": []}
    checks = tuple(checks)
    groups = grouped(checks)
    named = len({check.node for check in checks if check.node}) > 1
    for group in groups:
        if everything or group.status in ("fail", "warn", "info") or (group.required and group.status == "unknown"):
            finding(out, group, named=named)
        else:
            quiet[group.status].append(group)
    unknowns(out, quiet["unknown"])
    passed = len(passed_ids(groups))
    if passed and quiet["pass"]:
        out.print(f"[dim]{units.count(passed, 'check')} passed (--all names them)[/dim]")


def unknowns(out: Console, groups: Sequence[Group]) -> None:
    """Checks that were not measured, by name under what kept them from it."""
    if groups:
        number = units.count(len({group.id for group in groups}), "check")
        out.print(f"{mark('unknown')} {number} could not run")
    from agent.checks.groups import reasons

    for why, codes in reasons(groups).items():
        indented(out, escape(why))
        indented(out, f"[dim]{escape(units.some(codes))}[/dim]", 9)


def finding(out: Console, group: Group, *, named: bool = False) -> None:
    """One finding: what, where, what proves it, what to do; `named` says its node though it be one only."""
    one = is_about_one(group)
    heading(out, group, one=one)
    nodes = group.nodes if named or len(group.nodes) > 1 else ()
    if group.alike:
        indented(out, escape(group.message))
        if nodes and not one and group.subjects:
            for node, subjects in group.by_node[:SHOWN]:
                indented(out, escape(units.some(subjects, f"on {node}: ")))
        else:
            indented(out, "" if one else escape(units.some(group.subjects, "on ")))
    else:
        _each(out, group, named=bool(nodes), subjects=not one)
    indented(out, escape(units.some(nodes, "nodes " if len(nodes) > 1 else "node ")))
    if group.status in ("fail", "warn"):
        for check in group.checks[: len(group.codes) if group.trouble else 1]:  # those of the first device
            for line in check.evidence[:4]:
                indented(out, f"[dim]{escape(line)}[/dim]")
    remedy(out, group)


def is_about_one(group: Group) -> bool:
    """Whether the finding is about one device or setting, which its heading then names."""
    return len(group.subjects) == 1 and (group.alike or bool(group.trouble))


def heading(out: Console, group: Group, *, one: bool) -> None:
    """The status and the codes of a finding, and its one subject or how many places it was found in."""
    where = f"on {group.subjects[0]}" if one else group.places
    head = f"{mark(group.status)} [bold]{escape(group.title)}[/bold]"
    out.print(f"{head} {escape(where)}" if where else head)
    indented(out, f"{group.trouble}:" if group.trouble else "")


def remedy(out: Console, group: Group) -> None:
    """What to do, where something is wrong or a required check could not run."""
    if group.status in ("fail", "warn") or group.required:
        indented(out, f"[bold]→ {escape(group.remedy)}[/bold]" if group.remedy else "")


def _each(out: Console, group: Group, *, named: bool, subjects: bool) -> None:
    """A line per check of a group whose messages differ."""
    for check in group.checks[:SHOWN]:
        prefixed = check.subject and subjects and not check.message.startswith(check.subject)
        where = f"{check.node}: " if named else ""
        indented(out, escape(f"{where}{check.subject}: {check.message}" if prefixed else f"{where}{check.message}"))
    if len(group.checks) > SHOWN:
        indented(out, f"and {len(group.checks) - SHOWN} more")
