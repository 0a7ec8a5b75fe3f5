"""Findings on the terminal, failures first with the remedy, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from agent.base import units
from agent.base.lines import SHOWN, indented, mark
from contracts.host_list import list_names

if TYPE_CHECKING:  # loaded with checks; a topology that is read from a file has findings only
    from agent.checks.groups import Group
    from agent.checks.verdict import Verdict
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


def finding(out: Console, group: Group, *, named: bool = False, brief: bool = False) -> None:
    """One finding: what, where, what proves it, what to do; `named` says its node though it be one only.

    `brief` leaves out the proof, and names every node.
    """
    one = len(group.subjects) == 1 and (group.alike or bool(group.trouble))
    where = f"on {group.subjects[0]}" if one and not (brief and len(group.nodes) > 1) else group.places
    head = f"{mark(group.status)} [bold]{escape(group.title)}[/bold]"
    out.print(f"{head} {escape(where)}" if where else head)
    nodes = group.nodes if named or len(group.nodes) > 1 else ()
    indented(out, f"{group.trouble}:" if group.trouble else "")
    if brief and (nodes or len(group.checks) > 1):
        _places(out, group, named=bool(nodes), one=one)
    elif group.alike:
        indented(out, escape(group.message))
        if nodes and not one and group.subjects:
            for node, subjects in group.by_node[:SHOWN]:
                indented(out, escape(units.some(subjects, f"on {node}: ")))
        else:
            indented(out, "" if one else escape(units.some(group.subjects, "on ")))
    else:
        _each(out, group, named=bool(nodes), subjects=not one)
    if not brief:
        indented(out, escape(units.some(nodes, "nodes " if len(nodes) > 1 else "node ")))
    if group.status in ("fail", "warn"):
        proofs = 0 if brief else len(group.codes) if group.trouble else 1
        for check in group.checks[:proofs]:  # those of the first device
            for line in check.evidence[:4]:
                indented(out, f"[dim]{escape(line)}[/dim]")
    if group.status in ("fail", "warn") or group.required:
        indented(out, f"[bold]→ {escape(group.remedy)}[/bold]" if group.remedy else "")


def _places(out: Console, group: Group, *, named: bool, one: bool) -> None:
    """Every place that no message names; equal messages share a line, and so do nodes with the same devices."""
    by_message: dict[str, dict[str, dict[str, None]]] = {}
    for check in group.checks:
        words = check.message if len(group.checks) <= SHOWN else group.message
        by_message.setdefault(words, {}).setdefault(check.node, {})[check.subject] = None
    for words, by_node in by_message.items():
        indented(out, escape(words))
        shared: dict[tuple[str, ...], list[str]] = {}
        for node, subjects in by_node.items():
            shared.setdefault(tuple(filter(None, subjects)), []).append(node)
        for what, nodes in shared.items():
            known = (one and not named) or all(subject in words for subject in what)
            where = (list_names(nodes) if named else "", "" if known else list_names(what))
            indented(out, f"[dim]{escape(': '.join(filter(None, where)))}[/dim]", 9)
    if len(group.checks) > SHOWN and not group.alike:
        indented(out, "This is the first message. The others differ in numbers or places (-v shows all).")


def _each(out: Console, group: Group, *, named: bool, subjects: bool) -> None:
    """A line per check of a group whose messages differ."""
    for check in group.checks[:SHOWN]:
        prefixed = check.subject and subjects and not check.message.startswith(check.subject)
        where = f"{check.node}: " if named else ""
        indented(out, escape(f"{where}{check.subject}: {check.message}" if prefixed else f"{where}{check.message}"))
    if len(group.checks) > SHOWN:
        indented(out, f"and {len(group.checks) - SHOWN} more")


def verdict(out: Console, judged: Verdict, seconds: float) -> None:
    """The last line."""
    summary = "; ".join(filter(None, (judged.why, units.rest(judged.word, judged.by_check))))
    out.print(f"\n{mark(judged.word)} {escape(summary)} in {units.seconds(seconds)}")
