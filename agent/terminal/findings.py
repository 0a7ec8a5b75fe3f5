"""Print findings, failures first with the remedy; equal findings of several nodes or devices once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from agent.base import units
from agent.base.lines import SHOWN, mark, print_indented
from contracts.host_list import list_names

if TYPE_CHECKING:  # loaded with checks; a topology read from a file has only findings
    from agent.checks.findings import FindingGroup
    from contracts.finding import Finding


def print_findings(out: Console, checks: Iterable[Finding], *, everything: bool = False) -> None:
    """Print findings worst first, equal ones of several subjects once; unknown checks by name, passes as a count."""
    from agent.checks.findings import group_findings, is_problem, list_codes

    quiet: dict[str, list[FindingGroup]] = {"unknown": [], "pass": []}
    checks = tuple(checks)
    groups = group_findings(checks)
    several_nodes = len({check.node for check in checks if check.node}) > 1
    for group in groups:
        if everything or group.status == "info" or is_problem(group):
            print_group(out, group, nodes_named=several_nodes)
        else:
            quiet[group.status].append(group)
    print_unknown_checks(out, quiet["unknown"])
    passed = len(list_codes(groups, "pass"))
    if passed and quiet["pass"]:
        out.print(f"[dim]{units.count(passed, 'check')} passed (--all names them)[/dim]")


def print_unknown_checks(out: Console, groups: Sequence[FindingGroup]) -> None:
    """Print the checks that were not measured, grouped by the reason."""
    if groups:
        number = units.count(len({group.id for group in groups}), "check")
        out.print(f"{mark('unknown')} {number} could not run")
    from agent.checks.findings import group_by_reason

    for reason, codes in group_by_reason(groups).items():
        print_indented(out, escape(reason))
        print_indented(out, f"[dim]{escape(units.some(codes))}[/dim]", 9)


def print_group(out: Console, group: FindingGroup, *, nodes_named: bool = False, brief: bool = False) -> None:
    """Print one finding: what, where and the remedy, and unless `brief` the evidence and every message.

    `nodes_named` prints the node even if there is only one. If `brief`, many names are joined in Slurm's notation.
    """
    nodes = group.nodes if nodes_named or len(group.nodes) > 1 else ()
    one = len(group.subjects) == 1 and group.alike  # the heading names it
    place = group.place if one and len(group.nodes) <= 1 else group.places
    out.print(f"{mark(group.status)} [bold]{escape(group.title)}[/bold] {escape(place)}".rstrip())
    if nodes or len(group.checks) > 1:
        _print_places(out, group, named=bool(nodes), one=one, brief=brief)
    else:
        print_indented(out, escape(group.message))
    wrong = group.status in ("fail", "warn")
    shown = group.checks[: SHOWN if group.checks[0].code.startswith("env.") else 1]  # each setting, or the first device
    for line in dict.fromkeys(line for check in shown for line in check.evidence[:4]) if wrong and not brief else ():
        print_indented(out, f"[dim]{escape(line)}[/dim]")
    if wrong or group.required:
        print_indented(out, f"[bold]→ {escape(group.remedy)}[/bold]" if group.remedy else "")


def _print_places(out: Console, group: FindingGroup, *, named: bool, one: bool, brief: bool) -> None:
    """Print every place that no message names; equal messages share a line, and so do nodes with the same devices."""
    limit, names = (SHOWN, list_names) if brief else (len(group.checks), units.some)
    by_message: dict[str, dict[str, dict[str, None]]] = {}
    for check in group.checks:
        text = check.message if len(group.checks) <= limit else group.message
        by_message.setdefault(text, {}).setdefault(check.node, {})[check.subject] = None
    for text, by_node in by_message.items():
        print_indented(out, escape(text))
        shared: dict[tuple[str, ...], list[str]] = {}
        for node, subjects in by_node.items():
            shared.setdefault(tuple(filter(None, subjects)), []).append(node)
        for what, nodes in shared.items():
            is_named = (one and not named) or all(subject in text for subject in what)
            places = (names(nodes) if named else "", "" if is_named else names(what))
            print_indented(out, f"[dim]{escape(': '.join(filter(None, places)))}[/dim]", 9)
    if len(group.checks) > limit and not group.alike:
        print_indented(out, "This is the first message. The others differ in numbers or places (-v shows all).")
