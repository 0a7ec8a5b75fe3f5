"""Sort findings, group those that a reader should see as one, and explain their codes from the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Literal

from agent.base import units
from contracts.finding import Finding, Status
from contracts.tables import read_table

ORDER: tuple[Status, ...] = tuple(Status)  # worst first, the order in which they are printed
_OF_DEVICES = ("gpu", "pci", "rdma", "interfaces", "topology")  # families of codes whose subjects are devices

_IMPLIED_BY: dict[str, str] = read_table(__file__, "rules.toml")["implied_by"]
PAGES = ("findings", "settings", "log-problems", "diagnoses", "alerts")
_ENTRY = re.compile(r"^### `([\w.]+)`\n\n((?:- \*\*\w+:\*\* .+\n)+)", re.MULTILINE)
_POINT = re.compile(r"^- \*\*(\w+):\*\* (.+)$", re.MULTILINE)
MANY_CODES = 8  # if one family has more codes for one reason, only the family is named


def sort_worst_first(checks: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings: failures first, then by code and subject."""
    return tuple(sorted(checks, key=lambda check: (ORDER.index(check.status), check.code, check.node, check.subject)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingGroup:
    """One finding on several subjects, or several checks that one reason prevented: read and fixed as one."""

    id: str  # of the first finding; `codes` has all
    status: Status
    message: str  # of the first finding; the others differ at most in their subject
    remedy: str
    checks: tuple[Finding, ...]  # worst first

    @property
    def codes(self) -> tuple[str, ...]:
        """Return each finding code in the group once."""
        return tuple(dict.fromkeys(check.code for check in self.checks))

    @property
    def title(self) -> str:
        """Return the codes in a few words; if one family has many, only the family is named."""
        families = list(dict.fromkeys(code.split(".")[0] for code in self.codes))
        if len(self.codes) <= MANY_CODES:
            return ", ".join(self.codes)
        return ", ".join(f"{family}.*" for family in families) + f" ({len(self.codes)} checks)"

    @property
    def places(self) -> str:
        """Return where it was found: "on 2 nodes", "in 3 places" (of a file), "on 10 devices", "for gpus=8"; or ""."""
        if all(code.startswith("env.") for code in self.codes):  # from lint-env, where `node` names a part of the file
            parts = {check.node for check in self.checks}
            return f"in {len(parts)} places" if len(parts) > 1 else ""
        nodes = {name for check in self.checks for name in check.node.split(", ") if name}
        if len(nodes) > 1:
            return f"on {len(nodes)} nodes"
        subjects = {name for check in self.checks for name in check.subject.split(", ") if name}
        return self._at(sorted(subjects)) if len(subjects) > 1 else ""

    @property
    def place(self) -> str:
        """Return the first subject: "on GPU3", "for gdr=on"."""
        return self._at(self.subjects[:1])

    def _at(self, subjects: Sequence[str]) -> str:
        if not all(code.split(".")[0] in _OF_DEVICES for code in self.codes):
            return units.some(subjects, "for ", 4)
        return f"on {subjects[0] if len(subjects) == 1 else f'{len(subjects)} devices'}"

    @property
    def subjects(self) -> tuple[str, ...]:
        """Return the subjects in order, each once."""
        return tuple(dict.fromkeys(check.subject for check in self.checks if check.subject))

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the nodes on which it was found."""
        return tuple(dict.fromkeys(check.node for check in self.checks if check.node))

    @property
    def required(self) -> bool:
        """Return whether the gate requires one of the checks."""
        return any(check.required for check in self.checks)

    @property
    def alike(self) -> bool:
        """Return whether all checks have the same message."""
        return len({check.message for check in self.checks}) == 1


def is_problem(finding: Finding | FindingGroup) -> bool:
    """Return whether it needs attention: a failure, a warning, or a required check that could not run."""
    return finding.status in ("fail", "warn") or (finding.required and finding.status == "unknown")


def group_findings(checks: Iterable[Finding]) -> tuple[FindingGroup, ...]:
    """Group findings with the same code, status and remedy (ignoring the GPU number), worst first; also pass and info.

    If one reason prevented many required checks, they form one group. A finding that another one of the same device
    implies, which is at least as bad, is left out; reports as JSON have all.
    """
    checks = sort_worst_first(checks)
    raised = {(check.code, check.node, check.subject): ORDER.index(check.status) for check in reversed(checks)}
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for check in checks:
        other = raised.get((_IMPLIED_BY.get(check.code, ""), check.node, check.subject), len(ORDER))
        if check.status in ("fail", "warn") and other <= ORDER.index(check.status):
            continue
        unmeasured = ("unmeasured", check.message) if check.status == "unknown" and check.required else None
        groups.setdefault(unmeasured or (check.status, check.code, _of_any(check)), []).append(check)
    return tuple(
        FindingGroup(
            id=one[0].code, status=one[0].status, message=one[0].message, remedy=_join_remedies(one), checks=tuple(one)
        )
        for one in groups.values()
    )


def _of_any(check: Finding) -> str:
    """Return the remedy with N in place of the GPU's number, so that equal remedies of GPU0 and GPU1 compare equal."""
    number = check.subject.removeprefix("GPU")
    return re.sub(rf"(nvidia-smi (?:-r )?-i) {number}\b", r"\1 N", check.remedy) if number.isdigit() else check.remedy


def _join_remedies(checks: Sequence[Finding]) -> str:
    """Return each remedy once, without those contained in another; with the GPU's number if it is for one GPU."""
    several = len({check.subject for check in checks}) > 1
    remedies = list(dict.fromkeys(_of_any(check) if several else check.remedy for check in checks if check.remedy))
    return " ".join(
        text for text in remedies if not any(text is not other and text.rstrip(".") in other for other in remedies)
    )


def list_codes(groups: Iterable[FindingGroup], status: Literal["unknown", "pass"]) -> tuple[str, ...]:
    """Return the codes whose worst result is `status`; a check can pass on one device and fail on another."""
    groups = tuple(groups)
    is_worse = ORDER[: ORDER.index(Status(status))]
    worse = {code for group in groups if group.status in is_worse for code in group.codes}
    codes = dict.fromkeys(code for group in groups if group.status == status for code in group.codes)
    return tuple(code for code in codes if code not in worse)


def group_by_reason(unknown: Iterable[FindingGroup]) -> dict[str, tuple[str, ...]]:
    """Group checks that were not measured by the reason."""
    by_reason: dict[str, dict[str, None]] = {}
    for group in unknown:
        for check in group.checks:
            by_reason.setdefault(check.message.rstrip("."), {})[check.code] = None
    return {reason: tuple(codes) for reason, codes in by_reason.items()}


# The entries of finding codes, diagnoses and alerts in the reference pages of the documentation.


class UnknownCodeError(LookupError):
    """No page has this code; the message names similar codes."""


@cache
def read_entries() -> dict[str, str]:
    """Return the entry of every code and alert: the name, then its points as a Markdown list."""
    return {name: f"{name}\n\n{points}" for page in PAGES for name, points in _ENTRY.findall(_find_page(page))}


def _find_page(name: str) -> str:
    places = (Path(__file__).with_name("pages"), Path(__file__).parents[2] / "docs" / "reference")
    page = next((place / f"{name}.md" for place in places if (place / f"{name}.md").exists()), None)
    if page is None:
        raise UnknownCodeError(f"docs/reference/{name}.md is not packaged with this installation")
    return page.read_text(encoding="utf-8")


def find_entry(code: str) -> str:
    """Return the entry of a code or alert. Raises UnknownCodeError that names similar codes."""
    entries = read_entries()
    if exact := {name.lower(): name for name in entries}.get(code.lower()):
        return entries[exact]
    family = [name for name in entries if name.startswith(f"{code.lower()}.")]
    close = ", ".join(family[:8] or get_close_matches(code, entries, n=3, cutoff=0.4))
    raise UnknownCodeError(f"{code}: no such code or alert.{close and f' Similar: {close}.'} --list prints all")


def find_point(code: str, name: str) -> str:
    """Return one point of an entry, such as "Remedy"; empty if there is no such entry or point."""
    points: dict[str, str] = dict(_POINT.findall(read_entries().get(code, "")))
    return points.get(name, "")
